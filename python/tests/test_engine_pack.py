"""What `scripts/engine-pack` plans and refuses: no downloads, no engine, no device."""

import json
import os
import random
import sys
import tempfile
import unittest
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "scripts", folder) for folder in ("engine-pack.d", "engines.d")]

import parts  # noqa: E402
import stage  # noqa: E402
import stages  # noqa: E402
import wheels  # noqa: E402

LIMIT = 40 << 10


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Packed(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.piece, parts.PIECE = parts.PIECE, 16 << 10
        self.addCleanup(setattr, parts, "PIECE", self.piece)
        self.place = os.path.join(self.folder.name, "place")
        os.makedirs(self.place)
        self.sources = {"engine": self.source("engine", 1, 90_000), "kvarts": self.source("kvarts", 2, 20_000)}
        self.out = self.pack("out", self.sources)

    def source(self, name, seed, size):
        place = os.path.join(self.folder.name, f"{name}-{seed}")
        os.makedirs(os.path.join(place, "inner"))
        with open(os.path.join(place, "inner", "bytes"), "wb") as file:
            file.write(random.Random(seed).randbytes(size))
        with open(os.path.join(place, "program"), "w") as file:
            file.write("#!/bin/sh\n")
        os.chmod(os.path.join(place, "program"), 0o755)
        return place

    def pack(self, name, sources):
        out = os.path.join(self.folder.name, name)
        os.makedirs(out)
        streams = [parts.cut(name, place, out, preset=0) for name, place in sources.items()]
        parts.write_index(out, streams, parts.deal(streams, LIMIT), {})
        return out

    def folders(self, out=None):
        return [os.path.join(out or self.out, number) for number in sorted(os.listdir(out or self.out))]

    def file_of(self, folder):
        return next(os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".xz"))

    def test_folders_are_no_larger_than_asked_and_give_back_what_was_packed(self):
        folders = self.folders()
        self.assertGreater(len(folders), 2)
        for folder in folders:
            held = sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder) if name != parts.INDEX)
            self.assertLessEqual(held, LIMIT)
        for folder in folders[:-1]:
            self.assertTrue(parts.keep(folder, self.place))
        self.assertEqual(parts.keep(folders[-1], self.place), [])
        for name, place in parts.join(self.place).items():
            for file in ("inner/bytes", "program"):
                ours, theirs = os.path.join(self.sources[name], file), os.path.join(place, file)
                self.assertEqual(parts.digest_of(ours), parts.digest_of(theirs))
                self.assertEqual(os.access(ours, os.X_OK), os.access(theirs, os.X_OK))

    def test_the_last_stream_is_whole_in_the_last_folder(self):
        held = [name for name in os.listdir(self.folders()[-1]) if name.startswith("kvarts-")]
        with open(os.path.join(self.folders()[0], parts.INDEX)) as file:
            known = [piece["file"] for piece in json.load(file)["streams"][-1]["pieces"]]
        self.assertEqual(sorted(held), known)

    def test_folders_may_come_in_any_order_and_twice(self):
        for folder in [*reversed(self.folders()), *self.folders()]:
            lost = parts.keep(folder, self.place)
        self.assertEqual(lost, [])
        self.assertEqual(len(parts.join(self.place)), 2)

    def test_a_part_with_a_flipped_bit_is_refused(self):
        folder = self.folders()[1]
        with open(self.file_of(folder), "r+b") as file:
            file.seek(100)
            byte = file.read(1)[0]
            file.seek(100)
            file.write(bytes([byte ^ 1]))
        with self.assertRaisesRegex(parts.Bad, "SHA-256"):
            parts.keep(folder, self.place)

    def test_a_part_that_is_cut_short_is_refused(self):
        folder = self.folders()[1]
        os.truncate(self.file_of(folder), 100)
        with self.assertRaisesRegex(parts.Bad, "100 bytes"):
            parts.keep(folder, self.place)

    def test_a_missing_folder_is_named_and_nothing_is_unpacked(self):
        for folder in (self.folders()[0], self.folders()[-1]):
            parts.keep(folder, self.place)
        with self.assertRaisesRegex(parts.Bad, "of the folders 2"):
            parts.join(self.place)
        self.assertEqual(sorted(os.listdir(self.place)), [parts.INDEX, "pieces"])

    def test_a_part_that_went_bad_where_it_is_kept_is_refused(self):
        for folder in self.folders():
            parts.keep(folder, self.place)
        with open(os.path.join(self.place, "pieces", "engine-002.xz"), "r+b") as file:
            file.write(b"x")
        with self.assertRaisesRegex(parts.Bad, "engine-002.xz is damaged"):
            parts.join(self.place)
        self.assertFalse(any(name.startswith("engine-") for name in os.listdir(self.place)))

    def test_a_corrected_last_folder_is_enough_where_the_engine_is_there(self):
        for folder in self.folders():
            parts.keep(folder, self.place)
        before = parts.join(self.place)
        newer = self.pack("newer", {"engine": self.sources["engine"], "kvarts": self.source("kvarts", 3, 20_000)})
        self.assertEqual(parts.keep(self.folders(newer)[-1], self.place), [])
        after = parts.join(self.place)
        self.assertEqual(before["engine"], after["engine"])
        self.assertNotEqual(before["kvarts"], after["kvarts"])

    def test_parts_of_another_pack_do_not_stay(self):
        for folder in self.folders():
            parts.keep(folder, self.place)
        other = self.pack("other", {"engine": self.source("engine", 4, 90_000), "kvarts": self.sources["kvarts"]})
        lost = parts.keep(self.folders(other)[-1], self.place)
        before, after = (parts.pieces_of(parts.read_index(self.folders(out)[0])) for out in (self.out, other))
        held = os.listdir(self.folders(other)[-1])
        changed = {name for name, piece in after.items() if piece != before[name] and name not in held}
        self.assertTrue(changed)
        self.assertEqual(set(lost), changed)

    def test_what_fits_into_no_folder_is_refused(self):
        streams = [{"name": "engine", "pieces": [{"file": "a", "bytes": 50}]}, {"name": "kvarts", "pieces": [{"file": "b", "bytes": 10}]}]
        with self.assertRaises(parts.Bad):
            parts.deal(streams, 50, beside=1)
        self.assertEqual(parts.deal(streams, 50), [["a"], ["b"]])
        # The last stream is not cut, also where its first part would fit beside others.
        streams[0]["pieces"] = [{"file": "a", "bytes": 30}]
        streams[1]["pieces"] = [{"file": "b", "bytes": 15}, {"file": "c", "bytes": 15}]
        self.assertEqual(parts.deal(streams, 50), [["a"], ["b", "c"]])
        streams[1]["pieces"] = [{"file": "b", "bytes": 30}, {"file": "c", "bytes": 30}]
        with self.assertRaises(parts.Bad):
            parts.deal(streams, 50)


