"""What LMCache calls: batches of objects, one descriptor, an answer for each key; also after restarts, and without a server."""

import ctypes
import mmap
import os
import queue
import select
import tempfile
import time
import unittest
from unittest import mock

import kvarts
from kvarts.link import Link, revision_of
from kvarts.lmcache import Kvarts
from served import Served, Server

#: Far more than anything takes here.
SOON = 30
PARAMETERS = dict(revision="1", dtype="bf16", timeout=SOON, pause=0.1)


def names(count, first=0, model="test/model", group=0):
    return [f"{model}@00000001@{group:x}@{n:064x}" for n in range(first, first + count)]


def objects(keys, size=4096):
    return [memoryview((key.encode() * (size // len(key) + 1))[:size]) for key in keys]


class Adapter:
    """What LMCache's adapter does with the object: one thread polls the descriptor and drains."""

    def __init__(self, **kwargs):
        self.plugin = Kvarts(**{**PARAMETERS, **kwargs})
        self.poll = select.poll()
        self.poll.register(self.plugin.event_fd(), select.POLLIN)
        self.answers = {}

    def answer(self, future):
        deadline = time.monotonic() + SOON
        while future not in self.answers:
            assert time.monotonic() < deadline, "no answer"
            if self.poll.poll(500):
                for id, *answer in self.plugin.drain_completions():
                    assert id not in self.answers, "answered twice"
                    self.answers[id] = tuple(answer)
        return self.answers.pop(future)

    def set(self, keys, size=4096):
        return self.answer(self.plugin.submit_batch_set(keys, objects(keys, size)))

    def get(self, keys, size=4096):
        into = [bytearray(size) for _ in keys]
        ok, error, results = self.answer(self.plugin.submit_batch_get(keys, [memoryview(one) for one in into]))
        for key, here, one in zip(keys, results, into):
            assert not here or bytes(one) == bytes(objects([key], size)[0]), "wrong bytes"
        return ok, error, results

    def exists(self, keys):
        return self.answer(self.plugin.submit_batch_exists(keys))[2]

    def delete(self, keys):
        return self.answer(self.plugin.submit_batch_delete(keys))


class Recorded:
    """A client, and handles of it, of which it is remembered what times they tell the store."""

    def __init__(self, of, told):
        self._of, self._told = of, told

    def __getattr__(self, name):
        return getattr(self._of, name)

    def pages(self, *of, **kwargs):
        return Recorded(self._of.pages(*of, **kwargs), [*self._told, kwargs["layout"], kwargs.get("block_tokens")])

    def match(self, keys, times):
        Lmcache.told.append((*self._told, times.prefill_ms(0, 4000)))
        return self._of.match(keys, times=times)


class Lmcache(Served):
    told: list = []

    def adapter(self, **kwargs):
        adapter = Adapter(server=self.server.socket, **{"revision": self.id(), **kwargs})
        self.addCleanup(adapter.plugin.close)
        return adapter

    def test_objects_are_found_and_come_back_and_each_batch_is_answered_once(self):
        adapter = self.adapter()
        keys = names(8)
        self.assertEqual(adapter.exists(keys), [False] * 8)
        self.assertEqual(adapter.set(keys[:6]), (True, "", [True] * 6))
        self.assertEqual(adapter.exists(keys), [True] * 6 + [False] * 2)
        ok, error, results = adapter.get(keys)
        self.assertEqual((ok, results), (False, [True] * 6 + [False] * 2))
        self.assertTrue(error)
        self.assertEqual(adapter.delete(keys)[2], [True] * 6 + [False] * 2)
        self.assertEqual(adapter.exists(keys), [False] * 8)
        self.assertEqual(adapter.poll.poll(0), [])

    def test_the_store_is_told_how_long_the_engine_computes_an_object_where_the_operator_says_it(self):
        del Lmcache.told[:]
        connect = kvarts.connect
        with mock.patch.object(kvarts, "connect", lambda *of, **kwargs: Recorded(connect(*of, **kwargs), [])):
            adapter, keys = self.adapter(times={"samples": [(0, 1000, 100.0), (0, 8000, 800.0)]}, chunk_tokens=64), names(3)
            self.assertTrue(adapter.set(keys)[0])
            self.assertTrue(adapter.get(keys)[0])
            self.assertEqual(Lmcache.told, [("lmcache-object", 64, 400.0)])
            # A server that was started anew is told again.
            adapter.plugin._told.clear()
            with mock.patch("kvarts.lmcache._FRESH", -1.0):
                self.assertEqual(adapter.exists(keys), [True] * 3)
            self.assertEqual(Lmcache.told, [("lmcache-object", 64, 400.0)] * 2)
            self.assertEqual(self.adapter().exists(keys), [False] * 3)
            self.assertTrue(self.adapter().set(keys)[0])
            self.assertEqual(len(Lmcache.told), 2)
        for wrong in (dict(chunk_tokens=0), dict(chunk_tokens="256")):
            with self.assertRaisesRegex(ValueError, "chunk_tokens"):
                Kvarts(**{**PARAMETERS, **wrong})

    def test_disks_write_into_a_pool_for_as_long_as_it_is_mapped_where_it_was(self):
        adapter, keys, size = self.adapter(), names(4), 8192
        pools = adapter.plugin._pools
        if pools._maps is None:
            self.skipTest("this kernel does not say what is mapped (PROCMAP_QUERY, Linux 6.11)")
        self.assertTrue(adapter.set(keys, size)[0])
        fd = os.memfd_create("pool")
        os.ftruncate(fd, 4 * size)
        pool = mmap.mmap(fd, 4 * size)
        os.close(fd)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pool))
        # As LMCache gives them: nothing that is told of them keeps the pool mapped.
        views = [memoryview((ctypes.c_ubyte * size).from_address(address + n * size)) for n in range(4)]

        def get():
            for view in views:
                view.cast("B")[:] = bytes(size)
            self.assertTrue(adapter.answer(adapter.plugin.submit_batch_get(keys, views))[0])
            return [bytes(view) for view in views]

        expected = [bytes(one) for one in objects(keys, size)]
        self.assertEqual(get(), expected)
        self.assertEqual(pool[:size], expected[0])
        self.assertEqual([memory.mode for memory in pools._known.values()], ["adopted"])
        # The same addresses are other memory now; the file is still there.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
        self.assertEqual(libc.mmap(address, 4 * size, mmap.PROT_READ | mmap.PROT_WRITE, fixed, -1, 0), address)
        self.assertEqual(get(), expected, "bytes went to where the pool had been")
        self.assertEqual(pools._known, {})
        other = mmap.mmap(-1, 4 * size)
        views = [memoryview(other)[n * size : (n + 1) * size] for n in range(4)]
        self.assertEqual(get(), expected)

    def test_a_pool_that_the_server_cannot_write_to_is_copied(self):
        adapter, keys, size = self.adapter(), names(2), 4096
        self.assertTrue(adapter.set(keys, size)[0])
        with tempfile.TemporaryFile(dir=".") as file:
            file.truncate(2 * size)
            pool = mmap.mmap(file.fileno(), 2 * size)
        for _ in range(2):
            pool[:] = bytes(2 * size)
            views = [memoryview(pool)[n * size : (n + 1) * size] for n in range(2)]
            self.assertTrue(adapter.answer(adapter.plugin.submit_batch_get(keys, views))[0])
            self.assertEqual(pool[:], b"".join(objects(keys, size)))
        self.assertEqual(adapter.plugin._pools._known, {})

    def test_many_batches_under_way_are_answered_each(self):
        adapter = self.adapter()
        keys = names(64)
        futures = [adapter.plugin.submit_batch_set([key], objects([key])) for key in keys]
        self.assertEqual([adapter.answer(future)[0] for future in futures], [True] * 64)
        self.assertEqual(adapter.exists(keys), [True] * 64)

    def test_a_look_up_after_a_restart_finds_objects_of_every_size(self):
        first = self.adapter()
        small, large = names(3), names(3, 10)
        other = names(2, group=1)
        for keys, size in ((small, 4096), (large, 12345), (other, 777)):
            self.assertTrue(first.set(keys, size)[0])
        first.plugin.close()
        second = self.adapter()
        self.assertEqual(second.exists(small + large + other + names(1, 99)), [True] * 8 + [False])
        self.assertEqual(second.get(large, 12345)[2], [True] * 3)
        self.assertEqual(second.get(other, 777)[2], [True] * 2)
        # Asked for with another size, it is not that object.
        self.assertEqual(second.get(small, 8192)[2], [False] * 3)

    def test_models_revisions_and_types_never_share_a_byte(self):
        keys = names(2)
        self.adapter(revision="one").set(keys)
        for kwargs in ({"revision": "two"}, {"revision": "one", "dtype": "fp8"}, {"revision": "one", "identity": {"scales": "a"}}):
            with self.subTest(kwargs):
                other = self.adapter(**kwargs)
                self.assertEqual(other.exists(keys), [False, False])
                self.assertEqual(other.get(keys)[2], [False, False])
        several = self.adapter(revision={"test/model": "one"})
        self.assertEqual(several.exists(keys), [True, True])
        ok, error, _ = several.set(names(1, model="another"))
        self.assertFalse(ok)
        self.assertIn("revision", error)

    def test_what_is_missing_in_its_parameters_is_named(self):
        with self.assertRaisesRegex(ValueError, "revision"):
            Kvarts(dtype="bf16")
        with self.assertRaisesRegex(ValueError, "dtype"):
            Kvarts(revision="1")

    def test_bad_arguments_are_errors_of_their_batch(self):
        adapter = self.adapter()
        with self.assertRaisesRegex(ValueError, "memoryviews"):
            adapter.plugin.submit_batch_set(names(2), objects(names(1)))
        keys = names(1)
        self.assertTrue(adapter.set(keys)[0])
        read_only = memoryview(bytes(4096))
        ok, error, results = adapter.answer(adapter.plugin.submit_batch_get(keys, [read_only]))
        self.assertEqual((ok, results), (False, [False]))
        self.assertTrue(error)
        self.assertEqual(adapter.answer(adapter.plugin.submit_batch_exists([])), (True, "", []))


class LmcacheAway(unittest.TestCase):
    def test_without_a_server_everything_is_a_miss_and_it_comes_back(self):
        server = Server()
        self.addCleanup(server.stop)
        adapter = Adapter(server=server.socket)
        self.addCleanup(adapter.plugin.close)
        keys = names(4)
        self.assertTrue(adapter.set(keys)[0])
        server.kill()
        for _ in range(3):
            self.assertEqual(adapter.exists(keys), [False] * 4)
            self.assertEqual(adapter.get(keys)[2], [False] * 4)
            self.assertFalse(adapter.set(names(2, 50))[0])
        server.start()
        deadline = time.monotonic() + SOON
        while adapter.exists(keys) != [True] * 4:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        self.assertTrue(adapter.get(keys)[0])

    def test_it_starts_without_a_server(self):
        server = Server()
        self.addCleanup(server.stop)
        server.kill()
        adapter = Adapter(server=server.socket)
        self.addCleanup(adapter.plugin.close)
        self.assertEqual(adapter.exists(names(2)), [False, False])
        server.start()
        deadline = time.monotonic() + SOON
        while not adapter.set(names(2))[0]:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        self.assertEqual(adapter.get(names(2))[2], [True, True])


class Links(unittest.TestCase):
    def test_a_server_that_cannot_be_reached_is_left_alone_for_the_pause(self):
        answers = queue.SimpleQueue()
        tries = []

        def connect():
            tries.append(1)
            raise kvarts.Invalid("cannot be reached", "Config")

        link = Link(connect, pause=3600)
        self.addCleanup(link.close)
        for _ in range(3):
            link.do(lambda client: self.fail("there is no client"), answers.put)
            self.assertIsInstance(answers.get(timeout=SOON), kvarts.Retry)
        self.assertTrue(link.away)
        self.assertEqual(len(tries), 1)


    def test_a_block_that_is_being_stored_does_not_make_the_server_away(self):
        link = Link(lambda: self.fail("no client is wanted"), pause=3600)
        self.addCleanup(link.close)
        link.failed(kvarts.Retry("another put of this block is under way: retry", "InFlight"))
        self.assertFalse(link.away)
        link.failed(kvarts.Retry("no server answers", "Away"))
        self.assertTrue(link.away)


class Revisions(unittest.TestCase):
    def test_the_revision_of_a_directory_is_what_is_in_it(self):
        with tempfile.TemporaryDirectory() as place:
            weights = os.path.join(place, "model.safetensors")
            for name, text in (("config.json", "{}"), ("model.safetensors", "weights")):
                with open(os.path.join(place, name), "w", encoding="utf-8") as file:
                    file.write(text)
            first = revision_of(place)
            self.assertEqual(revision_of(place), first)
            os.utime(weights, ns=(1, 2))
            self.assertNotEqual(revision_of(place), first)
            second = revision_of(place)
            self.assertNotEqual(revision_of(place, "named"), second)
            with open(os.path.join(place, "config.json"), "w", encoding="utf-8") as file:
                file.write("[]")
            self.assertNotEqual(revision_of(place), second)

    def test_a_model_of_which_nothing_says_the_revision_is_refused(self):
        with self.assertRaisesRegex(ValueError, "revision"):
            revision_of("nobody/knows-this")
        self.assertEqual(revision_of("nobody/knows-this", "0e9e39f"), "0e9e39f")


if __name__ == "__main__":
    unittest.main()
