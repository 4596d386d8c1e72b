"""Prefixes of layered models: look-ups, layer by layer, leases."""

import time
import unittest

import numpy

import kvarts
from served import Served, keys

SPEC = "llama-3.1-8b"


class Blocks(Served):
    def handle(self, **kwargs):
        kwargs = dict(spec=SPEC, block_tokens=16, **kwargs)
        return self.pages(page=None, **kwargs)

    def test_a_match_says_what_is_worth_restoring_and_why(self):
        pages = self.handle()
        rng = numpy.random.default_rng(3)
        source = rng.integers(0, 256, size=(3, pages.block_bytes()), dtype=numpy.uint8)
        names = kvarts.chain(list(range(1000, 1064)), 16)
        self.assertTrue(pages.put(names[:3], [row for row in source], parent=b"").ok)
        self.assertIsNone(pages.match(names).plan)
        slow = kvarts.Times([(0, 16, 1e6), (0, 64, 4e6)])
        plan = pages.match(names, times=slow).plan
        self.assertEqual((plan.blocks, plan.tokens), (3, 48))
        self.assertGreater(plan.benefit_ms, 1e6)
        self.assertGreater(plan.disk_bytes, 0)
        self.assertTrue(all(does == "disk" for _, _, _, does, _ in plan.actions), plan.actions)
        fast = kvarts.Times([(0, 16, 1e-9), (0, 64, 4e-9)])
        plan = pages.match(names, times=fast).plan
        self.assertEqual((plan.blocks, plan.benefit_ms), (0, 0.0))
        self.assertIn("slower than computing", plan.reason)
        self.assertIn("slower than computing", repr(plan))
        self.assertIn("2 samples", repr(fast))
        sheet = kvarts.Times(model="llama-3.1-8b", device="h100", devices=2)
        self.assertGreater(sheet.prefill_ms(0, 8192), sheet.prefill_ms(4096, 4096))
        for wrong in (dict(), dict(model="llama-3.1-8b"), dict(model="llama-3.1-8b", device="abacus"), dict(samples=[(0, 0, 1.0)])):
            with self.assertRaises(kvarts.Invalid):
                kvarts.Times(**wrong)
        with self.assertRaises(kvarts.Invalid):
            pages.match(names, times=fast, prompt_tokens=0)

    def test_what_is_not_there_is_told_with_why(self):
        pages = self.pages()
        names = keys(6)
        page = bytes(pages.block_bytes())
        self.assertTrue(pages.put(names[:3], [page] * 3).ok)
        self.assertTrue(pages.delete(names[1:3]).ok)
        into = [bytearray(len(page)) for _ in names]
        got = pages.get(names, into)
        self.assertEqual(got.results, [True] + [False] * 5)
        why = pages.missing([names[at] for at in got.errors])
        self.assertEqual((why.deleted, why.never_stored, why.evicted, why.expired, why.out_of_service, why.cut_off), (2, 3, 0, 0, 0, 0))
        self.assertTrue(why)
        self.assertIn("2 deleted; 3 never stored", repr(why))
        self.assertFalse(pages.missing(names[:1]))
        self.assertEqual(repr(pages.missing(names[:1])), "<kvarts.Missing none>")
        found = pages.match(names)
        self.assertEqual((found.blocks, found.missing.deleted, found.missing.never_stored), (1, 2, 3))
        fleeting = self.pages(ttl=0.05, revision=self.id() + " fleeting")
        self.assertTrue(fleeting.put(names[:1], [page]).ok)
        while fleeting.exists(names[:1])[0]:
            time.sleep(0.05)
        self.assertEqual(fleeting.missing(names[:1]).expired, 1)

    def test_a_prefix_is_found_read_layer_by_layer_and_pinned(self):
        pages = self.handle()
        size, parts = pages.block_bytes(), pages.parts()
        layers = 1 + max(layer for layer, _ in parts)
        rng = numpy.random.default_rng(1)
        source = rng.integers(0, 256, size=(3, size), dtype=numpy.uint8)
        tokens = list(range(64))
        names = kvarts.chain(tokens, 16)
        self.assertTrue(pages.put(names[:3], [row for row in source], parent=b"").ok)
        found = pages.match(names, hold=30)
        self.assertEqual((found.blocks, found.lease.blocks), (3, 3))
        found.lease.renew(10)
        self.assertTrue(found.lease.end())
        self.assertFalse(found.lease.end())
        self.assertIsNone(pages.match(names).lease)
        per_layer = [sum(n for at, n in parts if at == layer) for layer in range(layers)]
        into = [bytearray(3 * n) for n in per_layer]
        reading = pages.layers(names[:3], layer_buffers=into)
        self.assertTrue(reading.wait(60))
        self.assertGreater(reading.arrived, 0)
        got = []
        for layer in reading:
            got.append((layer.layer, layer.blocks))
        self.assertEqual(got, [(layer, 3) for layer in range(layers)])
        self.assertEqual((reading.usable_blocks, reading.usable_layers, reading.errors), (3, layers, {}))
        # `[part][block]` inside a layer.
        at = 0
        for layer in range(layers):
            inside = 0
            for part in [n for where, n in parts if where == layer]:
                for block in range(3):
                    self.assertEqual(bytes(into[layer][inside : inside + part]), source[block, at : at + part].tobytes())
                    inside += part
                at += part
        some = pages.layers(names[:3], layer_buffers=into, layers=range(4, 6))
        self.assertEqual([layer.layer for layer in some], [4, 5])
        whole = numpy.zeros((3, size), dtype=numpy.uint8)
        self.assertEqual(sum(1 for _ in pages.layers(names[:3], [row for row in whole][::1])), layers)
        self.assertTrue((whole == source).all())
        lease = pages.pin(names, hold=20)
        self.assertEqual(lease.blocks, 3)
        self.assertTrue(lease.end())

    def test_what_has_arrived_is_seen_without_taking_it(self):
        pages = self.handle()
        size, layers = pages.block_bytes(), len(pages.parts())
        names = keys(2)
        pages.put(names, bytes([7]) * size + bytes([8]) * size)
        into = bytearray(2 * size)
        reading = pages.layers(names, into)
        deadline = time.monotonic() + 30
        while reading.arrived < layers:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.001)
        self.assertEqual([layer.layer for layer in reading], list(range(layers)))
        self.assertEqual((reading.arrived, reading.usable_blocks), (layers, 2))
        self.assertEqual((into[0], into[-1]), (7, 8))

    def test_a_read_that_is_given_up_lets_go_of_its_buffers(self):
        pages = self.handle()
        size = pages.block_bytes()
        names = keys(4)
        pages.put(names, bytes(size) * 4)
        into = bytearray(4 * size)
        reading = pages.layers(names, into)
        next(reading)
        reading.close()
        into.append(0)
        self.assertEqual(list(reading), [])

    def test_what_is_not_here_ends_a_read_early_and_says_why(self):
        pages = self.handle()
        size = pages.block_bytes()
        names = keys(3)
        pages.put(names[:1] + names[2:], bytes(size) * 2)
        reading = pages.layers(names, bytearray(3 * size))
        self.assertEqual({layer.blocks for layer in reading}, {1})
        self.assertIsInstance(reading.errors[1], kvarts.Miss)
        self.assertEqual(reading.usable_blocks, 1)

    def test_wrong_identities_are_refused_by_name(self):
        client = self.connect()
        for change, what in [
            (dict(spec="no such model"), "spec"),
            (dict(page=None), "page_bytes"),
            (dict(page=0), "page_bytes"),
            (dict(page={}), "page_bytes"),
            (dict(page="x"), "page_bytes"),
            (dict(page=2**63), "page_bytes"),
            (dict(model=""), "model"),
            (dict(revision="none"), "^revision: "),
            (dict(dtype="none"), "^dtype: "),
            (dict(engine=" x"), "^engine: "),
            (dict(layout=""), "^layout: "),
            (dict(layout_version="none"), "^layout_version: "),
            (dict(quantisation=""), "^quantisation: "),
            (dict(scales="x" * 5000), "^scales: "),
            (dict(tokenizer="a\n"), "^tokenizer: "),
            (dict(extras={"x": "y" * 100_000}), "^extras: "),
            (dict(model="x" * 5000), "model"),
            (dict(block_tokens=0), "block_tokens"),
            (dict(tp_size=0), "tp_size"),
            (dict(tp_size=2, tp_rank=2), "tp_rank"),
            (dict(ttl=-1.0), "ttl"),
            (dict(batches_max=0), "batches_max"),
        ]:
            with self.assertRaisesRegex(kvarts.Invalid, what, msg=str(change)):
                change = {"page": 4096 if "spec" not in change else None, **change}
                self.pages(client, **change)


if __name__ == "__main__":
    unittest.main()
