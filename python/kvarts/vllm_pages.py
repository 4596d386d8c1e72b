"""The positions of vLLM's KV blocks, and their identity in Kvarts: groups of layers, pages and keys.

A block of Kvarts has as many tokens as the largest block of the model's groups, and the pages of every group for these tokens. Groups are numbered
through all stages of a pipeline. A column of a group is a range of heads, the part of one rank, or the bytes that all ranks share (`vllm_ranges`).
"""

import math
from typing import NamedTuple

import kvarts

from . import vllm_compat as kinds
from .landing import Columned, Page, order_of, rows_of
from .link import brief
from .staging import Group, spec_of
from .vllm_identity import identity_of, layout_version
from .vllm_ranges import Columns

#: Classes that derive from supported kinds of attention but are not supported.
_STRANGE = ("RSWASpec", "SinkFullAttentionSpec", "HiddenStateCacheSpec", "CircularBufferSpec")


class Kind(NamedTuple):
    """A group of vLLM's KV caches."""

    number: int
    window: int | None  # the number of last tokens that a prefix needs; none: all
    is_state: bool  # a recurrent state, which exists at some boundaries only
    block_tokens: int
    specs: list  # the specifications of its layers, in any stage of a pipeline
    layers: dict  # name -> specification, for the layers of this stage


def _kind_of(number, group):
    spec = group.kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None) or {}
    layers = {name: inner.get(name, spec) for name in group.layer_names}
    # A stage of a pipeline may have no layer of a group.
    specs = list(layers.values()) or list(inner.values()) or [spec]
    windows = {_window_of(one) for one in specs}
    if len(windows) != 1:
        raise ValueError(f"kv_cache_groups: kvarts.vllm_layers does not support group {number}, whose layers have different windows: use kvarts.vllm instead")
    is_state = isinstance(specs[0], kinds.MambaSpec)
    return Kind(number, windows.pop(), is_state, spec.block_size, specs, layers)


def _window_of(spec):
    """The number of last tokens of which a prefix needs a layer's cache; `None`: all."""
    name = type(spec).__name__
    if isinstance(spec, kinds.MambaSpec):
        if spec.mamba_cache_mode != "align":
            raise ValueError(f"mamba_cache_mode: {spec.mamba_cache_mode!r} keeps no states at block boundaries: set mamba_cache_mode to align")
        return 1  # the state behind the last token
    is_known = name not in _STRANGE and not getattr(spec, "prefix_replay_tokens", 0) and getattr(spec, "prefix_cacheable", True)
    if is_known and isinstance(spec, kinds.SlidingWindowSpec):
        return max(1, spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0))
    if is_known and isinstance(spec, kinds.ChunkedLocalAttentionSpec):
        return spec.attention_chunk_size
    if is_known and isinstance(spec, kinds.FullAttentionSpec):
        return None
    raise ValueError(f"kv_cache_groups: kvarts.vllm_layers does not support layers of the kind {name}: try kvarts.vllm")


class Placed(NamedTuple):
    """The positions of a worker's caches."""

    device: int | None  # none: the CPU
    memories: list  # the whole memory of each cache
    groups: dict  # number -> Columned
    order: dict  # layer -> (group, index in the group's layers)
    facts: list


