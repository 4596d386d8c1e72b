"""Events for the routers in front of vLLM about chunks in its Kvarts tier: vLLM's own events of tiers, which vLLM publishes with the chunks' tokens.

The tier knows which chunks it has stored and found, and the server knows whether they are still stored. The chunks of each group are reported
separately.
"""

import dataclasses

import kvarts

from .events import Follower, Ledger
from .vllm_compat import Locality, Medium, OffloadingEvent, get_offload_block_hash, get_offload_group_idx

#: Further fields of vLLM's events, if its version has them: the chunks are on this engine's own server, and their removal is reported.
_MORE = {"locality": Locality.LOCAL, "ownership": "kvarts", "removal_expected": True}


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """The description of a chunk: its name, for the event of its removal."""

    name: bytes


class _Follower(Follower):
    """A follower whose ledger names blocks by key and group."""

    def _happened_to(self, event):
        return 0, [(key, event.group) for key in event.keys]

    def _here(self, pages, keys):
        return pages.exists([key for key, _ in keys], group=[group for _, group in keys])


class Announcer:
    """The announcer of a tier. `connect()`: as for `Follower`; `groups`: those of the engine's caches."""

    def __init__(self, connect, groups, pause):
        self._ledger = Ledger(1)
        self._follower = _Follower(self._ledger, connect, [(group, 0) for group in groups], pause)
        fields = {field.name for field in dataclasses.fields(OffloadingEvent)}
        self._more = {name: value for name, value in _MORE.items() if name in fields}

    def storing(self, chunks):
        """Records a put of these chunks that begins; returns the argument for `stored`."""
        self._describe(chunks)
        return self._ledger.ask()

    def stored(self, asked, chunks, results):
        names = [_named(chunk) for chunk in chunks]
        self._ledger.answer(asked, [name for name, here in zip(names, results) if here], [True] * sum(results))
        # A chunk that was not stored now may have been stored before.
        self._ledger.doubt([name for name, here in zip(names, results) if not here])

    def found(self, chunks, results):
        """Takes the result of a look-up. The found chunks may be on another node, so the follower looks up which of them this server has."""
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
    """The name of a chunk in the server's events: (key, group)."""
    key = get_offload_block_hash(chunk)
    return bytes(key) if len(key) == 32 else kvarts.key(key), get_offload_group_idx(chunk)
