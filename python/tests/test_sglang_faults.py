"""SGLang's storage under faults, by seeds: pages go, reads and puts fail, a server that stands still writes into memory or reads it later, and
the server goes away.

Whatever happens: a page that is said to be loaded has the bytes that were stored, what is stored under a key is what was put under it,
and no exception leaves the class. Each test of a planted bug sees one of these fail."""

import contextlib
import random
import types
import unittest
from unittest import mock

import doubles

doubles.install()

import torch  # noqa: E402

import faults  # noqa: E402
import kvarts  # noqa: E402
from faults import Time  # noqa: E402
from kvarts import link, sglang, sglang_holds  # noqa: E402
from seeded import Seeded  # noqa: E402
from test_sglang import PAGE, Pool, indices, keys  # noqa: E402

BYTES = 2 * PAGE * 3 * 2 * 8 * 2


class Client:
    """A client whose memory lies at made-up addresses."""

    def __init__(self, run):
        self.run, self.memories = run, []

    def memory(self, nbytes):
        made = types.SimpleNamespace(view=bytearray(nbytes), address=(1 + len(self.memories)) << 20)
        self.memories.append(made)
        return made

    def at(self, address):
        memory = self.memories[(address >> 20) - 1]
        return memoryview(memory.view)[address % (1 << 20) :][:BYTES]

    def pages(self, **named):
        return Pages(self.run, self)

    def close(self, timeout=None):
        pass


class Pages:
    def __init__(self, run, client):
        self.run, self.client = run, client
        self.locks = None  # a look-up that holds what it finds: (batch, keys)
        self.late = None  # what a server which stands still has not answered: (batch, keys, addresses)
        self.is_put = False
        self.batch = 0

    def _expect_there(self):
        if self.run.away:
            raise kvarts.Retry("away", "Away")
        if self.run.chance.random() < 0.05:
            raise self.run.chance.choice((kvarts.Deadline("slow", "DeadlinePassed"), kvarts.Refused("full", "NoSpace")))

    def exists(self, names, timeout=None):
        self._expect_there()
        return [name in self.run.stored for name in names]

    def submit_lock(self, names, hold, timeout=None):
        self._expect_there()
        self.batch += 1
        self.locks = self.batch, names
        return self.batch

    def unlock(self, names):
        self.run.held.difference_update(names)

    def _locked(self, seconds):
        if self.run.chance.random() < 0.2:
            self.run.clock.now += seconds
            return []
        (batch, names), self.locks = self.locks, None
        self.run.held.update(name for name in names if name in self.run.stored)
        return [types.SimpleNamespace(id=batch, ok=all(name in self.run.stored for name in names))]

    def _put(self, names, places):
        good = []
        for name, place in zip(names, places):
            good.append(self.run.chance.random() > 0.1)
            if good[-1]:
                self.run.stored.setdefault(name, bytes(self.client.at(place)))
        reasons = {} if all(good) else {"DeadlinePassed": (kvarts.Deadline("slow", "DeadlinePassed"), 1)}
        return types.SimpleNamespace(results=good, reasons=reasons, ok=all(good))

    def submit_put(self, names, places, timeout=None, parent=None):
        self.is_put = True
        return self.submit_get(names, places)

    def submit_get(self, names, places, timeout=None):
        self._expect_there()
        assert self.late is None, "memory that another batch still has"
        self.batch += 1
        self.late = self.batch, names, places
        return self.batch

    def wait(self, seconds):
        if self.locks is not None:
            return self._locked(seconds)
        if self.run.chance.random() < 0.2:
            if self.late is not None and self.run.chance.random() < 0.5:
                # Some of it comes or goes all the same.
                if self.is_put:
                    self._put(self.late[1][:1], self.late[2][:1])
                else:
                    self.client.at(self.late[2][0])[:] = b"\3" * BYTES
            return []
        (batch, names, places), self.late = self.late, None
        if self.is_put:
            done = self._put(names, places)
            done.id = batch
            return [done]
        good = []
        for name, place in zip(names, places):
            good.append(name in self.run.stored and self.run.chance.random() > 0.1)
            self.client.at(place)[:] = self.run.stored[name] if good[-1] else b"\2" * BYTES
        reasons = {} if all(good) else {"NotHere": (kvarts.Miss("gone", "NotHere"), 1)}
        return [types.SimpleNamespace(id=batch, results=good, reasons=reasons)]


class Link(faults.Link):
    def __init__(self, run, pause):
        super().__init__(types.SimpleNamespace(expect_there=lambda: None))
        self.pause, self.client = pause, Client(run)

    def do(self, work, failed):
        work(self.client)


