"""The positions of SGLang's pages on the device, and their identity in Kvarts: each pool is a group of layers.

A block of Kvarts is a page of the tree. Each pool of the page is a group with the bytes of all of its layers. A column of a group is a range of heads
(`ranges`), the part of one rank, or the bytes that all ranks share.
"""

import math
from typing import NamedTuple

import torch

from .landing import Columned, Page, rows_of
from .link import brief, configuration_of, contract, revision_of
from .ranges import expect_count, expect_even, expect_number, ranges_of
from .sglang_compat import ALIKE, ASSEMBLER, HYBRID, PoolName, needed, version
from .sglang_identity import settings
from .staging import Group, spec_of


def assembled(params, components):
    """The pools of this model on the device, in SGLang's description for linkers. SGLang has no such description for some pools, which are described
    here: attention over all tokens, alone, with windowed layers, or with recurrent states."""
    cache, page = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    entry, group = needed(ASSEMBLER, "DevicePoolEntry"), needed(ASSEMBLER, "DevicePoolGroup")
    dense = needed(ASSEMBLER, "_mha_device_pool_entry")
    kinds, kind = {str(component.name) for component in components}, type(cache).__name__
    if kind == "MHATokenToKVPool" and kinds == {"FULL"}:
        entries = [dense(PoolName.KV, cache, {layer: layer for layer in range(cache.layer_num)}, page)]
        alike, layers = False, cache.layer_num
    elif kind == "MLATokenToKVPool" and kinds == {"FULL"}:
        named = dict(name=PoolName.KV, indices_from_pool=PoolName.KV, device_pool=cache, components=[cache.kv_buffer])
        layout = dict(layer_mapping={layer: layer for layer in range(cache.layer_num)}, page_size=page, rows_are_pages=False)
        entries, alike, layers = [entry(**named, **layout)], True, cache.layer_num
    elif kind == "SWAKVPool" and kinds == {"FULL", "SWA"}:
        full, windowed = needed(HYBRID, "_swa_layer_mappings")(cache)
        entries = [dense(PoolName.KV, cache.full_kv_pool, full, page), dense(PoolName.SWA, cache.swa_kv_pool, windowed, page)]
        alike, layers = False, 1 + max([*full, *windowed])
    elif kind == "HybridLinearKVPool" and type(cache.full_kv_pool).__name__ == "MHATokenToKVPool" and kinds == {"FULL", "MAMBA"}:
        mapping = needed(HYBRID, "_stage_local_layer_mapping")
        full = mapping(cache.full_attention_layer_id_mapping, cache.start_layer)
        states = needed(ASSEMBLER, "_mamba_device_pool_entry")(params.req_to_token_pool, cache.start_layer)
        entries = [dense(PoolName.KV, cache.full_kv_pool, full, page), states]
        alike, layers = False, 1 + max([*full, *states.layer_mapping])
    else:
        return needed(ASSEMBLER, "resolve_hybrid_device_pool_group")(kvcache=cache, page_size=page, params=params, components=components)
    if params.mtp_draft_device_pools:
        raise ValueError("kvarts.sglang_linker does not support draft layers in the pools of the model: use kvarts.sglang instead")
    for draft in params.sidecar_draft_device_pools:
        # A draft model reads its layers after the whole load.
        entries.append(dense(PoolName.DRAFT, draft, {layer: layer for layer in range(draft.layer_num)}, page, PoolName.KV))
        # All ranks have the same latents, but not the same heads of the draft.
        alike, layers = False, max(layers, draft.layer_num)
    return group(entries, layers, page, rank_replicated=alike)


