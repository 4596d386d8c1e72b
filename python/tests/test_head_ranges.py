"""Engines of vLLM's that differ in tensor parallelism over one store, without vLLM: what ranks of one wrote lands in the ranks of another,
compared by bytes with slices of one tensor."""

import unittest
from types import SimpleNamespace
from unittest import mock

import doubles

doubles.install()

import torch  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec  # noqa: E402

import kvarts  # noqa: E402
from kvarts import vllm_ranges  # noqa: E402
from kvarts.ranges import counts_of, ranges_of  # noqa: E402
from kvarts.vllm_layers import KvartsLayers  # noqa: E402
from kvarts.vllm_pages import Plan  # noqa: E402
from served import Server  # noqa: E402
from test_vllm_layers import BLOCKS, NAMES, TOKENS, WINDOWED, Engine, Request, configuration  # noqa: E402

HEADS, WIDTH, SIZES = 8, 4, (1, 2, 4, 8)
#: Dimensions in the order of memory, of a cache that has keys and values apart: blocks, halves, tokens, heads.
APART = {"NHD": (0, 1, 2, 3, 4), "HND": (0, 1, 3, 2, 4)}


def total(heads, **more):
    """What vLLM says of a model with so many heads in every layer."""
    told = {"num_key_value_heads": heads, "hidden_size": 64, **more}
    return dict(get_total_num_kv_heads=lambda: heads, hf_text_config=SimpleNamespace(to_dict=lambda: told))


