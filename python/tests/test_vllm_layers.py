"""The layerwise connector for vLLM without an engine: both sides, driven as the scheduler and the workers do, over a real server, its pool and
the emulated device; with doubles of what is not installed."""

import signal
import time
import unittest
from types import SimpleNamespace
from unittest import mock

import doubles

doubles.install()

import torch  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec  # noqa: E402

import kvarts  # noqa: E402
from kvarts.landing import rows_of  # noqa: E402
from kvarts.staging import Group, cut  # noqa: E402
from kvarts.vllm_compat import runs_by_layer  # noqa: E402
from kvarts.vllm_layers import KvartsLayers  # noqa: E402
from kvarts.vllm_pages import Plan  # noqa: E402
from served import Server  # noqa: E402

SOON = 30
TOKENS, HEADS, WIDTH, BLOCKS = 16, 2, 32, 40
NAMES = [f"layer.{n}" for n in range(3)]
WINDOWED = [f"window.{n}" for n in range(2)]
BY_LAYER = SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=SimpleNamespace(name="PIECEWISE"))


def configuration(server, names=(NAMES,), heads=HEADS, width=WIDTH, tp=1, pp=1, rank=0, kinds=(FullAttentionSpec,), block=TOKENS, mode="align", speculative=False, **changes):
    extra = {"server": server.socket, "revision": "1", "timeout": SOON, "pause": 0.1, "pool_bytes": 32 << 20}
    # The engine of these tests computes in no time.
    extra["plans"] = False
    extra.update(changes.pop("extra", {}))
    parts = {
        "kv_transfer_config": dict(kv_connector_extra_config=extra, kv_role="kv_both", is_kv_consumer=True, is_kv_producer=True),
        "parallel_config": dict(tensor_parallel_size=tp, rank=rank, pipeline_parallel_size=pp),
        "model_config": dict(model="test/model", revision=None, dtype="bfloat16", quantization=None, hf_overrides={}),
        "load_config": dict(load_format="auto"),
        "cache_config": dict(cache_dtype="auto"),
    }
    for part, values in changes.items():
        parts[part] = {**parts[part], **values} if part in parts else values
    speculative = SimpleNamespace(method="eagle", use_eagle_block_drop=lambda: True, draft_model_config=None) if speculative else None
    config = SimpleNamespace(speculative_config=speculative)
    for part, values in parts.items():
        setattr(config, part, SimpleNamespace(**values))
    groups = []
    for at, (kind, own) in enumerate(zip(kinds, names)):
        sizes = dict(block_size=block if at == 0 else TOKENS, num_kv_heads=heads, head_size=width, dtype=torch.bfloat16)
        if kind is MambaSpec:
            spec = kind(block_size=TOKENS, shapes=((4, 8), (16,)), dtypes=(torch.bfloat16, torch.float32), mamba_cache_mode=mode)
        else:
            spec = kind(**sizes, sliding_window=2 * TOKENS) if kind is SlidingWindowSpec else kind(**sizes)
        own = [f"stage.{rank // tp}.{name}" for name in own]
        groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=own))
    return config, SimpleNamespace(kv_cache_groups=groups, hash_block_size=TOKENS, kv_cache_layout="LBNHC", num_blocks=BLOCKS)


class Request:
    def __init__(self, name, blocks, seed=0, **params):
        self.request_id = name
        self.num_tokens = self.num_prompt_tokens = blocks * TOKENS + 1
        self.num_computed_tokens = self.num_in_flight_tokens = 0
        self.block_hashes = [(1000 * seed + n).to_bytes(32, "big") for n in range(blocks)]
        self.kv_transfer_params = params or None