class Plan:
    """The blocks of an engine, for the scheduler and the workers: their bytes, keys and identity."""

    def __init__(self, vllm_config, kv_cache_config):
        self._config, self._caches = vllm_config, kv_cache_config
        parallel = vllm_config.parallel_config
        for part in ("prefill_context_parallel_size", "decode_context_parallel_size"):
            if getattr(parallel, part, 1) != 1:
                raise ValueError(f"{part}: kvarts.vllm_layers supports only {part} 1: use kvarts.vllm instead")
        self.worker = parallel.rank
        #: Whether a batch is computed in parallel parts. A layer is then complete when all parts have computed it.
        self.has_parts = bool(getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False))
        self._stage = parallel.rank // parallel.tensor_parallel_size
        self._kinds = [_kind_of(number, group) for number, group in enumerate(kv_cache_config.kv_cache_groups)]
        if all(kind.window is not None for kind in self._kinds):
            raise ValueError("kv_cache_groups: kvarts.vllm_layers needs layers with attention over all tokens, which this model lacks: try kvarts.vllm")
        self.groups = len(self._kinds)
        self.block_tokens = math.lcm(*(kind.block_tokens for kind in self._kinds))
        for kind in self._kinds:
            if kind.window is not None and kind.block_tokens != self.block_tokens:
                raise ValueError(
                    f"kv_cache_groups: windows have blocks of {kind.block_tokens} tokens, and other layers have blocks of another size, which kvarts.vllm_layers "
                    "does not support: use kvarts.vllm instead"
                )
        self.hash_tokens = kv_cache_config.hash_block_size or self.block_tokens
        self.hashes = self.block_tokens // self.hash_tokens
        self.has_windows = any(kind.window is not None and not kind.is_state for kind in self._kinds)
        #: Groups of states. vLLM copies a state at the beginning of a step, so the state must have landed before the step.
        self.states = {kind.number for kind in self._kinds if kind.is_state}
        # Ranks with the same bytes have consecutive numbers.
        alike = max(1, getattr(kv_cache_config, "kv_tp_replicas", 1))
        if self.states and alike > 1:
            raise ValueError("kv_tp_replicas: kvarts.vllm_layers does not support models with states whose ranks share heads: use kvarts.vllm instead")
        #: Whether there is a draft model, whose layers do not run in every pass.
        self.drafts = vllm_config.speculative_config is not None
        #: The number of last blocks that are not promised: the last block of a draft's cache depends on the token behind it.
        self.spare = int(self.drafts and getattr(vllm_config.speculative_config, "use_eagle_block_drop", lambda: False)())
        if self.states and self.drafts and getattr(parallel, "pipeline_parallel_size", 1) > 1:
            # All stages except the last one apply accepted drafts some steps later.
            raise ValueError(
                "pipeline_parallel_size: kvarts.vllm_layers does not support pipeline parallelism for a model with states and drafts: use kvarts.vllm instead"
            )
        self.bytes_of_block = 1
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._extra = extra
        self._columns = Columns(vllm_config, self._kinds, alike, extra.get("head_ranges"))
        self._windows = extra.get("windows", "auto")
        #: Whether the last windows of a request are kept when it ends.
        self.keeps_ends = self.has_windows and self._windows == "turn"
        #: The engine's tokens a second, for `auto`, if its times are known.
        self._rate = _rate_of(extra.get("times"))
        if self._windows not in ("full", "turn", "none", "auto") and not (type(self._windows) is int and self._windows > 0):
            raise ValueError(f"windows: {self._windows!r} is not valid: set full, turn, none, auto or a number of tokens")

    @property
    def main(self):
        """(number, tokens of a block, specification) of the first group with attention over all tokens."""
        kind = next(kind for kind in self._kinds if kind.window is None)
        return kind.number, kind.block_tokens, self._caches.kv_cache_groups[kind.number].kv_cache_spec

    # Names.

    def keys(self, request, first, last):
        """The keys of blocks: a block's key is vLLM's hash at the last token of the block."""
        return [bytes(request.block_hashes[(n + 1) * self.hashes - 1]) for n in range(first, last)]

    def named(self, facts):
        """The identity of the blocks, as arguments of `Client.pages`, and the groups of all stages. `facts`: (stage, rank) -> the worker's facts."""
        stages = sorted({stage for stage, _ in facts})
        for (stage, rank), told in facts.items():
            if told.groups != facts[stage, 0].groups:
                raise ValueError(f"kv_cache_groups: rank {rank} of pipeline stage {stage} has other layers or pages than rank 0: try kvarts.vllm")
        columns, groups, windows = [], [], {}
        for at, stage in enumerate(stages):
            for kind, told in zip(self._kinds, facts[stage, 0].groups):
                number = at * self.groups + kind.number
                count = self._columns.ranges(kind).total
                if told:
                    pages = self.block_tokens // kind.block_tokens
                    columns.append((number, count, [[nbytes * pages for nbytes, _ in parts] for _, parts in told]))
                    groups.append(Group(number, kind.window, tuple(range(count))))
                    if kind.window is not None:
                        windows[number] = kind.window
        self.bytes_of_block = max(1, sum(sum(map(sum, sizes)) * ranks for _, ranks, sizes in columns))
        spec = spec_of("vllm-layers", self.block_tokens, columns)
        return self._naming(spec, windows, facts), groups

    def _naming(self, spec, windows, facts):
        config, extra = self._config, self._extra
        identity = {**identity_of(config, extra.get("revision")), **extra.get("identity", {})}
        layout = self._caches.kv_cache_layout
        # The number of ranks is left out: engines with different numbers of ranks share blocks.
        told = [[stage, facts[stage, rank].groups] for stage, rank in sorted(facts) if rank == 0]
        differ = [[self._columns.described(kind), list(kind.layers)] for kind in self._kinds]
        return dict(
            spec=spec,
            windows=windows,
            model=config.model_config.model,
            revision=identity.pop("revision"),
            dtype=f"{config.cache_config.cache_dtype}/{_dtype_of(self._kinds)}".replace("torch.", ""),
            engine="vllm",
            layout=f"layers-{layout}",
            layout_version=layout_version(differ, told, layout, self._columns.fact()),
            block_tokens=self.block_tokens,
            tp_size=self._columns.count,
            extras=brief(identity),
        )

    # A worker's caches.

    def placed(self, caches):
        """The positions of a worker's caches."""
        import torch

        memories, numbers, groups, order, facts = [], {}, {}, {}, []
        device = None
        for kind in self._kinds:
            ranges = self._columns.ranges(kind)
            columns, told = {rank: [] for rank in ranges.own}, []
            for name in kind.layers:
                if name not in caches:
                    continue  # of another stage
                # A state has several parts, in one memory.
                parts = caches[name] if isinstance(caches[name], (list, tuple)) else [caches[name]]
                cache = parts[0]
                storage = cache.untyped_storage()
                if storage.data_ptr() not in numbers:
                    numbers[storage.data_ptr()] = len(memories)
                    whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
                    memories.append(whole)
                device = None if cache.device.type == "cpu" else cache.device.index or 0
                order[name] = (self._number(kind), len(told))
                views = [[self._block(view) for view in self._columns.split(kind, name, part)] for part in parts]
                for rank, *own in zip(ranges.own, *views):
                    columns[rank].append([self._page(name, view, numbers[storage.data_ptr()]) for view in own])
                self._expect_whole(kind, name, [page for layers in columns.values() for page in layers[-1]])
                told.append([name, [[page.rows.nbytes, _order_of(view)] for page, (view, *_) in zip(columns[ranges.own[0]][-1], views)]])
            facts.append(told)
            if told:
                groups[self._number(kind)] = Columned(self._number(kind), columns, ranges.saves)
        self._expect_all(caches, order)
        return Placed(device, memories, groups, order, facts)

    def _number(self, kind):
        return self._stage * self.groups + kind.number

    def _block(self, cache):
        """A view of the cache with vLLM's blocks as its first dimension. The cache itself may be divided into smaller blocks."""
        blocks = self._caches.num_blocks
        return cache if cache.shape[0] == blocks else kinds.group_kernel_blocks(cache, blocks)

    @staticmethod
    def _page(name, cache, memory):
        size = cache.element_size()
        try:
            rows = rows_of(*_lies(cache), size)
        except ValueError as error:
            raise ValueError(f"kv_cache_layout: {name}: {error}") from None
        return Page(memory, cache.storage_offset() * size, cache.stride(0) * size, rows)

    @staticmethod
    def _expect_whole(kind, name, parts):
        nbytes, spec = sum(page.rows.nbytes for page in parts), kind.layers[name]
        told = spec.state_content_size_bytes if kind.is_state else spec.unpadded_page_size_bytes
        if nbytes != told:
            raise ValueError(f"kv_cache_layout: a page of the layer {name} has {nbytes} bytes in memory, but {told} bytes according to vLLM: report it")

    @staticmethod
    def _expect_all(caches, order):
        first = lambda cache: (cache[0] if isinstance(cache, (list, tuple)) else cache).data_ptr()  # noqa: E731
        known = {first(caches[name]) for name in order}
        for name, cache in caches.items():
            # Layers may share the cache of another layer. A layer with its own cache and without a group would not be stored.
            if first(cache) not in known:
                raise ValueError(f"kv_cache_groups: the layer {name} has its own cache but no group, so it cannot be stored: try kvarts.vllm")

    # Requests.

    def slots(self, group, blocks, first, last):
        """The engine's slots of these blocks, in the order of their tokens."""
        per_block = self.block_tokens // self._kinds[group.number % self.groups].block_tokens
        return list(blocks[first * per_block : last * per_block])

    def kept(self, group, first, last, prompt, is_over):
        """The ranges of a window's blocks to keep, out of the blocks `first` to `last`, which are computed now. `prompt`: the number of blocks of the
        prompt; `is_over`: whether the request has ended, at `last`."""
        if self._windows == "turn":
            # At the end of the prompt, in the step that computes it, and at the end of the request.
            end, first = (last, 0) if is_over else (prompt, first)
            found = range(max(first, group.first_of(end, self.block_tokens)), min(last, end))
            return [(found.start, found.stop)] if found else []
        if first >= last or self._windows == "none":
            return []
        return kvarts.kept_windows(self._policy(), group.window, first, last, self.block_tokens)

    def keeps_state(self, boundary, before, prompt):
        """Whether the state at a boundary (in tokens) is kept. `before`: the last boundary of this request whose state was kept; `prompt`: the end of the
        prompt's last block. vLLM computes states only at the ends of its chunks, so the distance of boundaries decides."""
        if self._windows in ("full", "none"):
            return self._windows == "full"
        is_end = boundary == prompt
        if self._windows == "turn":
            return is_end
        return boundary - before >= max(1, self._policy()) or is_end and self._windows == "auto"

    def _policy(self):
        """Tokens from one boundary with kept windows to the next; 0: windows are kept at every boundary."""
        if self._windows != "auto":
            return 0 if self._windows == "full" else self._windows
        return kvarts.window_interval(self.window_bytes(), self.block_tokens, *self._rate)

    def window_bytes(self):
        """The bytes of all windows and states at one boundary, on one rank."""
        of = [(kind, spec) for kind in self._kinds if kind.window is not None for spec in kind.specs]
        bytes_of = lambda kind, spec: spec.state_content_size_bytes if kind.is_state else spec.page_size_bytes  # noqa: E731
        return sum(-(-kind.window // self.block_tokens) * bytes_of(kind, spec) for kind, spec in of)


def _rate_of(times):
    if times is None:
        return ()
    return (max(1, int(8192 * 1000 / max(1e-3, kvarts.Times(**times).prefill_ms(0, 8192)))),)


def _lies(cache):
    """Sizes and strides of a block of the cache."""
    return list(cache.shape[1:]), [cache.stride(at) for at in range(1, cache.dim())]


def _order_of(cache):
    return order_of(*_lies(cache))


def _dtype_of(kinds_of):
    types = {str(dtype) for kind in kinds_of for spec in kind.specs for dtype in getattr(spec, "dtypes", None) or (spec.dtype,)}
    return ",".join(sorted(types))
