"""Engines of SGLang's that differ in tensor parallelism over one store, without SGLang: what ranks of one wrote lands in the ranks of another,
compared by bytes with slices of one tensor."""

import json
import os
import sys
import tempfile
import unittest
from unittest import mock

import doubles

doubles.install()

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolName  # noqa: E402

from kvarts import sglang_pools  # noqa: E402
import test_sglang_linker as linkers  # noqa: E402
from test_sglang_linker import FULL, LAYERS, PAGE, PAGES, SWA, keys, kind, latents, transfer  # noqa: E402

HEADS, WIDTH = 8, 8
WRITTEN, READ = (1, 2, 3), (7, 5, 9)


def sliced(whole, rank, ranks):
    """A rank's pool, with what it has of these heads: of each buffer `whole` or nothing."""
    heads = whole[0].shape[1]
    first, own = rank * heads // ranks, max(1, heads // ranks)
    parts = [one[:, first : first + own].contiguous().copy() for one in whole]
    half = len(parts) // 2
    named = dict(layer_num=half, k_buffer=parts[:half], v_buffer=parts[half:], dtype=torch.bfloat16, head_num=own)
    return kind("MHATokenToKVPool", **named)


def wholes(layers, heads=HEADS):
    return [torch.randn(PAGES * PAGE, heads, WIDTH).to(torch.bfloat16) for _ in range(2 * layers)]


def empty(whole):
    return [one * 0 for one in whole]


