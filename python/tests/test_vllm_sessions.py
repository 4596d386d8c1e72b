"""Sessions that requests of `KvartsLayers` name: over a real server, with doubles of what is not installed."""

import json
import subprocess
import time
import unittest
from unittest import mock

import doubles

doubles.install()

import kvarts  # noqa: E402
from kvarts.sessions import LEASE, Sessions, Turn  # noqa: E402
from served import PROGRAM, Server  # noqa: E402
from test_vllm_layers import SOON, Engine, Request  # noqa: E402


def conversation(name, own, **terms):
    """A request whose blocks are those of these (seed, count), one behind the other."""
    request = Request(name, sum(count for _, count in own), **terms)
    request.block_hashes = [(1000 * seed + n).to_bytes(32, "big") for seed, count in own for n in range(count)]
    return request


class Named(unittest.TestCase):
    """An engine over a server."""

    def setUp(self):
        self.server = Server()
        self.addCleanup(self.server.stop)
        self.engine = Engine(self.server, extra={"revision": self.id()})
        self.addCleanup(self.engine.close)
        self.engine.ready()
        self.counts = {}

    def turn(self, outcome, name, own, **terms):
        """A request from its beginning to its end, until its session went on in this way."""
        engine, request = self.engine, conversation(name, own, **terms)
        engine.admit(request)
        engine.step(request)
        kept, _ = engine.scheduler.request_finished_all_groups(request, engine.held[request.request_id])
        while kept:
            kept = request.request_id not in engine.step()
        before, deadline = self.counts.get(f"turns {outcome}", 0), time.monotonic() + SOON
        while engine.counts(self.counts).get(f"turns {outcome}", 0) == before:
            self.assertLess(time.monotonic(), deadline, self.counts)
            engine.step()
            # ends: with the deadline
            time.sleep(0.002)

    def sessions(self):
        """Of each open one how many blocks it has, and how many of these are its parent's."""
        command = [PROGRAM, "session", "list", "--json", "--server", self.server.socket]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=SOON).stdout)["sessions"]
        return sorted((one["blocks"], one["parent_blocks"] or 0) for one in found)

    def test_turns_forks_and_an_earlier_place(self):
        self.turn("opened", "a", [(1, 3)], session="s")
        self.assertEqual(self.sessions(), [(3, 0)])
        self.turn("extended", "b", [(1, 3), (2, 2)], session="s")
        self.assertEqual(self.sessions(), [(5, 0)])
        # A fork has what both share once; of a parent that is not known here it is a session of its own.
        self.turn("forked", "c", [(1, 3), (3, 1)], session="t", session_of="s")
        self.assertEqual(self.sessions(), [(4, 3), (5, 0)])
        self.turn("opened", "d", [(4, 2)], session="u", session_of="nothing")
        self.turn("extended", "e", [(4, 2)], session="u", session_ends=True)
        self.assertEqual(self.sessions(), [(4, 3), (5, 0)])
        # The conversation goes on from an earlier place: what lies behind it is held no longer.
        self.turn("extended", "f", [(1, 3), (5, 1)], session="s")
        self.assertIn((4, 3), self.sessions())
        self.assertNotIn(5, [blocks for blocks, _ in self.sessions()])

    def test_turns_that_begin_otherwise_and_forks_without_blocks_of_their_own(self):
        self.turn("opened", "a", [(1, 3)], session="s", session_shared_tokens=10_000)
        # A fork that adds nothing, and a turn that is shorter than the one before.
        self.turn("forked", "b", [(1, 3)], session="t", session_of="s")
        self.turn("extended", "c", [(1, 3), (2, 1)], session="t")
        self.turn("extended", "d", [(1, 2)], session="s")
        # Another beginning: nothing of the session is of use.
        self.turn("opened", "e", [(3, 2)], session="s")
        self.assertEqual([blocks for blocks, _ in self.sessions() if blocks == 2], [2])
        # A last turn of less than a block, or one that never ran, ends its session, too.
        for name, conversation in (("f", "s"), ("g", "t")):
            before = len(self.sessions())
            self.engine.scheduler.request_finished_all_groups(Request(name, 0, session=conversation, session_ends=True), ([],))
            deadline = time.monotonic() + SOON
            while len(self.sessions()) >= before:
                self.assertLess(time.monotonic(), deadline)

    def test_a_server_that_was_started_again_has_the_session_anew(self):
        self.turn("opened", "a", [(1, 3)], session="s")
        self.server.kill()
        self.server.start()
        self.engine.ready()
        self.turn("opened", "b", [(1, 3), (2, 1)], session="s")
        self.assertEqual([blocks for blocks, _ in self.sessions()], [4])


class Client:
    """A server's sessions, as far as they are asked for. `log`: what was called, with the number of blocks."""

    def __init__(self):
        self.log, self.ended, self.opened = [], set(), 0

    def session(self, pages, keys, columns, shared_blocks, lease):
        self.log.append(("open", len(keys), shared_blocks))
        return Session(self)


