"""What a connector sees of blocks that only a bucket has: what look-ups say of them, and what reads then bring."""

import os
import shutil
import subprocess
import tempfile
import time
import unittest

import kvarts
from kvarts.link import Link
from served import IDENTITY, PAGE, PROGRAM, Server, keys, pattern
from test_lmcache import Adapter, names

#: Far more than anything takes here.
SOON = 30
COUNT = 12


class Behind(unittest.TestCase):
    """A bucket with blocks of a server that is gone."""

    @classmethod
    def setUpClass(cls):
        cls.bucket = tempfile.mkdtemp(prefix="kvarts-bucket-")
        server = Server()
        try:
            with kvarts.connect(server.socket) as client:
                pages = client.pages(PAGE, **IDENTITY)
                assert pages.put(keys(COUNT), [pattern(n) for n in range(COUNT)]).ok
                adapter = Adapter(server=server.socket)
                assert adapter.set(names(4))[0]
                adapter.plugin.close()
            push = [PROGRAM, "cold", "push", os.path.join(server.place, "d"), "--live", "--all", "--bucket", f"file://{cls.bucket}"]
            subprocess.run(push, check=True, stdout=subprocess.DEVNULL)
        finally:
            server.stop()

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.bucket, ignore_errors=True)

    def behind(self, *arguments, bucket=None):
        """A server with nothing of its own, and its pages; it knows what the bucket has."""
        server = Server("--cold-bucket", f"file://{bucket or self.bucket}", "--cold-refresh", "1", *arguments)
        self.addCleanup(server.stop)
        client = kvarts.connect(server.socket)
        self.addCleanup(client.close)
        return server, client.pages(PAGE, **IDENTITY)

    def until(self, what, done):
        deadline = time.monotonic() + SOON
        while not done():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.02)

    def expect(self, pages, wanted):
        into = [bytearray(PAGE) for _ in wanted]
        done = pages.get(keys(COUNT)[wanted.start : wanted.stop], into, timeout=SOON)
        self.assertEqual(done.results, [True] * len(wanted), done.errors)
        for n, one in zip(wanted, into):
            self.assertEqual(bytes(one), pattern(n))

    def test_by_default_look_ups_say_nothing_of_the_bucket_and_reads_take_what_it_has(self):
        _, pages = self.behind()
        self.expect(pages, range(0, 4))
        self.assertEqual(pages.match(keys(COUNT)[4:]).blocks, 0)
        self.assertEqual(pages.exists(keys(COUNT)[4:]), [False] * 8)

    def test_what_is_offered_is_found_by_look_ups_and_comes(self):
        server, pages = self.behind("--cold-offer", "on")
        self.until("blocks are offered", lambda: all(pages.exists(keys(COUNT))))
        self.assertEqual(pages.exists(keys(2, 5000)), [False, False])
        with self.subTest("with a lease of what is here"):
            found = pages.match(keys(COUNT), hold=10.0)
            self.assertEqual(found.blocks, COUNT)
        self.assertEqual(pages.pin(keys(COUNT), hold=10.0).blocks, 0, "what is held must be here")
        self.expect(pages, range(0, COUNT))
        adapter = Adapter(server=server.socket)
        self.addCleanup(adapter.plugin.close)
        self.until("objects are offered", lambda: adapter.exists(names(4)) == [True] * 4)
        self.assertEqual(adapter.get(names(4))[2], [True] * 4)

    def test_what_is_computed_sooner_is_offered_until_it_is_known_how_long_it_takes(self):
        _, pages = self.behind("--cold-offer", "4000000000")
        self.until("they are tried", lambda: all(pages.exists(keys(COUNT))))
        self.expect(pages, range(0, 4))
        self.until("it was measured", lambda: pages.exists(keys(COUNT)) == [True] * 4 + [False] * 8)
        self.assertEqual(pages.match(keys(COUNT)).blocks, 4)
        # A read takes it all the same.
        self.expect(pages, range(4, COUNT))

    def test_what_is_slower_to_compute_stays_offered(self):
        _, pages = self.behind("--cold-offer", "1")
        self.until("they are offered", lambda: all(pages.exists(keys(COUNT))))
        self.expect(pages, range(0, 4))
        self.until("they are offered", lambda: all(pages.exists(keys(COUNT))))

    def test_a_bucket_that_is_gone_costs_misses_within_the_time_and_is_offered_no_more(self):
        bucket = tempfile.mkdtemp(prefix="kvarts-bucket-")
        self.addCleanup(shutil.rmtree, bucket, True)
        shutil.copytree(self.bucket, bucket, dirs_exist_ok=True)
        _, pages = self.behind("--cold-offer", "on", bucket=bucket)
        self.until("blocks are offered", lambda: all(pages.exists(keys(COUNT))))
        shutil.rmtree(bucket)
        done = pages.get(keys(COUNT), [bytearray(PAGE) for _ in range(COUNT)], timeout=SOON)
        self.assertEqual(done.results, [False] * COUNT)
        self.assertTrue(all(isinstance(error, kvarts.Miss) for error in done.errors.values()), done.errors)
        self.assertEqual(pages.exists(keys(COUNT)), [False] * COUNT)
        self.assertTrue(pages.put(keys(1, 7000), [pattern(1)]).ok, "it serves on")


class Late(unittest.TestCase):
    """Blocks that come too late say nothing of the server if others came."""

    LATE = {"DeadlinePassed": (kvarts.Deadline("late", "DeadlinePassed"), 1)}

    def link(self):
        link = Link(lambda: None, SOON)
        self.addCleanup(link.stop)
        return link

    def test_an_answer_with_some_blocks_is_one_of_a_server_that_is_there(self):
        link = self.link()
        link.learn(True, self.LATE)
        self.assertFalse(link.away)

    def test_an_answer_with_none_is_one_of_a_server_that_is_away(self):
        link = self.link()
        link.learn(False, self.LATE)
        self.assertTrue(link.away)
        link = self.link()
        link.learn(False, {"NotHere": (kvarts.Miss("not here", "NotHere"), 1)})
        self.assertFalse(link.away)


if __name__ == "__main__":
    unittest.main()
