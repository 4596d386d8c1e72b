"""The page of engines that were run says what runs have said, and keeps what stands there of other versions."""

import importlib.util
import os
import sys
import tempfile
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def load(place):
    """scripts/engines.d/matrix.py, with its results in this directory."""
    folder = os.path.join(ROOT, "scripts", "engines.d")
    with mock.patch.dict(os.environ, KVARTS_ENGINES=place), mock.patch.object(sys, "path", [folder, *sys.path]), mock.patch.dict(sys.modules):
        sys.modules.pop("common", None)
        spec = importlib.util.spec_from_file_location("matrix", os.path.join(folder, "matrix.py"))
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    return made


class Matrix(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.matrix = load(made.name)
        self.matrix.PAGE = os.path.join(made.name, "page.md")

    def page(self):
        self.matrix.write()
        with open(self.matrix.PAGE, encoding="utf-8") as page:
            return page.read()

    def test_a_row_for_each_check_that_ended_and_the_worst_of_a_feature(self):
        for check, result, note in (
            ("restart", "passed", "768 of 768"),
            ("layers-ranks", "passed", ""),
            ("layers-heads", "FAILED", "Traceback\nand more"),
            ("layers-stages", "SKIPPED", "no | kernel\nand more"),
        ):
            self.matrix.record("vllm 0.32.0", check, result, note)
        page = self.page()
        self.assertIn("| prefix caching | passed: `restart` |", page)
        self.assertIn("| tensor parallelism | FAILED: `layers-heads` |", page)
        self.assertIn("| pipeline parallelism | not run here: `layers-stages` |", page)
        self.assertIn("| draft models (MTP) | not run |", page)
        self.assertRegex(page, r"\| vllm 0.32.0 \| `layers-stages` \| SKIPPED: no / kernel \| \d{4}-\d\d-\d\d \| \S+ \|")
        self.assertNotIn("Traceback", page)

    def test_rows_of_other_versions_stay_and_a_later_run_takes_the_place_of_an_earlier_one(self):
        self.matrix.record("vllm 0.31.0", "restart", "passed")
        self.matrix.record("vllm 0.32.0", "restart", "FAILED")
        first = self.page()
        os.unlink(self.matrix._FILE)
        self.assertEqual(self.page(), first)
        self.matrix.record("vllm 0.32.0", "restart", "passed")
        second = self.page()
        self.assertIn("| Feature | vllm 0.31.0 | vllm 0.32.0 |", second)
        self.assertIn("| prefix caching | passed: `restart` | passed: `restart` |", second)
        self.assertEqual(second.count("| `restart` |"), 2)

    def test_every_check_of_a_feature_is_one(self):
        known = set()
        for name in ("vllm_checks", "operator_checks", "sglang_checks", "lmcache_checks"):
            with open(os.path.join(ROOT, "scripts", "engines.d", f"{name}.py"), encoding="utf-8") as text:
                known |= {line.split("def check_")[1].split("(")[0] for line in text if "def check_" in line}
        for feature, checks in self.matrix.FEATURES.items():
            for check in checks:
                self.assertIn(check.split("-", 1)[-1], known, feature)


if __name__ == "__main__":
    unittest.main()