class Session:
    def __init__(self, client):
        self.client, self.name = client, client.opened
        client.opened += 1

    def _say(self, what, count=0):
        if self.name in self.client.ended:
            raise kvarts.Refused("over", "LeaseEnded")
        self.client.log.append((what, self.name, count))

    def fork(self, blocks):
        assert blocks, "on the wire that is all of them"
        self._say("fork", blocks)
        return Session(self.client)

    def extend(self, keys):
        self._say("extend", len(keys))

    def hold(self):
        self._say("hold")

    def renew(self):
        self._say("renew")

    def close(self):
        self._say("close")


class Known(unittest.TestCase):
    """What an engine knows of its sessions."""

    def test_a_lease_that_ended_opens_the_session_again(self):
        for ended in (0, 1):
            with self.subTest(ended=ended):
                client, sessions = Client(), Sessions([(0, 0)])
                self.assertEqual(sessions.go_on(client, None, [b"a"], Turn("parent")), "opened")
                self.assertEqual(sessions.go_on(client, None, [b"a", b"b"], Turn("s", "parent")), "forked")
                client.ended.add(ended)
                name, parent = ("parent", None) if ended == 0 else ("s", "parent")
                self.assertEqual(sessions.go_on(client, None, [b"a", b"b", b"c"], Turn(name, parent, shared=9)), "forked" if ended else "opened")
                self.assertEqual(client.log[-2:], [("extend", 2, 2), ("hold", 2, 0)] if ended else [("open", 3, 2), ("hold", 2, 0)])

    def test_of_a_connection_that_is_gone_nothing_is_used(self):
        before, client, sessions = Client(), Client(), Sessions([(0, 0)])
        sessions.go_on(before, None, [b"a"], Turn("s"))
        told = list(before.log)
        self.assertEqual(sessions.go_on(client, None, [b"a"], Turn("t", "s")), "opened")
        self.assertEqual(sessions.go_on(client, None, [b"a"], Turn("s", ends=True)), "opened")
        self.assertEqual(before.log, told)

    def test_sessions_and_their_blocks_are_bounded(self):
        client, sessions = Client(), Sessions([(0, 0)], sessions=2, blocks=4)
        for name in "abc":
            sessions.go_on(client, None, [name.encode()], Turn(name))
        self.assertEqual([one for one in client.log if one[0] == "close"], [("close", 0, 0)])
        # "b" has had its turn last.
        sessions.go_on(client, None, [b"b"], Turn("b"))
        sessions.go_on(client, None, [b"b", b"1", b"2", b"3"], Turn("b"))
        self.assertEqual([one for one in client.log if one[0] == "close"], [("close", 0, 0), ("close", 2, 0)])
        # One that alone is larger than all of the room is closed, too: its blocks are stored all the same.
        sessions.go_on(client, None, [b"x%d" % n for n in range(5)], Turn("x"))
        self.assertEqual((sessions._count, len(sessions._open)), (0, 0))

    def test_other_refusals_are_the_caller_s_and_nothing_is_asked_twice(self):
        class Refusing(Session):
            def extend(self, keys):
                super().extend(keys)
                raise kvarts.Refused("too much", "PinCap")

        client, sessions = Client(), Sessions([(0, 0)])
        client.session = lambda *_, **__: Refusing(client)
        sessions.go_on(client, None, [b"a"], Turn("s"))
        with self.assertRaises(kvarts.Refused):
            sessions.go_on(client, None, [b"a", b"b"], Turn("s"))
        # Of these all that is left to make way is closed, and what did not go on.
        self.assertEqual([what for what, *_ in client.log], ["hold", "extend", "close"])
        self.assertEqual(sessions._count, 0)
        self.assertLess(LEASE, 601)

    def test_where_a_tenant_may_hold_no_more_the_conversation_that_went_on_earliest_makes_way(self):
        class Bounded(Client):
            held = 0

            def session(self, *of, **kwargs):
                if self.held >= 2:
                    raise kvarts.Refused("too much", "PinCap")
                self.held += 1
                return super().session(*of, **kwargs)

        class Counted(Session):
            def close(self):
                super().close()
                self.client.held -= 1

        client, sessions = Bounded(), Sessions([(0, 0)])
        with mock.patch.dict(globals(), Session=Counted):
            for name in "abca":
                self.assertEqual(sessions.go_on(client, None, [name.encode()], Turn(name)), "opened")
        self.assertEqual([one for one in client.log if one[0] == "close"], [("close", 0, 0), ("close", 1, 0)])
        self.assertEqual(list(sessions._open), ["c", "a"])

    def test_a_conversation_that_is_too_large_alone_does_not_end_all_others(self):
        class Full(Client):
            def session(self, pages, keys, *of, **kwargs):
                if len(keys) > 2:
                    raise kvarts.Refused("too much", "PinCap")
                return super().session(pages, keys, *of, **kwargs)

        client, sessions = Full(), Sessions([(0, 0)])
        for name in "abcdef":
            sessions.go_on(client, None, [name.encode()], Turn(name))
        with self.assertRaises(kvarts.Refused):
            sessions.go_on(client, None, [b"1", b"2", b"3"], Turn("large"))
        self.assertEqual(list(sessions._open), ["d", "e", "f"])


if __name__ == "__main__":
    unittest.main()
