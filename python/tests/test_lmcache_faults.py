"""LMCache's plug-in under faults, by seeds: objects go, reads and puts fail, answers are late, and the server goes away.

Whatever happens: every batch is answered once; an object that is said to be loaded has the bytes that were stored, in its own buffer; and
what is stored under a key is what was put under it. Each test of a planted bug sees one of these fail."""

import contextlib
import itertools
import os
import random
import types
import unittest
from unittest import mock

import faults
import kvarts
from faults import Time
from kvarts import link, lmcache
from seeded import Seeded

SIZES = (64, 96)


class Pages:
    """A handle for objects of one size, or for the records of sizes."""

    def __init__(self, run, size, layout):
        self.run, self.size = run, size
        self.stored = run.stored.setdefault((layout, size), {})
        self.under, self.numbers = {}, itertools.count(1)
        self.bell = os.eventfd(0)
        run.bells.append(self.bell)

    def fileno(self):
        return self.bell

    def block_bytes(self):
        return self.size

    def _faulty(self):
        return not self.run.calm and self.run.chance.random() < 0.1

    # Records of sizes, at once.

    def get(self, names, memory):
        self.run.expect_there()
        results = [name in self.stored for name in names]
        for at, name in enumerate(names):
            if results[at]:
                memory[at * self.size : (at + 1) * self.size] = self.stored[name]
        return types.SimpleNamespace(results=results, error=None if all(results) else kvarts.Miss("absent", "NotHere"))

    def put(self, names, buffers):
        self.run.expect_there()
        self.stored.setdefault(names[0], bytes(buffers[0]))
        return types.SimpleNamespace(ok=True, error=None)

    # Objects, later.

    def _submit(self, kind, names, buffers=None):
        self.run.expect_there()
        if self._faulty():
            raise kvarts.Retry("full", "Busy")
        batch = next(self.numbers)
        late = 0.0 if self.run.calm else self.run.chance.choice((0.0, 0.2, 1.0))
        self.under[batch] = kind, names, buffers, self.run.clock.now + late
        return batch

    def submit_put(self, names, buffers, timeout=None):
        return self._submit("put", names, buffers)

    def submit_get(self, names, buffers, timeout=None):
        return self._submit("get", names, buffers)

    def submit_exists(self, names, timeout=None):
        return self._submit("exists", names)

    def submit_delete(self, names, timeout=None):
        return self._submit("delete", names)

    def drain(self):
        done = []
        for batch in [batch for batch, one in self.under.items() if one[3] <= self.run.clock.now]:
            kind, names, buffers, _ = self.under.pop(batch)
            results, reasons = [], {}
            for at, name in enumerate(names):
                error = None
                if self._faulty():
                    error = kvarts.Deadline("slow", "DeadlinePassed")
                elif kind != "put" and name not in self.stored:
                    error = kvarts.Miss("absent", "NotHere")
                elif kind == "put":
                    self.stored.setdefault(name, bytes(buffers[at]))
                elif kind == "get":
                    buffers[at][:] = self.stored[name]
                elif kind == "delete":
                    del self.stored[name]
                if error is not None:
                    if kind == "get":
                        buffers[at][:] = b"\2" * self.size
                    reasons[error.reason] = (error, 1)
                results.append(error is None)
            done.append(types.SimpleNamespace(id=batch, results=results, reasons=reasons))
        return done


class Link(faults.Link):
    def __init__(self, run, pause):
        super().__init__(types.SimpleNamespace(expect_there=run.expect_there))
        self._run, self.pause, self._client = run, pause, self

    def pages(self, size, layout=None, **named):
        return Pages(self._run, size, layout)


