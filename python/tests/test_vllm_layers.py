"""The layerwise connector for vLLM without an engine: both sides, driven as the scheduler and a worker do; with doubles of what
is not installed."""

import signal
import time
import unittest
from types import SimpleNamespace

import doubles

doubles.install()

import torch  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # noqa: E402

from kvarts.vllm_layers import KvartsLayers  # noqa: E402
from served import Server  # noqa: E402

SOON = 30
TOKENS, HEADS, WIDTH = 16, 2, 32
NAMES = [f"layer.{n}" for n in range(3)]


def configuration(server, names=NAMES, heads=HEADS, width=WIDTH, tp=1, rank=0, kind=None, **changes):
    extra = {"server": server.socket, "revision": "1", "timeout": 2 * SOON, "pause": 0.1}
    extra.update(changes.pop("extra", {}))
    parts = {
        "kv_transfer_config": dict(
            kv_connector_extra_config=extra, is_kv_consumer=True, is_kv_producer=True, kv_load_failure_policy="recompute"
        ),
        "parallel_config": dict(tensor_parallel_size=tp, rank=rank, pipeline_parallel_size=1),
        "scheduler_config": dict(async_scheduling=False),
        "model_config": dict(model="test/model", revision=None, dtype="bfloat16", quantization=None, hf_overrides={}),
        "load_config": dict(load_format="auto"),
        "cache_config": dict(cache_dtype="auto"),
    }
    for part, values in changes.items():
        parts[part] = {**parts[part], **values} if part in parts else values
    config = SimpleNamespace(speculative_config=None, use_v2_model_runner=False)
    for part, values in parts.items():
        setattr(config, part, SimpleNamespace(**values))
    sizes = dict(block_size=TOKENS, num_kv_heads=heads, head_size=width, dtype=torch.bfloat16)
    spec = kind(**sizes, sliding_window=64) if kind else FullAttentionSpec(**sizes)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=list(names))
    return config, SimpleNamespace(kv_cache_groups=[group], hash_block_size=TOKENS, kv_cache_layout="LBNHC")


class Request:
    def __init__(self, name, blocks, seed=0):
        self.request_id = name
        self.num_tokens = blocks * TOKENS + 1
        self.num_computed_tokens = self.num_in_flight_tokens = 0
        self.block_hashes = [(1000 * seed + n).to_bytes(32, "big") for n in range(blocks)]


