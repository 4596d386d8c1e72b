"""The layerwise connector under faults, by seeds: loads fail and layers are late or never come, puts are refused or not answered,
servers go away, blocks go, requests are preempted and given up, also while a step runs.

Whatever happens: what is stored under a key is what a run without faults would have stored; a request that ends well has computed
with nothing else; a block that was promised is there, or was reported in the same step; and when the faults are over, everything is
stored, and nothing is kept. Each test of a planted bug sees one of these fail."""

import contextlib
import random
import types
import unittest
from unittest import mock

import faults
import kvarts
from faults import LAYERS, Link, Request, Scheduler, Store, Time, right
from kvarts import link, vllm_layers
from seeded import Seeded


@contextlib.contextmanager
def in_virtual_time(store, clock):
    """The connector with this store, in this time."""
    links = []

    def made(plan):
        links.append(Link(store))
        return links[-1]

    shown = types.SimpleNamespace(**{name: getattr(kvarts, name) for name in kvarts.__all__})
    shown.Paged = lambda parts, slots: (parts, list(slots))
    with contextlib.ExitStack() as stack:
        for where, name, what in (
            (vllm_layers, "time", clock),
            (link, "time", clock),
            (vllm_layers, "kvarts", shown),
            (vllm_layers.Plan, "link", made),
        ):
            stack.enter_context(mock.patch.object(where, name, what))
        stack.enter_context(mock.patch.object(link.logger, "disabled", True))
        yield links