class Ranks(Engine):
    """An engine whose ranks have slices of one tensor for each block and layer: `all_heads` of them."""

    def __init__(self, server, tp, all_heads=HEADS, layout="LBNHC", **changes):
        self.tp, self.all_heads = tp, all_heads
        super().__init__(server, tp=tp, heads=max(1, all_heads // tp), width=WIDTH, layout=layout, model_config=total(all_heads), **changes)

    def _made(self, names):
        if self.layout not in APART:
            return super()._made(names)
        heads, width = self.shape
        order, shape = APART[self.layout], (BLOCKS, 2, TOKENS, heads, width)
        made = [torch.zeros([shape[n] for n in order], dtype=torch.bfloat16) for _ in names]
        return {name: one.permute([order.index(n) for n in range(5)]) for name, one in zip(names, made)}

    def right(self, request, at, name, n):
        torch.manual_seed(hash((request.block_hashes[n], name.split(".", 2)[2])) % 2**31)
        rank, own = at % self.tp, self.shape[0]
        first = rank * self.all_heads // self.tp
        apart = self.layout in APART
        sizes = (2, TOKENS, self.all_heads, WIDTH) if apart else (self.all_heads, TOKENS, 2 * WIDTH)
        whole = torch.randn(*sizes).to(torch.bfloat16)
        return whole[:, :, first : first + own] if apart else whole[first : first + own]


def bytes_of(cache, page, block):
    """What a page's rows say that this block has."""
    memory = cache.untyped_storage().tobytes(order="A")
    rows, begin = page.rows, page.first + block * page.stride
    starts = [begin + at * rows.outer[2] + inner * rows.inner[2] for at in range(rows.outer[0]) for inner in range(rows.inner[0])]
    return b"".join(memory[start : start + rows.row_bytes] for start in starts)


class Heads(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def engine(self, tp, ranges=None, name="", **changes):
        extra = {"revision": self.id(), "identity": {"name": str(name)}, "head_ranges": ranges, **changes.pop("extra", {})}
        return Ranks(self.server, tp, extra=extra, **changes)

    def stored(self, tp, ranges=None, name="", **changes):
        """What an engine of this number of ranks computes is stored: of every column the bytes of the first layer's block 1."""
        engine = self.engine(tp, ranges, name, **changes)
        try:
            request = Request("a", 3)
            engine.stored(request)
            side = engine.scheduler._side
            with kvarts.connect(self.server.socket) as client:
                handle, found = client.pages(**side._naming), []
                for rank in side._desk.groups[0].ranks:
                    into = bytearray(handle.block_bytes(0))
                    self.assertTrue(handle.get(request.block_hashes[1:2], [into], rank=[rank]).ok)
                    found.append(bytes(into))
            return side._naming, found
        finally:
            engine.close()

    def found(self, tp, ranges=None, name="", **changes):
        """How many of three blocks are right in every rank of another engine."""
        engine = self.engine(tp, ranges, name, **changes).ready()
        try:
            request = Request("b", 3)
            engine.next = 7
            self.assertEqual(engine.admit(request), 3, (tp, ranges, name, engine.counts({})))
            engine.step(request)
            # Nothing was computed of them, and nothing landed elsewhere.
            for cache in [cache for caches in engine.caches for cache in caches.values() if engine.groups == 1]:
                self.assertFalse(cache[:7].any() or cache[10:].any())
            return engine.good(request)
        finally:
            engine.close()

    def both_ways(self, ranges, ways, **changes):
        sizes = sorted({tp for way in ways for tp in way})
        written = {}
        for tp in sorted({tp for tp, _ in ways}):
            naming, written[tp] = self.stored(tp, ranges, tp, **changes)
            self.assertEqual(naming["tp_size"], ranges or 1)
        # A range has the same bytes whatever ranks wrote it.
        self.assertEqual(len({tuple(columns) for columns in written.values()}), 1, sizes)
        for writer, reader in ways:
            with self.subTest(writer=writer, reader=reader, **{"layout": changes.get("layout")}):
                self.assertEqual(self.found(reader, ranges, writer, **changes), 3)

    WAYS = [(writer, reader) for writer in SIZES for reader in SIZES if writer != reader]

    def test_any_number_of_ranks_reads_what_any_other_wrote(self):
        self.both_ways(HEADS, self.WAYS)

    def test_in_any_order_of_dimensions(self):
        for layout in ("LBHNC", "BLNHC", "LHBNC", "NHD", "HND"):
            self.both_ways(HEADS, [(1, 8), (8, 2), (2, 4), (4, 1)], layout=layout, extra={"revision": layout})

    def test_ranges_may_have_several_heads(self):
        self.both_ways(2, [(1, 2), (2, 1)])

    def test_ranks_that_share_a_head_store_it_once(self):
        self.both_ways(2, [(1, 8), (8, 2), (4, 1), (2, 8)], all_heads=2)
        for ranges, saves in ((2, [True, False, False, False] * 2), (None, [True] * 8)):
            engine = self.engine(8, ranges, all_heads=2)
            self.addCleanup(engine.close)
            self.assertEqual([worker._side._dock._groups[0].saves for worker in engine.workers], saves)

    def test_ranks_share_a_head_only_where_every_layer_has_as_many(self):
        # Caches of a rank are alike whether a layer has two heads or four.
        own = SimpleNamespace(per_layer_overrides=[{}, {"total_num_kv_heads": 4}])
        for more in (dict(hf_text_config=None), total(2, num_global_key_value_heads=4), total(2, layers=[{"num_attention_groups": 4}]), dict(model_arch_config=own)):
            with self.assertRaisesRegex(ValueError, "head_ranges: .*2 heads for every layer"):
                KvartsLayers(*self.made(4, 2, all_heads=2, model_config={**total(2), **more}))
        KvartsLayers(*self.made(4, 2, all_heads=2, model_config=total(2, num_global_key_value_heads=2))).shutdown()

    def test_latents_are_alike_for_any_number_of_ranks(self):
        self.both_ways(None, [(1, 8), (8, 2), (2, 1)], all_heads=1, kinds=(MLAAttentionSpec,))

    def test_windows_and_stages_of_a_pipeline(self):
        windows = dict(names=(NAMES, WINDOWED), kinds=(FullAttentionSpec, SlidingWindowSpec), extra={"windows": "full"})
        self.both_ways(4, [(1, 4), (4, 2), (2, 1)], **windows)
        self.both_ways(2, [(1, 2), (2, 1)], pp=2)

    def test_without_the_setting_engines_share_with_those_that_name_their_number(self):
        self.stored(2)
        self.assertEqual(self.found(1, 2), 3)
        for tp, ranges in ((1, None), (1, 4), (4, None)):
            engine = self.engine(tp, ranges).ready()
            self.addCleanup(engine.close)
            self.assertEqual(engine.find(Request("b", 3)), 0)

    def test_other_heads_share_nothing(self):
        self.stored(1, 2)
        for changes in (dict(all_heads=4), dict(layout="LBHNC"), dict(layout="NHD")):
            engine = self.engine(1, 2, **changes).ready()
            self.addCleanup(engine.close)
            self.assertEqual(engine.find(Request("b", 3)), 0, changes)

    def test_planted_ranges_in_another_order_are_seen(self):
        honest = vllm_ranges.Columns.split
        self.stored(4, 4)
        with mock.patch.object(vllm_ranges.Columns, "split", lambda *of: honest(*of)[::-1]):
            self.assertEqual(self.found(1, 4), 0)
        self.assertEqual(self.found(1, 4), 3)

    def test_planted_a_rank_that_takes_another_ones_ranges_is_seen(self):
        self.stored(1, 4)
        with mock.patch.object(vllm_ranges, "ranges_of", lambda rank, ranks, count: ranges_of(ranks - 1 - rank, ranks, count)):
            self.assertEqual(self.found(4, 4), 0)
        self.assertEqual(self.found(4, 4), 3)

    def test_what_cannot_be_split_is_refused_and_says_what_can(self):
        states = dict(names=(NAMES, WINDOWED), kinds=(FullAttentionSpec, MambaSpec))
        for what, tp, ranges, changes in (
            ("set one of 1, 2, 4, 8", 1, 3, {}),
            ("set one of 4, 8", 4, 2, {}),
            ("set one of 2", 8, 8, {"all_heads": 2}),
            ("'2' is not valid", 1, "2", {}),
            ("0 is not valid", 1, 0, {}),
            ("states are divided by ranks", 1, 2, states),
            ("does not report how many heads", 1, 2, {"all_heads": None}),
            ("8 heads on a rank, where 4 of 4", 1, 2, {"all_heads": 4, "heads": 8}),
        ):
            with self.subTest(what), self.assertRaisesRegex(ValueError, f"head_ranges: .*{what}"):
                KvartsLayers(*self.made(tp, ranges, **changes))
        # As many as its ranks are what such a model has.
        KvartsLayers(*self.made(1, 1, **states)).shutdown()
        spec = SimpleNamespace(num_kv_heads=2, block_size=TOKENS, unpadded_page_size_bytes=2 * TOKENS * 2 * WIDTH * 2)
        kind = SimpleNamespace(layers={"a": spec})
        for shape in ((BLOCKS, TOKENS, 2, 2 * WIDTH), (BLOCKS, 2, TOKENS, WIDTH), (BLOCKS, 2, 2, TOKENS, WIDTH)):
            with self.assertRaisesRegex(ValueError, "the dimension of its"):
                vllm_ranges._axis_of(kind, "a", torch.zeros(shape, dtype=torch.bfloat16))

    def test_a_cache_that_counts_parts_of_blocks_is_split_alike(self):
        whole = torch.randn(2 * BLOCKS, HEADS, TOKENS // 2, 2 * WIDTH).to(torch.bfloat16)
        for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
            found = {}
            for tp in (1, 2, 4):
                for rank in range(tp):
                    config, _, caches = self.made(tp, 4, rank=rank)
                    own = HEADS // tp
                    back = [order.index(n) for n in range(4)]
                    cache = whole[:, rank * own : (rank + 1) * own].permute(order).contiguous().permute(back)
                    [column] = Plan(config, caches).placed({f"stage.0.{name}": cache for name in NAMES[:1]}).groups.values()
                    for number, [[page]] in column.columns.items():
                        found.setdefault(number, set()).add(bytes_of(cache, page, 5))
            self.assertEqual({number: len(content) for number, content in found.items()}, dict.fromkeys(range(4), 1), order)

    def made(self, tp, ranges, all_heads=HEADS, heads=None, **changes):
        heads = heads or max(1, (all_heads or HEADS) // tp)
        changes.setdefault("model_config", total(all_heads))
        config, cache = configuration(self.server, heads=heads, width=WIDTH, tp=tp, extra={"head_ranges": ranges}, **changes)
        return config, KVConnectorRole.SCHEDULER, cache

    def test_drafts_have_heads_of_their_own(self):
        for draft_heads, draft_ranks, count in ((8, 2, 4), (4, 2, None), (8, 1, None)):
            config, _, cache = self.made(2, None)
            draft = SimpleNamespace(get_total_num_kv_heads=lambda n=draft_heads: n)
            config.speculative_config = SimpleNamespace(draft_model_config=draft, draft_parallel_config=SimpleNamespace(tensor_parallel_size=draft_ranks))
            kind = SimpleNamespace(is_state=False, specs=[group.kv_cache_spec for group in cache.kv_cache_groups])
            if count is None:
                with self.assertRaisesRegex(ValueError, "draft model"):
                    vllm_ranges.Columns(config, [kind], 1, 4)
                self.assertEqual(vllm_ranges.Columns(config, [kind], 1, None).fact(), ["ranks", 2])
            else:
                self.assertEqual(vllm_ranges.Columns(config, [kind], 1, 4).fact(), ["heads", 4])


class Arithmetic(unittest.TestCase):
    def test_ranges_of_all_ranks_are_all_ranges(self):
        for heads in (1, 2, 3, 6, 8, 40):
            for ranks in (1, 2, 3, 4, 8, 16):
                for count in counts_of(heads, ranks):
                    found = [ranges_of(rank, ranks, count) for rank in range(ranks)]
                    saved = [number for one in found if one.saves for number in one.own]
                    self.assertEqual(saved, list(range(count)), (heads, ranks, count))
                    for rank, one in enumerate(found):
                        # By heads: those that a rank of an engine has.
                        own = range(rank * heads // ranks, max(rank * heads // ranks + 1, (rank + 1) * heads // ranks))
                        have = [head for number in one.own for head in range(number * heads // count, (number + 1) * heads // count)]
                        self.assertEqual(list(own), have, (heads, ranks, count))
        self.assertEqual(counts_of(8, 3), [])


if __name__ == "__main__":
    unittest.main()