def _count_of(made, ranks, given):
    """The number of columns of each group. `given`: the configured number of ranges of heads."""
    expect_number(given)
    if made.rank_replicated:
        return 1
    if given in (None, ranks):
        return ranks
    for entry in made.entries:
        heads = _heads_of(entry)
        if heads is None:
            raise ValueError(f"head_ranges: pool {entry.name} is not split by heads: remove the setting; engines with the same number of ranks share blocks without it")
        # A rank with one head may share the head with other ranks.
        is_shared = heads == 1 and given < ranks
        expect_count(given, given if is_shared else heads * ranks, ranks)
        if is_shared:
            if entry.name == PoolName.DRAFT:
                raise ValueError(f"head_ranges: the number of heads of the draft model is unknown: set head_ranges to {ranks} or more")
            path, revision, _ = settings()
            found = configuration_of(path, revision) or {}
            expect_even(found.get("text_config") or found, given)
    return given


def _heads_of(entry):
    """The number of heads of a pool on this rank, the second dimension of its buffers; `None` if the pool is not split by heads."""
    heads = getattr(entry.device_pool, "head_num", None)
    is_dense = type(entry.device_pool).__name__ == "MHATokenToKVPool" and all(
        len(buffer.shape) == 3 and buffer.shape[1] == heads for buffer in entry.kv_buffer
    )
    return heads if is_dense else None


