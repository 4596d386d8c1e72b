"""The layerwise connector under faults, by seeds: blocks are late or never come, puts are refused or not answered, servers go away, blocks
go, the pool is full, requests are preempted and given up in every state, steps overlap, and a device does things late.

Whatever happens: what is stored under a key is what a run without faults would have stored; a request that ends well has computed
with nothing else; what was promised is there, in every layer, when that layer is computed; the scheduler's thread waits for nothing; and when
the faults are over, everything is stored, and nothing is kept. Each test of a planted bug sees one of these fail."""

import contextlib
import random
import types
import unittest
from unittest import mock

import faults
import kvarts
from faults import LAYERS, TOKENS, Link, Putters, Request, Scheduler, Store, Time, right
from kvarts import landing, link, staging, vllm_layers, vllm_pages, vllm_scheduler, vllm_worker
from seeded import Seeded


@contextlib.contextmanager
def in_virtual_time(store, clock, is_device=False):
    """The connector with this store, in this time, on a device or on the processor. Gives what stands for threads."""
    threads = types.SimpleNamespace(links=[], putters=[])

    def link_of(settings):
        threads.links.append(Link(store, is_schedulers=not threads.links))
        return threads.links[-1]

    def putters(*of, **named):
        threads.putters.append(Putters(store))
        return threads.putters[-1]

    def run():
        for one in [*threads.links, *threads.putters]:
            one.run()

    threads.run = run
    named = vllm_pages.Plan.named

    def told(plan, facts):
        """The handle that stands here is told what a real one reads out of the specification."""
        found, groups = named(plan, facts)
        return {**found, "groups": [group.number for group in groups], "ranks": max(len(group.ranks) for group in groups)}, groups

    faults.Device.of = store
    with contextlib.ExitStack() as stack:
        for where, name, what in (
            (vllm_scheduler, "time", clock),
            (staging, "time", clock),
            (link, "time", clock),
            (landing, "time", clock),
            (landing, "gpu", types.SimpleNamespace(Device=faults.Device, Lander=faults.Lander)),
            (staging.concurrent.futures, "ThreadPoolExecutor", putters),
            (vllm_layers.Settings, "link", link_of),
            (vllm_pages.Plan, "named", told),
            (vllm_worker, "Processor", faults.Card if is_device else vllm_worker.Processor),
        ):
            stack.enter_context(mock.patch.object(where, name, what))
        stack.enter_context(mock.patch.object(link.logger, "disabled", True))
        yield threads


#: What requests say of their blocks, in turns.
TERMS = (None, {"pin": 5.0}, None, {"ttl": 3.5, "max_load_tokens": 2 * TOKENS}, None, {"skip_save": True}, {"pin": -1, "ttl": "long", "priority": 3}, None)