class Heads(unittest.TestCase):
    setUp, linker, answer = linkers.Linkers.setUp, linkers.Linkers.linker, linkers.Linkers.answer
    look_up, load = linkers.Linkers.look_up, linkers.Linkers.load

    def written(self, ranks, make, transfers, components=(FULL,), **extra):
        made = [self.linker(make(rank, ranks), components, rank=rank, ranks=ranks, pool_bytes=1 << 20, **extra) for rank in range(ranks)]
        for one in made:
            self.assertTrue(one.offload(transfers))
            self.assertTrue(self.answer(one))

    def read(self, ranks, make, asked, loads, found, components=(FULL,), **extra):
        made = [self.linker(make(rank, ranks), components, rank=rank, ranks=ranks, pool_bytes=1 << 20, **extra) for rank in range(ranks)]
        for one in made:
            self.assertEqual(self.look_up(one, "a", asked), found)
            self.assertTrue(self.load(one, "a", loads))
        return made

    def expect_right(self, made, whole, ranks, name=PoolName.KV, pages=zip(WRITTEN, READ)):
        for (page, to), (rank, one) in [(pair, of) for pair in pages for of in enumerate(made)]:
            right = sliced(whole, rank, ranks)
            for here, there in zip([*right.k_buffer, *right.v_buffer], one.pools[name].kv_buffer):
                self.assertTrue(torch.equal(here[page * PAGE : (page + 1) * PAGE], there[to * PAGE : (to + 1) * PAGE]), (rank, ranks))
                self.assertTrue(here[page * PAGE : (page + 1) * PAGE].any())

    def both_ways(self, ways, heads=HEADS, ranges=HEADS):
        for writer, reader in ways:
            with self.subTest(writer=writer, reader=reader):
                whole, extra = wholes(LAYERS, heads), {"head_ranges": ranges, "identity": {"writer": f"{writer} {reader}"}}
                self.written(writer, lambda *of: sliced(whole, *of), [transfer(keys(3), WRITTEN)], **extra)
                made = self.read(reader, lambda *of: sliced(empty(whole), *of), [transfer(keys(3))], [transfer(keys(3), READ)], [1, 2, 3], **extra)
                self.expect_right(made, whole, reader, pages=[*zip(WRITTEN, READ)])
                self.assertFalse(any(buffer[6 * PAGE : 7 * PAGE].any() for one in made for buffer in one.pools[PoolName.KV].kv_buffer))

    def test_any_number_of_ranks_reads_what_any_other_wrote(self):
        self.both_ways([(writer, reader) for writer in (1, 2, 4, 8) for reader in (1, 2, 4, 8) if writer != reader])

    def test_ranges_may_have_several_heads(self):
        self.both_ways([(1, 2), (2, 1)], ranges=2)

    def model(self, **config):
        """A directory that says what the model has."""
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        with open(os.path.join(place.name, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        doubles.of_sglang(model_path=place.name)

    def test_ranks_that_share_a_head_store_it_once(self):
        self.model(text_config={"num_key_value_heads": 2}, vision_config={"num_key_value_heads": 16})
        self.both_ways([(8, 1), (1, 4), (2, 8)], heads=2, ranges=2)
        saves = [self.linker(sliced(wholes(1, 2), rank, 4), rank=rank, ranks=4, head_ranges=2)._pools.saves for rank in range(4)]
        self.assertEqual(saves, [True, False, True, False])

    def test_latents_are_alike_for_any_number_of_ranks(self):
        first = latents()
        for buffer in first.kv_buffer:
            buffer.copy_(torch.randn_like(buffer))
        for writer, reader in ((1, 4), (4, 2)):
            extra = {"identity": {"writer": str(writer)}}
            self.written(writer, lambda *of: first, [transfer(keys(3), WRITTEN)], **extra)
            made = self.read(reader, lambda *of: latents(), [transfer(keys(3))], [transfer(keys(3), READ)], [1, 2, 3], **extra)
            for one in made:
                for here, there in zip(first.kv_buffer, one.pools[PoolName.KV].kv_buffer):
                    for page, to in zip(WRITTEN, READ):
                        self.assertTrue(torch.equal(here[page * PAGE : (page + 1) * PAGE], there[to * PAGE : (to + 1) * PAGE]))

    def test_windows_are_split_too(self):
        full, windowed = wholes(1), wholes(2)

        def made(full, windowed):
            mapping = {0: (0, True), 1: (0, False), 2: (1, True)}
            return lambda *of: kind("SWAKVPool", full_kv_pool=sliced(full, *of), swa_kv_pool=sliced(windowed, *of), layers_mapping=mapping)

        both, extra = (FULL, SWA), {"head_ranges": 4}
        node = [transfer(keys(3), WRITTEN), transfer(keys(2, 1), (8, 10), PoolName.SWA)]
        self.written(4, made(full, windowed), node, both, **extra)
        asked = [transfer(keys(3)), transfer(keys(2, 1), name=PoolName.SWA)]
        for ranks in (1, 2):
            loads = [transfer(keys(3), READ), transfer(keys(2, 1), (4, 3), PoolName.SWA)]
            found = self.read(ranks, made(empty(full), empty(windowed)), asked, loads, [3], both, **extra)
            self.expect_right(found, full, ranks, pages=[*zip(WRITTEN, READ)])
            self.expect_right(found, windowed, ranks, PoolName.SWA, pages=[(8, 4), (10, 3)])

    def test_without_the_setting_engines_share_with_those_that_name_their_number(self):
        whole = wholes(LAYERS)
        self.written(2, lambda *of: sliced(whole, *of), [transfer(keys(3), WRITTEN)])
        made = self.read(1, lambda *of: sliced(empty(whole), *of), [transfer(keys(3))], [transfer(keys(3), READ)], [1, 2, 3], head_ranges=2)
        self.expect_right(made, whole, 1, pages=[*zip(WRITTEN, READ)])
        for ranges in (None, 4):
            self.assertEqual(self.linker(sliced(whole, 0, 1), head_ranges=ranges).lookup("a", [transfer(keys(3))]), [])

    def test_planted_ranges_in_another_order_are_seen(self):
        whole, honest = wholes(LAYERS), sglang_pools.Pools._split
        extra = {"head_ranges": 2}
        self.written(2, lambda *of: sliced(whole, *of), [transfer(keys(3), WRITTEN)], **extra)
        with mock.patch.object(sglang_pools.Pools, "_split", lambda *of: honest(*of)[::-1]):
            made = self.read(1, lambda *of: sliced(empty(whole), *of), [transfer(keys(3))], [transfer(keys(3), READ)], [1, 2, 3], **extra)
            with self.assertRaises(AssertionError):
                self.expect_right(made, whole, 1, pages=[*zip(WRITTEN, READ)])

    def test_what_cannot_be_split_is_refused_and_says_what_can(self):
        draft = dict(changes=dict(sidecar_draft_device_pools=(sliced(wholes(1, 2), 0, 4),)), draft="1")
        self.model(num_key_value_heads=2)
        other = kind("MHATokenToKVPool", layer_num=1, k_buffer=wholes(1)[:1], v_buffer=wholes(1)[:1], dtype=torch.bfloat16, head_num=4)
        for what, cache, ranks, ranges, more in (
            ("set one of 1, 2, 4, 8", sliced(wholes(1), 0, 1), 1, 3, {}),
            ("set one of 4, 8", sliced(wholes(1), 0, 4), 4, 2, {}),
            ("0 is not valid", sliced(wholes(1), 0, 1), 1, 0, {}),
            ("1 heads for every layer", sliced(wholes(1, 2), 0, 4), 4, 1, {}),
            ("number of heads of the draft", sliced(wholes(1, 2), 0, 4), 4, 2, draft),
            ("pool kv is not split by heads", other, 1, 2, {}),
        ):
            with self.subTest(what), self.assertRaisesRegex(ValueError, f"head_ranges: .*{what}"):
                self.linker(cache, ranks=ranks, head_ranges=ranges, **more)
        with mock.patch.object(sys.modules["sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler"], "resolve_hybrid_device_pool_group", _of_another_kind):
            with self.assertRaisesRegex(ValueError, "pool kv is not split by heads"):
                self.linker(kind("Other"), head_ranges=2)


def _of_another_kind(**named):
    pool = kind("Other", k_buffer=wholes(1)[:1], v_buffer=wholes(1)[:1], dtype=torch.bfloat16)
    entry = doubles._dense(PoolName.KV, pool, {0: 0}, PAGE)
    return doubles._Entries([entry], 1, PAGE)


if __name__ == "__main__":
    unittest.main()
