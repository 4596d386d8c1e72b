"""The stages of `scripts/engine-pack` over an engine and a server that are made up here: what they tell of one that does what it
should, and that each thing that goes wrong is told."""

import io
import json
import os
import sys
import tempfile
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "scripts", folder) for folder in ("engine-pack.d", "engines.d")]

import stage  # noqa: E402
import stages  # noqa: E402

BLOCK = 16
LENGTHS = [32, 64, 128]


class Store:
    """A server: prompts and how many of their tokens it has. `bad` names what it does wrong."""

    def __init__(self, bad=()):
        self.bad, self.has, self.count, self.damaged, self.alive, self.read = bad, {}, 0, 0, True, 0
        self.modes = {}

    def take(self, prompt, length):
        if self.alive and prompt not in self.has:
            self.has[prompt] = length - (BLOCK if "short" in self.bad else 0)
            self.count += self.has[prompt] // BLOCK

    def give(self, prompt):
        return self.has.get(prompt, 0) if self.alive else 0

    def stored(self):
        return self.count

    def moved(self, direction):
        self.read += 1 << 20
        return self.read

    def metric(self, name):
        return self.damaged

    def flip_a_bit(self):
        if "unnoticed" not in self.bad:
            first = next(iter(self.has))
            self.has[first] -= BLOCK
            self.damaged += 1

    def start(self):
        self.alive = "gone" not in self.bad

    def stop(self):
        self.alive = False

    kill = stop


class Engine:
    """An engine with its device, its host tier, and the server behind it."""

    def __init__(self, store, bad, connector):
        self.store, self.bad, self.connector = store, bad, connector
        self.device, self.host, self.to_store, self.spoilt, self.sent = set(), set(), [], False, None
        self.facts, self.polls, self.seen = {"vllm": "made up"}, 0, {}

    def generate(self, prompt, tokens=stage.TOKENS, likely=True):
        key, length = tuple(prompt), len(prompt) - stage.TAIL
        source, wrong = self.find(key, length)
        self.device.add(key)
        if self.connector:
            self.host.add(key)
            if self.connector["class"].startswith("Kvarts"):
                self.to_store.append((key, length))
        value = sum(prompt) % 97 + (1 if wrong else 0)
        # Log-probabilities are a little different where other shapes are computed.
        last = 0.001 if not source else 0.0
        found = {"tokens": [[value] * tokens], "likely": [[{str(value): -1.0 - last, "500": -9.0}] * tokens], "seconds": 0.01}
        for name, count in source.items():
            self.seen[name] = self.seen.get(name, 0) + count
        return found, source

    def find(self, key, length):
        if key in self.device:
            return {"device": length}, self.spoilt
        if key in self.host:
            return {"disk" if self.connector["class"] == "KvartsLayers" else "host": length}, "host" in self.bad
        if self.connector and self.connector["class"].startswith("Kvarts") and self.store.give(key):
            return {"disk": self.store.give(key)}, "disk" in self.bad
        return {}, False

    def first_token(self, prompt):
        found, source = self.generate(prompt, 1, False)
        return found["seconds"], source

    def forget(self, host):
        self.device.clear()
        self.step()
        if host:
            self.host.clear()

    def step(self):
        for key, length in self.to_store:
            self.store.take(key, length)
        self.to_store.clear()

    def ask(self, do, **_):
        if do == "spoil":
            self.spoilt = "blind" not in self.bad
            return {"spoilt": 1, "pages": 2}
        return dict(self.seen)

    def send(self, prompts, **_):
        self.sent, self.polls = prompts[0], 3
        self.to_store.append((tuple(self.sent), len(self.sent) - stage.TAIL))

    def is_busy(self):
        self.polls -= 1
        if self.polls == 1:
            self.step()
        return self.polls > 0

    def answer(self):
        if "failed" in self.bad:
            raise RuntimeError("the engine ended")
        return self.generate(self.sent)[0]

    def kill(self):
        pass