class Engine:
    """A scheduler, workers and their KV caches: what vLLM does in a step, without a model."""

    def __init__(self, server, tp=1, pp=1, heads=HEADS, width=WIDTH, layout="LBNHC", **changes):
        self.layout, self.shape = layout, (heads, width)
        places = [(stage, rank) for stage in range(pp) for rank in range(tp)]
        configs = [configuration(server, heads=heads, width=width, tp=tp, pp=pp, rank=at, **changes) for at in range(len(places))]
        self.scheduler = KvartsLayers(configs[0][0], KVConnectorRole.SCHEDULER, configs[0][1])
        self.groups = len(configs[0][1].kv_cache_groups)
        self.workers, self.caches, self.names = [], [], []
        for config, caches in configs:
            self.names.append([group.layer_names for group in caches.kv_cache_groups])
            self.workers.append(KvartsLayers(config, KVConnectorRole.WORKER, caches))
            self.caches.append(self._made([name for own in self.names[-1] for name in own]))
            self.workers[-1].register_kv_caches(self.caches[-1])
        self.scheduler.set_xfer_handshake_metadata_pp_aware(
            {place: worker.get_handshake_metadata() for place, worker in zip(places, self.workers)}
        )
        self.held = {}
        self.scheduler.bind_kv_cache_manager(SimpleNamespace(get_block_ids=lambda name: self.held[name], block_pool=None))
        self.next, self.graph = 1, BY_LAYER

    def _made(self, names):
        heads, width = self.shape
        order = {"LBNHC": (0, 1, 3, 2, 4), "BLNHC": (1, 0, 3, 2, 4), "LBHNC": (0, 1, 2, 3, 4), "LHBNC": (0, 2, 1, 3, 4)}[self.layout]
        shape = (len(names), BLOCKS, heads, TOKENS, 2 * width)
        whole = torch.zeros([shape[n] for n in order], dtype=torch.bfloat16)
        whole = whole.permute([order.index(n) for n in range(5)])
        return {name: whole[n] for n, name in enumerate(names)}

    def close(self):
        for part in [self.scheduler, *self.workers]:
            part.shutdown()

    def ready(self):
        """Until the workers have the pool."""
        deadline = time.monotonic() + SOON
        while self.scheduler._side._is_ready() is not True:
            assert time.monotonic() < deadline, "no pool"
            self.step()
            time.sleep(0.002)
        return self

    def find(self, request, computed=0):
        deadline = time.monotonic() + SOON
        while (found := self.scheduler.get_num_new_matched_tokens(request, computed * TOKENS)[0]) is None:
            assert time.monotonic() < deadline, "no answer"
            self.step()
            time.sleep(0.001)
        return found // TOKENS

    def admit(self, request):
        """Gives it memory; how many of its blocks are to be loaded."""
        found = self.find(request)
        held = []
        for group in range(self.groups):
            count = len(request.block_hashes)
            skipped = max(0, found * TOKENS - 2 * TOKENS + 1) // TOKENS if group else 0
            held.append([0] * skipped + list(range(self.next, self.next + count - skipped)))
            self.next += count - skipped
        self.held[request.request_id] = held
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: held), found * TOKENS)
        request.num_computed_tokens = found * TOKENS
        return found

    def step(self, *scheduled):
        """A step that computes what is left of these requests; who is let go of."""
        counts = {request.request_id: request.num_tokens - request.num_computed_tokens for request in scheduled}
        meta = self.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens=counts))
        for request in scheduled:
            request.num_in_flight_tokens = counts[request.request_id]
            request.num_computed_tokens += request.num_in_flight_tokens
        over, told = [], None
        for at, worker in enumerate(self.workers):
            worker.bind_connector_metadata(SimpleNamespace(**vars(meta)))
            worker.start_load_kv(self.graph)
            for group, names in enumerate(self.names[at]) if scheduled else ():
                for name in names:
                    if self.graph is BY_LAYER:
                        worker.wait_for_layer_load(name)
                    for request in scheduled:
                        self.compute(request, at, group, name)
                    if self.graph is BY_LAYER:
                        worker.save_kv_layer(name, None, None)
            worker.wait_for_save()
            over.append(worker.get_finished(set())[0])
            assert not worker.get_block_ids_with_load_errors()
            one = worker.build_connector_worker_meta()
            told = one if told is None else told.aggregate(one)
            worker.clear_connector_metadata()
        for request in scheduled:
            request.num_in_flight_tokens = 0
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=told))
        return set.intersection(*over)

    def compute(self, request, at, group, name):
        begin = (request.num_computed_tokens - request.num_in_flight_tokens) // TOKENS
        for n, block in list(enumerate(self.held[request.request_id][group]))[begin:]:
            self.caches[at][name][block] = self.right(request, at, name, n)

    def right(self, request, at, name, n):
        torch.manual_seed(hash((request.block_hashes[n], at, name)) % 2**31)
        return torch.randn(self.caches[at][name][0].shape).to(torch.bfloat16)

    def good(self, request):
        """The leading blocks that every cache has right, where the request has any."""
        for n in range(len(request.block_hashes)):
            for at, cache in enumerate(self.caches):
                for group, names in enumerate(self.names[at]):
                    block = self.held[request.request_id][group][n]
                    for name in names if block else ():
                        if not torch.equal(cache[name][block], self.right(request, at, name, n)):
                            return n
        return len(request.block_hashes)

    def counts(self, total):
        for part in [self.scheduler, *self.workers]:
            for name, count in (part.get_kv_connector_stats() or SimpleNamespace(data={})).data.items():
                total[name] = total.get(name, 0) + count
        return total

    def stored(self, request):
        """Computes a request and waits until its blocks are stored."""
        self.ready().admit(request)
        self.step(request)
        counts, deadline = self.counts({}), time.monotonic() + SOON
        while counts.get("saved", 0) < len(request.block_hashes):
            assert time.monotonic() < deadline, counts
            time.sleep(0.005)
            self.step()
            self.counts(counts)
        return counts


class WithStates(Engine):
    """Recurrent states beside attention: a block of a state has two parts, of different types, and padding behind them."""

    def __init__(self, server, **changes):
        super().__init__(server, names=(NAMES, WINDOWED), kinds=(FullAttentionSpec, MambaSpec), **changes)

    def _made(self, names):
        made = super()._made([name for name in names if "layer" in name])
        for name in [name for name in names if "window" in name]:
            whole = torch.zeros(BLOCKS, 96, dtype=torch.bfloat16)
            made[name] = [whole[:, :32].reshape(BLOCKS, 4, 8), whole[:, 32:64].view(torch.float32)]
        return made

    def states(self, block):
        """Every part of it, in every layer."""
        return [part[block] for name in self.names[0][1] for part in self.caches[0][name]]

    def fill(self, blocks, state):
        for name in self.names[0][0]:
            for block in blocks:
                self.caches[0][name][block] = torch.randn(self.caches[0][name][0].shape).to(torch.bfloat16)
        for part in self.states(state):
            part[...] = torch.randn(part.shape)

    def turn(self, counts=None, offers=None):
        """A step without a pass; requests whose loads have landed."""
        told = SimpleNamespace(boundary_state_offloads=offers or {})
        meta = self.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens=counts or {}, kv_connector_block_state=told))
        [worker] = self.workers
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(self.graph)
        worker.wait_for_save()
        _, landed = worker.get_finished(set())
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=worker.build_connector_worker_meta()))
        worker.clear_connector_metadata()
        return landed

    def until(self, is_good):
        deadline = time.monotonic() + SOON
        while not is_good(self.turn()):
            assert time.monotonic() < deadline
            time.sleep(0.002)


