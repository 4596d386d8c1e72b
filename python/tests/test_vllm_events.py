"""What routers in front of vLLM are told by `KvartsLayers`: an engine without a model, over a real server, with doubles of what is not installed. A
router's picture is compared with what the store has."""

import threading
import time
import unittest
from types import SimpleNamespace

import doubles

doubles.install()

from vllm.distributed.kv_events import AllBlocksCleared, BlockStored  # noqa: E402

import kvarts  # noqa: E402
from kvarts import events  # noqa: E402
from served import Server  # noqa: E402
from test_vllm_layers import SOON, TOKENS, Engine, Request  # noqa: E402

TOLD = dict(kv_events_config=dict(enable_kv_cache_events=True))


class Asked(Request):
    """A request as events need it."""

    def __init__(self, name, blocks, seed=0, lora=None):
        super().__init__(name, blocks, seed)
        self.all_token_ids = [seed * 1000 + n for n in range(self.num_tokens)]
        self.lora_request = lora


class Router:
    """What somebody knows who hears of all events of an engine."""

    def __init__(self, engine):
        self.engine, self.blocks, self.events = engine, {}, []

    def hear(self):
        for event in self.engine.scheduler.take_events():
            self.events.append(event)
            if isinstance(event, BlockStored):
                parent, size = event.parent_block_hash, event.block_size
                for at, name in enumerate(event.block_hashes):
                    assert name not in self.blocks, "told twice"
                    self.blocks[name] = (parent, list(event.token_ids[at * size : (at + 1) * size]))
                    parent = name
            else:
                for name in event.block_hashes:
                    assert name in self.blocks, "removed, and never told"
                    del self.blocks[name]

    def until(self, wanted):
        """Until these blocks are known, and no other ones."""
        deadline = time.monotonic() + SOON
        while self.blocks.keys() != set(wanted):
            assert time.monotonic() < deadline, f"{len(self.blocks)} blocks are known, {len(set(wanted))} are there"
            self.engine.step()
            self.hear()
            time.sleep(0.002)
        return self.blocks


