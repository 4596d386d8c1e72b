"""Pools that an engine's processes share: the scheduler stages, another process finds the bytes in its own mapping."""

import os
import subprocess
import sys
import unittest

import kvarts
from served import PAGE, Served, keys, pattern

WORKER = """
import sys
import kvarts
client = kvarts.connect(sys.argv[1])
memory = client.attach(sys.argv[2])
view = memoryview(memory.view)
for line in sys.stdin:
    at, nbytes = map(int, line.split())
    sys.stdout.buffer.write(view[at : at + nbytes])
    sys.stdout.flush()
"""


class Pools(Served):
    def pool(self, nbytes=64 * PAGE):
        client = self.connect()
        return client, client.shared_pool(nbytes)

    def bytes_of(self, pool, stage):
        view = memoryview(pool.memory.view)
        return [bytes(view[at + n : at + n + PAGE]) for at, nbytes in stage.places(0) for n in range(0, nbytes, PAGE)]

    def test_a_worker_in_another_process_finds_what_was_staged(self):
        client, pool = self.pool()
        pages = self.pages(client)
        names = keys(12)
        self.assertTrue(pages.put(names, [pattern(n) for n in range(12)]).ok)
        stage = pool.stage([(pages, 0, None)], names)
        self.assertEqual((stage.wait(60), stage.is_over, stage.why), (12, True, None))
        self.assertEqual(self.bytes_of(pool, stage), [pattern(n) for n in range(12)])
        worker = subprocess.Popen([sys.executable, "-c", WORKER, self.server.socket, pool.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        places = stage.places(0)
        worker_said, _ = worker.communicate("".join(f"{at} {nbytes}\n" for at, nbytes in places).encode())
        self.assertEqual((worker_said, worker.returncode), (b"".join(pattern(n) for n in range(12)), 0))
        self.assertEqual(sum(count for _, _, _, count in stage.stretches()), 12)
        stage.close()
        # What was staged is here for the next request.
        with self.assertRaises(kvarts.Invalid):
            stage.staged
        again = pool.stage([(pages, 0, None)], names[:5])
        self.assertEqual((again.wait(60), pool.counts["hits"], pool.counts["read"]), (5, 5, 12))

    def test_a_block_that_is_missing_ends_a_stage_and_says_why(self):
        client, pool = self.pool()
        pages = self.pages(client)
        names = keys(6)
        self.assertTrue(pages.put(names[:3] + names[4:], [pattern(n) for n in (0, 1, 2, 4, 5)]).ok)
        stage = pool.stage([(pages, 0, None)], names)
        self.assertEqual(stage.wait(60), 3)
        self.assertIsInstance(stage.why, kvarts.Miss)
        self.assertEqual(self.bytes_of(pool, stage), [pattern(n) for n in range(3)])
        # And one that was deleted is not served from memory.
        self.assertEqual(pages.delete(names[1:2]).results, [True])
        stage.close()
        stage = pool.stage([(pages, 0, None)], names[:3])
        self.assertEqual(stage.wait(60), 1)

    def test_a_pool_that_is_cleared_reads_again_what_no_stage_holds(self):
        client, pool = self.pool()
        pages = self.pages(client)
        names = keys(6)
        self.assertTrue(pages.put(names, [pattern(n) for n in range(6)]).ok)
        held, other = (pool.stage([(pages, 0, None)], some) for some in (names[:3], names[3:]))
        self.assertEqual((held.wait(60), other.wait(60)), (3, 3))
        other.close()
        pool.clear()
        again = pool.stage([(pages, 0, None)], names)
        self.assertEqual((again.wait(60), pool.counts["read"], self.bytes_of(pool, again)), (6, 9, [pattern(n) for n in range(6)]))

    def test_a_prefix_needs_of_some_groups_its_last_blocks_only(self):
        client = self.connect()
        pages = self.pages(client, page={0: PAGE, 1: PAGE}, block_tokens=16, windows={1: 32})
        names = keys(5)
        put = lambda group, at: self.assertTrue(pages.put([names[at]], [pattern(at)], group=group).ok)  # noqa: E731
        for at in range(5):
            put(0, at)
        self.assertEqual(pages.match(names).blocks, 0)
        for at in (2, 3):
            put(1, at)
        self.assertEqual(pages.match(names).blocks, 4)
        put(1, 0)
        self.assertEqual((pages.match(names).blocks, pages.match(names[:3]).blocks), (4, 1))
        with self.assertRaisesRegex(kvarts.Invalid, "windows"):
            self.pages(client, page={0: PAGE}, windows={1: 32})

    def test_windows_that_are_kept_are_ranges_of_blocks(self):
        self.assertEqual(kvarts.kept_windows(0, 32, 3, 7, 16), [(3, 7)])
        self.assertEqual(kvarts.kept_windows(64, 32, 0, 9, 16), [(2, 4), (6, 8)])
        # What a boundary behind them needs is among them.
        self.assertEqual(kvarts.kept_windows(64, 32, 5, 7, 16), [(6, 7)])
        self.assertEqual(kvarts.kept_windows(64, 1, 0, 9, 16), [(3, 4), (7, 8)])
        self.assertEqual((kvarts.window_interval(75 << 20, 16), kvarts.window_interval(0, 16)), (800, 0))

    def test_what_cannot_be_is_refused(self):
        client, pool = self.pool()
        pages = self.pages(client)
        for wrong in ("", "0" * 31, "x" * 32, "0" * 32):
            with self.assertRaises(kvarts.Error):
                client.attach(wrong)
        for columns, names in (([], keys(1)), ([(pages, 1, None)], keys(1)), ([(pages, 0, 3)], keys(1)), ([(pages, 0, None)], [])):
            with self.assertRaises(kvarts.Invalid):
                pool.stage(columns, names)
        stage = pool.stage([(pages, 0, None)], keys(1))
        with self.assertRaises(kvarts.Invalid):
            stage.stretches(1)
        stage.close()
        stage.close()
        with self.assertRaises(kvarts.Error):
            kvarts.open(self.place(), 256 << 20).shared_pool(PAGE)

    def place(self):
        import tempfile

        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        return os.path.join(place.name, "d")


if __name__ == "__main__":
    unittest.main()