class Stages(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.clock = Clock()

    def results(self):
        return stages.Results(self.folder.name, os.path.join(self.folder.name, "out"))

    def written(self):
        with open(os.path.join(self.folder.name, "out", "results.json")) as file:
            return json.load(file)

    def run_all(self, seconds, takes, names=()):
        """Which stages were begun, with how many seconds."""
        begun = []

        def start(one, limit, fact):
            begun.append((one.name, limit))
            fact({"what": "engine", "source": one.name})
            self.assertEqual(self.written()["facts"][-1]["source"], one.name, "a fact is written when the stage ends, and not at once")
            self.clock.now += min(limit, takes.get(one.name, 30))
            return f"ended after {limit:.0f} s" if takes.get(one.name, 30) > limit else None

        stages.run(stages.chosen(names), stages.Budget(seconds, self.clock), self.results(), start)
        return begun

    def test_the_order_is_that_of_what_is_worth_most(self):
        self.assertEqual([stage.name for stage in stages.STAGES], ["machine", "plain", "layers", "disk", "own", "memory"])
        self.assertEqual([name for name, _ in self.run_all(540, {})], ["machine", "plain", "layers", "disk", "own", "memory"])

    def test_no_stage_runs_past_the_time_of_all(self):
        began = self.clock.now
        begun = self.run_all(300, {"plain": 150, "disk": 500})
        self.assertLessEqual(self.clock.now - began, 300 - stages.RESERVE)
        self.assertEqual([name for name, _ in begun], ["machine", "plain", "layers", "disk"])
        self.assertEqual(dict(begun)["disk"], 300 - 30 - 150 - 30 - stages.RESERVE)
        states = {name: one["state"] for name, one in self.written()["stages"].items()}
        self.assertEqual(states, {"machine": "done", "plain": "done", "layers": "done", "disk": "failed", "own": "not begun", "memory": "not begun"})

    def test_every_stage_is_bounded_also_where_there_is_time(self):
        for name, limit in self.run_all(100_000, {}):
            self.assertEqual(limit, next(stage.most for stage in stages.STAGES if stage.name == name))

    def test_a_run_that_goes_on_does_what_is_missing(self):
        self.run_all(300, {"plain": 150, "disk": 500})
        self.assertEqual([name for name, _ in self.run_all(540, {})], ["disk", "own", "memory"])
        self.assertEqual(self.run_all(540, {}), [])

    def test_all_stages_together_fit_into_a_call(self):
        self.assertLessEqual(sum(stage.least for stage in stages.STAGES) + stages.RESERVE, 540)

    def test_an_unknown_stage_is_refused(self):
        with self.assertRaises(ValueError):
            stages.chosen(["discs"])

    def test_a_fact_told_again_replaces_the_one_before(self):
        results = self.results()
        for seconds in ([3.0], [2.0]):
            results.add("plain", {"what": "first token", "source": "computed", "length": 4096, "seconds": seconds})
        results.add("plain", {"what": "first token", "source": "computed", "length": 16384, "seconds": [8.0]})
        self.assertEqual([fact["seconds"] for fact in self.results().document["facts"]], [[2.0], [8.0]])
        self.assertEqual(stages.times(self.results().document["facts"]), {("computed", 4096): 2.0, ("computed", 16384): 8.0})

    def facts(self, **seconds):
        facts = [{"stage": "x", "what": "first token", "source": name.replace("_", " "), "length": 4096, "seconds": [value]} for name, value in seconds.items()]
        facts.append({"stage": "disk", "what": "stored", "source": "disk", "length": 4096, "bytes": 2_000_000_000})
        facts.append({"stage": "disk", "what": "disk rate", "bytes_per_second": 2_000_000_000})
        return facts

    def holds(self, facts):
        return [must["holds"] for must in stages.musts(facts)]

    def test_musts_are_judged(self):
        self.assertEqual(self.holds(self.facts(device=0.1, kvarts_disk=1.14, kvarts_host=0.5, vllm_host=0.5)), [True, True])
        self.assertEqual(self.holds(self.facts(device=0.1, kvarts_disk=1.16, kvarts_host=0.56, vllm_host=0.5)), [False, False])
        layers = self.facts(device=0.1, kvarts_disk=1.0, kvarts_host=0.5, vllm_host=0.5, layers_pool=0.56, layers_disk=1.14)
        self.assertEqual(self.holds(layers), [True, True, False, True])
        # Where computing the rest takes longer than the disk, that is the bound.
        self.assertEqual(self.holds(self.facts(device=2.0, kvarts_disk=2.2, kvarts_host=0.5, vllm_host=0.5)), [True, True])
        self.assertEqual(self.holds(self.facts(device=0.1, kvarts_disk=1.16)), [None, False], "what was not measured does not hold")
        tiny = [*self.facts(device=0.1, kvarts_disk=9.0, kvarts_host=9.0, vllm_host=0.5), {"stage": "machine", "what": "tiny"}]
        self.assertEqual(self.holds(tiny), [None, None])
        wrong = {"stage": "disk", "what": "output", "source": "kvarts disk", "length": 4096, "of": "that", "verdict": "different", "holds": False}
        self.assertEqual(self.holds([wrong])[0], False)
        elsewhere = {"stage": "disk", "what": "first token", "source": "kvarts disk", "length": 4096, "seconds": [1.0], "otherwise": [{"disk": 4080}]}
        self.assertEqual(self.holds([elsewhere])[0], False)

    def test_the_page_has_times_and_musts(self):
        results = self.results()
        for fact in self.facts(device=0.1, kvarts_disk=1.16):
            results.add(fact.pop("stage"), fact)
        with open(os.path.join(self.folder.name, "out", "report.txt")) as file:
            page = file.read()
        self.assertRegex(page, r"kvarts disk +1\.160")
        self.assertIn("DOES NOT HOLD", page)


class Outputs(unittest.TestCase):
    @staticmethod
    def output(*places):
        """An output of which each place says its token and what was likely."""
        return {"tokens": [[token for token, _ in places]], "likely": [[likely for _, likely in places]]}

    def test_outputs_are_equal_rounded_or_different(self):
        one = self.output((3, {"3": -1.0, "4": -3.0}), (5, {"5": -1.0, "6": -1.1}))
        self.assertEqual(stage.compare(one, one), "equal")
        shifted = self.output((3, {"3": -1.01, "4": -3.0}), (5, {"5": -1.0, "6": -1.1}))
        self.assertEqual(stage.compare(one, shifted), "rounding")
        close = self.output((3, {"3": -1.0, "4": -3.0}), (6, {"6": -1.04, "5": -1.05}))
        self.assertEqual(stage.compare(one, close), "rounding", "two tokens that were as likely as each other")
        far = self.output((4, {"4": -1.0, "3": -3.0}), (5, {"5": -1.0, "6": -1.1}))
        self.assertEqual(stage.compare(one, far), "different")
        unlikely = self.output((9, {"9": -1.0, "8": -1.2}), (5, {"5": -1.0, "6": -1.1}))
        self.assertEqual(stage.compare(one, unlikely), "different")
        moved = self.output((3, {"3": -1.5, "4": -3.0}), (5, {"5": -1.0, "6": -1.1}))
        self.assertEqual(stage.compare(one, moved), "different", "the same token, far less likely")


class Machine(unittest.TestCase):
    def test_only_what_was_written_is_read_to_measure_the_disk(self):
        with tempfile.TemporaryDirectory() as folder:
            name = os.path.join(folder, "segment")
            with open(name, "wb") as file:
                file.write(b"x" * (3 << 20))
                file.truncate(8 << 20)
                file.seek(6 << 20)
                file.write(b"x" * (1 << 20))
                file.flush()
                os.fsync(file.fileno())
            self.assertEqual(stage.written(name), [0, 1 << 20, 2 << 20, 6 << 20])

    def test_the_kind_of_a_file_system_is_told(self):
        self.assertEqual(stage.kind_of("/proc/self"), "proc")
        self.assertTrue(stage.kind_of("/"))


class Wheels(unittest.TestCase):
    def test_wheels_are_those_that_were_tried(self):
        for requirement in wheels.BESIDE:
            self.assertRegex(requirement, r"^[a-z0-9-]+==[0-9.]+")

    def test_what_a_dense_model_does_not_load_is_left_out(self):
        for name in ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/vllm-rs", "vllm/_moe_C_stable_libtorch.abi3.so", "x-1.data/scripts/x"):
            self.assertTrue(wheels.is_left_out(name), name)
        for name in ("vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/envs.py", "vllm-0.33.0.dist-info/METADATA"):
            self.assertFalse(wheels.is_left_out(name), name)

    def test_a_wheel_is_laid_as_it_is_imported(self):
        with tempfile.TemporaryDirectory() as folder:
            wheel = os.path.join(folder, "x-1-py3-none-any.whl")
            with zipfile.ZipFile(wheel, "w") as archive:
                for name in ("x/__init__.py", "x-1.data/purelib/y.py", "x-1.data/scripts/x", "x-1.dist-info/RECORD"):
                    archive.writestr(name, "pass\n")
            target = os.path.join(folder, "site")
            wheels.unpack([wheel], target)
            found = sorted(os.path.relpath(os.path.join(place, name), target) for place, _, names in os.walk(target) for name in names)
            self.assertEqual(found, ["x/__init__.py", "y.py"])
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("../x", "pass\n")
            with self.assertRaises(SystemExit):
                wheels.unpack([wheel], target)


if __name__ == "__main__":
    unittest.main()
