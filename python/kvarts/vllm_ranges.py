"""Splits vLLM's caches into columns that do not depend on the engine's number of ranks.

vLLM's caches of attention layers have the shape `(blocks, heads, tokens, content of a head)` or `(blocks, 2, tokens, heads, size of a head)`, in any
order in memory. The ranks have equal shares of the model's heads, in the order of ranks, or several ranks have the same head. Other caches (divided
states, caches without heads) have a column for each rank. An engine with such caches finds only blocks of engines with the same number of ranks.
"""

import dataclasses

from . import vllm_compat as kinds
from .link import differing
from .ranges import counts_of, expect_count, expect_even, expect_number, ranges_of


class Columns:
    """The columns of a model's groups. `kinds_of`: the groups; `alike`: the number of ranks that are known to have the same caches; `given`: the
    configured number of ranges."""

    def __init__(self, vllm_config, kinds_of, alike, given):
        parallel = vllm_config.parallel_config
        self._ranks = parallel.tensor_parallel_size
        self._rank = parallel.rank % self._ranks
        split = [kind for kind in kinds_of if not is_alike(kind)]
        self._heads, why = _heads_of(vllm_config, split, self._ranks) if split else (None, None)
        expect_number(given)
        if self._heads is not None and (given is not None or self._heads >= self._ranks):
            self.count = self._ranks if given is None else given
            expect_count(self.count, self._heads, self._ranks)
            if self.count < self._ranks:
                expect_even(_configuration_of(vllm_config.model_config), self.count)
            return
        self._heads, self.count = None, max(1, self._ranks // alike) if split else 1
        if split and given not in (None, self.count):
            raise ValueError(f"head_ranges: {why}: remove the setting; engines with the same number of ranks share blocks without it")

    def ranges(self, kind):
        """The ranges of a group that this rank has."""
        return ranges_of(self._rank, self._ranks, 1 if is_alike(kind) else self.count)

    def fact(self):
        """The facts about the columns that determine the bytes."""
        return ["ranks" if self._heads is None else "heads", self.count]

    def described(self, kind):
        """The specifications of a group's layers, for one range. They do not depend on the number of ranges of a rank, or on the padding of pages."""
        return [differing(self._of_range(kind, spec)) for spec in kind.specs]

    def _of_range(self, kind, spec):
        changes = {"page_size_padded": None} if getattr(spec, "page_size_padded", None) is not None else {}
        if self._heads is not None and not is_alike(kind):
            changes["num_kv_heads"] = self._heads // self.count
        return dataclasses.replace(spec, **changes)

    def split(self, kind, name, cache):
        """Views of a layer's cache, one for each column that this rank has."""
        own = self.ranges(kind).own
        if len(own) == 1:
            return [cache]
        axis = _axis_of(kind, name, cache)
        heads = cache.shape[axis] // len(own)
        index = [slice(None)] * cache.dim()
        parts = []
        for at in range(len(own)):
            index[axis] = slice(at * heads, (at + 1) * heads)
            parts.append(cache[tuple(index)])
        return parts


def is_alike(kind):
    """Whether all ranks have the same bytes of a group."""
    return all(
        isinstance(spec, kinds.MLAAttentionSpec) or getattr(spec, "max_tp_shards", None) == 1 or kind.is_state and spec.tp_replicated
        for spec in kind.specs
    )


def _heads_of(config, split, ranks):
    """(the model's number of heads, None), or (None, the reason for which the heads cannot be split into ranges)."""
    heads = getattr(config.model_config, "get_total_num_kv_heads", lambda: None)()
    if any(kind.is_state for kind in split):
        return None, "the model's states are divided by ranks, not by heads"
    if not heads:
        return None, "vLLM does not report how many heads the model has"
    share = max(1, heads // ranks)
    for spec in [spec for kind in split for spec in kind.specs]:
        packed = [name for name in ("num_head_slots", "state_content_bytes") if getattr(spec, name, None) is not None]
        if packed or getattr(spec, "tokens_per_state", 1) != 1:
            return None, "the caches of the model's layers are not divided by heads"
        if getattr(spec, "num_kv_heads", None) != share:
            return None, f"a layer has {getattr(spec, 'num_kv_heads', 'no')} heads on a rank, where {share} of {heads} are expected"
    if not _is_drafts_alike(config.speculative_config, heads, ranks):
        return None, "the draft model has another number of heads or ranks than the model"
    if not counts_of(heads, ranks):
        return None, f"{ranks} ranks do not share {heads} heads evenly"
    return heads, None


def _configuration_of(model):
    """The model's text configuration, and the overrides of its layers."""
    config = getattr(model, "hf_text_config", None)
    own = getattr(getattr(model, "model_arch_config", None), "per_layer_overrides", None)
    return [config.to_dict() if config is not None else {}, own]


def _is_drafts_alike(speculative, heads, ranks):
    """Whether there is no draft model, or it has as many heads and ranks as the model."""
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return True
    shared = getattr(getattr(speculative, "draft_parallel_config", None), "tensor_parallel_size", None)
    return shared == ranks and draft.get_total_num_kv_heads() == heads


def _axis_of(kind, name, cache):
    """The dimension of the heads, counted from the last one."""
    spec, shape = kind.layers[name], tuple(cache.shape)
    heads = spec.num_kv_heads
    content = spec.unpadded_page_size_bytes // (heads * spec.block_size * cache.element_size())
    if len(shape) == 4 and (shape[1], shape[3]) == (heads, content):
        return -3
    if len(shape) == 5 and (shape[1], shape[3], 2 * shape[4]) == (2, heads, content):
        return -2
    raise ValueError(f"head_ranges: the layer {name} has a cache of the shape {list(shape)}, and the dimension of its {heads} heads is unknown: remove the setting")
