"""vLLM's tier under faults, by seeds: blocks go, reads and puts fail, are late, or are never answered, and the server goes away.

Whatever happens: every job is answered once, and says of a load exactly which blocks are good; nothing touches a job's memory after
its answer; what is stored under a key is what was put under it first; a look-up has an answer in the end; and puts that fail make
no load a miss. Each test of a planted bug sees one of these fail."""

import contextlib
import itertools
import random
import types
import unittest
from unittest import mock

import doubles

doubles.install()

import numpy  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402

import faults  # noqa: E402
import kvarts  # noqa: E402
from faults import Time  # noqa: E402
from kvarts import link, vllm  # noqa: E402
from seeded import Seeded  # noqa: E402
from test_vllm import keys, specification  # noqa: E402

BYTES, CHUNKS = 64, 40
#: Seconds for which a disk writes to memory of a batch that has ended.
HELD = 0.2


class Pages:
    """A handle that answers when it likes. The server writes into a job's memory until it has answered."""

    def __init__(self, run):
        self.run = run
        self.under = {}  # batch -> [kind, keys, chunks, when]
        self.numbers = itertools.count(1)

    def _submit(self, kind, names, timeout, chunks=()):
        if self.run.away:
            raise kvarts.Retry("away", "Away")
        chance = self.run.chance
        late = 0.0 if self.run.calm else chance.choice((0.0, 0.0, 0.05, 0.3, 0.3, 900.0 if chance.random() < 0.2 else 0.0))
        batch, now = next(self.numbers), self.run.clock.now
        self.under[batch] = [kind, list(names), [int(one) // BYTES for one in chunks], now + min(late, timeout + HELD)]
        if late > timeout:
            self.under[batch].append("DeadlinePassed")
        return batch

    def submit_put(self, names, chunks, group=None, timeout=None):
        return self._submit("put", names, timeout, chunks)

    def submit_get(self, names, chunks, group=None, timeout=None):
        return self._submit("get", names, timeout, chunks)

    def submit_exists(self, names, group=None, timeout=None):
        return self._submit("exists", names, timeout)

    def cancel(self, batch):
        self.under[batch][3:] = [self.run.clock.now + HELD, "Cancelled"]

    def drain(self):
        done = []
        for batch in [batch for batch, one in self.under.items() if one[3] <= self.run.clock.now]:
            kind, names, chunks, _, *ended = self.under.pop(batch)
            results, reasons = self._answer(kind, names, chunks, *ended)
            done.append(types.SimpleNamespace(id=batch, kind=kind, results=results, reasons=reasons))
        return done

    def _answer(self, kind, names, chunks, ended=None):
        results, reasons, run = [], {}, self.run
        for at, name in enumerate(names):
            error = None
            if ended:
                error = (kvarts.Retry if ended == "Cancelled" else kvarts.Deadline)(ended, ended)
            elif not run.calm and run.chance.random() < 0.1:
                error = kvarts.Deadline("slow", "DeadlinePassed")
            elif kind != "put" and name not in run.stored:
                error = kvarts.Miss("absent", "NotHere")
            if kind == "put" and (error is None or run.chance.random() < 0.3):
                run.stored.setdefault(name, bytes(run.memory[chunks[at]]))
            elif kind == "get":
                # Of a read that failed there may be some.
                content = run.stored.get(name, b"\1" * BYTES)
                run.memory[chunks[at]] = numpy.frombuffer(content if error is None else b"\2" * BYTES, dtype=numpy.uint8)
            if error is not None:
                reasons[error.reason] = (error, 1 + reasons.get(error.reason, (None, 0))[1])
            results.append(error is None)
        return results, reasons

    def wait(self, timeout):
        self.run.clock.now += timeout
        return self.drain()

    def close(self):
        pass


class Link(faults.Link):
    def __init__(self, run, pause):
        super().__init__(types.SimpleNamespace(expect_there=lambda: None))
        self._run, self.pause = run, pause

    def do(self, work, failed):
        work(self)

    def pages(self, **named):
        return Pages(self._run)


class Run:
    def __init__(self, seed, away=True):
        self.chance, self.clock = random.Random(seed), Time()
        self.goes_away = away
        self.away = self.calm = False
        self.memory = numpy.zeros((CHUNKS, BYTES), dtype=numpy.uint8)
        self.stored = {}  # key -> bytes
        self.put = {}  # key -> what was put under it
        self.free = list(range(CHUNKS))
        self.jobs = {}  # job -> (keys, chunks, whether it is a load)
        self.numbers = itertools.count(1)
        self.names = keys(20)
        self.seen = {"hits": 0, "good": 0, "bad": 0, "given up": 0, "misses while loads work": 0}

    def right(self, key):
        return faults.digest(bytes(key[:-4])) * (BYTES // 32)

    def go(self, steps=60):
        with contextlib.ExitStack() as stack:
            for where, name, what in (
                (vllm, "time", self.clock),
                (link, "time", self.clock),
                (vllm, "PART", 2 * BYTES),
                (link, "SLOWEST", 4 * BYTES),
                (vllm, "Link", lambda connect, pause: Link(self, pause)),
                (vllm, "adopt", lambda client, memory: types.SimpleNamespace(address=0, close=lambda: None)),
                (link.logger, "disabled", True),
            ):
                stack.enter_context(mock.patch.object(where, name, what))
            view = memoryview(self.memory)
            self.tier = vllm.KvartsTier(specification(), view, "tier", timeout=2.0, identity={"revision": "1"})
            for _ in range(steps):
                self._something()
                self._step()
            self.calm, self.away = True, False
            for _ in range(200):
                self._step()
            if self.jobs or self.tier.has_pending_work():
                raise AssertionError("never answered")
            self.tier.shutdown()

    def _something(self):
        chance = self.chance
        if self.goes_away and chance.random() < 0.05:
            self.away = not self.away
        if chance.random() < 0.1:
            for name in [name for name in self.stored if chance.random() < 0.3]:
                del self.stored[name]
                self.put.pop(name, None)
        for _ in range(chance.randrange(3)):
            self._ask(chance.random() < 0.5)

    def _ask(self, is_load):
        count = min(self.chance.randrange(1, 8), len(self.free))
        if not count:
            return
        names, chunks = self.chance.sample(self.names, count), [self.free.pop() for _ in range(count)]
        for name, chunk in zip(names, chunks):
            self.memory[chunk] = 0 if is_load else numpy.frombuffer(self.right(name), dtype=numpy.uint8)
        if is_load:
            names = self._found(names) or names
            chunks, left = chunks[: len(names)], chunks[len(names) :]
            self.free += left
        job = next(self.numbers)
        self.jobs[job] = names, chunks, is_load
        submit = self.tier.submit_load if is_load else self.tier.submit_store
        submit(TransferJob(job, names, numpy.array(chunks, dtype=numpy.int32), is_load, ReqContext(f"r{job}")))

    def _found(self, names):
        """Those that a look-up finds; each has an answer before long."""
        context = ReqContext(f"l{next(self.numbers)}")
        for _ in range(600):
            found = [self.tier.lookup(name, context) for name in names]
            if LookupResult.RETRY not in found:
                self.tier.on_request_finished(context)
                self.seen["hits"] += found.count(LookupResult.HIT)
                return [name for name, one in zip(names, found) if one is LookupResult.HIT]
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            self._step()
        raise AssertionError("a look-up without an answer")

    def _step(self):
        self.clock.now += 0.05
        for result in self.tier.get_finished_jobs():
            self._judge(result)
        for (block_hash, content) in self.stored.items():
            if content != self.right(block_hash + bytes(4)):
                raise AssertionError("stored wrong")

    def _judge(self, result):
        if result.job_id not in self.jobs:
            raise AssertionError("answered twice")
        names, chunks, is_load = self.jobs.pop(result.job_id)
        good = set(names if result.success else result.successful_keys or ())
        for name, chunk in zip(names, chunks):
            if is_load and name in good and bytes(self.memory[chunk]) != self.right(name):
                raise AssertionError("a block that is not good")
            self.seen["good" if name in good else "bad"] += is_load
            # Another one's from now on.
            self.memory[chunk] = 7
        self.free += chunks
        for chunk in self.free:
            if (self.memory[chunk] != 7).any() and self.memory[chunk].any():
                raise AssertionError("memory was written to after the answer")


class Faults(Seeded, unittest.TestCase):
    course = Run

    def test_every_job_is_answered_once_and_says_which_blocks_are_good(self):
        seen = {}
        for run in self.every_seed():
            for name, count in [*run.seen.items(), *run.tier._failures.items()]:
                seen[name] = seen.get(name, 0) + count
        for what in ("hits", "good", "bad", "Cancelled", "DeadlinePassed", "away"):
            self.assertGreater(seen.get(what, 0), 0, seen)

    def test_planted_parts_are_written_down_in_the_wrong_place(self):
        def done(tier, batch, results):
            job, *_ = tier._jobs[batch]
            tier._jobs[batch] = job, 0, None
            honest(tier, batch, results)

        honest = vllm.KvartsTier._part_done
        self.expect_seen("a block that is not good", (vllm.KvartsTier, "_part_done", done))

    def test_planted_a_load_is_over_before_its_last_part(self):
        def done(tier, batch, results):
            tier._jobs[batch][0].open = 1
            honest(tier, batch, results)

        honest = vllm.KvartsTier._part_done
        self.expect_seen(("answered twice", "memory was written to"), (vllm.KvartsTier, "_part_done", done))

    def test_planted_what_is_silent_is_given_up_with_its_memory(self):
        def give_up(tier):
            for kind, silence in tier._silence.items():
                for batch in silence.broken():
                    job, first, _ = tier._jobs.pop(batch)
                    tier._jobs[batch] = vllm._Job(TransferJob(0, [], [], False, None), 1), 0, None
                    job.open -= 1
                    tier._pages.cancel(batch)
                    if not job.open:
                        tier._end(job)

        self.expect_seen("memory was written to", (vllm.KvartsTier, "_give_up", give_up))

    def seconds_until_given_up(self):
        """Of a large load from a server that has stopped."""
        run = Run(1)
        run.calm = True
        asked = itertools.count()

        def ask():
            if not next(asked):
                run.jobs[1] = keys(40), list(range(40)), True
                run.free.clear()
                run.tier.submit_load(TransferJob(1, keys(40), numpy.arange(40, dtype=numpy.int32), True, ReqContext("r")))
            elif run.jobs:
                self.ended_at = run.clock.now

        submit = Pages._submit

        def never(pages, kind, names, timeout, chunks=()):
            batch = submit(pages, kind, names, timeout, chunks)
            pages.under[batch][3:] = [run.clock.now + timeout, "DeadlinePassed"]
            return batch

        with mock.patch.object(run, "_something", ask), mock.patch.object(Pages, "_submit", never):
            run.go(steps=400)
        return self.ended_at - 1000

    def test_silence_ends_a_load_before_its_size_would_and_planted(self):
        self.assertLess(self.seconds_until_given_up(), 3)
        with mock.patch.object(vllm.KvartsTier, "_give_up", lambda tier: None):
            self.assertGreater(self.seconds_until_given_up(), 3)

    def test_what_is_large_is_loaded_although_it_takes_longer_than_the_timeout(self):
        """Parts come every 0.3 seconds of a load that takes 6, with a timeout of 2."""
        run = Run(1)
        run.calm = True
        big = keys(40)
        run.stored = {bytes(name[:-4]): run.right(name) for name in big}
        submit = Pages._submit

        def late(pages, kind, names, timeout, chunks=()):
            at = max([run.clock.now, *(one[3] for one in pages.under.values())]) + 0.3
            batch = submit(pages, kind, names, timeout, chunks)
            # As the client keeps it: the time that was given with the batch.
            pages.under[batch][3:] = [at] if at <= run.clock.now + timeout else [run.clock.now + timeout, "DeadlinePassed"]
            return batch

        def ask():
            if run.jobs or next(asked):
                return
            run.jobs[1] = big, list(range(40)), True
            run.free.clear()
            run.tier.submit_load(TransferJob(1, big, numpy.arange(40, dtype=numpy.int32), True, ReqContext("r")))

        asked = itertools.count()
        with mock.patch.object(Pages, "_submit", late), mock.patch.object(run, "_something", ask):
            run.go(steps=200)
        self.assertEqual((run.seen["good"], run.seen["bad"]), (40, 0))
        self.assertGreater(run.clock.now, 1000 + 6)

    def test_puts_that_fail_make_no_load_a_miss(self):
        run = Run(1)
        run.calm = True
        with mock.patch.object(run, "_something", lambda: None):
            run.go(steps=1)
        tier = run.tier
        quiet = mock.patch.object(link.logger, "disabled", True)
        quiet.start()
        self.addCleanup(quiet.stop)
        for error in (kvarts.Deadline("slow", "DeadlinePassed"), kvarts.Retry("full", "Busy"), kvarts.Retry("broken", "Away")):
            tier._link.learn(False, {error.reason: (error, 3)}, put=True)
            self.assertFalse(tier._link.away)
            tier._link.learn(False, {error.reason: (error, 3)})
            self.assertTrue(tier._link.away)
            tier._link._away_until = 0.0


if __name__ == "__main__":
    unittest.main()
