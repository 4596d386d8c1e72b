"""What is not a request: servers that stop, die and come back, forks, exits, and a store inside this process."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

import kvarts
from kvarts.aio import AsyncPages
from served import IDENTITY, PAGE, Served, Server, keys, pattern

#: Far more than anything takes here, and less than the deadline of a call that gives none.
SOON = 30


class Away(unittest.TestCase):
    """Each test has a server of its own, which goes away."""

    def setUp(self):
        self.server = Server()
        self.addCleanup(self.server.stop)

    def pages(self, **kwargs):
        client = kvarts.connect(self.server.socket, **kwargs)
        self.addCleanup(client.close, 5)
        return client, client.pages(PAGE, **IDENTITY)

    def submit_all(self, pages, timeout):
        return {
            pages.submit_put(keys(2, 50), [pattern(1), pattern(2)], timeout=timeout),
            pages.submit_get(keys(2), [bytearray(PAGE), bytearray(PAGE)], timeout=timeout),
            pages.submit_exists(keys(2), timeout=timeout),
            pages.submit_delete(keys(2, 90), timeout=timeout),
        }

    def answers(self, pages, asked):
        found = {}
        began = time.monotonic()
        while len(found) < len(asked) and time.monotonic() - began < SOON:
            found.update({done.id: done for done in pages.wait(1)})
        self.assertEqual(set(found), asked)
        return list(found.values())

    def test_a_server_that_stands_still_delays_nobody_beyond_the_deadline_and_comes_back(self):
        for via in ("local", "grpc"):
            with self.subTest(via):
                _, pages = self.pages(via=via)
                pages.put(keys(2), [pattern(1), pattern(2)])
                self.server.signal(signal.SIGSTOP)
                try:
                    asked = self.submit_all(pages, 0.3)
                    for done in self.answers(pages, asked):
                        self.assertEqual({error.kind for error in done.errors.values()}, {"deadline"}, done)
                    # A submission never waits for room in the socket, however much there is to send.
                    asked = {pages.submit_exists(keys(4000), timeout=0.3) for _ in range(60)}
                    self.answers(pages, asked)
                    with self.assertRaises(TimeoutError):
                        pages.exists(keys(1), timeout=0.2)
                finally:
                    self.server.signal(signal.SIGCONT)
                back = [bytearray(PAGE), bytearray(PAGE)]
                # It has calls to catch up with first, and may say so.
                until = time.monotonic() + SOON
                while not (done := pages.get(keys(2), back, timeout=SOON)).ok and time.monotonic() < until:
                    self.assertLessEqual({error.kind for error in done.errors.values()}, {"retry", "deadline"})
                    time.sleep(0.05)
                self.assertTrue(done.ok, done.errors)
                self.assertEqual([bytes(one) for one in back], [pattern(1), pattern(2)])

    def test_a_batch_that_is_cancelled_is_answered_although_the_server_stands_still(self):
        _, pages = self.pages()
        pages.put(keys(2), [pattern(1), pattern(2)])
        self.server.signal(signal.SIGSTOP)
        try:
            asked = self.submit_all(pages, SOON)
            self.assertTrue(all(pages.cancel(id) for id in asked))
            for done in self.answers(pages, asked):
                self.assertEqual({error.reason for error in done.errors.values()}, {"Cancelled"}, done)
            buffers = [bytearray(PAGE), bytearray(PAGE)]
            pages.submit_get(keys(2), buffers)
            pages.close(SOON)
            buffers[0].append(0)
        finally:
            self.server.signal(signal.SIGCONT)

    def test_a_server_that_was_killed_is_a_retry_and_comes_back_with_what_it_had(self):
        client, pages = self.pages()
        memory = client.memory(2 * PAGE)
        self.assertTrue(pages.put(keys(2), [pattern(1), pattern(2)]).ok)
        self.server.kill()
        asked = self.submit_all(pages, 5)
        asked.add(pages.submit_get(keys(2), memory.view[: 2 * PAGE], timeout=5))
        for done in self.answers(pages, asked):
            self.assertFalse(any(done.results), done)
            self.assertLessEqual({error.kind for error in done.errors.values()}, {"retry", "deadline", "invalid"}, done)
        self.server.start()
        # Relaxed puts are there after the death of a process; the same handle goes on.
        deadline = time.monotonic() + SOON
        into = [bytearray(PAGE), memory.address]
        while not (done := pages.get(keys(2), into)).ok and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertTrue(done.ok, done.errors)
        self.assertEqual((bytes(into[0]), bytes(memory.view[:PAGE])), (pattern(1), pattern(2)))

    def test_a_server_that_is_not_there_yet_is_a_retry_by_whatever_path(self):
        self.server.kill()
        for server in (self.server.socket, "127.0.0.1:1", self.server.socket + "x"):
            for via in ("best", "grpc"):
                with self.assertRaises(kvarts.Retry, msg=(server, via)) as caught:
                    kvarts.connect(server, timeout=5, via=via)
                self.assertEqual(caught.exception.reason, "Away")
                self.assertIn(server, str(caught.exception))
        with self.assertRaises(kvarts.Retry):
            kvarts.connect(self.server.socket, timeout=5, token="secret")
        for server in (self.server.socket + "x" * 200, "http://"):
            with self.assertRaises(kvarts.Invalid, msg=server):
                kvarts.connect(server, timeout=5)
        file = self.server.socket + "f"
        with open(file, "wb"):
            pass
        self.addCleanup(os.remove, file)
        os.chmod(file, 0)
        with self.assertRaises(kvarts.Error):
            kvarts.connect(file, timeout=5)

    def test_many_given_up_calls_do_not_make_the_next_ones_refused(self):
        client, pages = self.pages(via="grpc", timeout=SOON)
        pages.put(keys(1), [pattern(1)])
        for _ in range(3):
            self.server.signal(signal.SIGSTOP)
            try:
                asked = {pages.submit_exists(keys(1), timeout=0.1) for _ in range(200)}
                for done in self.answers(pages, asked):
                    self.assertEqual({error.kind for error in done.errors.values()}, {"deadline"}, done)
            finally:
                self.server.signal(signal.SIGCONT)
            kinds = set()
            for _ in range(20):
                done = pages.get(keys(1), [bytearray(PAGE)])
                kinds.update(error.kind for error in done.errors.values())
                try:
                    client.stats()
                except kvarts.Error as error:
                    kinds.add(error.kind)
            self.assertLessEqual(kinds, {"retry"})


class Processes(Served):
    def run_python(self, script):
        script = textwrap.dedent(
            """
            import contextlib, os, signal, sys, threading, time
            import kvarts
            from served import *
            IDENTITY["revision"] = str(time.time())
            client = kvarts.connect(%r)
            pages = client.pages(PAGE, **IDENTITY)
            """
        ) % self.server.socket + textwrap.dedent(script)
        done = subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=120)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return done.stdout

    def test_in_a_forked_child_every_call_is_refused_and_the_parent_goes_on(self):
        found = self.run_python(
            """
            import gc, warnings
            warnings.simplefilter("ignore", DeprecationWarning)
            pages.put(keys(1), [pattern(1)])
            buffer = bytearray(PAGE)
            pages.submit_get(keys(1), [buffer])
            child = os.fork()
            if child == 0:
                wrong = 0
                calls = [lambda: pages.submit_exists(keys(1)), lambda: pages.drain(), lambda: client.memory(4096), lambda: client.close(),
                         lambda: pages.close(), lambda: pages.get(keys(1), [bytearray(PAGE)]), lambda: pages.namespace]
                for call in calls:
                    try:
                        call()
                        wrong += 1
                    except kvarts.Invalid as error:
                        wrong += error.reason != "Forked"
                del pages, client, calls
                gc.collect()
                other = kvarts.connect(%r)
                wrong += not other.pages(PAGE, **IDENTITY).exists(keys(1))[0]
                other.close()
                sys.exit(wrong)
            assert os.waitpid(child, 0)[1] == 0
            [done] = pages.wait(20)
            assert done.ok and buffer == pattern(1)
            assert pages.exists(keys(1)) == [True]
            print("good")
            """
            % self.server.socket
        )
        self.assertEqual(found, "good\n")

    def test_a_process_may_end_at_any_moment(self):
        ends = ["pass", "sys.exit(0)", "os._exit(0)", "del pages, client", "raise SystemExit", "threading.Thread(target=pages.wait).start()"]
        for end in ends:
            with self.subTest(end):
                self.run_python(
                    f"""
                    pages.put(keys(4), [pattern(n) for n in range(4)])
                    memory = client.memory(4 * PAGE)
                    for n in range(100):
                        pages.submit_get(keys(4), [bytearray(PAGE) for _ in range(4)])
                        pages.submit_put(keys(4, 10 * n), [pattern(n)] * 4)
                    pages.submit_get(keys(4), memory.view[: 4 * PAGE])
                    {end}
                    """
                )

    def test_a_process_ends_soon_although_the_server_stands_still(self):
        server = Server()
        self.addCleanup(server.stop)
        began = time.monotonic()
        self.run_python(
            f"""
            other = kvarts.connect({server.socket!r})
            still = other.pages(PAGE, **IDENTITY)
            os.kill({server.process.pid}, signal.SIGSTOP)
            still.submit_get(keys(1), [bytearray(PAGE)])
            still.submit_put(keys(1), [pattern(1)])
            """
        )
        self.assertLess(time.monotonic() - began, SOON)

    def test_a_signal_ends_a_call_that_waits(self):
        self.run_python(
            f"""
            server = Server()
            try:
                other = kvarts.connect(server.socket)
                still = other.pages(PAGE, **IDENTITY)
                server.signal(signal.SIGSTOP)
                buffer = bytearray(PAGE)
                threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                try:
                    ended = still.get(keys(1), [buffer])
                    raise AssertionError(f"it ended: {{ended}}")
                except KeyboardInterrupt:
                    buffer.append(0)
                threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                try:
                    still.submit_get(keys(1), [bytearray(PAGE)])
                    still.wait()
                    raise AssertionError("it ended")
                except KeyboardInterrupt:
                    pass
            finally:
                server.stop()
            """
        )

    def test_a_client_has_as_many_threads_as_it_is_told(self):
        found = self.run_python(
            f"""
            def threads():
                names = []
                for task in os.listdir("/proc/self/task"):
                    # One may have ended since it was listed.
                    with contextlib.suppress(OSError), open(f"/proc/self/task/{{task}}/comm") as file:
                        names.append(file.read().strip())
                return names.count("kvarts-client")

            other = kvarts.connect({self.server.socket!r}, threads=5)
            assert other.pages(PAGE, **IDENTITY).put(keys(1), [pattern(1)]).ok
            # Two of the first client's. A thread has its name after it has begun.
            deadline = time.monotonic() + {SOON}
            while threads() != 2 + 5 and time.monotonic() < deadline:
                time.sleep(0.01)
            print(threads())
            """
        )
        self.assertEqual(found, "7\n")
        for threads in (0, 1025, -1):
            with self.assertRaisesRegex((kvarts.Invalid, OverflowError), "threads|negative"):
                self.connect(threads=threads)

    def test_other_threads_run_while_one_waits(self):
        pages = self.pages()
        source = [pattern(n) for n in range(64)]
        import threading

        errors = []

        def work(number):
            try:
                mine = keys(64, 1000 * number)
                for _ in range(3):
                    assert pages.put(mine, source).ok
                    into = [bytearray(PAGE) for _ in mine]
                    assert pages.get(mine, into).ok and into == source
            except BaseException as error:  # told by the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        self.assertEqual(errors, [])

    def test_what_happens_is_told_in_order(self):
        client = self.connect()
        events = client.watch()
        pages = self.pages(client)
        pages.put(keys(2), [pattern(1), pattern(2)])
        pages.delete(keys(1))
        told = []
        while len(told) < 3:
            event = next(events)
            if event.namespace == pages.namespace:
                told.append((event.what, event.key, event.group))
        # Blocks of one put become visible in any order, if they lie in several shards.
        self.assertEqual(sorted(told[:2]), sorted(("stored", key, 0) for key in keys(2)))
        self.assertEqual(told[2], ("deleted", keys(1)[0], 0))
        self.assertEqual(len(event.sequence), 2)
        stats = client.stats()
        self.assertEqual(stats["budget_bytes"], 1 << 30)
        self.assertTrue(stats["counts"])

    def test_batches_are_coroutines(self):
        pages = self.pages()

        async def all_of_it():
            async with AsyncPages(pages) as store:
                done = await asyncio.gather(*(store.put(keys(4, 4 * n), [pattern(n)] * 4) for n in range(20)))
                self.assertTrue(all(one.ok for one in done))
                into = [bytearray(PAGE) for _ in range(4)]
                self.assertTrue((await store.get(keys(4), into)).ok)
                self.assertEqual(into, [pattern(0)] * 4)
                self.assertEqual(await store.exists(keys(1, 4000)), [False])
                self.assertEqual((await store.match(keys(4))).blocks, 4)
                self.assertEqual((await store.missing(keys(1, 4000))).never_stored, 1)
                (await store.pin(keys(4), hold=5)).end()
                again = [bytearray(PAGE) for _ in range(4)]
                self.assertEqual([layer.blocks async for layer in store.layers(keys(4), again)], [4])
                self.assertEqual(again, into)
                reading = asyncio.ensure_future(anext(store.layers(keys(4), again)))
                await asyncio.sleep(0)
                reading.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await reading
                again[0].append(0)
                with self.assertRaises(kvarts.Invalid):
                    await store.get(keys(1), [b""])
                task = asyncio.ensure_future(store.get(keys(4), into))
                await asyncio.sleep(0)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                into[0].append(0)

        asyncio.run(all_of_it())


class Embedded(unittest.TestCase):
    def setUp(self):
        self.place = tempfile.mkdtemp(prefix="kvarts-")
        self.addCleanup(shutil.rmtree, self.place, ignore_errors=True)

    def test_a_store_in_this_process_has_the_same_interface_and_keeps_what_it_has(self):
        with kvarts.open(self.place, 256 << 20) as client:
            self.assertEqual(client.path, "embedded")
            pages = client.pages(PAGE, **IDENTITY)
            self.assertTrue(pages.put(keys(3), [pattern(n) for n in range(3)]).ok)
            memory = client.memory(3 * PAGE)
            self.assertEqual(memory.mode, "embedded")
            self.assertTrue(pages.get(keys(3), memory.view[: 3 * PAGE]).ok)
            self.assertEqual(bytes(memory.view[PAGE : 2 * PAGE]), pattern(1))
            self.assertEqual(client.stats()["budget_bytes"], 256 << 20)
            events = client.watch()
            pages.delete(keys(1, 500))
            pages.put(keys(1, 501), [pattern(1)])
            self.assertEqual(next(events).key, keys(1, 501)[0])
            odd = bytearray(PAGE + 1)
            self.assertTrue(pages.get(keys(1, 2), [memoryview(odd)[1:]]).ok)
            self.assertEqual(odd[1:], pattern(2))
            self.assertEqual(pages.exists(keys(4)), [True] * 3 + [False])
            with self.assertRaises(kvarts.Refused) as caught:
                kvarts.open(self.place, 256 << 20)
            self.assertEqual(caught.exception.reason, "Locked")
        with self.assertRaises(kvarts.Invalid):
            pages.exists(keys(1))
        with kvarts.open([self.place], 256 << 20) as client:
            pages = client.pages(PAGE, **IDENTITY)
            into = bytearray(PAGE)
            self.assertTrue(pages.get(keys(1, 1), into).ok)
            self.assertEqual(into, pattern(1))

    def test_what_cannot_be_opened_says_why(self):
        for call in (lambda: kvarts.open(self.place, 1), lambda: kvarts.open([], 1 << 30), lambda: kvarts.open("/proc/nowhere", 1 << 30)):
            with self.assertRaises(kvarts.Error):
                call()
        with self.assertRaises((TypeError, OverflowError)):
            kvarts.open(self.place, -1)

    def test_a_damaged_page_is_corrupt_for_its_key_alone(self):
        with kvarts.open(self.place, 256 << 20) as client:
            pages = client.pages(PAGE, **IDENTITY, durable=True)
            self.assertTrue(pages.put(keys(3), [pattern(n) for n in range(3)]).ok)
        flipped = 0
        for folder, _, files in os.walk(self.place):
            for name in files:
                path = os.path.join(folder, name)
                with open(path, "r+b") as file:
                    data = file.read()
                    at = data.find(pattern(1)[:4096])
                    if at >= 0:
                        file.seek(at + 1000)
                        file.write(bytes([data[at + 1000] ^ 1]))
                        flipped += 1
        self.assertEqual(flipped, 1)
        with kvarts.open(self.place, 256 << 20) as client:
            pages = client.pages(PAGE, **IDENTITY)
            done = pages.get(keys(3), [bytearray(PAGE) for _ in range(3)])
            self.assertEqual(done.results, [True, False, True])
            self.assertIsInstance(done.errors[1], kvarts.Corrupt)
            self.assertEqual(pages.exists(keys(3)), [True, False, True])


if __name__ == "__main__":
    unittest.main()