class Engine:
    """A scheduler, workers and their KV caches: what vLLM does in a step, without a model."""

    def __init__(self, server, blocks=32, tp=1, names=NAMES, heads=HEADS, width=WIDTH, layout="LBNHC", **changes):
        self.names, self.tp = names, tp
        config = configuration(server, names, heads, width, tp, **changes)
        self.scheduler = KvartsLayers(config[0], KVConnectorRole.SCHEDULER, config[1])
        self.workers, self.caches = [], []
        for rank in range(tp):
            config = configuration(server, names, heads, width, tp, rank, **changes)
            self.workers.append(KvartsLayers(config[0], KVConnectorRole.WORKER, config[1]))
            order = {"LBNHC": (0, 1, 3, 2, 4), "BLNHC": (1, 0, 3, 2, 4)}[layout]
            shape = (len(names), blocks, heads, TOKENS, 2 * width)
            whole = torch.zeros([shape[n] for n in order], dtype=torch.bfloat16)
            whole = whole.permute([order.index(n) for n in range(5)])
            self.caches.append({name: whole[n] for n, name in enumerate(names)})
            self.workers[-1].register_kv_caches(self.caches[-1])
        self.held = {}
        self.evicted = set()
        self.scheduler.bind_kv_cache_manager(
            SimpleNamespace(get_block_ids=lambda name: (self.held[name],), block_pool=None, evict_blocks=self.evicted.update)
        )
        self.next = 0
        self.invalid = set()

    def close(self):
        for part in [self.scheduler, *self.workers]:
            part.shutdown()

    def find(self, request):
        deadline = time.monotonic() + SOON
        while (found := self.scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
            assert time.monotonic() < deadline, "no answer"
            time.sleep(0.001)
        return found // TOKENS

    def admit(self, request):
        """Gives it memory; how many of its blocks are to be loaded."""
        found = self.find(request)
        count = len(request.block_hashes)
        self.held[request.request_id] = list(range(self.next, self.next + count))
        self.next += count
        blocks = SimpleNamespace(get_block_ids=lambda: (self.held[request.request_id],))
        self.scheduler.update_state_after_alloc(request, blocks, found * TOKENS)
        request.num_computed_tokens = found * TOKENS
        return found

    def step(self, scheduled=()):
        """A step that computes what is left of these requests; what the workers say."""
        meta = self.scheduler.build_connector_meta(SimpleNamespace())
        for request in scheduled:
            request.num_in_flight_tokens = request.num_tokens - request.num_computed_tokens
            request.num_computed_tokens += request.num_in_flight_tokens
        invalid, over, told = set(), [], None
        for rank, worker in enumerate(self.workers):
            worker.bind_connector_metadata(meta)
            worker.start_load_kv(None)
            for name in self.names:
                worker.wait_for_layer_load(name)
                for request in scheduled:
                    self.compute(request, rank, name)
                worker.save_kv_layer(name, None, None)
            worker.wait_for_save()
            over.append(worker.get_finished(set())[0])
            invalid |= worker.get_block_ids_with_load_errors()
            one = worker.build_connector_worker_meta()
            told = one if told is None else told.aggregate(one)
            worker.clear_connector_metadata()
        for request in scheduled:
            request.num_in_flight_tokens = 0
            held = self.held[request.request_id]
            if bad := [at for at, block in enumerate(held) if block in invalid]:
                request.num_computed_tokens = bad[0] * TOKENS
        self.invalid = invalid
        self.scheduler.update_connector_output(SimpleNamespace(invalid_block_ids=invalid, kv_connector_worker_meta=told))
        return set.intersection(*over)

    def compute(self, request, rank, name):
        begin = (request.num_computed_tokens - request.num_in_flight_tokens) // TOKENS
        for at, block in list(enumerate(self.held[request.request_id]))[begin:]:
            self.caches[rank][name][block] = self.right(request, rank, name, at)

    def right(self, request, rank, name, at):
        torch.manual_seed(hash((request.block_hashes[at], rank, name)) % 2**31)
        return torch.randn(self.caches[rank][name][0].shape).to(torch.bfloat16)

    def good(self, request):
        """The leading blocks that every cache has right."""
        for at, block in enumerate(self.held[request.request_id]):
            for rank, cache in enumerate(self.caches):
                for name in self.names:
                    if not torch.equal(cache[name][block], self.right(request, rank, name, at)):
                        return at
        return len(self.held[request.request_id])

    def counts(self):
        found = {}
        for part in [self.scheduler, *self.workers]:
            for name, count in (part.get_kv_connector_stats() or SimpleNamespace(data={})).data.items():
                found[name] = found.get(name, 0) + count
        return found

    def stored(self, request):
        """Computes a request and waits until its blocks are stored."""
        self.admit(request)
        self.step([request])
        self.step()
        counts, want = self.counts(), len(request.block_hashes) * self.tp
        deadline = time.monotonic() + SOON
        while counts.get("stored", 0) < want:
            assert time.monotonic() < deadline, counts
            time.sleep(0.005)
            self.step()
            for name, count in self.counts().items():
                counts[name] = counts.get(name, 0) + count


class Layers(unittest.TestCase):
    def setUp(self):
        self.server = Server()
        self.addCleanup(self.server.stop)

    def engine(self, server_away=False, **kwargs):
        engine = Engine(self.server, **kwargs)
        self.addCleanup(engine.close)
        self.wait_for(lambda: server_away or all(worker._side._pages is not None for worker in engine.workers))
        return engine

    def wait_for(self, condition):
        deadline = time.monotonic() + SOON
        while not condition():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.005)

    def test_blocks_come_back_layer_by_layer_in_a_second_engine(self):
        for layout in ("LBNHC", "BLNHC"):
            with self.subTest(layout):
                first, request = self.engine(layout=layout, extra={"revision": layout}), Request("a", 4)
                first.stored(request)
                second, again = self.engine(layout=layout, extra={"revision": layout}), Request("b", 4)
                second.next = 7
                self.assertEqual(second.admit(again), 4)
                second.step([again])
                self.assertEqual((second.good(again), second.invalid), (4, set()))
                self.assertFalse(any(cache[11:].any() or cache[:7].any() for cache in second.caches[0].values()))
                counts = second.counts()
                self.assertEqual((counts["loaded"], counts["layers"]), (4, len(NAMES)))

    def test_a_layer_is_usable_before_the_last_one_was_read(self):
        # Far more than the memory through which bytes are copied, so that the last layer cannot be there with the first.
        large = dict(names=[f"layer.{n}" for n in range(12)], heads=8, width=128, blocks=160)
        first, request = self.engine(**large), Request("a", 128)
        first.stored(request)
        second, again = self.engine(**large), Request("b", 128)
        self.assertEqual(second.admit(again), 128)
        second.step([again])
        counts = second.counts()
        self.assertEqual((second.good(again), counts["layers"]), (128, 12))
        self.assertGreater(counts["early"], 0)
        self.assertLess(counts["early"], 12)

    def test_blocks_that_are_gone_are_computed_again_and_what_was_computed_from_them_is_not_stored(self):
        first, request = self.engine(), Request("a", 4)
        first.stored(request)
        second, again = self.engine(), Request("b", 6)
        again.block_hashes[:4] = request.block_hashes
        self.assertEqual(second.admit(again), 4)
        handle = second.workers[0]._side._pages
        self.assertTrue(handle.delete([request.block_hashes[2]]).ok)
        second.step([again])
        self.assertEqual(second.invalid, {2, 3})
        self.assertEqual(second.good(again), 2)
        second.step()
        self.assertEqual(handle.exists(again.block_hashes), [True, True, False, True, False, False])
        second.step([again])
        second.step()
        self.assertEqual(second.good(again), 6)
        self.wait_for(lambda: all(handle.exists(again.block_hashes)))

    def test_memory_of_a_request_that_is_over_is_kept_until_it_was_copied(self):
        engine, request = self.engine(), Request("a", 3)
        engine.admit(request)
        engine.step([request])
        self.assertEqual(engine.scheduler.request_finished(request, engine.held["a"]), (True, None))
        self.assertTrue(engine.scheduler.has_pending_push_work())
        self.assertEqual(engine.step(), set())
        self.assertEqual(engine.step(), {"a"})
        self.assertFalse(engine.scheduler.has_pending_push_work())
        handle = engine.workers[0]._side._pages
        self.wait_for(lambda: all(handle.exists(request.block_hashes)))
        other = Request("b", 3)
        self.assertEqual(engine.admit(other), 3)
        engine.step([other])
        self.assertEqual(engine.scheduler.request_finished(other, engine.held["b"]), (False, None))

    def test_a_request_that_lost_its_memory_is_stored_when_it_was_computed_again(self):
        engine, request = self.engine(), Request("a", 3)
        engine.admit(request)
        engine.step([request])
        request.num_computed_tokens = 0  # preempted
        engine.held["a"] = []
        engine.step()
        handle = engine.workers[0]._side._pages
        self.assertEqual(handle.exists(request.block_hashes), [False] * 3)
        engine.stored(request)
        self.assertEqual(handle.exists(request.block_hashes), [True] * 3)

    def test_ranks_have_parts_of_their_own_and_a_prefix_needs_all_of_them(self):
        first, request = self.engine(tp=2), Request("a", 3)
        first.stored(request)
        second, again = self.engine(tp=2), Request("b", 3)
        self.assertEqual(second.admit(again), 3)
        second.step([again])
        self.assertEqual(second.good(again), 3)
        first.workers[1]._side._pages.delete([request.block_hashes[1]])
        self.assertEqual(first.find(Request("c", 3)), 1)

    def test_engines_of_another_identity_share_nothing(self):
        first, request = self.engine(), Request("a", 2)
        first.stored(request)
        others = [
            {"extra": {"revision": "2"}},
            {"extra": {"identity": {"more": "1"}}},
            {"tp": 2},
            {"heads": 4},
            {"model_config": {"model": "another"}},
            {"cache_config": {"cache_dtype": "fp8"}},
            {"cache_config": {"kv_cache_dtype_skip_layers": ["0"]}},
            {"names": NAMES[:2]},
        ]
        for kwargs in others:
            with self.subTest(kwargs):
                self.assertEqual(self.engine(**kwargs).find(Request("b", 2)), 0)
        self.assertEqual(self.engine().find(Request("b", 2)), 2)

    def test_a_server_that_stands_still_is_a_miss_and_comes_back(self):
        engine, request = self.engine(extra={"timeout": 2.0}), Request("a", 3)
        engine.stored(request)
        late = Request("late", 3)
        self.assertEqual(engine.admit(late), 3)
        self.server.signal(signal.SIGSTOP)
        try:
            engine.step([late])
            self.assertEqual(engine.invalid, set(engine.held["late"]))
            self.assertEqual(engine.find(Request("b", 3)), 0)
            engine.step([late])
            self.assertEqual((engine.good(late), engine.invalid), (3, set()))
        finally:
            self.server.signal(signal.SIGCONT)
        self.wait_for(lambda: engine.find(Request("c", 3)) == 3 or engine.scheduler._side._asked.clear())

    def test_it_starts_without_a_server(self):
        self.server.kill()
        engine, request = self.engine(server_away=True, extra={"timeout": 2.0}), Request("a", 3)
        self.assertEqual(engine.admit(request), 0)
        engine.step([request])
        self.assertEqual(engine.good(request), 3)
        self.server.start()
        other = Request("b", 3, seed=1)
        engine.admit(other)

        def there():
            other.num_computed_tokens = 0
            engine.step([other])
            engine.step()
            return engine.find(Request("c", 3, seed=1)) == 3 or engine.scheduler._side._asked.clear()

        self.wait_for(there)

    def test_what_it_cannot_do_is_refused_by_name(self):
        refused = [
            ("async_scheduling", {"scheduler_config": {"async_scheduling": True}}),
            ("pipeline_parallel_size", {"parallel_config": {"pipeline_parallel_size": 2}}),
            ("speculative_config", {"speculative_config": {"method": "eagle"}}),
            ("kv_cache_groups", {"kind": SlidingWindowSpec}),
            ("hf_overrides", {"model_config": {"hf_overrides": lambda config: config}}),
            ("revision", {"extra": {"revision": None}}),
        ]
        for what, changes in refused:
            with self.assertRaisesRegex(ValueError, what):
                KvartsLayers(*self.made(changes))

    def test_the_operators_policy_is_left_alone_and_recompute_is_refused_where_vllm_cannot_take_back(self):
        fails, recomputes = ({"kv_load_failure_policy": policy} for policy in ("fail", "recompute"))
        for policy in (fails, recomputes):
            config, role, cache = self.made({"kv_transfer_config": policy})
            KvartsLayers(config, role, cache).shutdown()
            self.assertEqual(config.kv_transfer_config.kv_load_failure_policy, policy["kv_load_failure_policy"])
        for runner in (True, None):  # the second runner, and a version that does not say which one
            with self.assertRaisesRegex(ValueError, "recompute.*VLLM_USE_V2_MODEL_RUNNER=0"):
                KvartsLayers(*self.made({"kv_transfer_config": recomputes}, runner))
            KvartsLayers(*self.made({"kv_transfer_config": fails}, runner)).shutdown()
            # What loads nothing takes nothing back.
            KvartsLayers(*self.made({"kv_transfer_config": {**recomputes, "is_kv_consumer": False}}, runner)).shutdown()
        connector = KvartsLayers(*self.made({}))
        self.addCleanup(connector.shutdown)
        with self.assertRaisesRegex(ValueError, "evict_blocks"):
            connector.bind_kv_cache_manager(SimpleNamespace(get_block_ids=lambda name: ([],)))
        self.assertFalse(KvartsLayers.supports_sleep_mode(None))

    def test_a_layer_that_has_no_cache_of_its_own_is_passed_over_and_one_in_no_group_is_refused(self):
        engine = self.engine()
        worker, caches = engine.workers[0], dict(engine.caches[0])
        worker.wait_for_layer_load("shares.0")
        worker.save_kv_layer("shares.0", None, None)
        worker._side._caches.clear()
        worker.register_kv_caches({**caches, "shares.0": caches[NAMES[0]]})
        worker._side._caches.clear()
        with self.assertRaisesRegex(ValueError, "kv_cache_groups: alone"):
            worker.register_kv_caches({**caches, "alone": torch.zeros(8, 8)})
        worker._side._caches.clear()
        worker.register_kv_caches(caches)

    def test_a_load_of_which_a_layer_was_not_waited_for_has_failed(self):
        first, request = self.engine(), Request("a", 4)
        first.stored(request)
        second, again = self.engine(), Request("b", 4)
        self.assertEqual(second.admit(again), 4)
        names, second.names = second.names, second.names[1:]
        second.step([again])
        self.assertEqual(second.invalid, set(second.held["b"]))
        second.names = names
        self.assertEqual(second.find(Request("c", 4)), 0)

    def made(self, changes, runner=False):
        config, cache = configuration(self.server, **changes)
        config.use_v2_model_runner = runner
        if runner is None:
            del config.use_v2_model_runner
        return config, KVConnectorRole.SCHEDULER, cache


if __name__ == "__main__":
    unittest.main()
