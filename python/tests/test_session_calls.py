"""Calls for sessions have a thread and a bounded queue of their own: over a real server whose sessions are held, and alone."""

import threading
import time
import unittest
from types import SimpleNamespace
from unittest import mock

import doubles

doubles.install()

import kvarts  # noqa: E402
from kvarts.session_calls import Calls  # noqa: E402
from served import Server  # noqa: E402
from test_vllm_layers import SOON, Engine, Request  # noqa: E402


class Held:
    """A client whose server takes long to open sessions: until it is let go."""

    def __init__(self, client, asked, let_go):
        self._client, self._asked, self._let_go = client, asked, let_go

    def __getattr__(self, name):
        return getattr(self._client, name)

    def session(self, *of, **kwargs):
        self._asked.append(len(of[1]))
        if not self._let_go.wait(SOON):
            raise AssertionError("it was not let go")
        return self._client.session(*of, **kwargs)


class Slow(unittest.TestCase):
    """An engine over a server that is slow with sessions alone."""

    def setUp(self):
        self.server = Server()
        self.addCleanup(self.server.stop)
        self.asked, self.let_go = [], threading.Event()
        connect = kvarts.connect
        held = mock.patch.object(kvarts, "connect", lambda *of, **kwargs: Held(connect(*of, **kwargs), self.asked, self.let_go))
        held.start()
        self.addCleanup(held.stop)
        self.engine = Engine(self.server, extra={"revision": self.id()})
        self.addCleanup(self.engine.close)
        self.addCleanup(self.let_go.set)
        self.engine.ready()
        self.counts = {}

    def finished(self, name, seed, **terms):
        """A request whose turn is over."""
        request = Request(name, 2, seed=seed, **terms)
        self.engine.admit(request)
        self.engine.step(request)
        kept, _ = self.engine.scheduler.request_finished_all_groups(request, self.engine.held[name])
        while kept:
            kept = name not in self.engine.step()

    def until(self, what, is_so):
        deadline = time.monotonic() + SOON
        while not is_so():
            self.assertLess(time.monotonic(), deadline, f"{what}: {self.counts}")
            self.engine.step()
            self.engine.counts(self.counts)

    def turns(self):
        return {name: count for name, count in self.counts.items() if name.startswith("turns")}

    def test_look_ups_are_answered_while_a_session_call_is_held(self):
        self.finished("a", 1, session="s")
        self.until("the session is asked for", lambda: self.asked)
        for n in range(3):
            self.assertEqual(self.engine.find(Request(f"again {n}", 2, seed=1)), 2)
            self.assertEqual(self.engine.find(Request(f"other {n}", 2, seed=7)), 0)
        self.assertEqual((self.asked, self.turns()), ([2], {}))
        self.let_go.set()
        self.until("it is opened", lambda: self.turns() == {"turns opened": 1})

    def test_what_is_over_the_bound_is_dropped_and_counted(self):
        self.engine.scheduler._side._desk._calls._turns = 2
        self.finished("a", 1, session="s1")
        self.until("the session is asked for", lambda: self.asked)
        for n in range(2, 6):
            self.finished(str(n), n, session=f"s{n}")
        self.until("two are dropped", lambda: self.turns() == {"turns Behind": 2})
        # A conversation that ends without blocks is dropped like any other.
        self.engine.scheduler.request_finished_all_groups(Request("b", 0, session="s1", session_ends=True), ([],))
        self.until("it is counted", lambda: self.turns() == {"turns Behind": 3})
        self.assertEqual(self.asked, [2])
        self.let_go.set()
        self.until("those within the bound have their sessions", lambda: self.turns() == {"turns Behind": 3, "turns opened": 3})

    def test_an_engine_ends_while_a_session_call_is_held(self):
        self.finished("a", 1, session="s")
        self.until("the session is asked for", lambda: self.asked)
        self.finished("b", 2, session="t")
        side = self.engine.scheduler._side
        # Its turn waits when its blocks are stored.
        self.until("the second turn waits", lambda: len(side._desk._calls._waiting) == 1)
        side.settings.timeout = 0.1
        self.engine.scheduler.shutdown()
        self.assertFalse(self.let_go.is_set())
        side.take_answers()
        self.engine.counts(self.counts)
        self.assertEqual(self.turns(), {"turns Closed": 1})
        self.let_go.set()
        side._desk._calls._thread.join(SOON)
        self.assertFalse(side._desk._calls._thread.is_alive())
        self.assertEqual(self.asked, [2])