class Run:
    """One seed: what is asked of an engine, and what goes wrong meanwhile."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.clock = Time()
        self.ranks = self.chance.choice((1, 1, 2))
        self.store = Store(self.chance, self.clock, self.ranks)
        self.policy = self.chance.choice(("recompute", "recompute", "fail"))
        self.deaf = self.chance.choice((None, None, None, self.chance.randrange(LAYERS)))
        self.names = 0
        # Texts with beginnings in common.
        self.texts = [self._text(self.chance.randrange(4), self.chance.randrange(1, 8)) for _ in range(6)]

    def _text(self, kind, blocks):
        keys, branch = [b""], self.chance.randrange(1, 5)
        for at in range(blocks):
            keys.append(faults.digest(keys[-1], bytes([at, 0 if at <= branch else kind])))
        return keys[1:]

    def go(self, steps=40):
        with in_virtual_time(self.store, self.clock) as links:
            self.links = links
            self.engine = self._engine()
            for _ in range(steps):
                self._something()
                self._step()
            self._calm()

    def _engine(self):
        engine = Scheduler(self.chance, self.clock, self.store, ranks=self.ranks, policy=self.policy, deaf=self.deaf)
        self.requests = []
        return engine

    def _something(self):
        happens = self.store.happens
        while happens(0.4):
            text = self.chance.choice(self.texts)
            for _ in range(self.chance.choice((1, 1, 2, 3))):
                self._ask(text)
        if happens(0.2):
            self.store.churn()
        if happens(0.05):
            self.store.away = not self.store.away
        if self.store.away and happens(0.3):
            self.store.away = False
        if happens(0.05) and self.requests:
            self.engine.give_up(self.chance.choice(self.requests))
        if happens(0.1):
            self.clock.now += self.chance.choice((0.5, 3.0))
        if happens(0.03):
            # The engine is killed, and another one is started: only what is stored is left.
            del self.links[:]
            self.engine = self._engine()

    def _ask(self, text):
        self.names += 1
        request = Request(f"r{self.names}", text, 3 if self.store.calm else self.chance.choice((0, 0, 4)))
        self.requests.append(request)
        self.engine.add(request)

    def _step(self):
        if not self.store.happens(0.2):  # the thread of the link may be late
            for one in self.links:
                one.run()
        gone = [request for request in self.requests if self.store.happens(0.03)]
        self.engine.step(gone)
        self._judge_store()

    def _judge_store(self):
        known = {text[at]: (text, at) for text in self.texts for at in range(len(text))}
        for (rank, key), layers in self.store.blocks.items():
            text, at = known[key]
            if layers != [right(text, at, layer, rank) for layer in range(LAYERS)]:
                raise AssertionError(f"stored wrong: block {at}")

    def _calm(self):
        """The faults are over: what is asked now is stored in the end, and nothing is kept."""
        self.store.calm, self.store.away = True, False
        for _ in range(2):  # answers that come late are faults, too
            self._until_idle()
            self.clock.now += 100.0
        for text in self.texts:
            self._ask(text)
            self._until_idle()
        # Where a load that the forward pass does not wait for ends its request, not everything is computed.
        for text in self.texts if self.deaf is None or self.policy == "recompute" else ():
            for at, key in enumerate(text):
                # What once rested on a failed load is not stored as long as the engine keeps that very block.
                doubtful = self.engine.of_hash.get(key) in self.engine.connector._side._tainted
                for rank in range(self.ranks):
                    if (rank, key) not in self.store.blocks and not doubtful:
                        raise AssertionError(f"never stored: block {at}")
        engine = self.engine
        side = engine.connector._side
        left = (engine.kept, side._known, side._asked, side._loads, side._under, engine.workers[0].connector._side._puts)
        if any(left) or len(engine.free) != 24:
            raise AssertionError(f"kept for ever: {left}, {len(engine.free)} blocks free")

    def _until_idle(self):
        for _ in range(400):
            for one in self.links:
                one.run()
            self.engine.step()
            self._judge_store()
            if not (self.engine.running or self.engine.waiting or self.engine.connector.has_pending_push_work()):
                return
        raise AssertionError("never idle")


bound = vllm_layers.Finder.bind


class Faults(Seeded, unittest.TestCase):
    course = Run

    def test_what_is_stored_is_right_and_what_is_promised_is_there_or_is_reported(self):
        seen = {"loaded": 0, "stored": 0}
        for run in self.every_seed():
            for part in [run.engine.connector, *(worker.connector for worker in run.engine.workers)]:
                for name, count in part._side.stats.data.items():
                    seen[name.split()[0]] = seen.get(name.split()[0], 0) + count
                    seen[name] = seen.get(name, 0) + (count if " " in name else 0)
        # That it has tried anything.
        for what in ("loaded", "stored", "failed", "failed Silence", "failed Unwaited", "failed Digest", "failed DeadlinePassed"):
            self.assertGreater(seen.get(what, 0), 0, seen)

    def test_planted_blocks_of_a_failed_load_stay_in_the_prefix_cache(self):
        self.expect_seen("wrong answer", (vllm_layers.Finder, "_take_back", lambda *of: None))

    @staticmethod
    def run_links(links):
        for one in links:
            one.run()

    def after_a_failed_load(self, requests, given_up=()):
        """An engine that is asked for a text, all of which is stored; a block goes after it was found. It needs several steps to
        compute the rest again. What the store has in the end, and the engine."""
        clock = Time()
        store = Store(random.Random(1), clock, 1)
        store.calm = True
        text = [faults.digest(bytes([at])) for at in range(5)]
        store.blocks = {(0, key): [right(text, at, layer, 0) for layer in range(LAYERS)] for at, key in enumerate(text)}
        with in_virtual_time(store, clock) as links:
            engine = Scheduler(store.chance, clock, store)
            engine.limits = (8, 1)
            asked = [Request(name, text) for name in requests]
            for request in asked[: requests.index("later") if "later" in requests else None]:
                engine.add(request)
            self.run_links(links)
            for at in range(20):
                engine.step([request for request in asked if request.request_id in given_up] if at == 1 else ())
                self.run_links(links)
                if at == 0:
                    del store.blocks[0, text[1]]
                if at == 2 and "later" in requests:
                    engine.add(asked[-1])
            wrong = [at for at, key in enumerate(text) if store.blocks.get((0, key)) != [right(text, at, n, 0) for n in range(LAYERS)]]
            return wrong, engine

    def test_no_request_is_admitted_on_blocks_that_are_being_loaded_and_planted(self):
        wrong, engine = self.after_a_failed_load(["first", "second"])
        self.assertEqual((wrong, len(engine.done)), ([], 2))
        with mock.patch.object(vllm_layers.Finder, "_rests_on_a_load", lambda *of: False):
            with self.assertRaisesRegex(AssertionError, "wrong answer"):
                self.after_a_failed_load(["first", "second"])

    def test_a_request_that_is_given_up_while_its_load_fails_leaves_nothing_in_the_engine_and_planted(self):
        wrong, engine = self.after_a_failed_load(["first", "later"], given_up=["first"])
        self.assertEqual((wrong, len(engine.done)), ([], 1))
        with mock.patch.object(vllm_layers.Finder, "_take_back", lambda *of: None):
            with self.assertRaisesRegex(AssertionError, "wrong answer"):
                self.after_a_failed_load(["first", "later"], given_up=["first"])
            # What is worse: it is stored, and wrong for every engine from then on.
            with mock.patch.object(Scheduler, "_judge", lambda *of: None):
                wrong, _ = self.after_a_failed_load(["first", "later"], given_up=["first"])
                self.assertNotEqual(wrong, [])
        # An engine that would keep it: then nothing of the next request is stored.
        with mock.patch.object(vllm_layers.Finder, "bind", lambda finder, of, evict: bound(finder, of, lambda blocks: None)):
            with mock.patch.object(Scheduler, "_judge", lambda *of: None):
                self.assertEqual(self.after_a_failed_load(["first", "later"], given_up=["first"])[0], [1])

    def test_planted_a_load_counts_that_the_forward_pass_did_not_wait_for(self):
        def end(mover, whole=True):
            if whole and mover._readings:
                mover.wait_for(mover.plan.layers[-1])
                mover._waited = set(mover.plan.layers)
            return honest(mover, whole)

        honest = vllm_layers.Mover._end_loads
        self.expect_seen(("wrong answer", "stored wrong"), (vllm_layers.Mover, "_end_loads", end))

    def test_planted_failed_blocks_are_not_reported(self):
        self.expect_seen("promised, and not there", (vllm_layers.Mover, "take_failed", lambda mover: set()))

    def one_that_waits(self):
        """How many of six blocks are stored of one request, whose first save met a store that takes nothing."""
        clock = Time()
        store = Store(random.Random(1), clock, 1)
        store.calm = True
        with in_virtual_time(store, clock) as links:
            engine = Scheduler(store.chance, clock, store)
            self.run_links(links)
            engine.add(Request("a", [faults.digest(bytes([at])) for at in range(6)], stays=20))
            # After the scheduler was told that there is room, and before the worker is to copy.
            puts_away = mock.patch.object(vllm_layers.Mover, "_begin_copy", lambda mover, save: mover._back.update({save.number: True}))
            for at in range(12):
                with puts_away if at < 6 else contextlib.nullcontext():
                    engine.step()
                self.run_links(links)
            self.assertEqual([request.state for request in engine.running], ["running"])
            return len(store.blocks)

    def test_what_was_not_taken_is_offered_again_and_planted_counts_as_saved(self):
        self.assertEqual(self.one_that_waits(), 6)

        def done(finder, known, told):
            known.sent = {}

        with mock.patch.object(vllm_layers.Finder, "_saves_done", done):
            self.assertLess(self.one_that_waits(), 6)

    def test_planted_memory_is_let_go_before_it_was_copied(self):
        def finished(finder, request, blocks):
            honest(finder, request, blocks)
            return False

        honest = vllm_layers.Finder.finished
        self.expect_seen(("stored wrong", "let go, and not kept"), (vllm_layers.Finder, "finished", finished))

    def test_planted_a_failed_layer_is_passed_over(self):
        def next_layer(mover, reading):
            good = reading.good
            honest(mover, reading)
            reading.good = good if reading.reading is not None else 0

        honest = vllm_layers.Mover._next_layer
        self.expect_seen("promised, and not there", (vllm_layers.Mover, "_next_layer", next_layer))


if __name__ == "__main__":
    unittest.main()
