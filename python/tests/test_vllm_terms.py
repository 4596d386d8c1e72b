"""What requests and operators say of blocks that `KvartsLayers` loads and stores: how long they live and are held, whether they are stored, and
why what is not loaded is not. Over a real server; with doubles of what is not installed."""

import json
import subprocess
import time
import unittest
from types import SimpleNamespace

import doubles

doubles.install()

import kvarts  # noqa: E402
from kvarts import vllm_terms  # noqa: E402
from kvarts.pins import Pins  # noqa: E402
from kvarts.staging import MISSING, Staging  # noqa: E402
from kvarts.uses import Uses  # noqa: E402
from kvarts.vllm_terms import Terms, terms_of  # noqa: E402
from served import PROGRAM, Server  # noqa: E402
from test_vllm_layers import SOON, TOKENS, Engine, Request  # noqa: E402


def said(**params):
    return SimpleNamespace(kv_transfer_params=params)


class What(unittest.TestCase):
    def test_what_is_understood_is_taken(self):
        given = {"max_load_tokens": 0, "max_offload_tokens": 7, "ttl": 3600, "pin": 0.5, "skip_save": True}
        given |= {"session": "a", "session_of": "b", "session_shared_tokens": 320, "session_ends": True}
        self.assertEqual(terms_of(said(**given)), Terms(**given))
        for none in (SimpleNamespace(), SimpleNamespace(kv_transfer_params=None), SimpleNamespace(kv_transfer_params=[1]), said(do_remote_prefill=True)):
            self.assertEqual(terms_of(none), Terms())

    def test_what_is_not_understood_is_told_once_with_what_would_be_right_and_ignored(self):
        wrong = {
            "max_load_tokens": (-1, 1.5, "4096", True, [1]),
            "max_offload_tokens": (-1, "all"),
            "ttl": (0, -3, "1h", True, float("nan"), float("inf"), 1e12),
            "pin": (0, -1, "yes", True, 86401, {"seconds": 5}),
            "skip_save": (1, "true", 0),
            "session": ("", "x" * 129, "a\nb", 7, ["a"]),
            "session_of": ("", 0),
            "session_shared_tokens": (-1, "10"),
            "session_ends": (1, "true"),
            "priority": (1, "high"),
        }
        text = {"session": "printable characters", "session_of": "printable characters", "session_shared_tokens": "tokens", "session_ends": "true or false"}
        right = text | {"max_load_tokens": "tokens", "max_offload_tokens": "tokens", "ttl": "seconds", "pin": "at most 86400", "skip_save": "true or false", "priority": "`pin`"}
        for name, values in wrong.items():
            for value in values:
                with self.subTest(f"{name} {value!r}"):
                    vllm_terms._told.clear()
                    beside = {"ttl": 9} if name != "ttl" else {"pin": 9}
                    with self.assertLogs("kvarts", "WARNING") as logs:
                        self.assertEqual(terms_of(said(**beside, **{name: value})), Terms(**beside))
                    [told] = logs.output
                    self.assertIn(f"{name}: {value!r}"[: 9 + len(name)], told)
                    self.assertIn(right[name], told)

    def test_a_client_can_neither_raise_nor_fill_the_log_nor_the_memory(self):
        class Bad:
            def __repr__(self):
                raise RuntimeError

        vllm_terms._told.clear()
        with self.assertLogs("kvarts", "WARNING") as logs:
            self.assertEqual(terms_of(said(ttl=Bad(), pin="x" * 10_000)), Terms())
            for value in range(200):
                for _ in range(2):
                    terms_of(said(ttl=-value))
        self.assertEqual(len(logs.output), 202)
        self.assertLess(max(map(len, logs.output)), 300)
        self.assertLessEqual(len(vllm_terms._told), 64)

    def test_uses_are_counted_of_leading_blocks_and_forgotten(self):
        uses = Uses(2, kept=6)
        self.assertEqual([uses.use("ab"), uses.use("abc"), uses.use("abc")], [0, 2, 3])
        # Behind a block that was not used often enough none counts.
        self.assertEqual(uses.use("xbc"), 0)
        self.assertEqual(len(uses._counts), 4)
        uses.use("defghi")
        self.assertEqual(uses.use("abc"), 0)

    def test_reasons_add_up_to_what_was_not_staged(self):
        def reasons(blocks, stored, why=None, pays=None, **missing):
            staging = Staging(list(range(10)), 2, 0, 0)
            staging.blocks, staging.stored, staging.why, staging.pays = blocks, stored, why, pays
            staging.missing = SimpleNamespace(**{**dict.fromkeys(MISSING, 0), **missing}) if missing else None
            return staging.reasons()

        self.assertEqual(reasons(10, 10), {})
        self.assertEqual(reasons(2, None, "Away"), {"Away": 8})
        self.assertEqual(reasons(5, 7, "Silence", evicted=1, cut_off=2), {"Silence": 2, "evicted": 1, "cut_off": 2})
        self.assertEqual(reasons(4, 8, None, 4, never_stored=2), {"unpaid": 4, "never_stored": 2})
        self.assertEqual(reasons(3, 8, "late", 6, never_stored=2), {"late": 3, "unpaid": 2, "never_stored": 2})
        self.assertEqual(reasons(9, 10), {"spare": 1})


