"""What the routers in front of vLLM are told of what its Kvarts tier has: events of vLLM's own tiers, which it publishes with the tokens that it remembers.

The tier knows which chunks it stored and found, the server what becomes of them. A chunk of each group is told of by itself.
"""

import dataclasses

import kvarts

from .events import Follower, Ledger
from .vllm_compat import Locality, Medium, OffloadingEvent, get_offload_block_hash, get_offload_group_idx

#: What vLLM's events have beside keys, medium and removal, as far as its version has it: these chunks are on this engine's own server, and
#: are told of when they go.
_MORE = {"locality": Locality.LOCAL, "ownership": "kvarts", "removal_expected": True}


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """What a removal needs to know of a chunk."""

    name: bytes


class _Follower(Follower):
    """Blocks are known by their key and their group."""

    def _happened_to(self, event):
        return 0, [(key, event.group) for key in event.keys]

    def _here(self, pages, keys):
        return pages.exists([key for key, _ in keys], group=[group for _, group in keys])


class Announcer:
    """One for each tier. `connect()`: as `Follower` takes it; `groups`: those of the engine's caches."""

    def __init__(self, connect, groups, pause):
        self._ledger = Ledger(1)
        self._follower = _Follower(self._ledger, connect, [(group, 0) for group in groups], pause)
        fields = {field.name for field in dataclasses.fields(OffloadingEvent)}
        self._more = {name: value for name, value in _MORE.items() if name in fields}

    def storing(self, chunks):
        """These are about to be stored: what `stored` takes."""
        self._describe(chunks)
        return self._ledger.ask()

    def stored(self, asked, chunks, results):
        names = [_named(chunk) for chunk in chunks]
        self._ledger.answer(asked, [name for name, here in zip(names, results) if here], [True] * sum(results))
        # It may have been there before.
        self._ledger.doubt([name for name, here in zip(names, results) if not here])

    def found(self, chunks, results):
        """What a look-up found, here or on another node: the server is asked again for its own."""
        here = [chunk for chunk, is_here in zip(chunks, results) if is_here]
        names = [_named(chunk) for chunk in here]
        if lacking := self._ledger.lacks(names):
            self._describe([here[at] for at in lacking])
            self._ledger.doubt([names[at] for at in lacking])

    def _describe(self, chunks):
        self._ledger.describe([(_named(chunk), _Chunk(bytes(chunk))) for chunk in chunks])

    @property
    def has_news(self):
        return self._ledger.has_news

    def take(self):
        gone, there = self._ledger.take()
        for removed, chunks in ((True, [name for _, name in gone]), (False, [chunk.name for chunk in there])):
            if chunks:
                yield OffloadingEvent(keys=chunks, medium=Medium.STORAGE, removed=removed, **self._more)

    def close(self, timeout):
        self._follower.close(timeout)


def _named(chunk):
    """As the server's events have it."""
    key = get_offload_block_hash(chunk)
    return bytes(key) if len(key) == 32 else kvarts.key(key), get_offload_group_idx(chunk)