class Run:
    """One seed: what is asked of an engine, and what goes wrong meanwhile."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.clock = Time()
        self.store = Store(self.chance, self.clock)
        choice = self.chance.choice
        self.engines = dict(ranks=choice((1, 1, 2)), stages=choice((1, 1, 2)), groups=choice((1, 2)), ahead=choice((False, True)))
        self.engines.update(deaf=choice((None, None, None, self.chance.randrange(LAYERS))), windows=choice(("full", "full", "turn", 3 * TOKENS)))
        self.engines.update(states=choice((False, True)))
        self.is_device = choice((False, True))
        self.names = 0
        self.seen = {}
        self.coming = []  # of requests that another engine has prefilled: (when, text, how many blocks it stores then)
        # Texts with beginnings in common.
        self.texts = [self._text(self.chance.randrange(4), self.chance.randrange(1, 8)) for _ in range(6)]

    def _text(self, kind, blocks):
        keys, branch = [b""], self.chance.randrange(1, 5)
        for at in range(blocks):
            keys.append(faults.digest(keys[-1], bytes([at, 0 if at <= branch else kind])))
        return keys[1:]

    def go(self, steps=40):
        with in_virtual_time(self.store, self.clock, self.is_device) as self.threads:
            self.engine = self._engine()
            for _ in range(steps):
                self._something()
                self._step()
            self._calm()
            self._count()

    def _engine(self):
        self.requests = []
        return Scheduler(self.chance, self.clock, self.store, **self.engines)

    def _count(self):
        for part in [self.engine.connector, *(worker.connector for worker in self.engine.workers)]:
            for name, count in (part.get_kv_connector_stats() or types.SimpleNamespace(data={})).data.items():
                self.seen[name] = self.seen.get(name, 0) + count

    def _something(self):
        happens = self.store.happens
        self._store_what_comes()
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
        if happens(0.25):
            self.clock.now += self.chance.choice((0.5, 3.0))
        if happens(0.08):
            # The engine is killed, and another one is started: only what is stored is left.
            self._count()
            del self.threads.links[:], self.threads.putters[:]
            self.engine = self._engine()

    def _store_what_comes(self):
        ready, self.coming = [one for one in self.coming if one[0] <= self.clock.now], [one for one in self.coming if one[0] > self.clock.now]
        columns = [(group, rank) for group in range(self.engines["stages"] * self.engines["groups"]) for rank in range(self.engines["ranks"])]
        for _, text, blocks in ready:
            for column in columns:
                for at, key in enumerate(text[:blocks]):
                    self.store.blocks[*column, key] = [right(text, at, layer, column) for layer in range(LAYERS)]

    def _ask(self, text):
        self.names += 1
        request = Request(f"r{self.names}", text, 3 if self.store.calm else self.chance.choice((0, 0, 4)))
        if self.store.happens(0.2):
            blocks = self.chance.randrange(1, len(text) + 1)
            request.handed(blocks)
            # In two parts, or one, or not at all.
            for part in {self.chance.randrange(blocks), blocks - 1}:
                self.coming.append((self.clock.now + self.chance.choice((0.0, 0.05, 1.0, 1000.0)), text, part + 1))
        elif not self.store.calm:
            request.kv_transfer_params = TERMS[self.names % len(TERMS)]
        self.requests.append(request)
        self.engine.add(request)

    def _step(self):
        if not self.store.happens(0.2):  # threads may be late
            self.threads.run()
        gone = [request for request in self.requests if self.store.happens(0.03)]
        self.engine.step(gone)
        self.store.judge(self.texts)

    def _calm(self):
        """The faults are over: what is asked now is stored in the end, and nothing is kept."""
        self.store.calm, self.store.away = True, False
        for _ in range(2):  # answers that come late are faults, too
            self._until_idle()
            self.clock.now += 100.0
        for text in self.texts:
            self._ask(text)
            self._until_idle()
        full = [group for stage in range(self.engines["stages"]) for group in [stage * self.engines["groups"]]]
        for text in self.texts:
            for at, key in enumerate(text):
                for group in full:
                    for rank in range(self.engines["ranks"]):
                        if (group, rank, key) not in self.store.blocks:
                            raise AssertionError(f"never stored: block {at}")
        engine = self.engine
        side = engine.connector._side
        left = (engine.kept, side._known, side._stagings, side._landing, side._saves, self.store.pools.used)
        if any(left) or len(engine.free) != 23:
            raise AssertionError(f"kept for ever: {left}, {len(engine.free)} blocks free")

    def _until_idle(self):
        for _ in range(400):
            self.threads.run()
            self.engine.step()
            self.store.judge(self.texts)
            busy = self.engine.running or self.engine.remote or self.engine.landed or self.engine.waiting or self.engine.connector.has_pending_push_work() or self.engine.late
            if not busy and not any(one.work for one in [*self.threads.links, *self.threads.putters]):
                return
        raise AssertionError("never idle")


class Faults(Seeded, unittest.TestCase):
    course = Run

    def test_what_is_stored_is_right_and_what_is_promised_is_there(self):
        seen = {}
        for run in self.every_seed(times=4):
            for name, count in run.seen.items():
                seen[name] = seen.get(name, 0) + count
        # That it has tried anything.
        for what in (
            "promised", "landed", "saved", "layered", "unstaged NotHere", "unstaged Silence", "unstaged DeadlinePassed", "unstaged Busy",
            "dropped busy", "dropped NoSpace", "dropped DeadlinePassed", "staged read", "handed", "unhanded Silence",
            "pinned", "unpinned NotHere", "unstaged never_stored", "unstaged away", "unstaged max_load_tokens",
        ):  # fmt: skip
            self.assertGreater(seen.get(what, 0), 0, seen)
        self.assertLess(seen["layered"], seen["layers"])

    def test_planted_a_promise_before_the_last_block_is_staged(self):
        def settled(desk, staging):
            honest(desk, staging)
            if staging.stages and not staging.is_over:
                staging.columns = {c: (begin, [(0, 1, 0, 1)] * 8) for _, begin, columns in staging.stages for c in columns}
                staging.blocks = staging.wanted
                staging.over.set()
                return True
            return staging.is_over

        honest = staging.Desk._is_settled
        self.expect_seen("promised, and not there", (staging.Desk, "_is_settled", settled))

    def test_planted_a_stage_is_let_go_of_before_it_has_landed(self):
        def promised(finder, what, *of):
            honest(finder, what, *of)
            finder._desk.let_go(what)

        honest = vllm_scheduler.Finder._promised
        self.expect_seen(("promised, and not there", "a stage that was let go of"), (vllm_scheduler.Finder, "_promised", promised))

    def test_planted_what_another_engine_never_stores_is_waited_for(self):
        def ask(desk, one):
            one.heard = staging.time.monotonic()
            return honest(desk, one)

        honest = staging.Desk._ask_again
        self.expect_seen("never idle", (staging.Desk, "_ask_again", ask))

    def test_planted_a_pass_waits_for_no_layer(self):
        self.expect_seen("promised, and not there", (vllm_worker.Mover, "_await", lambda mover, place: None))

    def test_planted_a_layer_that_does_not_wait_is_taken_for_one_that_does(self):
        def load(mover, runs_by_layer):
            mover._heard = set(mover._order)
            honest(mover, runs_by_layer)

        honest = vllm_worker.Mover.load
        self.expect_seen(("wrong answer", "stored wrong", "a load that was promised"), (vllm_worker.Mover, "load", load))

    def after_a_preemption(self):
        """On a device, whose streams do nothing before they must: a request loses its pages to another one in the step behind that in which
        they were to leave. What of its two blocks is stored wrong."""
        clock = Time()
        store = Store(random.Random(1), clock)
        store.calm = True
        texts = [[faults.digest(bytes([at, kind])) for at in range(2)] for kind in range(2)]
        def done(saving, timeout=0.0):
            while saving.coming:
                saving.coming.popleft()()
                saving.left += 1
            return saving.left == len(saving.layers)

        left = mock.patch.object(faults.Saving, "done", done)
        with in_virtual_time(store, clock, is_device=True) as threads, left:
            engine = Scheduler(store.chance, clock, store, blocks=4)
            engine.limits = (8, 8)
            for _ in range(2):
                threads.run()
                engine.step()
            first, second = (Request(name, text, 9) for name, text in zip("ab", texts))
            engine.add(first)
            for at in range(12):
                threads.run()
                if at and engine.connector._side._saves and first.state == "running":
                    engine._preempt(first)
                    engine.waiting.clear()
                    engine.add(second)
                engine.step()
            self.assertEqual(first.state, "waiting")
            found = [store.blocks.get((0, 0, key)) for key in texts[0]]
            return [at for at, content in enumerate(found) if content != [right(texts[0], at, layer, (0, 0)) for layer in range(LAYERS)]]

    def test_pages_are_written_again_behind_what_leaves_them_and_planted(self):
        self.assertEqual(self.after_a_preemption(), [])
        with mock.patch.object(faults.Card, "join", lambda streams: None):
            self.assertNotEqual(self.after_a_preemption(), [])

    def test_planted_a_request_is_let_in_before_its_load_has_landed(self):
        def landed(mover):
            return honest(mover) | {name for name, _ in mover._coming if name not in early and not early.add(name)}

        honest, early = vllm_worker.Mover.take_landed, set()
        self.expect_seen(("promised, and not there", "wrong answer", "'r"), (vllm_worker.Mover, "take_landed", landed))

    def test_planted_states_are_saved_some_steps_late(self):
        def save(finder, step, output):
            finder.late = [*getattr(finder, "late", []), output.kv_connector_block_state]
            if len(finder.late) > 3:
                honest(finder, step, types.SimpleNamespace(kv_connector_block_state=finder.late.pop(0)))

        honest = vllm_scheduler.Finder._save_states
        self.expect_seen("stored wrong", (vllm_scheduler.Finder, "_save_states", save))

    def test_planted_memory_is_let_go_before_it_was_copied(self):
        def finished(finder, request, blocks):
            honest(finder, request, blocks)
            return False

        honest = vllm_scheduler.Finder.finished
        self.expect_seen(("stored wrong", "let go, and not kept"), (vllm_scheduler.Finder, "finished", finished))

    def test_planted_blocks_are_put_before_every_worker_has_taken_its_part(self):
        def learn(finder, told):
            honest(finder, type(told)(told.attached, {number: finder._workers for number in told.done}))

        honest = vllm_scheduler.Finder.learn
        self.expect_seen("stored wrong", (vllm_scheduler.Finder, "learn", learn))

    def test_planted_an_answer_that_may_be_taken_back_is_saved(self):
        def end(finder, known, scheduled):
            return finder._hashed(known.request)

        self.expect_seen("stored wrong", (vllm_scheduler.Finder, "_end_of", end))

    def test_planted_what_was_not_stored_counts_as_saved(self):
        def stored(finder, save, count, why):
            honest(finder, save, save.last - save.first, None)

        honest = vllm_scheduler.Finder._stored
        with mock.patch.object(Run, "_calm", self.after_one_try):
            self.expect_seen("never stored", (vllm_scheduler.Finder, "_stored", stored))

    @staticmethod
    def after_one_try(run):
        """A request that goes on while its first put fails."""
        run.store.calm, run.store.away = True, False
        run._until_idle()
        fresh = [faults.digest(b"fresh", bytes([at])) for at in range(4)]
        run.texts.append(fresh)
        run.names += 1
        request = Request(f"r{run.names}", fresh, 60)
        run.engine.add(request)
        refuse = mock.patch.object(faults.Draft, "put", lambda draft, **terms: draft._give() or [False] * len(draft.keys))
        with refuse:
            for _ in range(4):
                run.threads.run()
                run.engine.step()
                run.clock.now += 2.0
        for _ in range(50):
            run.threads.run()
            run.engine.step()
        if not all((0, 0, key) in run.store.blocks for key in fresh):
            raise AssertionError("never stored: what was refused once")

    def test_what_was_refused_once_is_offered_again(self):
        with mock.patch.object(Run, "_calm", self.after_one_try):
            for seed in range(4):
                Run(seed).go()

    def after_a_block_that_goes(self, others, happens):
        """A text, all of which is stored; its second block goes when it has been found. One request asks for it, in pieces of a block a
        step, and `others` with it or later; then something `happens` to the first one. What of the text is not stored, or not right, in the
        end, and how many blocks were promised."""
        clock = Time()
        store = Store(random.Random(1), clock)
        store.calm = True
        text = [faults.digest(bytes([at])) for at in range(6)]
        store.blocks = {(0, 0, key): [right(text, at, layer, (0, 0)) for layer in range(LAYERS)] for at, key in enumerate(text)}
        match, promised = faults.Pages.match, []

        def found(pages, keys, hold=None):
            answer = match(pages, keys, hold)
            if answer.blocks == len(text):
                del store.blocks[0, 0, text[1]]
            return answer

        with in_virtual_time(store, clock) as threads, mock.patch.object(faults.Pages, "match", found):
            engine = Scheduler(store.chance, clock, store)
            engine.limits = (8, 1)
            for _ in range(3):
                threads.run()
                engine.step()
            first, *later = (Request(name, text, 2) for name in ("first", *others))
            engine.add(first)
            for request in later if "with" in others else ():
                engine.add(request)
            for at in range(40):
                threads.run()
                if first.state == "running" and not promised:
                    happens(engine, first)
                    promised.append(engine.connector._side.stats.data.get("promised", 0))
                if promised and at > 20 and later and later[0].state == "waiting" and later[0] not in engine.waiting:
                    engine.add(later[0])
                engine.step()
            self.assertEqual(len(engine.done), 1 + len(later) - (first.state == "given up"))
            wrong = [at for at, key in enumerate(text) if store.blocks.get((0, 0, key)) != [right(text, at, n, (0, 0)) for n in range(LAYERS)]]
            return wrong, promised

    def test_the_first_request_is_given_up_a_step_after_its_load(self):
        self.assertEqual(self.after_a_block_that_goes(["later"], Scheduler.give_up), ([], [1]))

    def test_the_first_request_loses_its_memory_a_step_after_its_load(self):
        self.assertEqual(self.after_a_block_that_goes([], Scheduler._preempt), ([], [1]))

    def test_the_first_request_is_given_up_while_another_one_shares_its_blocks(self):
        self.assertEqual(self.after_a_block_that_goes(["with"], Scheduler.give_up), ([], [1]))

    @staticmethod
    def is_ready_after_a_restart():
        """The server is another one between the scheduler's call for a pool and the workers' for the same."""
        clock = Time()
        store = Store(random.Random(1), clock)
        store.calm = True
        with in_virtual_time(store, clock) as threads:
            engine = Scheduler(store.chance, clock, store, ranks=2)
            threads.links[0].run()
            store.away = True
            store.away = False
            for _ in range(20):
                engine.step()
                engine.connector._side._is_ready()
                threads.run()
                clock.now += 0.5
            return engine.connector._side._is_ready()

    def test_workers_find_the_pool_behind_a_restart_of_the_server_and_planted(self):
        self.assertTrue(self.is_ready_after_a_restart())
        with mock.patch.object(staging.Desk, "knock", lambda desk: None):
            self.assertFalse(self.is_ready_after_a_restart())

    def test_a_pool_is_taken_once_however_long_that_takes(self):
        clock = Time()
        store = Store(random.Random(1), clock)
        store.calm = True
        with in_virtual_time(store, clock) as threads:
            engine = Scheduler(store.chance, clock, store)
            taken, honest = [], faults.Client.shared_pool

            def shared_pool(client, nbytes):
                # Steps go on meanwhile.
                store.is_links = False
                engine.step()
                store.is_links = True
                taken.append(honest(client, nbytes))
                return taken[-1]

            with mock.patch.object(faults.Client, "shared_pool", shared_pool):
                for _ in range(5):
                    threads.run()
                    engine.step()
            self.assertEqual(len(taken), 1)

    def test_planted_windows_of_another_boundary_are_landed(self):
        def first(group, boundary, block_tokens):
            return min(boundary - 1, honest(group, boundary + 1, block_tokens)) if group.window is not None else 0

        honest = staging.Group.first_of
        self.expect_seen(("blocks ", "promised, and not there", "wrong answer"), (staging.Group, "first_of", first))


if __name__ == "__main__":
    unittest.main()