class Kept(unittest.TestCase):
    """Engines over a server."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server()

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def engine(self, server=None, extra=None):
        engine = Engine(server or self.server, extra={"revision": self.id(), **(extra or {})})
        self.addCleanup(engine.close)
        return engine

    def own_server(self):
        server = Server()
        self.addCleanup(server.stop)
        return server

    def handle(self, engine):
        client = kvarts.connect(self.server.socket)
        self.addCleanup(client.close)
        return client.pages(**engine.scheduler._side._naming)

    def wait(self, engine, is_good):
        deadline = time.monotonic() + SOON
        while not is_good():
            self.assertLess(time.monotonic(), deadline)
            engine.step()
            time.sleep(0.002)

    def computed(self, engine, request):
        """A request from its beginning to its end; how many of its blocks were loaded."""
        found = engine.admit(request)
        engine.step(request)
        self.ended(engine, request)
        return found

    def ended(self, engine, request):
        kept, _ = engine.scheduler.request_finished_all_groups(request, engine.held[request.request_id])
        while kept:
            kept = request.request_id not in engine.step()

    def settled(self, engine):
        """Until nothing is on its way to the store."""
        self.wait(engine, lambda: not engine.scheduler._side.is_saving)

    def stored(self, engine, request):
        self.settled(engine)
        return sum(self.handle(engine).exists(request.block_hashes))

    def pins(self, server):
        command = [PROGRAM, "pin", "--list", "--server", server.socket, "--json"]
        found = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=SOON).stdout)["pins"]
        # What look-ups hold ends sooner.
        return [pin for pin in found if pin["ends_in_ms"] > 2000 * SOON]

    def test_blocks_live_as_long_as_their_request_says(self):
        engine = self.engine().ready()
        short, long = Request("a", 3, ttl=1.5), Request("b", 3, seed=1, ttl=3600)
        self.computed(engine, short)
        self.computed(engine, long)
        handle = self.handle(engine)
        self.wait(engine, lambda: not any(handle.exists(short.block_hashes)) and not engine.scheduler._side.is_saving)
        self.assertEqual(sum(handle.exists(long.block_hashes)), 3)
        engine.counts({})
        engine.scheduler.reset_cache()
        self.assertEqual(self.computed(engine, Request("c", 3, skip_save=True)), 0)
        self.assertEqual(engine.counts({})["unstaged expired"], 3)

    def test_a_request_can_hold_its_blocks_and_a_chain_is_held_once(self):
        server = self.own_server()
        engine = self.engine(server).ready()
        engine.counts({})
        request = Request("a", 3, pin=300)
        self.computed(engine, request)
        counts = {}
        self.wait(engine, lambda: engine.counts(counts).get("pinned") == 3)
        [pin] = self.pins(server)
        self.assertEqual((pin["blocks"], pin["path"], pin["taken_by"]), (3, "local", "match"))
        self.assertTrue(250_000 < pin["ends_in_ms"] <= 300_000, pin)
        # Once more, from a request that computes nothing of it: longer, and no second lease. A longer chain takes its place.
        for name, blocks, seconds in (("b", 3, 500), ("c", 5, 400), ("d", 5, 600), ("e", 5, 1)):
            again, counts = Request(name, blocks, pin=seconds), {}
            self.computed(engine, again)
            self.wait(engine, lambda: engine.counts(counts).get("pinned") == blocks)
        found = sorted((pin["blocks"], round(pin["ends_in_ms"], -5)) for pin in self.pins(server))
        # What was to be held longer than the longer chain was held until that covered it, and nothing for less than was said.
        self.assertEqual(found, [(5, 600_000)])
        self.assertEqual(counts.get("unpinned NotHere", 0), 0)

    def test_what_cannot_be_held_is_counted_with_its_reason(self):
        server = self.own_server()
        engine = self.engine(server).ready()
        self.computed(engine, Request("a", 3, pin=300, skip_save=True))
        counts = {}
        self.wait(engine, lambda: engine.counts(counts).get("unpinned NotHere") == 3)
        self.settled(engine)
        engine.admit(request := Request("b", 3, pin=300, skip_save=True))
        engine.step(request)
        server.kill()
        self.ended(engine, request)
        self.wait(engine, lambda: sum(count for name, count in engine.counts(counts).items() if name.startswith("unpinned")) == 6)
        self.assertEqual(counts["unpinned NotHere"], 3, counts)

    def test_a_request_may_be_left_out(self):
        engine = self.engine().ready()
        request = Request("a", 4, skip_save=True)
        self.computed(engine, request)
        self.assertEqual((self.stored(engine, request), engine.counts({}).get("dropped busy")), (0, None))
        # It loads what others stored all the same.
        self.computed(engine, Request("b", 4))
        self.assertEqual(self.stored(engine, request), 4)
        self.assertEqual(self.computed(engine, Request("c", 4, skip_save=True)), 4)

    def test_blocks_are_stored_when_they_were_used_as_often_as_the_operator_says(self):
        engine = self.engine(extra={"store_after": 2}).ready()
        first, second = Request("a", 4), Request("b", 4)
        second.block_hashes[2:] = Request("x", 2, seed=9).block_hashes
        self.computed(engine, first)
        self.assertEqual(self.stored(engine, first), 0)
        self.computed(engine, second)
        self.assertEqual((self.stored(engine, first), self.stored(engine, second)), (2, 2))
        self.computed(engine, Request("c", 4))
        self.assertEqual((self.stored(engine, first), self.stored(engine, second)), (4, 2))
        # What another engine needs now does not wait.
        handed = Request("d", 3, seed=5, do_remote_decode=True)
        engine.admit(handed)
        engine.step(handed)
        _, told = engine.scheduler.request_finished_all_groups(handed, engine.held["d"])
        self.assertEqual(told["kvarts"]["tokens"], 3 * TOKENS)
        self.wait(engine, lambda: self.stored(engine, handed) == 3)

    def test_an_answer_counts_as_used(self):
        engine = self.engine(extra={"store_after": 2}).ready()
        request = Request("a", 4)
        request.num_prompt_tokens = 2 * TOKENS + 1
        self.computed(engine, request)
        # The next turn has it in its prompt.
        self.computed(engine, Request("b", 4))
        self.assertEqual(self.stored(engine, request), 4)

    def test_a_preempted_request_uses_its_blocks_once(self):
        engine = self.engine(extra={"store_after": 2}).ready()
        request = Request("a", 4)
        engine.admit(request)
        request.num_computed_tokens = 0
        self.computed(engine, request)
        self.assertEqual(self.stored(engine, request), 0)

    def test_short_requests_are_left_out(self):
        engine = self.engine(extra={"minimum_blocks": 3}).ready()
        short, long = Request("a", 2), Request("b", 3, seed=1)
        self.computed(engine, short)
        self.computed(engine, long)
        self.assertEqual((self.stored(engine, short), self.stored(engine, long)), (0, 3))
        # Where an answer makes it long enough, all of it is stored.
        grows = Request("c", 3, seed=2)
        grows.num_prompt_tokens = TOKENS + 1
        self.computed(engine, grows)
        self.assertEqual(self.stored(engine, grows), 3)

    def test_settings_that_are_none_are_refused_at_the_start(self):
        for extra in ({"store_after": 0}, {"store_after": "2"}, {"minimum_blocks": -1}, {"minimum_blocks": True}, {"minimum_blocks": 1.5}):
            with self.subTest(extra), self.assertRaisesRegex(ValueError, f"{next(iter(extra))}: .*: set a whole number"):
                Engine(self.server, extra=extra)

    def test_misses_are_counted_by_why(self):
        engine = self.engine().ready()
        request = Request("a", 4)
        self.computed(engine, request)
        self.settled(engine)
        engine.counts({})
        handle = self.handle(engine)
        handle.delete(request.block_hashes[2:3])
        engine.scheduler.reset_cache()
        self.assertEqual(self.computed(engine, Request("b", 4, max_load_tokens=3 * TOKENS, skip_save=True)), 2)
        counts = {name: count for name, count in engine.counts({}).items() if name.startswith("unstaged")}
        self.assertEqual(counts, {"unstaged deleted": 1, "unstaged max_load_tokens": 1})
        self.assertEqual(self.computed(engine, Request("c", 5, seed=3, skip_save=True)), 0)
        self.assertEqual(engine.counts({})["unstaged never_stored"], 5)

    def test_a_server_that_is_away_and_what_does_not_pay_are_reasons(self):
        fast = {"plans": True, "times": {"samples": [(0, 1000, 0.001), (0, 100_000, 0.1), (100_000, 1000, 0.001)]}}
        self.engine().stored(Request("a", 4))
        engine = self.engine(extra=fast).ready()
        self.assertEqual(self.computed(engine, Request("b", 5, skip_save=True)), 0)
        counts = engine.counts({})
        self.assertEqual((counts["unstaged unpaid"], counts["unstaged never_stored"]), (4, 1), counts)
        server = self.own_server()
        engine = self.engine(server, extra={"timeout": 1.0}).ready()
        server.kill()
        engine.find(Request("c", 3))
        self.assertEqual(self.computed(engine, Request("d", 3)), 0)
        counts = {name: count for name, count in engine.counts({}).items() if name.startswith("unstaged")}
        self.assertEqual(sum(counts.values()), 3, counts)


class Leases(unittest.TestCase):
    def test_a_lease_that_has_ended_is_taken_anew_and_one_that_holds_less_is_no_reason_not_to_ask(self):
        class Lease:
            def __init__(self, blocks):
                self.blocks, self.renewed, self.ended, self.is_gone = blocks, [], 0, False

            def renew(self, hold):
                if self.is_gone:
                    raise kvarts.Refused("over", "LeaseEnded")
                self.renewed.append(hold)

            def end(self):
                self.ended += 1
                return True

        made, there = [], [2]

        def match(keys, hold):
            made.append(Lease(min(there[0], len(keys))))
            return SimpleNamespace(blocks=made[-1].blocks, lease=made[-1] if made[-1].blocks else None)

        pins, pages = Pins(), SimpleNamespace(match=match)
        self.assertEqual(pins.hold(pages, [b"a", b"b", b"c"], 10.0), 2)
        there[0] = 3
        self.assertEqual(pins.hold(pages, [b"a", b"b", b"c"], 10.0), 3)
        self.assertEqual((len(made), made[0].ended), (2, 1))
        self.assertEqual(pins.hold(pages, [b"a", b"b", b"c"], 5.0), 3)
        self.assertEqual((len(made), round(made[1].renewed[0])), (2, 10))
        made[1].is_gone = True
        self.assertEqual(pins.hold(pages, [b"a", b"b", b"c"], 5.0), 3)
        self.assertEqual(len(made), 3)
        there[0] = 0
        made[2].is_gone = True
        self.assertEqual(pins.hold(pages, [b"x"], 5.0), 0)


if __name__ == "__main__":
    unittest.main()
