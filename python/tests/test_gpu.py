"""Layers land in pages of an engine's memory and leave it: on the emulated device, over memory of this process."""

import unittest

import numpy

import kvarts
from kvarts import gpu
from served import PAGE, Served, keys, pattern

BLOCKS, SLOTS = 12, 20
ROW = PAGE // 16


class Landing(Served):
    def setUp(self):
        self.client = self.connect()
        self.handle = self.pages(self.client)
        self.pool = self.client.shared_pool(64 * PAGE)
        self.device = gpu.Device("emulated")
        self.lander = gpu.Lander(self.device, ring_bytes=16 * PAGE)
        self.lander.pin(self.pool.memory)
        self.stream = self.device.stream()
        self.engine = numpy.zeros(SLOTS * 2 * PAGE, dtype=numpy.uint8)

    def staged(self):
        names = keys(BLOCKS)
        self.assertTrue(self.handle.put(names, [pattern(n) for n in range(BLOCKS)]).ok)
        stage = self.pool.stage([(self.handle, 0, None)], names)
        self.assertEqual(stage.wait(60), BLOCKS)
        return stage

    def slots(self):
        return [(7 * n + 3) % SLOTS for n in range(BLOCKS)]

    def test_blocks_land_in_their_slots_and_leave_them(self):
        stage = self.staged()
        # Sixteen rows of a page lie apart in the engine's slots.
        part = (0, 0, 0, 2 * PAGE, (16, ROW, 2 * ROW), (1, 0, 0), ROW)
        pages = self.lander.pages(self.handle, [self.engine], [part], self.slots())
        columns = [(stage.stretches(), pages)]
        landed = self.lander.land(self.pool.memory, columns, after=self.stream.handle, stage=stage)
        stage.close()
        landed.wait(0, self.stream.handle)
        self.stream.synchronize()
        self.assertTrue(landed.done(60))
        found = self.engine.reshape(SLOTS, 16, 2, ROW)
        for n, slot in enumerate(self.slots()):
            self.assertEqual(found[slot, :, 0].tobytes(), pattern(n), n)
        self.assertFalse(found[:, :, 1].any())
        # And back, as other blocks, which are put from the pool.
        found[:, :, 0] ^= 0x5A
        names = keys(BLOCKS, first=100)
        draft = self.pool.draft(self.handle, names)
        saving = self.lander.save(self.pool.memory, [(draft.stretches(), pages)], draft=draft)
        # While a save has it a draft is not put, and its room stays whatever its handle does.
        with self.assertRaisesRegex(kvarts.Invalid, "still writes"):
            draft.put()
        other = self.pool.draft(self.handle, keys(BLOCKS, first=300))
        free = self.pool.counts["free_bytes"]
        unfinished = self.lander.save(self.pool.memory, [(other.stretches(), pages)], draft=other)
        other.close()
        self.assertEqual(self.pool.counts["free_bytes"], free)
        del unfinished
        saving.layer(0, self.stream.handle)
        self.assertTrue(saving.finish().done(60))
        self.assertEqual((draft.put(), draft.why), ([True] * BLOCKS, None))
        with self.assertRaises(kvarts.Invalid):
            draft.put()
        there = numpy.zeros(BLOCKS * PAGE, dtype=numpy.uint8)
        self.assertTrue(self.handle.get(names, there).ok)
        for n, block in enumerate(there.reshape(BLOCKS, PAGE)):
            self.assertEqual((block ^ 0x5A).tobytes(), pattern(n), n)
        # They stayed in the pool.
        before = self.pool.counts["read"]
        self.assertEqual(self.pool.stage([(self.handle, 0, None)], names).wait(60), BLOCKS)
        self.assertEqual((self.pool.counts["read"], self.pool.counts["kept"]), (before, BLOCKS))
        # One that is there already is not stored again; one that is let go of gives its room back.
        again = self.pool.draft(self.handle, names[:2])
        self.assertEqual(again.put(), [True, True])
        free = self.pool.counts["free_bytes"]
        self.pool.draft(self.handle, keys(3, first=200)).close()
        self.assertEqual(self.pool.counts["free_bytes"], free)

    def test_what_cannot_be_is_refused(self):
        whole = (0, 0, 0, PAGE, (1, 0, 0), (1, 0, 0), PAGE)
        make = self.lander.pages
        for parts, slots, per_block in (
            ([], [0], 1),
            ([whole], [0, 0], 1),
            ([whole], [2 * SLOTS], 1),
            ([whole], [0], 2),
            ([(1, *whole[1:])], [0], 1),
            ([(*whole[:3], PAGE - 1, *whole[4:])], [0, 1], 1),
        ):
            with self.assertRaises(kvarts.Error, msg=(parts, slots, per_block)):
                make(self.handle, [self.engine], parts, slots, per_block=per_block)
        pages = make(self.handle, [self.engine], [whole], [0])
        for stretches in ([], [(0, 1, 0, 2)], [(64 * PAGE, 1, 0, 1)]):
            with self.assertRaises(kvarts.Error, msg=stretches):
                self.lander.land(self.pool.memory, [(stretches, pages)])
        saving = self.lander.save(self.pool.memory, [([(0, 1, 0, 1)], pages)])
        with self.assertRaises(kvarts.Error):
            saving.finish()
        with self.assertRaises(kvarts.Error):
            self.lander.land(self.pool.memory, [([(0, 1, 0, 1)], pages)], after=12345)
        with self.assertRaises(kvarts.Error):
            gpu.Device("tpu:0")


if __name__ == "__main__":
    unittest.main()
