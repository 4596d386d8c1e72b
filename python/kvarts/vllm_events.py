"""Events for the routers in front of vLLM about blocks in Kvarts: vLLM's own KV events, with the medium `STORAGE`.

vLLM publishes the events beside those of its own blocks, with its sequence numbers and its replay (`--kv-events-config`). A block is reported when all
of its columns are stored: every group with attention over all tokens, every range of heads and every stage of the pipeline. Windows and states are not
reported, because routers count a prefix once.
"""

from array import array

import kvarts

from .events import Follower, Ledger
from .vllm_compat import (
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    generate_block_hash_extra_keys,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)

#: The locality of the blocks for this engine: only blocks of its own server are reported.
_LOCALITY = "LOCAL"


class _Run:
    """The common data of consecutive blocks of a request: all of their tokens, the extra keys of each of vLLM's blocks (`None`: no block has any), and
    the adapter."""

    __slots__ = ("extras", "lora", "tokens")

    def __init__(self, tokens, extras, lora):
        self.tokens, self.extras, self.lora = tokens, extras, lora


class _Described:
    """The description of a block for routers. `name`: the hashes of vLLM's blocks in it; `at`: its index in its run."""

    __slots__ = ("at", "name", "parent", "run")

    def __init__(self, name, parent, run, at):
        self.name, self.parent, self.run, self.at = name, parent, run, at


class Announcer:
    """The announcer of an engine. `plan`: the engine's blocks; `naming`: their identity, as arguments of `Client.pages`; `groups`: those of all
    stages."""

    def __init__(self, plan, naming, groups, settings):
        self._plan = plan
        self._group, self._block_tokens, self._spec = plan.main
        columns = [(group.number, rank) for group in groups if group.window is None for rank in group.ranks]
        self._ledger = Ledger(len(columns))
        self._follower = Follower(self._ledger, lambda: settings.asking(naming), columns, settings.pause)

    def offered(self, request, first, last):
        """Records a put of these blocks that begins; returns the argument for `saved`."""
        keys = self._keys(request, first, last)
        self._ledger.describe(zip(keys, self._described(request, first, last)))
        return self._ledger.ask(), keys

    def saved(self, offered, stored):
        """Records that the put has stored this number of leading blocks."""
        asked, keys = offered
        self._ledger.answer(asked, keys[:stored], [True] * stored)
        self._ledger.doubt(keys[stored:])

    def found(self, request, blocks):
        """Records that a look-up has found this number of leading blocks, on any node."""
        keys = self._keys(request, 0, blocks)
        if lacking := self._ledger.lacks(keys):
            begin = 0
            for at in range(1, len(lacking) + 1):
                # A run has only blocks that need a description, because it is kept as a whole.
                if at == len(lacking) or lacking[at] != lacking[at - 1] + 1:
                    first, last = lacking[begin], lacking[at - 1] + 1
                    self._ledger.describe(zip(keys[first:last], self._described(request, first, last)))
                    begin = at
            self._ledger.doubt([keys[at] for at in lacking])

    def look(self, manager):
        """Records events that vLLM itself is about to publish."""
        queue = getattr(manager.block_pool, "kv_event_queue", ())
        if any(isinstance(event, AllBlocksCleared) for event in queue):
            self._ledger.cleared()

    @property
    def has_news(self):
        return self._ledger.has_news

    def take(self):
        """The pending events, for vLLM's publisher."""
        gone, there = self._ledger.take()
        events = []
        if gone:
            hashes = [one for _, name in gone for one in name]
            events.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM_STORAGE, group_idx=self._group, locality=_LOCALITY))
        run = []
        for block in there:
            if run and (block.parent != run[-1].name[-1] or block.run.lora != run[-1].run.lora):
                events.append(self._stored(run))
                run = []
            run.append(block)
        if run:
            events.append(self._stored(run))
        return events

    def close(self, timeout):
        self._follower.close(timeout)

    def _keys(self, request, first, last):
        """The keys in the form of the server's events."""
        return [key if len(key) == 32 else kvarts.key(key) for key in self._plan.keys(request, first, last)]

    def _described(self, request, first, last):
        """The descriptions of these blocks of a request."""
        size, per_block = self._block_tokens, self._plan.block_tokens // self._block_tokens
        hashes = resolve_block_hashes(request.block_hashes, self._plan.hash_tokens, size)
        lora = request.lora_request
        lora = (lora.adapter_id, lora.name) if lora is not None else (None, None)
        first, last = first * per_block, last * per_block
        extras, _ = generate_block_hash_extra_keys(request, first * size, last * size, 0)
        if extras is not None:
            extras = [generate_block_hash_extra_keys(request, n * size, (n + 1) * size, 0)[0] for n in range(first, last)]
        run = _Run(array("I", request.all_token_ids[first * size : last * size]), extras, lora)
        names = [maybe_convert_block_hash(one) for one in hashes[first:last]]
        before = [maybe_convert_block_hash(hashes[first - 1]) if first else None, *names[per_block - 1 :: per_block]]
        return [_Described(tuple(names[at * per_block : (at + 1) * per_block]), before[at], run, at) for at in range(len(names) // per_block)]

    def _stored(self, run):
        (lora_id, lora_name), tokens, extras = run[0].run.lora, [], []
        per_block = self._plan.block_tokens // self._block_tokens
        for same, first, last in _pieces(run):
            tokens += same.tokens[first * self._plan.block_tokens : last * self._plan.block_tokens].tolist()
            extras += same.extras[first * per_block : last * per_block] if same.extras is not None else [None] * ((last - first) * per_block)
        return BlockStored(
            block_hashes=[one for block in run for one in block.name],
            parent_block_hash=run[0].parent,
            token_ids=tokens,
            block_size=self._block_tokens,
            lora_id=lora_id,
            medium=MEDIUM_STORAGE,
            lora_name=lora_name,
            extra_keys=to_event_extra_keys(extras),
            group_idx=self._group,
            kv_cache_spec_kind=get_kv_cache_spec_kind(self._spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(self._spec),
            locality=_LOCALITY,
        )


def _pieces(blocks):
    """Splits blocks into consecutive blocks of one run: (run, first, behind the last)."""
    begin = 0
    for at in range(1, len(blocks) + 1):
        first = blocks[begin]
        if at == len(blocks) or blocks[at].run is not first.run or blocks[at].at != first.at + at - begin:
            yield first.run, first.at, first.at + at - begin
            begin = at