class Layers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def engine(self, server=None, **kwargs):
        extra = {"revision": self.id(), **kwargs.pop("extra", {})}
        engine = Engine(server or self.server, extra=extra, **kwargs)
        self.addCleanup(engine.close)
        return engine

    def own_server(self):
        server = Server()
        self.addCleanup(server.stop)
        return server

    def handle(self, engine):
        client = kvarts.connect(self.server.socket)
        self.addCleanup(client.close)
        return client.pages(**engine.scheduler._side._naming)

    def test_blocks_come_back_layer_by_layer_in_a_second_engine(self):
        for layout in ("LBNHC", "BLNHC", "LBHNC", "LHBNC"):
            with self.subTest(layout):
                first, request = self.engine(layout=layout, extra={"identity": {"layout": layout}}), Request("a", 4)
                first.stored(request)
                second, again = self.engine(layout=layout, extra={"identity": {"layout": layout}}).ready(), Request("b", 4)
                second.next = 7
                self.assertEqual(second.admit(again), 4)
                second.step(again)
                self.assertEqual(second.good(again), 4)
                self.assertFalse(any(cache[11:].any() or cache[:7].any() for cache in second.caches[0].values()))
                counts = second.counts({})
                self.assertEqual((counts["promised"], counts["landed"], counts["layers"]), (4, 4, len(NAMES)))
                # No pass had shown yet that its layers wait.
                self.assertEqual(counts.get("layered", 0), 0)

    def test_what_was_saved_is_promised_from_the_pool(self):
        engine, request = self.engine(), Request("a", 4)
        engine.stored(request)
        again = Request("b", 4)
        self.assertEqual(engine.admit(again), 4)
        engine.step(again)
        counts = engine.counts({})
        self.assertEqual((engine.good(again), counts["staged pool"], counts.get("staged read", 0)), (4, 4, 0))
        # By now a pass has shown it.
        self.assertEqual(counts["layered"], len(NAMES))

    def test_a_pass_that_is_one_graph_waits_for_all_layers_first(self):
        engine = self.engine()
        engine.stored(Request("a", 4))
        engine.graph = SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=SimpleNamespace(name="FULL"))
        again = Request("b", 4)
        self.assertEqual(engine.admit(again), 4)
        engine.step(again)
        self.assertEqual((engine.good(again), engine.counts({}).get("layered", 0)), (4, 0))
        self.assertTrue(runs_by_layer(BY_LAYER, {}))
        self.assertFalse(runs_by_layer(BY_LAYER, {"attn_metadata": {}}))
        self.assertFalse(runs_by_layer(SimpleNamespace(attn_metadata=None, cudagraph_runtime_mode=None), {}))

    def test_a_load_of_which_a_layer_does_not_wait_any_more_has_failed(self):
        engine = self.engine()
        engine.stored(Request("a", 4))
        again = Request("b", 4)
        self.assertEqual(engine.admit(again), 4)
        meta = engine.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"b": 1}))
        [worker] = engine.workers
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(BY_LAYER)
        for name in engine.names[0][0][1:]:
            worker.wait_for_layer_load(name)
        worker.wait_for_save()
        self.assertEqual(worker.get_block_ids_with_load_errors(), set(engine.held["b"][0][:4]))
        self.assertEqual(worker.get_block_ids_with_load_errors(), set())
        engine.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=worker.build_connector_worker_meta()))
        # From then on passes wait for all of it.
        later = Request("c", 4)
        self.assertEqual(engine.admit(later), 4)
        engine.counts({})
        engine.step(later)
        self.assertEqual((engine.good(later), engine.counts({}).get("layered", 0)), (4, 0))

    def test_blocks_that_are_gone_are_not_promised_and_what_is_computed_again_is_stored(self):
        engine, request = self.engine(), Request("a", 4)
        engine.stored(request)
        handle = self.handle(engine)
        self.assertTrue(handle.delete([request.block_hashes[2]]).ok)
        again = Request("b", 6)
        again.block_hashes[:4] = request.block_hashes
        self.assertEqual(engine.admit(again), 2)
        engine.step(again)
        self.assertEqual(engine.good(again), 6)
        self.until(engine, lambda: all(handle.exists(again.block_hashes)))

    def until(self, engine, condition):
        deadline = time.monotonic() + SOON
        while not condition():
            self.assertLess(time.monotonic(), deadline)
            engine.step()
            time.sleep(0.005)

    def test_memory_of_a_request_that_is_over_is_kept_until_it_was_copied(self):
        engine, request = self.engine().ready(), Request("a", 3)
        engine.admit(request)
        engine.step(request)
        kept, more = engine.scheduler.request_finished_all_groups(request, engine.held["a"])
        self.assertIsNone(more)
        # A machine with other work may have copied it before it was asked.
        if kept:
            self.assertTrue(engine.scheduler.has_pending_push_work())
            deadline = time.monotonic() + SOON
            while not (let_go := engine.step()):
                self.assertLess(time.monotonic(), deadline)
            self.assertEqual(let_go, {"a"})
            self.assertFalse(engine.scheduler.has_pending_push_work())
        handle = self.handle(engine)
        self.until(engine, lambda: all(handle.exists(request.block_hashes)))
        other = Request("b", 3)
        self.assertEqual(engine.admit(other), 3)
        engine.step(other)
        # All of it is stored: nothing is kept, but a load that has not been told yet.
        self.assertEqual(engine.scheduler.request_finished_all_groups(other, engine.held["b"]), (False, None))
        self.until(engine, lambda: not engine.scheduler.has_pending_push_work())

    def prefilled(self, engine, request):
        """An engine has computed this request for another one, and stored nothing yet; what it hands over."""
        engine.ready().admit(request)
        engine.step(request)
        return engine.scheduler.request_finished_all_groups(request, engine.held[request.request_id])[1]

    def test_what_one_engine_prefills_another_one_decodes(self):
        prefill, decode = self.engine(), self.engine().ready()
        request = Request("a", 4, do_remote_decode=True)
        handed = self.prefilled(prefill, request)
        told = handed["kvarts"]
        self.assertEqual((handed["do_remote_prefill"], told["tokens"], told["tail_tokens"]), (True, 4 * TOKENS, 1))
        self.assertEqual(told["namespace"], self.handle(prefill).namespace.hex())
        again = Request("b", 4, **handed)
        # Not before the other engine has stored it.
        stored = all(self.handle(prefill).exists(request.block_hashes))
        for _ in range(20):
            self.assertTrue(stored or decode.scheduler.get_num_new_matched_tokens(again, 0)[0] is None)
            decode.step()
            time.sleep(0.002)
            stored = stored or all(self.handle(prefill).exists(request.block_hashes))
        self.until(prefill, lambda: not prefill.scheduler.has_pending_push_work())
        self.assertEqual(decode.admit(again), 4)
        decode.step(again)
        self.assertEqual(decode.good(again), 4)
        counts = decode.counts({})
        self.assertEqual((counts["handed"], [name for name in counts if name.startswith("unhanded")]), (4, []))

    def test_what_is_not_handed_over_is_computed(self):
        prefill, decode = self.engine(), self.engine(extra={"timeout": 0.3}).ready()
        handed = self.prefilled(prefill, Request("a", 4, do_remote_decode=True))
        # The engine dies before it has stored any of it.
        keys = [bytes([9]) * 32 for _ in range(4)]
        handed["kvarts"]["last_key"] = keys[-1].hex()
        again = Request("b", 4, **handed)
        again.block_hashes = keys
        self.assertEqual(decode.admit(again), 0)
        decode.step(again)
        self.assertEqual(decode.good(again), 4)
        self.assertEqual(decode.counts({})["unhanded Silence"], 4)

    def test_nothing_is_waited_for_that_is_said_to_have_other_names(self):
        decode = self.engine().ready()
        own = self.handle(decode).namespace.hex()
        last = Request("a", 4).block_hashes[3].hex()
        for why, told in {
            "OtherIdentity": {"namespace": "00" * 32, "tokens": 4 * TOKENS, "last_key": last},
            "OtherKeys": {"namespace": own, "tokens": 4 * TOKENS, "last_key": "00" * 32},
            "too long": {"namespace": own, "tokens": 1 << 70, "last_key": last},
            "none": {"namespace": own, "tokens": 0},
            "text": {"namespace": own, "tokens": "64", "last_key": last},
            "less than a block": {"namespace": own, "tokens": TOKENS - 1, "last_key": last},
            "negative": {"namespace": own, "tokens": -64, "last_key": last},
            "no dictionary": [own],
        }.items():
            with self.subTest(why):
                # Its silence would be that of the test.
                self.assertEqual(decode.find(Request(f"b {why}", 4, do_remote_prefill=True, kvarts=told)), 0)
        counts = decode.counts({})
        self.assertEqual((counts["unhanded OtherIdentity"], counts["unhanded OtherKeys"]), (4, 8))

    def test_an_engine_whose_server_is_away_hands_nothing_over(self):
        server = self.own_server()
        engine, request = self.engine(server, extra={"timeout": 1.0}), Request("a", 4, do_remote_decode=True)
        engine.ready().admit(request)
        server.stop()
        engine.step(request)
        self.until(engine, lambda: engine.scheduler._side._link.away or engine.scheduler._side._link.puts_away)
        handed = engine.scheduler.request_finished_all_groups(request, engine.held["a"])[1]
        self.assertEqual((handed["kvarts"]["tokens"], handed["kvarts"]["tail_tokens"]), (0, 4 * TOKENS + 1))

    def test_only_an_engine_that_prefills_for_others_must_deliver(self):
        self.assertFalse(self.engine().scheduler.requires_kv_delivery)
        parts = dict(kv_role="kv_producer", is_kv_consumer=False, is_kv_producer=True)
        self.assertTrue(self.engine(kv_transfer_config=parts).scheduler.requires_kv_delivery)

    def test_a_request_that_lost_its_memory_is_stored_when_it_was_computed_again(self):
        engine, request = self.engine().ready(), Request("a", 3)
        engine.admit(request)
        request.num_computed_tokens = 0  # preempted before it ran
        engine.held["a"] = [[]]
        engine.step()
        handle = self.handle(engine)
        self.assertEqual(handle.exists(request.block_hashes), [False] * 3)
        engine.stored(request)
        self.assertEqual(handle.exists(request.block_hashes), [True] * 3)

    def test_ranks_have_parts_of_their_own_and_a_prefix_needs_all_of_them(self):
        first, request = self.engine(tp=2), Request("a", 3)
        first.stored(request)
        second, again = self.engine(tp=2).ready(), Request("b", 3)
        self.assertEqual(second.admit(again), 3)
        second.step(again)
        self.assertEqual(second.good(again), 3)
        self.handle(first).delete([request.block_hashes[1]], rank=1)
        self.assertEqual(first.find(Request("c", 3)), 1)

    def test_ranks_that_have_the_same_bytes_store_them_once(self):
        first, request = self.engine(tp=2, kinds=(MLAAttentionSpec,)), Request("a", 3)
        first.stored(request)
        second, again = self.engine(tp=2, kinds=(MLAAttentionSpec,)).ready(), Request("b", 3)
        self.assertEqual(second.admit(again), 3)
        meta = second.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
        [load] = meta.loads
        self.assertEqual([list(by_rank) for by_rank in load.stretches.values()], [[0]])
        self.assertEqual(len(second.scheduler._side._desk.groups[0].ranks), 1)
        self.assertEqual([worker._side._dock._groups[0].saves for worker in second.workers], [True, False])

    def test_with_a_draft_model_passes_wait_for_all_and_the_last_block_is_not_promised(self):
        engine = self.engine(speculative=True)
        engine.stored(Request("a", 4))
        again = Request("b", 6)
        self.assertEqual(engine.admit(again), 3)
        engine.step(again)
        self.assertEqual((engine.good(again), engine.counts({}).get("layered", 0)), (6, 0))

    def test_a_step_whose_end_was_not_told_ends_with_the_next(self):
        engine = self.engine().ready()
        request = Request("a", 3)
        engine.admit(request)
        [worker] = engine.workers
        for name, end in (("a", False), (None, True)):
            counts = {name: request.num_tokens} if name else {}
            worker.bind_connector_metadata(engine.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens=counts)))
            worker.start_load_kv(BY_LAYER)
            if end:
                worker.wait_for_save()
            told = worker.build_connector_worker_meta()
            engine.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=told))
            request.num_computed_tokens = request.num_tokens
        self.until(engine, lambda: not engine.scheduler._side._saves)

    def test_stages_of_a_pipeline_have_layers_of_their_own(self):
        first, request = self.engine(pp=2, tp=2), Request("a", 3)
        first.stored(request)
        second, again = self.engine(pp=2, tp=2).ready(), Request("b", 3)
        self.assertEqual(second.admit(again), 3)
        second.step(again)
        self.assertEqual(second.good(again), 3)
        self.handle(first).delete([request.block_hashes[2]], group=1, rank=0)
        self.assertEqual(first.find(Request("c", 3)), 2)

    WINDOWS = dict(names=(NAMES, WINDOWED), kinds=(FullAttentionSpec, SlidingWindowSpec))

    def test_windows_are_kept_by_policy_and_a_prefix_ends_where_they_are(self):
        # Of a window of 32 tokens a prefix needs the two blocks before its end.
        for windows, found in (("full", 7), (4 * TOKENS, 4), ("turn", 7), ("none", 0), ("auto", 7)):
            with self.subTest(windows):
                name = {"identity": {"windows": str(windows)}, "windows": windows}
                first, request = self.engine(**self.WINDOWS, extra=name), Request("a", 7)
                first.stored(request)
                self.until(first, lambda: not first.scheduler._side._saves)
                time.sleep(0.05)
                second, again = self.engine(**self.WINDOWS, extra=name).ready(), Request("b", 9)
                again.block_hashes[:7] = request.block_hashes
                # On a machine with other work less may be staged in time at first, and never more.
                for asked in range(100):
                    before = Request(f"before-{asked}", 9)
                    before.block_hashes[:7] = request.block_hashes
                    if (now := second.find(before)) == found:
                        break
                    self.assertLess(now, found)
                    time.sleep(0.02)
                self.assertEqual(second.admit(again), found)
                second.step(again)
                self.assertEqual(second.good(again), 9)
                if found == 7:
                    # Of the window no more than that was read.
                    self.assertEqual(second.counts({})["staged read"], 7 + 2)

    def test_the_end_of_a_turn_is_where_its_answer_ends(self):
        for windows, found in (("turn", 8), ("full", 8)):
            with self.subTest(windows):
                extra = {"identity": {"windows": windows}, "windows": windows}
                first, request = self.engine(**self.WINDOWS, extra=extra).ready(), Request("a", 4)
                first.admit(request)
                first.step(request)
                # The answer: blocks that are computed one by one.
                for at in range(4, 8):
                    request.block_hashes.append(at.to_bytes(32, "big"))
                    request.num_tokens += TOKENS
                    for group in first.held["a"]:
                        group.append(first.next)
                        first.next += 1
                    first.step(request)
                self.assertEqual(first.scheduler.request_finished_all_groups(request, first.held["a"])[0], True)
                handle = self.handle(first)
                self.until(first, lambda: all(handle.exists(request.block_hashes)) and handle.exists(request.block_hashes[6:], group=1) == [True] * 2)
                self.until(first, lambda: not first.scheduler.has_pending_push_work())
                if windows == "turn":
                    self.assertEqual(handle.exists(request.block_hashes, group=1), [at in (2, 3, 6, 7) for at in range(8)])
                second, again = self.engine(**self.WINDOWS, extra=extra).ready(), Request("b", 9)
                self.assertEqual(second.find(again), found)

    def test_windows_that_passed_before_a_request_was_let_in_keep_no_others_from_being_saved(self):
        engine, request = self.engine(**self.WINDOWS, extra={"windows": "full"}).ready(), Request("a", 8)
        # vLLM has five blocks itself: of the window the last two of them.
        engine.held["a"] = [list(range(1, 9)), [0, 0, 0, *range(9, 14)]]
        self.assertEqual(engine.find(request, computed=5), 0)
        engine.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: engine.held["a"]), 0)
        request.num_computed_tokens = 5 * TOKENS
        engine.step(request)
        handle = self.handle(engine)
        self.until(engine, lambda: handle.exists(request.block_hashes, group=1) == [at >= 3 for at in range(8)])
        self.until(engine, lambda: all(handle.exists(request.block_hashes)))

    def test_windows_that_are_gone_end_the_prefix_earlier(self):
        engine, request = self.engine(**self.WINDOWS, extra={"windows": "full"}), Request("a", 6)
        engine.stored(request)
        handle = self.handle(engine)
        self.until(engine, lambda: all(handle.exists(request.block_hashes, group=1)))
        handle.delete([request.block_hashes[4]], group=1)
        again = Request("b", 6)
        self.assertEqual(engine.admit(again), 4)
        engine.step(again)
        self.assertEqual(engine.good(again), 6)

    def test_engines_of_another_identity_share_nothing(self):
        first, request = self.engine(), Request("a", 2)
        first.stored(request)
        others = [
            {"extra": {"revision": "2"}},
            {"extra": {"identity": {"more": "1"}}},
            {"tp": 2},
            {"pp": 2},
            {"heads": 4},
            {"model_config": {"model": "another"}},
            {"cache_config": {"cache_dtype": "fp8"}},
            {"cache_config": {"kv_cache_dtype_skip_layers": ["0"]}},
            {"names": (NAMES[:2],)},
        ]
        for kwargs in others:
            with self.subTest(kwargs):
                self.assertEqual(self.engine(**kwargs).ready().find(Request("b", 2)), 0)
        self.assertEqual(self.engine().ready().find(Request("b", 2)), 2)

    def test_what_is_staged_lands_after_the_server_has_died(self):
        server = self.own_server()
        engine, request = self.engine(server), Request("a", 3)
        engine.stored(request)
        late = Request("late", 3)
        self.assertEqual(engine.find(late), 3)
        server.kill()
        self.assertEqual(engine.admit(late), 3)
        engine.step(late)
        self.assertEqual(engine.good(late), 3)

    def test_a_server_that_stands_still_is_a_miss_and_comes_back(self):
        server = self.own_server()
        engine, request = self.engine(server, extra={"timeout": 2.0}), Request("a", 3)
        engine.stored(request)
        late = Request("late", 3)
        self.assertEqual(engine.find(late), 3)
        server.signal(signal.SIGSTOP)
        try:
            # What was staged before is promised, and landed.
            self.assertEqual(engine.admit(late), 3)
            engine.step(late)
            self.assertEqual(engine.good(late), 3)
            self.assertEqual(engine.find(Request("b", 3)), 0)
        finally:
            server.signal(signal.SIGCONT)
        self.until(engine, lambda: engine.find(Request(f"c {time.monotonic()}", 3)) == 3)

    def test_it_starts_without_a_server(self):
        server = self.own_server()
        server.kill()
        engine, request = self.engine(server, extra={"timeout": 2.0}), Request("a", 3)
        self.assertEqual(engine.admit(request), 0)
        engine.step(request)
        self.assertEqual(engine.good(request), 3)
        self.assertEqual(engine.scheduler.request_finished_all_groups(request, engine.held["a"]), (False, None))
        server.start()
        self.until(engine, lambda: engine.scheduler._side._is_ready())
        engine.stored(Request("b", 3, seed=1))

    def test_a_request_may_bound_what_is_loaded_and_saved_of_it(self):
        engine, request = self.engine().ready(), Request("a", 4, max_offload_tokens=3 * TOKENS)
        engine.admit(request)
        engine.step(request)
        handle = self.handle(engine)
        self.until(engine, lambda: sum(handle.exists(request.block_hashes)) == 3)
        self.assertEqual(engine.find(Request("b", 4, max_load_tokens=2 * TOKENS + 5)), 2)
        self.assertEqual(engine.find(Request("c", 4, max_load_tokens=0)), 0)
        self.assertEqual(engine.find(Request("d", 4)), 3)
        skips = Request("s", 4)
        skips.skip_reading_prefix_cache = True
        self.assertEqual(engine.find(skips), 0)
        # And no more is told of it than was asked: some block is left to compute.
        self.assertEqual(engine.find(Request("e", 4), computed=3), 0)

    def states(self, **extra):
        engine = WithStates(self.server, extra={"revision": self.id(), "windows": "full", **extra})
        self.addCleanup(engine.close)
        # `ready` makes steps without requests.
        return engine.ready()

    def allocated(self, engine, request, held, found):
        engine.held[request.request_id] = held
        engine.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: held), found * TOKENS)
        request.num_computed_tokens = found * TOKENS

    def test_states_land_before_their_request_is_let_in(self):
        first, request = self.states(), Request("a", 3)
        self.assertEqual(first.find(request), 0)
        self.allocated(first, request, [[1, 2, 3, 4], [0, 0, 9, 10]], 0)
        first.fill((1, 2, 3), 9)
        # The state behind the second block was passed; that behind the third is where vLLM says.
        first.turn({"a": 3 * TOKENS}, {"a": [(1, 9, 3 * TOKENS)]})
        request.num_computed_tokens = 3 * TOKENS
        counts = {}
        first.until(lambda landed: first.counts(counts).get("saved", 0) == 4)
        second, again = self.states(), Request("b", 4)
        again.block_hashes[:3] = request.block_hashes
        self.assertEqual(second.find(again), 3)
        self.assertEqual(second.scheduler.get_num_new_matched_tokens(again, 0), (3 * TOKENS, True))
        self.allocated(second, again, [[5, 6, 7], [0, 0, 8]], 3)
        second.until(lambda landed: landed == {"b"})
        for one, two in zip(first.states(9), second.states(8)):
            self.assertTrue(one.any() and torch.equal(one, two))
        for name, other in zip(first.names[0][0], second.names[0][0]):
            for one, two in zip((1, 2, 3), (5, 6, 7)):
                self.assertTrue(torch.equal(first.caches[0][name][one], second.caches[0][other][two]))
        # It is let in; nothing is asked or promised once more.
        self.allocated(second, again, [[5, 6, 7, 11], [0, 0, 8, 12]], 0)
        again.num_computed_tokens = 3 * TOKENS
        self.assertEqual(second.scheduler._side._known["b"].promised, 3)
        self.assertFalse(second.scheduler._side._waiting)

    def test_a_request_that_is_given_up_while_it_is_landed_is_forgotten(self):
        first, request = self.states(), Request("a", 2)
        self.assertEqual(first.find(request), 0)
        self.allocated(first, request, [[1, 2], [0, 9]], 0)
        first.turn({"a": 2 * TOKENS}, {"a": [(1, 9, 2 * TOKENS)]})
        request.num_computed_tokens = 2 * TOKENS
        counts = {}
        first.until(lambda landed: first.counts(counts).get("saved", 0) == 3)
        again = Request("b", 3)
        again.block_hashes[:2] = request.block_hashes
        self.assertEqual(first.find(again), 2)
        self.allocated(first, again, [[3, 4], [0, 5]], 2)
        # vLLM keeps its places until the load has landed.
        self.assertEqual(first.scheduler.request_finished_all_groups(again, [[3, 4], [0, 5]]), (False, None))
        first.until(lambda landed: landed == {"b"})
        first.until(lambda landed: not first.scheduler._side._landing)
        self.assertNotIn("b", first.scheduler._side._known)

    def test_which_states_are_kept(self):
        for policy, kept in (
            ("full", [16, 32, 64, 80, 96]),
            ("none", []),
            ("turn", [80]),
            (48, [64]),
            # States of so few bytes are kept wherever they are.
            ("auto", [16, 32, 64, 80, 96]),
        ):
            config, cache = configuration(self.server, names=(NAMES, WINDOWED), kinds=(FullAttentionSpec, MambaSpec), extra={"windows": policy})
            plan, found = Plan(config, cache), [0]
            for boundary in (16, 32, 64, 80, 96):
                if plan.keeps_state(boundary, found[-1], 80):
                    found.append(boundary)
            self.assertEqual(found[1:], kept, policy)

    def test_what_is_deleted_while_a_request_waits_is_not_promised_for_long(self):
        engine, request = self.engine(), Request("a", 4)
        engine.stored(request)
        again = Request("b", 4)
        self.assertEqual(engine.find(again), 4)
        self.handle(engine).delete(request.block_hashes[2:3])
        with mock.patch("kvarts.staging.FRESH", 0.0):
            time.sleep(0.001)
            self.assertIsNone(engine.scheduler.get_num_new_matched_tokens(again, 0)[0])
        self.assertEqual(engine.find(again), 2)

    def test_what_is_staged_is_promised_however_long_a_step_takes_and_whatever_the_server_does_then(self):
        server = self.own_server()
        engine, request = self.engine(server, extra={"timeout": 1.0}), Request("a", 4)
        engine.stored(request)
        with mock.patch("kvarts.staging.FRESH", 0.0):
            # Each time that it is asked for, the stage ended long ago.
            self.assertEqual(engine.find(Request("b", 4)), 4)
            server.signal(signal.SIGSTOP)
            try:
                time.sleep(0.001)
                self.assertIsNone(engine.scheduler.get_num_new_matched_tokens(Request("b", 4), 0)[0])
                # It is asked for again, and there is no answer: what was staged stays good.
                self.assertEqual(engine.find(Request("b", 4)), 4)
            finally:
                server.signal(signal.SIGCONT)

    def test_what_does_not_pay_is_not_promised(self):
        # An engine that computes a million tokens a second, and one that takes a second for each.
        fast = {"times": {"samples": [(0, 1000, 0.001), (0, 100_000, 0.1), (100_000, 1000, 0.001)]}}
        slow = {"times": {"samples": [(0, 10, 10_000.0), (0, 1000, 1_000_000.0), (1000, 10, 10_000.0)]}}
        fast["plans"] = slow["plans"] = True
        self.engine(extra=slow).stored(Request("a", 4))
        self.assertEqual(self.engine(extra=fast).ready().find(Request("b", 4)), 0)
        self.assertEqual(self.engine(extra=slow).ready().find(Request("b", 4)), 4)
        # An operator may want it all the same.
        self.assertEqual(self.engine(extra={**fast, "plans": False}).ready().find(Request("b", 4)), 4)

    def test_how_long_prompts_take_is_measured_and_what_does_not_pay_is_not_promised(self):
        self.engine().stored(Request("a", 4))
        for milliseconds, found in ((0.00001, 0), (1000.0, 4)):  # of each token
            engine = self.engine(extra={"plans": True}).ready()
            steps = engine.scheduler._side.settings.steps
            for n in range(16):
                self.assertIsNone(steps.times)
                request = Request(f"p{n}", 17 if n % 2 else 4, seed=100 + n + int(milliseconds))
                self.assertEqual(engine.admit(request), 0)
                steps._ended, clock = 0.0, iter((1e3, 1e3 + milliseconds * request.num_tokens / 1e3))
                with mock.patch("kvarts.steps.time", SimpleNamespace(monotonic=lambda clock=clock: next(clock))):
                    engine.step(request)
                engine.next = 1  # the places of the one before
                engine.scheduler.request_finished_all_groups(request, engine.held[request.request_id])
            self.assertAlmostEqual(steps.times.prefill_ms(0, 4 * TOKENS + 1) / milliseconds, 4 * TOKENS + 1, delta=1)
            self.assertEqual(engine.find(Request("b", 4)), found)

    def test_what_lies_in_the_pool_is_promised_however_slow_the_disk_is_said_to_be(self):
        fast = {"plans": True, "times": {"samples": [(0, 1000, 0.001), (0, 100_000, 0.1), (100_000, 1000, 0.001)]}}
        engine, request = self.engine(extra=fast), Request("a", 4)
        engine.stored(request)
        found = Request("b", 4)
        self.assertEqual(engine.find(found), 4)
        engine.scheduler.request_finished_all_groups(found, ())
        engine.scheduler.reset_cache()
        self.assertEqual(engine.find(Request("d", 4)), 0)

    def test_what_it_cannot_do_is_refused_by_name(self):
        refused = [
            ("decode_context_parallel_size", {"parallel_config": {"decode_context_parallel_size": 2}}),
            ("kv_cache_groups: .* needs layers with attention", {"kinds": (SlidingWindowSpec,)}),
            ("kv_cache_groups: windows", {**self.WINDOWS, "block": 2 * TOKENS}),
            ("mamba_cache_mode", {"names": (NAMES, WINDOWED), "kinds": (FullAttentionSpec, MambaSpec), "mode": "all"}),
            ("windows", {"extra": {"windows": "some"}}),
        ]
        for what, changes in refused:
            with self.assertRaisesRegex(ValueError, what):
                KvartsLayers(*self.made(changes))
        for what, changes in (
            ("hf_overrides", {"model_config": {"hf_overrides": lambda config: config}}),
            ("revision", {"extra": {"revision": None}}),
        ):
            with self.assertRaisesRegex(ValueError, what):
                Engine(self.server, **changes)
        self.assertTrue(KvartsLayers.supports_sleep_mode(None))
        self.assertFalse(KvartsLayers.requires_piecewise_for_cudagraph({}))

    def made(self, changes):
        config, cache = configuration(self.server, **changes)
        return config, KVConnectorRole.SCHEDULER, cache

    def test_a_layer_that_has_no_cache_of_its_own_is_passed_over_and_one_in_no_group_is_refused(self):
        engine = self.engine().ready()
        worker, caches = engine.workers[0], dict(engine.caches[0])
        worker.wait_for_layer_load("shares.0")
        worker.save_kv_layer("shares.0", None, None)
        worker.register_kv_caches({**caches, "shares.0": caches["stage.0.layer.0"]})
        with self.assertRaisesRegex(ValueError, "kv_cache_groups: the layer alone"):
            worker.register_kv_caches({**caches, "alone": torch.zeros(8, 8)})