class Stages(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.place = folder.name
        for folder in ("disk", "memory"):
            os.makedirs(os.path.join(self.place, folder))
        for name, value in {"STALL": 0.05, "PATIENCE": 0.2}.items():
            patch = mock.patch.object(stage, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def facts(self, name, bad=(), known=()):
        """What a stage tells."""
        store = Store(bad)
        settings = {
            "place": self.place,
            "lengths": LENGTHS,
            "repeats": 2,
            "vocabulary": 512,
            "token_bytes": 1 << 12,
            "engine": {"block_size": BLOCK},
            "tier": {},
            "own": {},
            "pool_bytes": 1,
            "disk": os.path.join(self.place, "disk"),
            "memory": os.path.join(self.place, "memory"),
            "disk_budget": 0,
            "memory_budget": 0,
            "known": list(known),
        }
        store.socket = "s"
        told = io.StringIO()
        one = stage.Stage(settings, told)
        with (
            mock.patch.object(stage, "Store", lambda *_: store),
            mock.patch.object(stage, "Engine", lambda settings, name, connector=None: Engine(store, bad, connector)),
        ):
            try:
                getattr(one, name)()
            finally:
                one.end()
        return [{"stage": name, **json.loads(line)} for line in told.getvalue().splitlines()]

    def bad_of(self, name, bad=()):
        """The musts that do not hold."""
        return [must["must"] for must in stages.musts(self.facts(name, bad)) if must["holds"] is False]

    def test_an_engine_that_does_what_it_should_fails_no_must(self):
        for name in ("plain", "layers", "disk", "own", "memory"):
            self.assertEqual(self.bad_of(name), [], name)

    def test_every_source_is_timed_and_compared(self):
        self.facts("plain")
        facts = [fact for name in ("plain", "layers", "disk", "own", "memory") for fact in self.facts(name)]
        timed = {source for source, _ in stages.times(facts)}
        self.assertEqual(timed, {"computed", "device", "layers disk", "layers pool", "kvarts disk", "kvarts host", "vllm host", "kvarts memory"})
        for length in LENGTHS:
            compared = {fact["source"] for fact in facts if fact["what"] == "output" and fact["length"] == length}
            self.assertLessEqual({"stored in disk", "kvarts disk", "kvarts host, disk", "vllm host", "kvarts memory"}, compared)
        self.assertEqual(len([fact for fact in facts if fact["what"] == "fault"]), 4)

    def test_wrong_bytes_are_told(self):
        self.facts("plain")
        bad = self.bad_of("disk", ("disk",))
        self.assertEqual(len([must for must in bad if must.startswith("kvarts disk, ")]), len(LENGTHS))
        for fault in ("flipped", "killed while the engine loads", "killed while it stores"):
            self.assertTrue(any(fault in must for must in bad), fault)
        self.assertEqual(len([must for must in self.bad_of("layers", ("host",)) if must.startswith("kvarts host, layers, ")]), len(LENGTHS))
        self.assertEqual(len([must for must in self.bad_of("own", ("host",)) if must.startswith("vllm host, ")]), len(LENGTHS))

    def test_a_comparison_that_sees_no_spoilt_page_is_told(self):
        self.assertTrue(any("made zeros" in must for must in self.bad_of("plain", ("blind",))))

    def test_a_prefix_that_comes_back_short_is_told(self):
        self.facts("plain")
        bad = self.bad_of("disk", ("short",))
        self.assertTrue(any("the whole prefix" in must for must in bad))
        self.assertEqual(len([must for must in bad if must.startswith("kvarts disk, ") and "the output" in must]), len(LENGTHS))

    def test_damage_that_the_server_does_not_count_is_told(self):
        self.facts("plain")
        self.assertTrue(any("flipped" in must for must in self.bad_of("disk", ("unnoticed",))))

    def test_a_server_that_does_not_come_back_is_told(self):
        self.facts("plain")
        self.assertTrue(any("killed while the engine loads" in must for must in self.bad_of("disk", ("gone",))))

    def test_a_request_that_fails_with_the_server_fails_the_stage(self):
        self.facts("plain")
        with self.assertRaisesRegex(RuntimeError, "ended"):
            self.facts("disk", ("failed",))

    def test_what_is_known_is_not_measured_again(self):
        self.facts("plain")
        first = self.facts("disk")
        known = [[fact.get(name) for name in stages.KEY] for fact in first if fact["what"] in ("first token", "fault")]
        again = self.facts("disk", known=known)
        self.assertFalse([fact for fact in again if fact["what"] in ("first token", "fault")])


if __name__ == "__main__":
    unittest.main()