class Events(unittest.TestCase):
    def server(self, *arguments):
        server = Server(*arguments)
        self.addCleanup(server.stop)
        return server

    def engine(self, server, **kwargs):
        engine = Engine(server, **{**TOLD, **kwargs})
        self.addCleanup(self.no_thread_is_left)
        self.addCleanup(engine.close)
        return engine.ready(), Router(engine)

    def no_thread_is_left(self):
        deadline = time.monotonic() + SOON
        while left := [one.name for one in threading.enumerate() if one.name in ("kvarts-events", "kvarts-stream")]:
            if len(self._cleanups) > 1 and any(call[0] == self.no_thread_is_left for call in self._cleanups):
                return  # another engine's
            assert time.monotonic() < deadline, left
            time.sleep(0.01)

    def handle(self, server, engine):
        client = kvarts.connect(server.socket)
        self.addCleanup(client.close)
        return client.pages(**engine.scheduler._side._naming)

    def stored(self, engine, router, *requests):
        """Until they are, and are told of."""
        for request in requests:
            engine.stored(request)
        return router.until({*router.blocks, *(name for request in requests for name in request.block_hashes)})

    def test_a_block_is_told_of_with_what_it_is(self):
        engine, router = self.engine(self.server())
        request = Asked("a", 4, lora=SimpleNamespace(adapter_id=3, name="tuned"))
        self.stored(engine, router, request)
        for n, name in enumerate(request.block_hashes):
            before = request.block_hashes[n - 1] if n else None
            self.assertEqual(router.blocks[name], (before, request.all_token_ids[n * TOKENS : (n + 1) * TOKENS]))
        event = router.events[0]
        self.assertEqual((event.block_size, event.medium, event.locality, event.group_idx), (TOKENS, "STORAGE", "LOCAL", 0))
        self.assertEqual((event.kv_cache_spec_kind, event.lora_id, event.lora_name), ("full_attention", 3, "tuned"))
        self.assertEqual(len(event.extra_keys), len(event.block_hashes))

    def test_nothing_is_made_for_routers_where_vllm_tells_them_nothing(self):
        engine, router = self.engine(self.server(), kv_events_config=dict(enable_kv_cache_events=False))
        engine.stored(Request("a", 4))
        self.assertEqual((list(engine.scheduler.take_events()), engine.scheduler._side._routers), ([], None))
        self.assertFalse([one for one in threading.enumerate() if one.name == "kvarts-events"])

    def test_what_is_deleted_is_told_as_gone(self):
        server = self.server()
        engine, router = self.engine(server)
        one, other = Asked("a", 4), Asked("b", 4, seed=1)
        self.stored(engine, router, one, other)
        pages = self.handle(server, engine)
        pages.delete(one.block_hashes[2:])
        router.until({*one.block_hashes[:2], *other.block_hashes})
        removed = router.events[-1]
        self.assertEqual((removed.medium, removed.group_idx, removed.locality), ("STORAGE", 0, "LOCAL"))
        pages.delete_all()
        router.until(())

    def test_what_is_stored_again_by_another_engine_is_told_again(self):
        server = self.server()
        engine, router = self.engine(server)
        request = Asked("a", 4)
        self.stored(engine, router, request)
        self.handle(server, engine).delete(request.block_hashes)
        router.until(())
        other, others = self.engine(server)
        self.stored(other, others, Asked("b", 4))
        router.until(request.block_hashes)

    def test_what_is_evicted_is_told_as_gone(self):
        server = self.server("--budget", "4 MiB", "--segment", "1 MiB", "--shards", "1")
        engine, router = self.engine(server)
        pages = self.handle(server, engine)
        requests = [Asked(f"r{n}", 36, seed=n) for n in range(12)]
        for request in requests:
            engine.next = 1
            engine.stored(request)
            router.hear()
        names = [name for request in requests for name in request.block_hashes]
        there = [name for name, is_here in zip(names, pages.exists(names)) if is_here]
        self.assertLess(len(there), len(names), "nothing was evicted: this tried nothing")
        router.until(there)

    def test_a_server_that_is_killed_and_comes_back(self):
        server = self.server()
        engine, router = self.engine(server)
        request, later = Asked("a", 4), Asked("b", 4, seed=1)
        self.stored(engine, router, request, later)
        before = self.handle(server, engine)
        before.delete(later.block_hashes[1:2])
        server.kill()
        server.start()
        pages = self.handle(server, engine)
        # What is deleted before the engine is there again is in a gap.
        pages.delete(request.block_hashes[3:])
        names = [*request.block_hashes, *later.block_hashes]
        there = [name for name, is_here in zip(names, pages.exists(names)) if is_here]
        router.until(there)
        self.assertNotIn(request.block_hashes[3], there)
        # Events come again.
        pages.delete_all()
        router.until(())

    def test_blocks_of_a_server_that_stays_away_are_told_as_gone_and_are_back_with_it(self):
        server = self.server()
        engine, router = self.engine(server)
        request = Asked("a", 4)
        self.stored(engine, router, request)
        away, events._AWAY = events._AWAY, 0.1
        self.addCleanup(setattr, events, "_AWAY", away)
        server.kill()
        router.until(())
        server.start()
        pages = self.handle(server, engine)
        router.until([name for name, is_here in zip(request.block_hashes, pages.exists(request.block_hashes)) if is_here])

    def test_an_engine_that_starts_tells_of_what_it_finds(self):
        server = self.server()
        first, router = self.engine(server)
        request = Asked("a", 4)
        self.stored(first, router, request)
        second, others = self.engine(server)
        self.assertEqual(second.admit(Asked("b", 6)), 4)
        others.until(request.block_hashes)
        self.assertEqual(others.blocks, router.blocks)

    def test_what_vllm_tells_routers_to_forget_is_told_again(self):
        engine, router = self.engine(self.server())
        request = Asked("a", 4)
        known = dict(self.stored(engine, router, request))
        queue = [AllBlocksCleared()]
        engine.scheduler._side.manager.block_pool = SimpleNamespace(kv_event_queue=queue)
        engine.step()
        queue.clear()
        router.blocks.clear()
        self.assertEqual(router.until(request.block_hashes), known)

    def test_a_block_is_told_of_when_all_of_its_columns_are_there(self):
        server = self.server()
        engine, router = self.engine(server, tp=2)
        request = Asked("a", 4)
        self.stored(engine, router, request)
        pages = self.handle(server, engine)
        pages.delete(request.block_hashes[1:2], rank=1)
        router.until([request.block_hashes[0], *request.block_hashes[2:]])
