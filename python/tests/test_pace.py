"""What a plan cannot know of a disk: that it answers too late. Over a real server that stands still, with doubles of what is not installed."""

import signal
import time
import unittest
from unittest import mock

import doubles

doubles.install()

import kvarts  # noqa: E402
from kvarts import staging  # noqa: E402
from kvarts.pace import Pace  # noqa: E402
from served import Server  # noqa: E402
from test_vllm_layers import SOON, Engine, Request  # noqa: E402


class Paces(unittest.TestCase):
    def test_what_was_slow_is_remembered_for_longer_each_time(self):
        pace = Pace()
        self.assertTrue(pace.pays(1 << 40, 1.0, 0.0))
        # A megabyte a second: a thousand bytes a millisecond.
        pace.was_slow(2_000_000, 2.0, 100.0)
        self.assertTrue(pace.pays(1_000_000, 1000.0, 101.0))
        self.assertFalse(pace.pays(1_000_001, 1000.0, 101.0))
        self.assertEqual([pace.pays(1 << 40, 1.0, now) for now in (104.9, 105.0)], [False, True])
        pace.was_slow(0, 2.0, 200.0)
        self.assertEqual([pace.pays(1, 1e9, now) for now in (209.9, 210.0)], [False, True])
        for _ in range(20):
            pace.was_slow(0, 0.0, 300.0)
        self.assertEqual([pace.pays(1, 1e9, now) for now in (619.9, 620.0)], [False, True])
        pace.was_good()
        self.assertTrue(pace.pays(1 << 40, 1.0, 301.0))
        pace.was_slow(0, 1.0, 700.0)
        self.assertEqual([pace.pays(1, 1e9, now) for now in (704.9, 705.0)], [False, True])


class Disks(unittest.TestCase):
    #: An engine that takes a second for each token: the plan always says that it pays.
    SLOW = {"plans": True, "timeout": 1.0, "times": {"samples": [(0, 10, 10_000.0), (0, 1000, 1_000_000.0), (1000, 10, 10_000.0)]}}

    def setUp(self):
        self.server = Server()
        self.addCleanup(self.server.stop)

    def engine(self, **extra):
        engine = Engine(self.server, extra={"revision": self.id(), **self.SLOW, **extra})
        self.addCleanup(engine.close)
        return engine

    @staticmethod
    def before_stages(act):
        """Something happens between a look-up and the read."""
        honest = staging.Desk._stages_of

        def stages_of(desk, *of):
            act()
            return honest(desk, *of)

        return mock.patch.object(staging.Desk, "_stages_of", stages_of)

    def test_a_disk_that_did_not_answer_is_not_asked_at_once_again_and_later_it_is(self):
        self.engine(timeout=SOON).stored(Request("a", 4))
        with mock.patch("kvarts.pace._FIRST", 3.0):
            engine = self.engine().ready()
        with self.before_stages(lambda: self.server.signal(signal.SIGSTOP)):
            try:
                self.assertEqual(engine.find(Request("b", 4)), 0)
            finally:
                self.server.signal(signal.SIGCONT)
        # The server answers look-ups again; the plan says that it pays.
        deadline = time.monotonic() + SOON
        while (counts := self.asked(engine))[1] is None:
            self.assertLess(time.monotonic(), deadline, counts)
        found, why = counts
        self.assertEqual((found, why), (0, {"unstaged unpaid": 4}))
        while self.asked(engine)[0] != 4:
            self.assertLess(time.monotonic(), deadline)

    def asked(self, engine):
        """How many blocks a request finds, and why not the others; no reason where the server was away."""
        engine.scheduler.reset_cache()
        engine.counts({})
        request = Request(f"r{time.monotonic()}", 4, skip_save=True)
        found = engine.admit(request)
        engine.next = 1
        why = {name: count for name, count in engine.counts({}).items() if name.startswith("unstaged")}
        engine.scheduler.request_finished_all_groups(request, engine.held[request.request_id])
        return found, None if any(name in why for name in ("unstaged away", "unstaged Retry", "unstaged Away")) else why

    def test_what_lies_in_the_pool_is_promised_while_the_disk_is_slow_and_is_no_sign_of_it(self):
        engine = self.engine(timeout=SOON)
        engine.stored(Request("a", 4))
        desk = engine.scheduler._side._desk
        desk._pace.was_slow(0, 1.0, time.monotonic())
        self.assertEqual(engine.find(Request("b", 4)), 4)
        self.assertFalse(desk._pace.pays(1, 1.0, time.monotonic()))
        engine.scheduler.request_finished_all_groups(Request("b", 4), ())
        engine.scheduler.reset_cache()
        self.assertEqual(engine.find(Request("c", 4)), 0)

    def test_a_stage_that_comes_whole_is_a_sign_of_the_disk_and_a_miss_is_none(self):
        self.engine(timeout=SOON).stored(Request("a", 4))
        engine = self.engine(timeout=SOON).ready()
        pace = engine.scheduler._side._desk._pace
        with mock.patch.object(pace, "was_good") as good, mock.patch.object(pace, "was_slow") as slow:
            self.assertEqual(engine.find(Request("b", 4)), 4)
            self.assertEqual((good.call_count, slow.call_count), (1, 0))
            engine.scheduler.request_finished_all_groups(Request("b", 4), ())
            engine.scheduler.reset_cache()
            with self.before_stages(lambda: self.delete(engine, Request("c", 4).block_hashes[2:3])):
                self.assertEqual(engine.find(Request("c", 4)), 2)
        self.assertEqual((good.call_count, slow.call_count), (1, 0))

    def delete(self, engine, keys):
        with kvarts.connect(self.server.socket) as client:
            client.pages(**engine.scheduler._side._naming).delete(keys)


if __name__ == "__main__":
    unittest.main()
