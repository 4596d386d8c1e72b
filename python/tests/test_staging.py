"""A scheduler's stages, with stages that end at moments that a test chooses."""

import types
import unittest

import kvarts
from kvarts.staging import Desk, Group, Staging


class Ending:
    """A stage whose last blocks come while it is looked at."""

    why = None

    def __init__(self, blocks):
        self.blocks, self.looks = blocks, 0

    def _look(self):
        self.looks += 1
        return self.looks > 1

    @property
    def is_over(self):
        return self._look()

    @property
    def staged(self):
        return self.blocks if self._look() else 0

    def stretches(self, column):
        return [(0, self.blocks, 0, self.blocks)]

    def close(self):
        pass


class Stages(unittest.TestCase):
    def test_what_comes_while_a_stage_is_looked_at_is_not_late(self):
        desk = Desk.__new__(Desk)
        desk.groups, desk._pool = [Group(0, None, (0,))], types.SimpleNamespace(counts=dict(hits=0, shared=0, came=3))
        staging = Staging([b"a", b"b", b"c"], 0, 49, 0)
        staging.wanted, staging.stages = 3, [(Ending(3), 0, [(0, 0)])]
        while not desk._is_settled(staging):
            pass
        self.assertEqual((staging.blocks, staging.why), (3, None))

    def test_a_tenant_that_may_hold_no_more_loads_all_the_same(self):
        def match(keys, hold=None):
            if hold is not None:
                raise kvarts.Refused("no", reason[0])
            return keys

        desk, reason = Desk.__new__(Desk), ["PinCap"]
        desk._timeout, desk._pages = 1.0, types.SimpleNamespace(match=match)
        self.assertEqual(desk._matched([b"a"]), [b"a"])
        reason[0] = "LeaseEnded"
        with self.assertRaises(kvarts.Refused):
            desk._matched([b"a"])


if __name__ == "__main__":
    unittest.main()