class Run:
    def __init__(self, seed):
        self.chance, self.clock = random.Random(seed), Time()
        self.away = self.calm = False
        self.stored, self.bells, self.waiting = {}, [], {}
        self.keys = [f"model@{rank}@{group}@{n:x}@" for rank in range(2) for group, n in itertools.product(range(2), range(5))]
        self.contents = {kvarts.key("lmcache", key): self.right(key) for key in self.keys}
        self.seen = {"loaded": 0, "not loaded": 0, "found": 0, "stored": 0, "refused": 0}

    def expect_there(self):
        if self.away:
            raise kvarts.Retry("away", "Away")

    @staticmethod
    def right(key):
        return (faults.digest(key.encode()) * 3)[: SIZES[int(key.split("@")[2])]]

    def go(self, steps=80):
        with contextlib.ExitStack() as stack:
            for where, name, what in (
                (lmcache, "time", self.clock),
                (link, "time", self.clock),
                (lmcache, "Link", lambda connect, pause: Link(self, pause)),
                (link.logger, "disabled", True),
            ):
                stack.enter_context(mock.patch.object(where, name, what))
            self.cache = lmcache.Kvarts(server="s", revision="1", dtype="bf16")
            stack.callback(lambda: [os.close(bell) for bell in self.bells])
            stack.callback(self.cache.close)
            for _ in range(steps):
                self._something()
                self._step()
            self.calm, self.away = True, False
            for _ in range(20):
                self._step()
            if self.waiting:
                raise AssertionError("never answered")

    def _something(self):
        chance = self.chance
        if chance.random() < 0.1:
            self.away = not self.away
        for (layout, _), objects in self.stored.items():
            for name in [name for name in objects if layout == "lmcache-object" and chance.random() < 0.03]:
                del objects[name]
        kind = chance.choice(("set", "set", "get", "get", "exists", "delete"))
        keys = chance.sample(self.keys, chance.randrange(1, 7))
        buffers = [bytearray(self.right(key) if kind == "set" else len(self.right(key))) for key in keys]
        if kind in ("set", "get"):
            future = getattr(self.cache, f"submit_batch_{kind}")(keys, [memoryview(buffer) for buffer in buffers])
        else:
            future = getattr(self.cache, f"submit_batch_{kind}")(keys)
        self.waiting[future] = kind, keys, buffers

    def _step(self):
        self.clock.now += 0.3
        if self.chance.random() < 0.8:
            self.cache._link.run()
        for future, ok, error, results in self.cache.drain_completions():
            self._judge(future, ok, results)
        for (layout, _), objects in self.stored.items():
            for name, content in objects.items() if layout == "lmcache-object" else ():
                if content != self.contents[name]:
                    raise AssertionError("stored wrong")

    def _judge(self, future, ok, results):
        if future not in self.waiting:
            raise AssertionError("answered twice")
        kind, keys, buffers = self.waiting.pop(future)
        if len(results) != len(keys) or (kind in ("set", "get") and ok != all(results)):
            raise AssertionError("the answer contradicts itself")
        for key, buffer, good in zip(keys, buffers, results):
            if kind == "get":
                self.seen["loaded" if good else "not loaded"] += 1
                if good and bytes(buffer) != self.right(key):
                    raise AssertionError("an object that is not right")
            elif kind == "set":
                self.seen["stored" if good else "refused"] += 1
            elif kind == "exists":
                self.seen["found"] += good


class Faults(Seeded, unittest.TestCase):
    course = Run

    def test_every_batch_is_answered_once_and_what_is_loaded_is_right(self):
        seen = {}
        for run in self.every_seed():
            for name, count in run.seen.items():
                seen[name] = seen.get(name, 0) + count
        self.assertTrue(all(seen.values()), seen)

    def test_planted_results_of_a_part_are_taken_for_those_of_the_first_keys(self):
        def done(cache, pages, told):
            task, positions = cache._parts[pages, told.id]
            cache._parts[pages, told.id] = task, range(len(positions))
            honest(cache, pages, told)

        honest = lmcache.Kvarts._part_done
        self.expect_seen(("an object that is not right", "stored wrong"), (lmcache.Kvarts, "_part_done", done))

    def test_planted_a_batch_is_answered_with_its_first_part(self):
        def end(cache, task):
            task.open = 1
            honest(cache, task)

        honest = lmcache.Kvarts._end_part
        self.expect_seen("answered twice", (lmcache.Kvarts, "_end_part", end))

    def test_planted_what_did_not_begin_is_not_answered(self):
        self.expect_seen("never answered", (lmcache.Kvarts, "_answer", lambda cache, task, error: None))


if __name__ == "__main__":
    unittest.main()
