"""SGLang's linker without an engine: over a real server, its pool and the emulated device, with doubles of what is not installed."""

import signal
import sys
import time
import types
import unittest
from unittest import mock

import doubles

doubles.install()

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # noqa: E402

from kvarts import sglang_linker  # noqa: E402
from kvarts.sglang_identity import names_of  # noqa: E402
from kvarts.sglang_linker import KvartsLinker  # noqa: E402
from kvarts.staging import Desk  # noqa: E402
from served import Server  # noqa: E402

SOON = 30
PAGE, PAGES, LAYERS, WINDOW = 16, 12, 3, 32
FULL, SWA = types.SimpleNamespace(name="FULL"), types.SimpleNamespace(name="SWA")


def buffers(count, width=8):
    return [torch.zeros(PAGES * PAGE, 2, width, dtype=torch.bfloat16) for _ in range(count)]


def kind(name, **fields):
    """A pool of a class of this name: by that SGLang's kinds are told apart."""
    return type(name, (types.SimpleNamespace,), {})(**fields)


def heads(layers=LAYERS):
    return kind("MHATokenToKVPool", layer_num=layers, k_buffer=buffers(layers), v_buffer=buffers(layers), dtype=torch.bfloat16)


def latents():
    return kind("MLATokenToKVPool", layer_num=LAYERS, kv_buffer=buffers(LAYERS), dtype=torch.bfloat16)


def windows():
    mapping = {0: (0, True), 1: (0, False), 2: (1, True)}
    return kind("SWAKVPool", full_kv_pool=heads(1), swa_kv_pool=heads(2), layers_mapping=mapping)


def params(cache, rank=0, ranks=1, **changes):
    drafts = dict(mtp_draft_device_pools=(), sidecar_draft_device_pools=())
    allocator = types.SimpleNamespace(get_kvcache=lambda: cache)
    named = dict(token_to_kv_pool_allocator=allocator, page_size=PAGE, swa_retain_window=WINDOW, place=(rank, ranks), req_to_token_pool=None)
    return types.SimpleNamespace(**{**named, **drafts, **changes})


def keys(count, first=0):
    return [f"{n:064x}" for n in range(first, first + count)]


def places(*pages):
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def transfer(names, pages=None, name=PoolName.KV):
    return PoolTransfer(name, keys=names, device_indices=None if pages is None else places(*pages))


