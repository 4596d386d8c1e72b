"""The storage of SGLang without an engine: made by SGLang's own factory, on a pool of the host; with doubles of what is
not installed."""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import types
import unittest
from unittest import mock

import doubles

doubles.install()

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402

import kvarts  # noqa: E402
from served import PROGRAM, Server  # noqa: E402

SOON = 30
PAGE, LAYERS, HEADS, WIDTH = 16, 3, 2, 8


class Pool:
    """What the storage asks of a `HostKVCache`: pages of one layout, as flat tensors."""

    layout = "page_first"
    page_size = PAGE

    def __init__(self, pages=8, dtype="bfloat16"):
        self.dtype = getattr(torch, dtype)
        self.kv_buffer = torch.zeros(2, pages * PAGE, LAYERS, HEADS, WIDTH, dtype=self.dtype)

    def get_dummy_flat_data_page(self):
        return torch.zeros(2 * PAGE * LAYERS * HEADS * WIDTH, dtype=self.dtype)

    def get_data_page(self, index, flat=True):
        return self.kv_buffer[:, index : index + PAGE].flatten()

    def set_from_flat_data_page(self, index, data_page):
        self.kv_buffer[:, index : index + PAGE] = data_page.reshape(2, PAGE, LAYERS, HEADS, WIDTH)


class States:
    """A pool of states: one for each place, of bytes."""

    layout = "layer_first"
    page_size = 1

    def __init__(self, places=8):
        self.dtype = torch.float32
        self.kv_buffer = torch.zeros(places, 500, dtype=torch.uint8)

    def get_dummy_flat_data_page(self):
        return torch.zeros(500, dtype=torch.uint8)

    def get_data_page(self, index, flat=True):
        return self.kv_buffer[index]

    def set_from_flat_data_page(self, index, data_page):
        self.kv_buffer[index] = data_page


def kvarts_sglang():
    import kvarts.sglang

    return kvarts.sglang


def keys(count, first=0):
    return [f"{n:064x}" for n in range(first, first + count)]


def indices(*pages):
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def storage(pool, tp_rank=0, tp_size=1, alias="served/name", mla=False, **extra):
    """As SGLang makes it."""
    given = {"backend_name": "kvarts", "module_path": "kvarts.sglang", "class_name": "Kvarts", "interface_v1": 1, "revision": "1"}
    config = HiCacheStorageConfig(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=mla,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=alias,
        extra_config={**given, **extra},
    )
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    return made