class Run:
    def __init__(self, seed):
        self.chance, self.clock = random.Random(seed), Time()
        self.away, self.stored, self.held = False, {}, set()
        self.seen = {"loaded": 0, "not loaded": 0, "stored": 0}

    @staticmethod
    def right(name):
        return faults.digest(name.encode()) * (BYTES // 32)

    def go(self, steps=60):
        doubles.of_sglang()
        shape = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False)
        config = types.SimpleNamespace(**shape, model_name="x", extra_config={"revision": "1"})
        with contextlib.ExitStack() as stack:
            for where, name, what in (
                (sglang, "time", self.clock),
                (sglang_holds, "time", self.clock),
                (link, "time", self.clock),
                (sglang, "_SHARED", 3 * BYTES),
                (sglang, "Link", lambda connect, pause: Link(self, pause)),
                (link.logger, "disabled", True),
            ):
                stack.enter_context(mock.patch.object(where, name, what))
            stack.enter_context(mock.patch("sglang.srt.runtime_context.get_model", lambda: doubles.SGLANG))
            self.storage, self.pool = sglang.Kvarts(config), Pool()
            self.storage.register_mem_pool_host(self.pool)
            for _ in range(steps):
                self._something()
                for name, content in self.stored.items():
                    if content != self.right(name.hex()):
                        raise AssertionError("stored wrong")

    def _something(self):
        chance = self.chance
        self.clock.now += chance.choice((0.1, 2.0))
        if chance.random() < 0.05:
            self.away = not self.away
        for name in [name for name in self.stored if name not in self.held and chance.random() < 0.05]:
            del self.stored[name]
        names, places = chance.sample(keys(12), 6), list(range(6))
        chance.shuffle(places)
        if chance.random() < 0.5:
            for name, place in zip(names, places):
                content = torch.frombuffer(bytearray(self.right(name)), dtype=torch.uint8)
                self.pool.set_from_flat_data_page(place * PAGE, content.view(self.pool.dtype))
            stored = self.storage.batch_set_v1(names, indices(*places))
            self.seen["stored"] += sum(stored)
            return
        assert 0 <= self.storage.batch_exists(names) <= 6
        loaded = self.storage.batch_get_v1(names, indices(*places))
        for name, place, good in zip(names, places, loaded):
            self.seen["loaded" if good else "not loaded"] += 1
            page = self.pool.get_data_page(place * PAGE).contiguous().view(torch.uint8)
            if good and bytes(page.tolist()) != self.right(name):
                raise AssertionError("a page that is not right")


class Faults(Seeded, unittest.TestCase):
    course = Run

    def test_a_page_that_is_said_to_be_loaded_has_the_bytes_that_were_stored(self):
        seen = {}
        for run in self.every_seed():
            for name, count in run.seen.items():
                seen[name] = seen.get(name, 0) + count
        self.assertTrue(all(seen.values()), seen)

    def test_after_a_batch_that_the_server_answered_too_late_the_rest_of_the_call_is_not_tried(self):
        for call in ("batch_set_v1", "batch_get_v1"):
            run, begun = Run(1), []
            run.go(steps=0)

            def submit(pages, names, places, begun=begun, **_):
                begun.append(len(names))
                return len(begun)

            def wait(pages, seconds, begun=begun):
                reasons = {"DeadlinePassed": (kvarts.Deadline("slow", "DeadlinePassed"), begun[-1])}
                return [types.SimpleNamespace(id=len(begun), results=[False] * begun[-1], reasons=reasons)]

            with mock.patch.multiple(Pages, submit_put=submit, submit_get=submit, wait=wait), mock.patch.object(sglang, "_SHARED", 3 * BYTES):
                self.assertEqual(getattr(run.storage, call)(keys(6), indices(*range(6))), [False] * 6)
            self.assertEqual(begun, [3], call)

    def test_planted_memory_that_a_read_still_has_is_used_again(self):
        def read(storage, staging, names):
            staging.held_by, staging.handle.late = None, None
            done = honest(storage, staging, names)
            # Bytes of the read before come now.
            if staging.held_by is None and storage._link.client.run.chance.random() < 0.2:
                storage._link.client.at(staging.addresses[0])[:] = b"\3" * BYTES
            return done

        honest = sglang.Kvarts._read
        self.expect_seen("a page that is not right", (sglang.Kvarts, "_read", read))

    def test_planted_every_page_of_an_answer_counts_as_loaded(self):
        def read(storage, staging, names):
            done = honest(storage, staging, names)
            if done is not None:
                done.results = [True] * len(names)
            return done

        honest = sglang.Kvarts._read
        self.expect_seen("a page that is not right", (sglang.Kvarts, "_read", read))

    def test_planted_pages_are_put_from_the_wrong_place(self):
        def written(storage, staging, names, fill, parent):
            return honest(storage, staging, list(reversed(names)), fill, parent)

        honest = sglang.Kvarts._written
        self.expect_seen("stored wrong", (sglang.Kvarts, "_written", written))

    def test_planted_memory_that_a_put_still_has_is_filled_again(self):
        def written(storage, staging, names, fill, parent):
            before, staging.handle.late, staging.held_by = staging.handle.late, None, None
            done = honest(storage, staging, names, fill, parent)
            if before is not None:
                staging.handle._put(*before[1:])
            return done

        honest = sglang.Kvarts._written
        self.expect_seen("stored wrong", (sglang.Kvarts, "_written", written))


if __name__ == "__main__":
    unittest.main()