class Pool(NamedTuple):
    """A pool, and its group."""

    group: Group
    entry: object
    span: int  # rows of a page

    def slots(self, indices):
        """The numbers of the pages of these indices. The call may wait for the device, where the numbers are."""
        rows = self.entry.prepare_locations(self.entry.translate_indices(indices))
        return [row // self.span for row in rows]


class Pools:
    """The pools of a process. `rank` of `ranks`: among the ranks that share the model's heads. `extra`: the operator's settings."""

    def __init__(self, params, components, rank, ranks, extra):
        for part in ("pp_size", "attn_cp_size"):
            if getattr(params, part, 1) != 1:
                raise ValueError(f"{part}: kvarts.sglang_linker supports only {part} 1: use kvarts.sglang instead")
        if getattr(needed("sglang.srt.runtime_context", "get_parallel")(), "attn_dcp_size", 1) != 1:
            raise ValueError("dcp_size: kvarts.sglang_linker does not support decode context parallelism: use kvarts.sglang instead")
        made = assembled(params, components)
        #: By SGLang's names.
        self.entries = made.entry_map
        self.block_tokens, self.layers = params.page_size, made.num_layers
        self._extra = extra
        self._ranges = ranges_of(rank, ranks, _count_of(made, ranks, extra.get("head_ranges")))
        #: Whether this rank stores its blocks. Only one of the ranks with the same bytes does.
        self.saves = self._ranges.saves
        has_draft = params.mtp_draft_device_pools or params.sidecar_draft_device_pools
        if has_draft and not extra.get("draft"):
            raise ValueError("draft: the setting is missing: set the revision of the draft model")
        self._windows = {PoolName.SWA: getattr(params, "swa_retain_window", None), PoolName.MAMBA: self.block_tokens}
        self.device, self.memories, self.columns, self._pools, self._facts = None, [], {}, {}, []
        #: For each of SGLang's layers: (group, index of the layer in the group) for all groups with the layer.
        self.order = [[] for _ in range(self.layers)]
        self._numbers = {}
        for number, entry in enumerate(made.entries):
            self._place(number, entry)
        #: name of a pool of the tree -> the pools whose indices SGLang takes from that pool.
        self._of_source = {}
        for pool in self._pools.values():
            self._of_source.setdefault(pool.entry.indices_from_pool, []).append(pool)

    @property
    def groups(self):
        """The groups that this rank stages."""
        return [pool.group for pool in self._pools.values()]

    def of(self, name):
        """The pools whose indices SGLang takes from this pool of the tree."""
        return self._of_source.get(name, [])

    def window_of(self, group):
        """The number of last blocks of a group that a prefix needs; `None`: all."""
        return None if group.window is None else -(-group.window // self.block_tokens)

    def _place(self, number, entry):
        columns, spans, facts = {number: [] for number in self._ranges.own}, set(), []
        for place, (layer, buffers) in enumerate(sorted(entry.layer_mapping.items())):
            buffers = (buffers,) if isinstance(buffers, int) else buffers
            parts = [component[at] for at in buffers for component in entry.components]
            sizes = [component[at][2] for at in buffers for component in entry.buffer_meta]
            self.order[layer].append((number, place))
            views = [self._split(buffer) for buffer in parts]
            for own, *of_range in zip(columns.values(), *views):
                own.append([self._page(entry, view, nbytes // len(columns), spans) for view, nbytes in zip(of_range, sizes)])
            facts.append([layer, *(f"{view.dtype} {list(view.shape[1:])} {nbytes // len(columns)}" for (view, *_), nbytes in zip(views, sizes))])
        if len(spans) != 1:
            raise ValueError(f"pool {entry.name}: its pages have different numbers of rows ({sorted(spans)}), which kvarts.sglang_linker does not support: try kvarts.sglang")
        window = self._windows.get(entry.indices_from_pool)
        if window is None and entry.indices_from_pool != PoolName.KV:
            raise ValueError(f"pool {entry.name}: kvarts.sglang_linker does not support this pool: try kvarts.sglang")
        self._pools[entry.name] = Pool(Group(number, window, tuple(columns)), entry, spans.pop())
        self.columns[number] = Columned(number, columns, self.saves)
        # Buffers store types of eight bits as plain bytes; the pool has the type.
        kind = [type(entry.device_pool).__name__, str(getattr(entry.device_pool, "dtype", None))]
        self._facts.append([str(entry.name), str(entry.indices_from_pool), *kind, facts])

    def _split(self, buffer):
        """The parts of a buffer, one for each range of this rank."""
        if (count := len(self._ranges.own)) == 1:
            return [buffer]
        heads = buffer.shape[1] // count
        return [buffer[:, at * heads : (at + 1) * heads] for at in range(count)]

    def _page(self, entry, buffer, nbytes, spans):
        size, storage = buffer.element_size(), buffer.untyped_storage()
        if storage.data_ptr() not in self._numbers:
            self._numbers[storage.data_ptr()] = len(self.memories)
            self.memories.append(torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(storage))
        self.device = None if buffer.device.type == "cpu" else buffer.device.index or 0
        span = nbytes // (size * math.prod(buffer.shape[1:]))
        spans.add(span)
        if span > 1 and buffer.shape[0] < getattr(entry.device_pool, "size", 0):
            raise ValueError(f"pool {entry.name}: its layout has no row for each token, which kvarts.sglang_linker requires: use kvarts.sglang instead")
        page = buffer[:span]
        try:
            rows = rows_of(list(page.shape), [page.stride(at) for at in range(page.dim())], size)
        except ValueError as error:
            raise ValueError(f"pool {entry.name}: {error}") from None
        if rows.nbytes != nbytes:
            raise ValueError(f"pool {entry.name}: a page has {rows.nbytes} bytes in memory, but {nbytes} bytes according to SGLang: report it")
        return Page(self._numbers[storage.data_ptr()], buffer.storage_offset() * size, buffer.stride(0) * size * span, rows)

    def naming(self, draft):
        """The identity of the blocks, as arguments of `Client.pages`. `draft`: the path of the draft model, if there is one."""
        path, revision, found = settings()
        own = {number: next(iter(column.columns.values())) for number, column in self.columns.items()}
        sizes = [(number, self._ranges.total, [[page.rows.nbytes for page in layer] for layer in layers]) for number, layers in own.items()]
        if self._extra.get("draft"):
            found["draft"] = f"{draft} {self._extra['draft']}"
        return dict(
            spec=spec_of("sglang-layers", self.block_tokens, sizes),
            windows={group.number: group.window for group in self.groups if group.window is not None},
            model=path,
            revision=revision_of(path, self._extra.get("revision") or revision),
            dtype=",".join(sorted({str(pool.entry.kv_buffer[0].dtype) for pool in self._pools.values()})).replace("torch.", ""),
            engine="sglang",
            layout="layers",
            layout_version=contract("sglang", version(), ALIKE, self._facts),
            block_tokens=self.block_tokens,
            tp_size=self._ranges.total,
            extras=brief({**found, **self._extra.get("identity", {})}),
        )