class Sglang(unittest.TestCase):
    def setUp(self):
        self.server = Server()
        self.addCleanup(self.server.stop)
        doubles.of_sglang()
        settings = mock.patch("sglang.srt.runtime_context.get_model", lambda: doubles.SGLANG)
        settings.start()
        self.addCleanup(settings.stop)

    def storage(self, pool=None, settings=None, **extra):
        doubles.of_sglang(**(settings or {}))
        pool = pool or Pool()
        made = storage(pool, **{"server": self.server.socket, "timeout": SOON, "pause": 0.1, **extra})
        self.addCleanup(made.close)
        return made, pool

    def test_pages_come_back_into_other_places_of_another_pool(self):
        first, pool = self.storage()
        pool.kv_buffer.copy_(torch.randn_like(pool.kv_buffer))
        self.assertEqual(first.batch_exists(keys(3)), 0)
        self.assertEqual(first.batch_set_v1(keys(3), indices(0, 1, 2)), [True] * 3)
        second, other = self.storage()
        self.assertEqual(second.batch_exists(keys(5)), 3)
        self.assertEqual(second.batch_get_v1(keys(4), indices(7, 5, 3, 1)), [True] * 3 + [False])
        for here, there in ((0, 7), (1, 5), (2, 3)):
            self.assertTrue(torch.equal(pool.get_data_page(here * PAGE), other.get_data_page(there * PAGE)))
        self.assertFalse(other.get_data_page(PAGE).any())
        self.assertTrue(second.set(keys(1, 50)[0], pool.get_data_page(0)))
        self.assertTrue(torch.equal(second.get(keys(1, 50)[0]), pool.get_data_page(0)))
        second.clear()
        self.assertEqual(first.batch_exists(keys(3)), 0)

    def test_ranks_revisions_models_and_types_share_nothing(self):
        first, _ = self.storage(tp_size=2)
        self.assertEqual(first.batch_set_v1(keys(1), indices(0)), [True])
        self.assertEqual(self.storage(tp_size=2)[0].batch_exists(keys(1)), 1)
        others = [
            {"tp_size": 2, "tp_rank": 1},
            {"tp_size": 1},
            {"tp_size": 2, "revision": "2"},
            {"tp_size": 2, "settings": {"model_path": "another"}},
            {"tp_size": 2, "settings": {"dtype": "float32"}},
            {"tp_size": 2, "settings": {"quantization": "fp8"}},
            {"tp_size": 2, "settings": {"kv_cache_dtype": "fp8_e4m3"}},
            {"tp_size": 2, "settings": {"json_model_override_args": '{"rope_scaling": {"rope_type": "yarn", "factor": 4}}'}},
            {"tp_size": 2, "settings": {"load_format": "dummy"}},
            {"tp_size": 2, "pool": Pool(dtype="float16")},
        ]
        for kwargs in others:
            with self.subTest(kwargs):
                self.assertEqual(self.storage(**kwargs)[0].batch_exists(keys(1)), 0)

    def test_the_name_under_which_a_model_is_served_decides_nothing(self):
        first, pool = self.storage()
        pool.kv_buffer.copy_(torch.randn_like(pool.kv_buffer))
        self.assertEqual(first.batch_set_v1(keys(1), indices(0)), [True])
        # The same model under another name, and another model under the same one.
        self.assertEqual(self.storage(alias="default")[0].batch_exists(keys(1)), 1)
        self.assertEqual(self.storage(settings={"model_path": "tuned/model"})[0].batch_exists(keys(1)), 0)
        # The alias is one of a model whose revision is known; the path is not.
        with self.assertRaisesRegex(ValueError, "revision.*tuned/model"):
            self.storage(settings={"model_path": "tuned/model"}, revision=None)
        self.assertEqual(self.storage(settings={"revision": "1"}, revision=None)[0].batch_exists(keys(1)), 1)

    def test_engines_that_prefill_and_decode_share_pages(self):
        decode, pool = self.storage(prefetch_threshold=16, prefetch_timeout_base=1, hicache_storage_pass_prefix_keys=True)
        pool.kv_buffer.copy_(torch.randn_like(pool.kv_buffer))
        self.assertEqual(decode.batch_set_v1(keys(2), indices(0, 1), types.SimpleNamespace(prefix_keys=None)), [True] * 2)
        # An engine that decodes leaves SGLang's own settings in those of the storage; one that prefills takes them out.
        prefill, other = self.storage()
        self.assertEqual(prefill.batch_exists(keys(3)), 2)
        self.assertEqual(prefill.batch_get_v1(keys(2), indices(4, 5)), [True] * 2)
        self.assertTrue(torch.equal(pool.kv_buffer[:, : 2 * PAGE], other.kv_buffer[:, 4 * PAGE : 6 * PAGE]))

    def test_a_version_of_sglang_that_lacks_something_works_or_is_refused_with_what_it_lacks(self):
        # 0.5.21 and 0.5.22: no writer is named, and there are no shards of pages.
        older = types.SimpleNamespace(tp_rank=1, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, extra_config={})
        older.__dict__.update(is_mla_model=False, model_name="x")
        older.extra_config.update(server=self.server.socket, revision="1", timeout=SOON)
        from kvarts.sglang import Kvarts

        storage = Kvarts(older)
        self.addCleanup(storage.close)
        storage.register_mem_pool_host(Pool())
        self.assertEqual(storage.batch_set_v1(keys(1), indices(0)), [True])
        self.assertEqual(storage.batch_exists(keys(1)), 1)
        self.assertEqual(self.storage(tp_rank=1, tp_size=2)[0].batch_exists(keys(1)), 1)
        # Of ranks that have the same bytes one writes.
        older.is_mla_model = True
        second = Kvarts(older)
        self.addCleanup(second.close)
        second.register_mem_pool_host(Pool())
        self.assertEqual(second.batch_set_v1(keys(1, 7), indices(0)), [True])
        self.assertEqual(second.batch_exists(keys(1, 7)), 0)
        sharded = lambda: types.SimpleNamespace(attn_dcp_size=2)  # noqa: E731
        with mock.patch("sglang.srt.runtime_context.get_parallel", sharded), self.assertRaisesRegex(ValueError, "dcp_size"):
            Kvarts(older)
        for what in ("sglang.srt.mem_cache.utils.storage_namespace_seed", "sglang.srt.runtime_context.get_model"):
            with mock.patch(what, None), self.assertRaisesRegex(ValueError, f"this version has no {what}.*0.5.21"):
                Kvarts(older)

    def test_page_hashes_that_know_neither_adapters_nor_salts_are_refused(self):
        blind = {"of no adapter": lambda adapter, salt: salt, "of no salt": lambda adapter, salt: adapter}
        for what, seed in blind.items():
            with self.subTest(what), mock.patch("sglang.srt.mem_cache.utils.storage_namespace_seed", seed):
                with self.assertRaisesRegex(ValueError, "adapters or salts"):
                    self.storage()

    def test_settings_that_cannot_be_read_are_refused(self):
        for name in ("dtype", "quantization", "kv_cache_dtype"):
            doubles.of_sglang()
            delattr(doubles.SGLANG, name)
            with self.subTest(name), self.assertRaisesRegex(ValueError, name):
                kvarts_sglang().settings()

    def test_keys_that_depend_on_what_else_is_computed_are_refused(self):
        long = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
        with tempfile.TemporaryDirectory() as place:
            with open(os.path.join(place, "config.json"), "w") as file:
                json.dump({"rope_scaling": long}, file)
            ours = {"model_path": place}
            for length in (None, 4097):
                with self.subTest(length), self.assertRaisesRegex(ValueError, "context_length.*4096"):
                    self.storage(settings={**ours, "context_length": length})
            self.storage(settings={**ours, "context_length": 4096})
        with self.assertRaisesRegex(ValueError, "context_length"):
            self.storage(settings={"json_model_override_args": json.dumps({"rope_scaling": long})})

    def leases(self):
        command = [PROGRAM, "pin", "--list", "--server", self.server.socket, "--json"]
        return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=SOON).stdout)["pins"]

    def test_what_a_look_up_finds_is_held_until_it_is_read(self):
        storage, _ = self.storage(hold=60)
        self.assertEqual(storage.batch_set_v1(keys(3), indices(0, 1, 2)), [True] * 3)
        # Nothing is held of what is not there.
        self.assertEqual((storage.batch_exists(keys(2, 9)), self.leases()), (0, []))
        self.assertEqual(storage.batch_exists(keys(5)), 3)
        [lease] = self.leases()
        self.assertEqual((lease["blocks"], lease["path"], lease["taken_by"]), (3, "local", "exists"))
        self.assertTrue(30_000 < lease["ends_in_ms"] <= 60_000, lease)
        self.assertEqual(storage.batch_get_v1(keys(3), indices(5, 6, 7)), [True] * 3)
        deadline = time.monotonic() + SOON
        while self.leases():
            self.assertLess(time.monotonic(), deadline)
        # Two requests look up the same pages: each read ends its own hold.
        self.assertEqual((storage.batch_exists(keys(3)), storage.batch_exists(keys(3))), (3, 3))
        storage.batch_get_v1(keys(3), indices(5, 6, 7))
        self.assertEqual(sum(lease["blocks"] for lease in self.leases()), 3)
        free, _ = self.storage(hold=0)
        before = len(self.leases())
        self.assertEqual((free.batch_exists(keys(3)), len(self.leases())), (3, before))
        for wrong in (-1, "10", True):
            with self.subTest(wrong), self.assertRaisesRegex(ValueError, "hold: .*seconds"):
                self.storage(hold=wrong)

    def test_what_was_found_cannot_be_evicted_before_it_is_read(self):
        for hold, read in ((60, 3), (0, 0)):
            self.server.stop()
            self.server = Server("--budget", "4 MiB", "--segment", "1 MiB", "--shards", "1")
            self.addCleanup(self.server.stop)
            storage, _ = self.storage(hold=hold)
            self.assertEqual(storage.batch_set_v1(keys(3), indices(0, 1, 2)), [True] * 3)
            self.assertEqual(storage.batch_exists(keys(3)), 3)
            for first in range(100, 4100, 8):
                storage.batch_set_v1(keys(8, first), indices(*range(8)))
            self.assertEqual(sum(storage.batch_get_v1(keys(3), indices(5, 6, 7))), read, hold)

    def test_what_cannot_be_held_is_found_all_the_same(self):
        storage, _ = self.storage(hold=60)
        self.assertEqual(storage.batch_set_v1(keys(3), indices(0, 1, 2)), [True] * 3)
        held = storage._pools[PoolName.KV].holds
        for lost in (lambda *of: False, mock.Mock(side_effect=kvarts.Refused("the tenant's cap", "PinCap"))):
            with mock.patch.object(held, "hold", lost):
                self.assertEqual(storage.batch_exists(keys(3)), 3)

        def gone(names, timeout):
            storage._pools[PoolName.KV].pages.delete(names[1:2])
            return False

        # What has gone meanwhile is not answered with.
        with mock.patch.object(held, "hold", gone):
            self.assertEqual(storage.batch_exists(keys(3)), 1)

    def test_pages_are_put_behind_those_that_sglang_names(self):
        storage, pool = self.storage()
        storage.batch_exists(keys(1))
        staging, put = storage._pools[PoolName.KV].staging["put"], []
        honest = staging.handle
        staging.handle, staging.pages = mock.Mock(wraps=honest), 2
        staging.handle.submit_put = lambda names, *places, parent, **more: put.append((names, parent)) or honest.submit_put(names, *places, parent=parent, **more)
        name = lambda n: bytes.fromhex(keys(1, n)[0])  # noqa: E731
        for first, prefix, parents in ((0, [], [b"", name(1)]), (3, keys(3), [name(2), name(4)]), (6, None, [None, None])):
            told_of = types.SimpleNamespace(prefix_keys=prefix)
            self.assertEqual(storage.batch_set_v1(keys(3, first), indices(0, 1, 2), told_of), [True] * 3)
            self.assertEqual([parent for _, parent in put], parents, prefix)
            put.clear()
        self.assertEqual(storage.batch_set_v2([PoolTransfer(PoolName.KV, host_indices=indices(1), keys=keys(1, 20))], types.SimpleNamespace(prefix_keys=keys(20))), {"kv": [True]})
        self.assertEqual(put, [([name(20)], name(19))])

    def test_a_store_that_takes_nothing_is_no_reason_to_load_nothing(self):
        storage, _ = self.storage()
        self.assertEqual(storage.batch_set_v1(keys(2), indices(0, 1)), [True] * 2)
        storage._link.put_failed(kvarts.Deadline("too slow", "DeadlinePassed"))
        self.assertEqual(storage.batch_set_v1(keys(1, 9), indices(3)), [False])
        self.assertEqual(storage.batch_get_v1(keys(2), indices(2, 3)), [True] * 2)

    def hybrid(self, **kwargs):
        """A storage with the pools of a hybrid model."""
        storage, pool = self.storage(**kwargs)
        pools = {PoolName.KV: pool, PoolName.SWA: Pool(), PoolName.MAMBA: States(), PoolName.INDEXER: Pool()}
        for name, host in pools.items():
            storage.register_mem_host_pool_v2(host, name)
        storage.on_host_pools_registered()
        for host in pools.values():
            host.kv_buffer.copy_(torch.randint(1, 100, host.kv_buffer.shape).to(host.kv_buffer.dtype))
        return storage, pools

    def test_a_prefix_of_a_hybrid_model_ends_where_every_pool_has_what_is_wanted(self):
        first, pools = self.hybrid()
        names, states = keys(4), [keys(4)[1], keys(4)[3]]
        self.assertEqual(first.batch_set_v1(names, indices(0, 1, 2, 3)), [True] * 4)
        stored = first.batch_set_v2(
            [
                PoolTransfer(PoolName.SWA, host_indices=indices(4, 5, 6), keys=names[1:]),
                PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0, 1]), keys=states),
                PoolTransfer(PoolName.INDEXER, host_indices=indices(0, 1, 2), keys=names[:3]),
            ]
        )
        self.assertEqual(stored, {"swa": [True] * 3, "mamba": [True] * 2, "indexer": [True] * 3})
        second, others = self.hybrid()
        for host in others.values():
            host.kv_buffer.zero_()
        swa = PoolTransfer(PoolName.SWA, keys=names[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        mamba = PoolTransfer(PoolName.MAMBA, keys=names[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        found = second.batch_exists_v2(names + keys(1, 9), [swa, mamba])
        self.assertEqual((found.kv_hit_pages, found.restorable_prefix_pages), (4, [4]))
        self.assertEqual(found.extra_pool_hit_pages, {"kv": 4, "swa": 4, "mamba": 4})
        found = second.batch_exists_v2(names, [PoolTransfer(PoolName.INDEXER), mamba])
        self.assertEqual((found.kv_hit_pages, found.restorable_prefix_pages), (2, [2]))
        self.assertEqual(second.batch_exists_v2(keys(2, 9), [mamba]).kv_hit_pages, 0)
        loaded = second.batch_get_v2(
            [
                PoolTransfer(PoolName.SWA, host_indices=indices(7, 6), keys=names[2:]),
                PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([5, 6]), keys=[states[1], names[0]]),
            ]
        )
        self.assertEqual(loaded, {"swa": [True] * 2, "mamba": [True, False]})
        for name, here, there in ((PoolName.SWA, 5 * PAGE, 7 * PAGE), (PoolName.SWA, 6 * PAGE, 6 * PAGE), (PoolName.MAMBA, 1, 5)):
            self.assertTrue(torch.equal(pools[name].get_data_page(here), others[name].get_data_page(there)), name)
        self.assertFalse(others[PoolName.MAMBA].kv_buffer[6].any())
        wrong = PoolTransfer(PoolName.SWA, host_indices=indices(7), keys=names[2:])
        self.assertEqual(second.batch_get_v2([wrong]), {"swa": [False] * 2})

    def test_recurrent_states_belong_to_their_rank_where_everything_else_is_alike(self):
        first, _ = self.hybrid(mla=True, tp_size=2)
        state = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0]), keys=keys(1))
        indexer = PoolTransfer(PoolName.INDEXER, host_indices=indices(0), keys=keys(1))
        self.assertEqual(first.batch_set_v1(keys(1), indices(0)), [True])
        first.batch_set_v2([state, indexer])
        second, _ = self.hybrid(mla=True, tp_size=2, tp_rank=1)
        self.assertEqual(second.batch_exists(keys(1)), 1)
        self.assertEqual(second.batch_get_v2([state, indexer]), {"mamba": [False], "indexer": [True]})

    def test_a_draft_model_without_a_revision_is_refused(self):
        storage, _ = self.storage()
        with self.assertRaisesRegex(ValueError, "draft"):
            storage.register_mem_host_pool_v2(Pool(), PoolName.DRAFT)
        self.storage(draft="1")[0].register_mem_host_pool_v2(Pool(), PoolName.DRAFT)

    def test_without_a_server_everything_is_a_miss_and_it_comes_back(self):
        storage, _ = self.storage()
        self.assertEqual(storage.batch_set_v1(keys(2), indices(0, 1)), [True] * 2)
        self.server.kill()
        self.assertEqual(storage.batch_exists(keys(2)), 0)
        self.assertEqual(storage.batch_get_v1(keys(2), indices(2, 3)), [False] * 2)
        self.assertEqual(storage.batch_set_v1(keys(2, 9), indices(2, 3)), [False] * 2)
        self.server.start()
        deadline = time.monotonic() + SOON
        while storage.batch_exists(keys(2)) != 2 or storage.batch_get_v1(keys(2), indices(2, 3)) != [True] * 2:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_a_server_that_stands_still_is_a_miss_and_comes_back(self):
        storage, _ = self.storage(timeout=1.0)
        deadline = time.monotonic() + SOON
        while storage.batch_set_v1(keys(2), indices(0, 1)) != [True] * 2:
            self.assertLess(time.monotonic(), deadline)
        self.server.signal(signal.SIGSTOP)
        try:
            self.assertEqual(storage.batch_get_v1(keys(2), indices(2, 3)), [False] * 2)
            self.assertEqual(storage.batch_exists(keys(2)), 0)
            self.assertEqual(storage.batch_set_v1(keys(2, 9), indices(2, 3)), [False] * 2)
        finally:
            self.server.signal(signal.SIGCONT)
        deadline = time.monotonic() + SOON
        while storage.batch_get_v1(keys(2), indices(2, 3)) != [True] * 2:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_a_store_does_not_wait_for_a_server_that_stands_still(self):
        storage, pool = self.storage(timeout=1.0)
        pool.kv_buffer.copy_(torch.randn_like(pool.kv_buffer))
        deadline = time.monotonic() + SOON
        while storage.batch_set_v1(keys(2), indices(0, 1)) != [True] * 2:
            self.assertLess(time.monotonic(), deadline)
        self.server.signal(signal.SIGSTOP)
        late = threading.Timer(SOON, self.server.signal, (signal.SIGCONT,))
        late.start()
        try:
            # The server's threads stop a moment later.
            time.sleep(0.2)
            began = time.monotonic()
            self.assertEqual(storage.batch_set_v1(keys(2, 9), indices(2, 3)), [False] * 2)
            # Also behind the pause, while the server may still read the memory.
            time.sleep(0.2)
            self.assertEqual(storage.batch_set_v1(keys(2, 20), indices(4, 5)), [False] * 2)
            self.assertLess(time.monotonic() - began, SOON / 2)
        finally:
            late.cancel()
            self.server.signal(signal.SIGCONT)
        while storage.batch_set_v1(keys(2, 30), indices(6, 7)) != [True] * 2:
            self.assertLess(time.monotonic(), deadline + SOON)
            time.sleep(0.05)
        # What the server read late is what was in the memory then.
        other, places = self.storage()
        for first, page in ((9, 2), (20, 4), (30, 6)):
            for n, good in enumerate(other.batch_get_v1(keys(2, first), indices(0, 1))):
                if good:
                    self.assertTrue(torch.equal(places.get_data_page(n * PAGE), pool.get_data_page((page + n) * PAGE)))

    def test_it_starts_without_a_server(self):
        self.server.kill()
        storage, _ = self.storage(timeout=1.0)
        self.assertEqual(storage.batch_exists(keys(2)), 0)
        self.server.start()
        deadline = time.monotonic() + SOON
        while storage.batch_set_v1(keys(2), indices(0, 1)) != [True] * 2:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_a_model_without_a_revision_is_refused(self):
        with self.assertRaisesRegex(ValueError, "revision"):
            self.storage(revision=None)

    def test_a_cache_of_eight_bits_without_a_type_is_refused(self):
        with self.assertRaisesRegex(ValueError, "dtype"):
            self.storage(pool=Pool(dtype="uint8"))
        first, _ = self.storage(pool=Pool(dtype="uint8"), dtype="fp8_e4m3")
        self.assertEqual(first.batch_set_v1(keys(1), indices(0)), [True])
        self.assertEqual(first.batch_exists(keys(1)), 1)
        self.assertEqual(self.storage(pool=Pool(dtype="uint8"), dtype="fp8_e5m2")[0].batch_exists(keys(1)), 0)


if __name__ == "__main__":
    unittest.main()