class Queue(unittest.TestCase):
    def setUp(self):
        self.link = SimpleNamespace(away=False, pause=1000.0)
        self.done, self.entered, self.let_go = [], threading.Event(), threading.Event()
        self.addCleanup(self.let_go.set)

    def give(self, calls, name, blocks=1, error=None):
        def work():
            if error is not None:
                raise error
            self.done.append(name)

        calls.give(work, lambda error: self.done.append((name, getattr(error, "reason", type(error).__name__))), blocks)

    def hold(self, calls):
        """Nothing goes on until it is let go."""

        def work():
            self.entered.set()
            self.assertTrue(self.let_go.wait(SOON))

        calls.give(work, self.fail)
        self.assertTrue(self.entered.wait(SOON))

    def end(self, calls):
        self.let_go.set()
        calls.end()
        calls.join(SOON)
        self.assertFalse(calls._thread is not None and calls._thread.is_alive())

    def test_they_run_in_their_order_and_their_blocks_are_bounded(self):
        calls = Calls(self.link, turns=3, blocks=10)
        self.hold(calls)
        # One that is larger than all of the room is taken where nothing waits.
        for name, blocks in [("a", 11), ("b", 1)]:
            self.give(calls, name, blocks)
        self.assertEqual(self.done, [("b", "Behind")])
        self.end(calls)
        self.assertEqual(self.done, [("b", "Behind"), "a"])
        self.give(calls, "c")
        self.assertEqual(self.done[2:], [("c", "Closed")])
        calls, self.done = Calls(self.link, turns=3, blocks=10), []
        self.entered.clear()
        self.let_go.clear()
        self.hold(calls)
        for name, blocks in [("a", 5), ("b", 5), ("c", 1), ("d", 0), ("e", 0)]:
            self.give(calls, name, blocks)
        self.assertEqual(self.done, [("c", "Behind"), ("e", "Behind")])
        self.end(calls)
        self.assertEqual(self.done[2:], ["a", "b", "d"])
        self.assertEqual((calls._held, len(calls._waiting)), (0, 0))

    def test_an_error_ends_no_thread_and_a_silent_server_is_left_alone(self):
        calls = Calls(self.link)
        with self.assertLogs("kvarts") as said:
            self.give(calls, "a", error=ValueError("a defect"))
            self.give(calls, "b", error=kvarts.Refused("too much", "PinCap"))
            self.give(calls, "c", error=kvarts.Retry("no room", "Busy"))
            self.give(calls, "d")
            self.give(calls, "e", error=kvarts.Deadline("silence", "DeadlinePassed"))
            self.give(calls, "f")
            self.end(calls)
        self.assertEqual(self.done, [("a", "ValueError"), ("b", "PinCap"), ("c", "Busy"), "d", ("e", "DeadlinePassed"), ("f", "Away")])
        self.assertEqual([one.levelname for one in said.records], ["ERROR", "WARNING"])
        self.link.away, calls = True, Calls(self.link)
        self.give(calls, "g")
        self.end(calls)
        self.assertEqual(self.done[-1], ("g", "Away"))

    def test_an_engine_without_sessions_has_no_thread(self):
        calls = Calls(self.link)
        self.end(calls)
        self.assertIsNone(calls._thread)


if __name__ == "__main__":
    unittest.main()