class Linkers(unittest.TestCase):
    def setUp(self):
        self.server = Server()
        self.addCleanup(self.server.stop)
        doubles.of_sglang()
        for where, name, what in (
            (sys.modules["sglang.srt.runtime_context"], "get_model", lambda: doubles.SGLANG),
            (sglang_linker, "_place_of", lambda params: params.place),
        ):
            patch = mock.patch.object(where, name, what)
            patch.start()
            self.addCleanup(patch.stop)

    def linker(self, cache=None, components=(FULL,), rank=0, ranks=1, changes=None, **extra):
        cache = cache or heads()
        given = {"server": self.server.socket, "revision": "1", "timeout": SOON, "wait": SOON, "pause": 0.1, "pool_bytes": 16 << 20, **extra}
        made = KvartsLinker(None, params(cache, rank, ranks, **(changes or {})), components=components, extra_config=given)
        self.addCleanup(made.close)
        return made

    def fill(self, linker):
        for entry in linker.pools.values():
            for buffer in entry.kv_buffer:
                buffer.copy_(torch.randn_like(buffer))

    def answer(self, linker):
        """Of the oldest offload."""
        deadline = time.monotonic() + SOON
        while not linker.num_completed_offloads():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.002)
        return linker.pop_completed_offload()

    def look_up(self, linker, rid, transfers):
        """What is found of something that is stored, in the end: a look-up may come too early or take too long."""
        deadline = time.monotonic() + SOON
        while not (found := linker.lookup(rid, transfers)):
            self.assertLess(time.monotonic(), deadline)
            linker.num_completed_offloads()
            time.sleep(0.02)
        return found

    def load(self, linker, rid, transfers):
        self.assertTrue(linker.load(rid, transfers))
        index = linker.start_layer_wise_loading()
        linker.layer_done_counter.set_consumer(index)
        for layer in range(linker.layer_done_counter.num_layers):
            linker.layer_done_counter.wait_until(layer)
        return linker.finish_layer_wise_loading(index)

    def expect_equal(self, one, pages, other, others, name=PoolName.KV):
        for here, there in zip(one.pools[name].kv_buffer, other.pools[name].kv_buffer):
            for page, to in zip(pages, others):
                self.assertTrue(torch.equal(here[page * PAGE : (page + 1) * PAGE], there[to * PAGE : (to + 1) * PAGE]))
                self.assertTrue(here[page * PAGE : (page + 1) * PAGE].any())

    def test_pages_come_back_into_other_places(self):
        first = self.linker()
        self.fill(first)
        self.assertEqual(first.lookup("a", [transfer(keys(3))]), [])
        self.assertTrue(first.offload([transfer(keys(3), (1, 2, 3))]))
        self.assertTrue(self.answer(first))
        second = self.linker()
        self.assertEqual(self.look_up(second, "a", [transfer(keys(5))]), [1, 2, 3])
        # The device has had the first one since; two of the others are wanted.
        self.assertEqual(self.look_up(second, "a", [transfer(keys(4, 1))]), [1, 2])
        self.assertTrue(self.load(second, "a", [transfer(keys(2, 1), (7, 5))]))
        self.expect_equal(first, (2, 3), second, (7, 5))
        self.assertFalse(second.pools[PoolName.KV].kv_buffer[0][6 * PAGE : 7 * PAGE].any())
        self.assertEqual(second.start_layer_wise_loading(), -1)

    def test_latents_are_stored_once_and_come_back_at_every_rank(self):
        ranks = [self.linker(latents(), rank=rank, ranks=2) for rank in range(2)]
        self.fill(ranks[0])
        for rank in reversed(ranks):
            self.assertTrue(rank.offload([transfer(keys(2), (1, 2))]))
            self.assertTrue(self.answer(rank))
        other = self.linker(latents(), rank=1, ranks=2)
        self.assertEqual(self.look_up(other, "a", [transfer(keys(2))]), [1, 2])
        self.assertTrue(self.load(other, "a", [transfer(keys(2), (3, 4))]))
        self.expect_equal(ranks[0], (1, 2), other, (3, 4))

    def test_heads_need_every_rank(self):
        ranks = [self.linker(rank=rank, ranks=2) for rank in range(2)]
        for rank in ranks:
            self.fill(rank)
            # Look-ups at a time at which only some have stored.
            self.assertEqual(self.linker(rank=0, ranks=2).lookup("a", [transfer(keys(2))]), [])
            self.assertTrue(rank.offload([transfer(keys(2), (1, 2))]))
            self.assertTrue(self.answer(rank))
        for at, rank in enumerate(ranks):
            other = self.linker(rank=at, ranks=2)
            self.assertEqual(self.look_up(other, "a", [transfer(keys(2))]), [1, 2])
            self.assertTrue(self.load(other, "a", [transfer(keys(2), (3, 4))]))
            self.expect_equal(rank, (1, 2), other, (3, 4))

    def test_a_prefix_ends_where_its_windows_are(self):
        first = self.linker(windows(), (FULL, SWA))
        self.fill(first)
        node = [transfer(keys(4), (1, 2, 3, 4)), transfer(keys(2, 2), (8, 9), PoolName.SWA)]
        self.assertTrue(first.offload(node))
        self.assertTrue(self.answer(first))
        self.assertTrue(first.offload([transfer(keys(2, 4), (5, 6))]))
        self.assertTrue(self.answer(first))
        second = self.linker(windows(), (FULL, SWA))
        # A window of two pages: nothing shorter than four, and nothing longer.
        self.assertEqual(self.look_up(second, "a", [transfer(keys(6)), transfer(keys(2, 4), name=PoolName.SWA)]), [4])
        self.assertEqual(self.look_up(second, "a", [transfer(keys(3, 3)), transfer(keys(2, 4), name=PoolName.SWA)]), [1])
        self.assertTrue(self.load(second, "a", [transfer(keys(1, 3), (1,)), transfer(keys(1, 3), (5,), PoolName.SWA)]))
        self.expect_equal(first, (4,), second, (1,))
        self.expect_equal(first, (9,), second, (5,), PoolName.SWA)

    def test_revisions_drafts_and_kinds_share_nothing(self):
        first = self.linker()
        self.assertTrue(first.offload([transfer(keys(2), (1, 2))]))
        self.assertTrue(self.answer(first))
        self.assertEqual(self.look_up(self.linker(), "a", [transfer(keys(2))]), [1, 2])
        for changes in (dict(revision="2"), dict(draft="1"), dict(identity={"x": "1"}), dict(cache=heads(2)), dict(ranks=2), dict(cache=latents())):
            self.assertEqual(self.linker(**changes).lookup("a", [transfer(keys(2))]), [], changes)

    def test_what_is_not_understood_is_refused_at_the_start(self):
        draft = dict(sidecar_draft_device_pools=(heads(1),))
        for message, changes in (
            ("pp_size", dict(changes=dict(pp_size=2))),
            ("attn_cp_size", dict(changes=dict(attn_cp_size=2))),
            # Rows that are pages of heads.
            ("its layout", dict(cache=kind("MHATokenToKVPool", layer_num=1, k_buffer=buffers(1), v_buffer=buffers(1), dtype=None, size=PAGE * PAGES + 1))),
            ("draft: the setting is missing", dict(changes=draft)),
            ("use kvarts.sglang instead", dict(changes=dict(mtp_draft_device_pools=(heads(1),)))),
            ("does not support this pool", dict(cache=windows(), components=(FULL, SWA), changes=dict(swa_retain_window=None))),
            ("no such pools", dict(cache=kind("MHATokenToKVPoolFP4"))),
        ):
            with self.assertRaisesRegex(ValueError, message):
                self.linker(**changes)
        with mock.patch.object(sys.modules["sglang.srt.runtime_context"], "get_parallel", lambda: types.SimpleNamespace(attn_dcp_size=2)):
            with self.assertRaisesRegex(ValueError, "dcp_size"):
                self.linker()
        self.assertIn(PoolName.DRAFT, self.linker(changes=draft, draft="1").pools)

    def test_loads_that_are_queued_can_be_cancelled_and_what_is_not_staged_is_not_landed(self):
        first = self.linker()
        self.assertTrue(first.offload([transfer(keys(2), (1, 2))]))
        self.assertTrue(self.answer(first))
        self.assertEqual(self.look_up(first, "a", [transfer(keys(2))]), [1, 2])
        self.assertTrue(first.load("a", [transfer(keys(2), (3, 4))]))
        self.assertTrue(first.cancel_queued_load("a"))
        self.assertFalse(first.cancel_queued_load("a"))
        self.assertEqual(first.start_layer_wise_loading(), -1)
        with self.assertLogs("kvarts", "ERROR"):
            self.assertFalse(self.load(first, "a", [transfer(keys(2), (3, 4))]))
        self.assertFalse(first.load("b", [transfer([])]))

    def test_what_is_deleted_while_a_request_waits_is_not_answered_with_for_long(self):
        linker = self.linker()
        self.assertTrue(linker.offload([transfer(keys(3), (1, 2, 3))]))
        self.assertTrue(self.answer(linker))
        self.assertEqual(self.look_up(linker, "a", [transfer(keys(3))]), [1, 2, 3])
        linker._desk._pages.delete(names_of(keys(1, 1)))
        with mock.patch("kvarts.staging.FRESH", 0.0):
            time.sleep(0.001)
            self.assertEqual(self.look_up(linker, "a", [transfer(keys(3))]), [1])

    def test_what_was_answered_with_stays_good_while_the_server_stands_still(self):
        linker = self.linker(timeout=1.0, wait=0.2)
        self.assertTrue(linker.offload([transfer(keys(3), (1, 2, 3))]))
        self.assertTrue(self.answer(linker))
        self.assertEqual(self.look_up(linker, "a", [transfer(keys(3))]), [1, 2, 3])
        self.server.signal(signal.SIGSTOP)
        try:
            with mock.patch("kvarts.staging.FRESH", 0.0):
                for _ in range(3):
                    time.sleep(0.001)
                    linker.num_completed_offloads()
                    # With the last token, and without.
                    self.assertEqual(linker.lookup("a", [transfer(keys(3))]), [1, 2, 3])
                    self.assertEqual(linker.lookup("a", [transfer(keys(2))]), [1, 2])
            self.assertTrue(self.load(linker, "a", [transfer(keys(2), (5, 6))]))
        finally:
            self.server.signal(signal.SIGCONT)

    def test_a_server_that_stands_still_costs_one_wait_and_is_taken_again(self):
        linker = self.linker(timeout=1.0, wait=0.2, pause=0.5)
        self.fill(linker)
        self.assertTrue(linker.offload([transfer(keys(2), (1, 2))]))
        self.assertTrue(self.answer(linker))
        linker.reset()
        self.server.signal(signal.SIGSTOP)
        try:
            took = []
            for rid in "ab":
                began = time.monotonic()
                self.assertEqual(linker.lookup(rid, [transfer(keys(2))]), [])
                took.append(time.monotonic() - began)
            self.assertLess(took[1], 0.1)
            # An offload is answered, too; until then SGLang keeps its pages.
            self.assertTrue(linker.offload([transfer(keys(2, 4), (4, 5))]))
            self.assertFalse(self.answer(linker))
        finally:
            self.server.signal(signal.SIGCONT)
        deadline = time.monotonic() + SOON
        while not linker.lookup("c", [transfer(keys(2))]):
            self.assertLess(time.monotonic(), deadline)
            linker.num_completed_offloads()
            time.sleep(0.05)

    def test_an_offload_larger_than_the_pool_goes_piece_by_piece(self):
        linker = self.linker(pool_bytes=16 << 10)
        self.fill(linker)
        count, refused, honest = PAGES - 1, [], Desk.room_for

        def room_for(desk, *of):
            room = honest(desk, *of)
            refused.extend([True] if room is None else [])
            return room

        piece = mock.patch("kvarts.sglang_offloads._PIECE", 2 * 3 * 2 * PAGE * 2 * 8 * 2)
        with piece, mock.patch.object(Desk, "room_for", room_for):
            self.assertTrue(linker.offload([transfer(keys(count), range(1, count + 1))]))
            self.assertTrue(linker.offload([transfer(keys(1, 50), (1,))]))
            self.assertTrue(self.answer(linker))
            self.assertTrue(self.answer(linker))
        self.assertEqual(linker._counts["saved"], count + 1)
        self.assertTrue(refused, "all of it had room at once")

    def test_pages_are_stored_behind_those_that_a_look_up_or_their_node_names_before_them(self):
        linker = self.linker()
        self.fill(linker)
        before, honest = {}, Desk.room_for

        def room_for(desk, group, names, first, parent):
            before[names[0]] = parent
            return honest(desk, group, names, first, parent)

        names = names_of(keys(5))
        # The server is there, as after any answer.
        self.assertTrue(linker.offload([transfer(keys(1, 200), (1,))]))
        self.assertTrue(self.answer(linker))
        self.assertEqual(linker.lookup("a", [transfer(keys(5))]), [])
        piece = mock.patch("kvarts.sglang_offloads._PIECE", 2 * 3 * 2 * PAGE * 2 * 8 * 2)
        with piece, mock.patch.object(Desk, "room_for", room_for):
            # The last node is one of a prompt for which no look-up was made.
            for first, count in ((2, 3), (0, 2), (50, 1)):
                self.assertTrue(linker.offload([transfer(keys(count, first), range(1, count + 1))]))
                self.assertTrue(self.answer(linker))
        nodes = {names[0]: b"", names[2]: names[1], names_of(keys(1, 50))[0]: b""}
        self.assertEqual({name: before[name] for name in nodes}, nodes)
        self.assertEqual(before, {name: before[name] for name in nodes} | {name: names[at - 1] for at, name in enumerate(names) if at and name in before})
        with mock.patch("kvarts.sglang_offloads._ORDERED", 4):
            linker._offloads.follow(names_of(keys(6, 100)))
        self.assertEqual(len(linker._offloads._before), 4)

    def test_it_starts_without_a_server(self):
        self.server.kill()
        linker = self.linker(timeout=0.2, pause=0.1)
        self.assertEqual(linker.lookup("a", [transfer(keys(2))]), [])
        self.assertTrue(linker.offload([transfer(keys(2), (1, 2))]))
        self.assertFalse(self.answer(linker))
        self.server.start()
        deadline = time.monotonic() + SOON
        while True:
            self.assertTrue(linker.offload([transfer(keys(2), (1, 2))]))
            if self.answer(linker):
                break
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_the_acts_are_counted_in_the_metrics_of_sglang(self):
        made = {}

        class Counter:
            def __init__(self, name, text, labels):
                made[name], self.labelled = self, {}
                self.names = labels

            def labels(self, *values):
                assert len(values) == len(self.names)
                return types.SimpleNamespace(inc=lambda count: self.labelled.__setitem__(values, self.labelled.get(values, 0) + count))

        with mock.patch.dict(sys.modules, prometheus_client=types.SimpleNamespace(Counter=Counter)):
            linker = self.linker(changes=dict(enable_metrics=True))
        self.fill(linker)
        self.assertTrue(linker.offload([transfer(keys(2), (1, 2))]))
        self.assertTrue(self.answer(linker))
        linker.reset()
        self.assertEqual(self.look_up(linker, "a", [transfer(keys(3))]), [1, 2])
        self.assertTrue(self.load(linker, "a", [transfer(keys(2), (3, 4))]))
        linker.num_completed_offloads()
        told = {name: counter.labelled for name, counter in made.items() if counter.labelled}
        waited = told.pop("sglang:kvarts_waited_seconds")
        self.assertGreater(waited["0",], 0)
        expected = {"promised_blocks": 2, "landed_blocks": 2, "layers": LAYERS, "overlapped_layers": LAYERS, "saved_blocks": 2}
        expected = {f"sglang:kvarts_{name}": {("0",): count} for name, count in expected.items()}
        labelled = {"staged_blocks": {("0", "read"): 2}, "unstaged_blocks": {("0", "never_stored"): 1}}
        self.assertEqual(told, {**expected, **{f"sglang:kvarts_{name}": counts for name, counts in labelled.items()}})


if __name__ == "__main__":
    unittest.main()
