"""Batches of pages: one answer each, at any address, and no crash whatever is passed in."""

import array
import gc
import os
import select
import tempfile
import unittest
from unittest import mock

import numpy

import kvarts
from served import PAGE, Served, keys, pattern


class Batches(Served):
    def test_pages_come_back_from_any_address_each_answered_once(self):
        pages = self.pages()
        source = bytearray(3 + 16 * (PAGE + 100))
        views = [memoryview(source)[3 + n * (PAGE + 100) :][:PAGE] for n in range(16)]
        for n, view in enumerate(views):
            view[:] = pattern(n)
        put = pages.submit_put(keys(16), views)
        poller = select.poll()
        poller.register(pages.fileno(), select.POLLIN)
        self.assertTrue(poller.poll(20_000))
        [done] = pages.drain()
        self.assertEqual((done.id, done.kind, done.ok, done.written, done.error), (put, "put", True, 16, None))
        self.assertEqual(poller.poll(0), [])
        # Each into memory of its own, one of them a part of an array, in another order.
        into = [bytearray(PAGE) for _ in range(14)] + [numpy.zeros(PAGE, dtype=numpy.uint8)]
        big = numpy.zeros((4, PAGE // 4), dtype=numpy.float32)
        into.append(big[1])
        names = list(reversed(keys(16)))
        got = pages.submit_get(names, into)
        [done] = pages.wait(20)
        self.assertEqual((done.id, done.results, done.errors, done.prefix), (got, [True] * 16, {}, 16))
        for n, buffer in zip(reversed(range(16)), into):
            self.assertEqual(bytes(memoryview(buffer).cast("B")), pattern(n), n)
        self.assertFalse(big[0].any() or big[2].any())
        self.assertEqual(pages.under_way, 0)

    def test_what_is_missing_is_told_for_its_key_alone(self):
        pages = self.pages()
        names = keys(3)
        self.assertTrue(pages.put(names[:1] + names[2:], [pattern(0), pattern(2)]).ok)
        into = [bytearray(b"x" * PAGE) for _ in names]
        done = pages.get(names, into)
        self.assertEqual(done.results, [True, False, True])
        self.assertEqual(list(done.errors), [1])
        self.assertIsInstance(done.errors[1], kvarts.Miss)
        self.assertEqual((done.errors[1].kind, done.errors[1].reason), ("miss", "NotHere"))
        self.assertEqual(pages.exists(names), [True, False, True])
        self.assertEqual(bytes(into[2]), pattern(2))

    def test_reasons_are_told_with_one_error_for_each_and_not_for_each_key(self):
        pages = self.pages()
        names = keys(8192)
        self.assertTrue(pages.put(names[:2], [pattern(0), pattern(1)]).ok)
        made = mock.Mock(side_effect=kvarts.errors._make)
        with mock.patch("kvarts.errors._make", made):
            batch = pages.submit_exists(names)
            [done] = pages.wait(60)
            self.assertEqual((done.id, done.results), (batch, [True] * 2 + [False] * 8190))
            self.assertEqual(made.call_count, 0)
            [(reason, (error, count))] = done.reasons.items()
            self.assertEqual((reason, count, made.call_count), ("NotHere", 8190, 1))
        self.assertIsInstance(error, kvarts.Miss)
        self.assertEqual(len(done.errors), count)
        self.assertEqual(pages.put(names[:1], [pattern(0)]).reasons, {})
        # Several reasons in one answer.
        into = bytearray(PAGE)
        done = pages.get([names[5], names[0], names[0]], [into, bytearray(PAGE), bytearray(PAGE)])
        self.assertEqual({reason: count for reason, (_, count) in done.reasons.items()}, {"NotHere": 1, "Duplicate": 1})

    def test_deleted_pages_are_gone_and_what_was_not_here_says_so(self):
        pages = self.pages()
        names = keys(2)
        pages.put(names[:1], [pattern(1)])
        done = pages.delete(names)
        self.assertEqual(done.results, [True, False])
        self.assertEqual(pages.exists(names), [False, False])
        pages.put(names, [pattern(1), pattern(2)])
        self.assertEqual(pages.delete_all(), 2)
        self.assertEqual(pages.exists(names), [False, False])

    def test_the_first_put_of_a_key_wins(self):
        pages = self.pages()
        self.assertEqual(pages.put(keys(1), [pattern(1)]).written, 1)
        again = pages.put(keys(1), [pattern(2)])
        self.assertEqual((again.ok, again.written), (True, 0))
        into = bytearray(PAGE)
        self.assertTrue(pages.get(keys(1), into).ok)
        self.assertEqual(bytes(into), pattern(1))

    def test_a_key_that_stands_again_is_answered_for_itself(self):
        pages = self.pages()
        [name] = keys(1)
        self.assertEqual(pages.put([name, name], [pattern(1), pattern(2)]).results, [True, True])
        into = [bytearray(PAGE), bytearray(PAGE)]
        done = pages.get([name, name], into)
        self.assertEqual(done.results, [True, False])
        self.assertEqual((done.errors[1].kind, done.errors[1].reason), ("invalid", "Duplicate"))
        self.assertEqual([bytes(one) for one in into], [pattern(1), bytes(PAGE)])

    def test_one_buffer_may_have_all_pages_and_a_source_may_stand_twice(self):
        pages = self.pages()
        source = pattern(5)
        self.assertTrue(pages.put(keys(2), [source, source]).ok)
        whole = numpy.zeros((2, PAGE), dtype=numpy.uint8)
        self.assertTrue(pages.get(keys(2), whole).ok)
        self.assertEqual(whole.tobytes(), source * 2)

    def test_groups_and_ranks_are_kept_apart_and_travel_in_one_batch(self):
        pages = self.pages(page={0: PAGE, 3: 4096}, tp_size=2, tp_rank=1)
        [name] = keys(1)
        self.assertEqual((pages.block_bytes(), pages.block_bytes(3)), (PAGE, 4096))
        sources = [pattern(1), pattern(2, 4096), pattern(3)]
        done = pages.put([name] * 3, sources, group=[0, 3, 0], rank=[1, 1, 0])
        self.assertTrue(done.ok, done.errors)
        into = [bytearray(len(one)) for one in sources]
        self.assertTrue(pages.get([name] * 3, into, group=[0, 3, 0], rank=[1, 1, 0]).ok)
        self.assertEqual([bytes(one) for one in into], sources)
        self.assertEqual(pages.exists([name, name], group=[0, 3], rank=[1, 0]), [True, False])
        self.assertEqual(pages.exists([name]), [True])

    def test_identities_share_nothing(self):
        client = self.connect()
        one = self.pages(client)
        one.put(keys(1), [pattern(1)])
        others = [
            dict(revision="other"),
            dict(dtype="fp8"),
            dict(block_tokens=32),
            dict(layout="other"),
            dict(extras={"lora": "x"}),
            dict(tp_size=2),
            dict(page=PAGE // 2),
        ]
        for other in others:
            handle = self.pages(client, **other)
            self.assertNotEqual(handle.namespace, one.namespace)
            self.assertEqual(handle.exists(keys(1)), [False], other)
        self.assertEqual(self.pages(client).exists(keys(1)), [True])

    def test_locks_hold_and_are_let_go(self):
        pages = self.pages()
        pages.put(keys(2), [pattern(1), pattern(2)])
        batch = pages.submit_lock(keys(3), hold=30)
        [done] = pages.wait(20)
        self.assertEqual((done.kind, done.results), ("lock", [True, True, False]))
        pages.unlock(batch)
        pages.submit_lock(keys(2), hold=30)
        pages.wait(20)
        pages.unlock(keys(2))

    def test_lanes_have_eventfds_of_their_own(self):
        pages = self.pages(lanes=True)
        fds = [pages.event_fd(lane) for lane in ("store", "lookup", "load")]
        self.assertEqual(len(set(fds)), 3)
        pages.submit_put(keys(1), [pattern(1)])
        self.assertEqual(select.select(fds, [], [], 20)[0], fds[:1])
        self.assertEqual(pages.drain("load"), [])
        self.assertEqual([one.kind for one in pages.drain("store")], ["put"])
        pages.submit_exists(keys(1))
        self.assertEqual(select.select(fds, [], [], 20)[0], fds[1:2])
        self.assertEqual(len(pages.drain()), 1)

    def test_shared_memory_is_filled_without_a_copy_and_found_by_address(self):
        client = self.connect()
        pages = self.pages(client)
        memory = client.memory(4 * PAGE)
        self.assertEqual(memory.mode, "adopted")
        self.assertGreaterEqual(memory.nbytes, 4 * PAGE)
        view = numpy.frombuffer(memory.view, dtype=numpy.uint8)
        view[: 2 * PAGE] = numpy.frombuffer(pattern(1) + pattern(2), dtype=numpy.uint8)
        # By a view, and by an address that is no multiple of anything.
        self.assertTrue(pages.put(keys(2), [view[:PAGE], memory.address + PAGE]).ok)
        self.assertTrue(pages.get(keys(2), [memory.address + 3 * PAGE - 77, memory.address]).ok)
        self.assertEqual(view[3 * PAGE - 77 :][:PAGE].tobytes(), pattern(1))
        self.assertEqual(view[:PAGE].tobytes(), pattern(2))
        with self.assertRaisesRegex(kvarts.Invalid, r"buffers\[0\].*are not in registered memory"):
            pages.submit_get(keys(1), [memory.address + 4 * PAGE])
        memory.close()
        with self.assertRaises(kvarts.Invalid):
            pages.submit_get(keys(1), [memory.address])
        self.assertEqual(view[:PAGE].tobytes(), pattern(2), "a view keeps its memory")

    def test_memory_of_an_engine_is_adopted(self):
        import mmap
        import os

        client = self.connect()
        pages = self.pages(client)
        fd = os.memfd_create("engine", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(fd, 8 * PAGE)
        engine = mmap.mmap(fd, 4 * PAGE, offset=4 * PAGE)
        known = client.adopt(engine, fd=fd, offset=4 * PAGE)
        os.close(fd)
        self.assertEqual(known.mode, "adopted")
        engine[:PAGE] = pattern(9)
        self.assertTrue(pages.put(keys(1), [memoryview(engine)[:PAGE]]).ok)
        self.assertTrue(pages.get(keys(1), [known.address + 2 * PAGE]).ok)
        self.assertEqual(engine[2 * PAGE : 3 * PAGE], pattern(9))
        with self.assertRaisesRegex(kvarts.Invalid, "already registered"):
            client.adopt(engine)
        known.close()
        plain = client.adopt(engine)
        self.assertEqual(plain.mode, "copied")
        self.assertTrue(pages.get(keys(1), [plain.address]).ok)
        self.assertEqual(engine[:PAGE], pattern(9))

    def test_a_file_of_an_engine_that_cannot_be_sealed_is_adopted(self):
        import mmap
        import os

        from kvarts.shared import adopt, file_of

        client = self.connect()
        pages = self.pages(client)
        for is_there in (True, False):
            path = f"/dev/shm/kvarts-test-{os.getpid()}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # As long as the pages are, though that is no whole number of the kernel's.
                os.ftruncate(fd, 8 * PAGE + 100)
                engine = mmap.mmap(fd, 7 * PAGE + 100, offset=PAGE)
            finally:
                if not is_there:
                    os.unlink(path)
            memory = memoryview(engine)[4096:]
            found, offset = file_of(memory)
            self.assertEqual((os.fstat(found).st_ino, offset), (os.fstat(fd).st_ino, PAGE + 4096))
            os.close(found)
            known = adopt(client, memory)
            os.close(fd)
            if is_there:
                os.unlink(path)
            self.assertEqual(known.mode, "adopted")
            memory[:PAGE] = pattern(9)
            self.assertTrue(pages.put(keys(1), [memory[:PAGE]]).ok)
            self.assertTrue(pages.get(keys(1), [known.address + 2 * PAGE]).ok)
            self.assertEqual(memory[2 * PAGE : 3 * PAGE].tobytes(), pattern(9))
            known.close()

    def test_memory_of_an_engine_that_is_no_file_is_copied(self):
        import mmap

        from kvarts.shared import adopt, file_of

        client = self.connect()
        for memory in (bytearray(2 * PAGE), memoryview(mmap.mmap(-1, 2 * PAGE))):
            known = adopt(client, memory)
            self.assertEqual(known.mode, "copied")
            known.close()
        with tempfile.TemporaryFile(dir=".") as file:
            file.truncate(2 * PAGE)
            on_disk = memoryview(mmap.mmap(file.fileno(), 2 * PAGE))
            found, _ = file_of(on_disk)
            os.close(found)
            known = adopt(client, on_disk)
            self.assertEqual(known.mode, "copied", "a file on disk is no memory")
            known.close()

    def test_closed_memory_lets_go_of_its_buffer_at_once(self):
        client = self.connect()
        pages = self.pages(client)
        buffer = bytearray(2 * PAGE)
        memory = client.adopt(buffer)
        pages.put(keys(1), [memory.address])
        with self.assertRaises(BufferError):
            buffer.append(0)
        memory.close()
        buffer.append(0)
        memory.close()
        self.assertEqual((memory.mode, memory.nbytes), ("copied", 2 * PAGE))

    def test_slots_of_a_pool(self):
        pages = self.pages()
        pool = numpy.zeros((8, PAGE + 4096), dtype=numpy.uint8)
        pool[5, :PAGE] = numpy.frombuffer(pattern(5), dtype=numpy.uint8)
        pool[2, :PAGE] = numpy.frombuffer(pattern(2), dtype=numpy.uint8)
        place = lambda slots: kvarts.Paged([(pool, 0, PAGE + 4096)], slots)
        self.assertTrue(pages.put(keys(2), place([5, 2])).ok)
        self.assertTrue(pages.get(keys(2), place([0, 7])).ok)
        self.assertEqual((pool[0, :PAGE].tobytes(), pool[7, :PAGE].tobytes()), (pattern(5), pattern(2)))
        for slots, what in [([0, 8], "ends after"), ([0], "1 slots were given for 2 keys"), ([2**32 - 1, 0], "ends after")]:
            with self.assertRaisesRegex(kvarts.Invalid, what):
                pages.submit_get(keys(2), place(slots))
        with self.assertRaises((kvarts.Invalid, OverflowError)):
            pages.submit_get(keys(2), place([-1, 0]))
        with self.assertRaises(kvarts.Invalid):
            pages.submit_get(keys(2), place([1, 1]))

    def test_bad_input_is_an_exception_that_names_the_argument(self):
        pages = self.pages()
        good, page = keys(1), bytearray(PAGE)
        rows = numpy.zeros((PAGE, 2), dtype=numpy.uint8)
        gone = memoryview(bytearray(PAGE))
        gone.release()
        wrong = [
            (good, [bytearray(PAGE - 1)], r"buffers\[0\]: the buffer has 65535 bytes, but a block has 65536"),
            (good, [bytearray(PAGE + 1)], r"buffers\[0\]"),
            (good, [bytearray(0)], r"buffers\[0\]"),
            (good, [bytes(PAGE)], r"buffers\[0\]: the buffer is read-only"),
            (good, [rows[:, 0]], r"buffers\[0\]: the buffer is not contiguous"),
            (good, [gone], r"buffers\[0\]"),
            (good, [None], r"buffers\[0\]"),
            (good, ["x" * PAGE], r"buffers\[0\]"),
            (good, [0], r"buffers\[0\]"),
            (good, [12345], r"buffers\[0\]"),
            (good, [2**64 - 1], r"buffers\[0\]"),
            (good, [2**70], r"buffers\[0\]"),
            (good, [], r"buffers: 0 buffers were given for 1 keys"),
            (good, [page, page], r"buffers: 2 buffers were given for 1 keys"),
            (good, bytearray(PAGE - 1), r"buffers"),
            (good, None, r"buffers"),
            ([], [], r"keys"),
            (good[0], [page], r"keys"),
            (["x" * 4097], [page], r"keys\[0\]"),
            ([b""], [page], r"keys\[0\]"),
            ([7], [page], r"keys\[0\]"),
            (5, [page], r"keys"),
            ([good[0]] * 70_000, [page], r"keys: the list has more than"),
        ]
        for names, buffers, what in wrong:
            with self.assertRaisesRegex(kvarts.Invalid, what, msg=what):
                pages.submit_get(names, buffers)
        both = [page, memoryview(page)]
        with self.assertRaises(kvarts.Invalid):
            pages.submit_get(keys(2), both)
        for group, rank, what in [(1, None, "group"), (None, 1, "rank"), ([0, 0], None, "group"), ("x", None, "group")]:
            with self.assertRaisesRegex(kvarts.Invalid, what):
                pages.submit_exists(good, group=group, rank=rank)
        for seconds in (-1, float("nan"), float("inf"), 1e300):
            with self.assertRaisesRegex(kvarts.Invalid, "timeout"):
                pages.submit_exists(good, timeout=seconds)
        with self.assertRaises(kvarts.Invalid):
            pages.drain("nothing")
        self.assertEqual(pages.under_way, 0)
        self.assertTrue(pages.put(good, [pattern(1)]).ok, "and it still works")

    def test_a_buffer_is_held_until_its_batch_is_answered_and_not_longer(self):
        pages = self.pages()
        pages.put(keys(1), [pattern(3)])
        buffer = bytearray(PAGE)
        pages.submit_get(keys(1), [buffer])
        [done] = pages.wait(20)
        self.assertTrue(done.ok)
        buffer.append(0)
        # A buffer that only the batch still has.
        pages.submit_get(keys(1), [bytearray(PAGE)])
        pages.submit_put(keys(1, 5), [bytearray(pattern(5))])
        gc.collect()
        got = []
        while len(got) < 2:
            got += pages.wait(20)
        self.assertTrue(all(one.ok for one in got))

    def test_typed_arrays_are_memory_like_any_other(self):
        pages = self.pages()
        words = array.array("I", range(PAGE // 4))
        self.assertTrue(pages.put(keys(1), [words]).ok)
        back = array.array("I", bytes(PAGE))
        self.assertTrue(pages.get(keys(1), [back]).ok)
        self.assertEqual(words, back)
        tensors = numpy.zeros((2, PAGE // 8), dtype=numpy.float32)

        class OnlyDlpack:
            def __init__(self, array):
                self.array = array

            def __dlpack__(self, **kwargs):
                return self.array.__dlpack__(**kwargs)

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        self.assertTrue(pages.get(keys(1), [OnlyDlpack(tensors)]).ok)
        self.assertEqual(tensors.tobytes(), words.tobytes())
        with self.assertRaisesRegex(kvarts.Invalid, "not contiguous"):
            pages.submit_get(keys(1), [OnlyDlpack(numpy.zeros((PAGE // 4, 2), dtype=numpy.float32)[:, 0])])
        with self.assertRaisesRegex(kvarts.Invalid, "but a block has"):
            pages.submit_get(keys(1), [OnlyDlpack(tensors[0])])

    def test_a_closed_handle_refuses_and_has_let_go_of_everything(self):
        pages = self.pages()
        pages.put(keys(8), pattern(1) * 8)
        buffers = [bytearray(PAGE) for _ in range(8)]
        for _ in range(50):
            pages.submit_get(keys(8), buffers)
        pages.close()
        for buffer in buffers:
            buffer.append(0)
        for call in (lambda: pages.submit_exists(keys(1)), lambda: pages.submit_get(keys(1), [bytearray(PAGE)])):
            # Not `Retry`: a loop on it would never end.
            with self.assertRaises(kvarts.Invalid) as caught:
                call()
            self.assertEqual(caught.exception.reason, "Closed")
        self.assertEqual((pages.drain(), pages.under_way), ([], 0))
        pages.close()

    def test_keys_are_named_by_what_an_engine_calls_them(self):
        self.assertEqual(kvarts.key(b"k" * 32), b"k" * 32)
        self.assertEqual(len(kvarts.key("a")), 32)
        names = [kvarts.key("a", "b"), kvarts.key("ab"), kvarts.key("ab", ""), kvarts.key(b"a", "b"), kvarts.key(1), kvarts.key("1")]
        self.assertEqual(len(set(names)), len(names))
        tokens = list(range(70))
        chain = kvarts.chain(tokens, 16)
        self.assertEqual(len(chain), 4)
        self.assertEqual(chain, kvarts.chain(numpy.array(tokens, dtype=numpy.uint32), 16))
        self.assertEqual(chain[2:], kvarts.chain(tokens[32:], 16, parent=chain[1]))
        self.assertNotEqual(chain[0], kvarts.chain(tokens, 16, extra=b"lora")[0])
        for wrong in (lambda: kvarts.key(), lambda: kvarts.key(""), lambda: kvarts.key(1.5), lambda: kvarts.key("x" * 5000)):
            with self.assertRaises(kvarts.Invalid):
                wrong()
        with self.assertRaises(kvarts.Invalid):
            kvarts.chain([2**32], 16)


if __name__ == "__main__":
    unittest.main()
