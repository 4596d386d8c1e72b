"""How vLLM's caches are split into columns that do not depend on how many ranks the engine has.

vLLM gives a cache of attention layers as `(blocks, heads, tokens, content of a head)`, or as `(blocks, 2, tokens, heads, size of a head)`, in
any order in memory. Its ranks have equal shares of the model's heads in the order of ranks, or several of them the same head. Anything else
(states that are shared out, caches whose parts are no heads) is kept by ranks: such an engine finds only what one of as many ranks has stored.
"""

import dataclasses

from . import vllm_compat as kinds
from .link import differing
from .ranges import counts_of, expect_count, expect_even, expect_number, ranges_of


class Columns:
    """The columns of a model's groups. `kinds_of`: its groups; `alike`: how many ranks are known to have the same caches; `given`: the number
    of ranges that the operator names."""

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
            raise ValueError(f"head_ranges: {why}; remove the setting: engines with the same number of ranks share their blocks anyway")

    def ranges(self, kind):
        """What this rank has of a group."""
        return ranges_of(self._rank, self._ranks, 1 if is_alike(kind) else self.count)

    def fact(self):
        """What of it decides bytes."""
        return ["ranks" if self._heads is None else "heads", self.count]

    def described(self, kind):
        """The specifications of a group's layers, of one range: they do not say how many an engine's rank has, nor how pages are padded."""
        return [differing(self._of_range(kind, spec)) for spec in kind.specs]

    def _of_range(self, kind, spec):
        changes = {"page_size_padded": None} if getattr(spec, "page_size_padded", None) is not None else {}
        if self._heads is not None and not is_alike(kind):
            changes["num_kv_heads"] = self._heads // self.count
        return dataclasses.replace(spec, **changes)

    def split(self, kind, name, cache):
        """Of each column that this rank has its part of a layer's cache: views of it."""
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
    """(the model's number of heads, why they cannot be split into ranges)"""
    heads = getattr(config.model_config, "get_total_num_kv_heads", lambda: None)()
    if any(kind.is_state for kind in split):
        return None, "the model's states are kept by ranks"
    if not heads:
        return None, "vLLM does not say how many heads the model has"
    share = max(1, heads // ranks)
    for spec in [spec for kind in split for spec in kind.specs]:
        packed = [name for name in ("num_head_slots", "state_content_bytes") if getattr(spec, name, None) is not None]
        if packed or getattr(spec, "tokens_per_state", 1) != 1:
            return None, "what its layers keep for a token is not told apart by heads"
        if getattr(spec, "num_kv_heads", None) != share:
            return None, f"a layer has {getattr(spec, 'num_kv_heads', 'no')} heads on a rank, where {share} of {heads} are expected"
    if not _is_drafts_alike(config.speculative_config, heads, ranks):
        return None, "the draft model has other heads"
    if not counts_of(heads, ranks):
        return None, f"{ranks} ranks do not share {heads} heads evenly"
    return heads, None


def _configuration_of(model):
    """What the model's configuration says of its text, with what layers have of their own."""
    config = getattr(model, "hf_text_config", None)
    own = getattr(getattr(model, "model_arch_config", None), "per_layer_overrides", None)
    return [config.to_dict() if config is not None else {}, own]


def _is_drafts_alike(speculative, heads, ranks):
    """Whether a draft's heads, if it has any, are as many as the model's and are shared out in the same way."""
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
    raise ValueError(f"head_ranges: {name} has a cache of the shape {list(shape)}: the dimension of its {heads} heads is unknown")