class Places(unittest.TestCase):
    def test_rows_say_where_every_byte_of_a_page_lies(self):
        for sizes, strides, item, rows in (
            ((4, 8, 16), (128, 16, 1), 2, ((1, 0, 0), (1, 0, 0), 1024)),
            # Heads apart, and two halves apart.
            ((4, 8, 16), (1000, 16, 1), 2, ((1, 0, 0), (4, 256, 2000), 256)),
            ((2, 4, 8, 16), (9000, 1000, 16, 1), 2, ((2, 1024, 18000), (4, 256, 2000), 256)),
            # The order of sizes is not that of memory.
            ((8, 4, 16), (16, 128, 1), 1, ((1, 0, 0), (1, 0, 0), 512)),
            ((5, 1), (3, 7), 4, ((1, 0, 0), (5, 4, 12), 4)),
            ((1,), (1,), 2, ((1, 0, 0), (1, 0, 0), 2)),
        ):
            self.assertEqual(tuple(rows_of(sizes, strides, item)), rows)
            self.assertEqual(rows_of(sizes, strides, item).nbytes, item * torch.zeros(sizes).numel())
        with self.assertRaises(ValueError):
            rows_of((2, 2, 2, 2), (1000, 100, 10, 1), 1)

    def test_stretches_are_cut_at_blocks(self):
        whole = [(0, 8, 2, 3), (4096, 4, 0, 4)]
        self.assertEqual(cut(whole, 0, 7), whole)
        self.assertEqual(cut(whole, 1, 4), [(0, 8, 3, 2), (4096, 4, 0, 1)])
        self.assertEqual(cut(whole, 3, 3), [])
        with self.assertRaises(ValueError):
            cut(whole, 0, 8)

    def test_a_group_needs_all_or_its_window(self):
        self.assertEqual([Group(0, window, (0,)).first_of(10, 16) for window in (None, 1, 16, 17, 1000)], [0, 9, 9, 8, 0])


if __name__ == "__main__":
    unittest.main()
