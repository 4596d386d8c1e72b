"""Sessions that requests name: the server holds a conversation's blocks from one turn to the next, counts once what its forks share, and in a
cluster gives the conversation's chain an owner.

A turn counts when its request is over and its blocks are stored. All of this runs in the link's thread.
"""

import time
from collections import OrderedDict
from typing import NamedTuple

import kvarts

#: Seconds that a session lasts after a turn: a longer lease needs the right to pin.
LEASE = 600.0
#: Open sessions, and their blocks together, that one engine knows at most; the session whose last turn was the earliest is closed first.
SESSIONS, BLOCKS = 4096, 1 << 20


class Turn(NamedTuple):
    """A request of a conversation. `parent`: the conversation that it was forked from; `shared`: leading blocks that other conversations have, too;
    `ends`: whether it is the last turn."""

    name: str
    parent: str | None = None
    shared: int = 0
    ends: bool = False


class _Open:
    """A session on the server. `keys`: its blocks; `until`: when its lease ends."""

    def __init__(self, client, session, keys):
        self.client, self.session, self.keys, self.until = client, session, keys, time.monotonic() + LEASE

    def is_usable(self, client):
        return self.client is client and time.monotonic() < self.until


class Sessions:
    """`columns`: group and rank of each column whose blocks are held."""

    def __init__(self, columns, sessions=SESSIONS, blocks=BLOCKS):
        self._columns, self._sessions, self._blocks = columns, sessions, blocks
        self._open, self._count = OrderedDict(), 0  # name -> _Open; blocks of all of them

    def go_on(self, client, pages, keys, turn):
        """A turn is over and has these blocks, by keys of 32 bytes. Says whether the session was `opened`, `forked` or `extended` for it. Raises what
        the server answers."""
        try:
            how = self._gone_on(client, pages, keys, turn)
        except kvarts.Refused as error:
            if error.reason != "LeaseEnded":
                raise
            # The lease of this session or of its parent ended meanwhile, or the server was started again.
            for name in (turn.name, turn.parent):
                self._forgotten(name)
            how = self._gone_on(client, pages, keys, turn)
        if turn.ends:
            self._end(client, turn.name)
        while self._open and (len(self._open) > self._sessions or self._count > self._blocks):
            self._end(client, next(iter(self._open)))
        return how

    def _gone_on(self, client, pages, keys, turn):
        # While a session is used it is in no table: where a call fails, its lease is what ends it.
        known = self._forgotten(turn.name)
        parent = self._open.get(turn.parent)
        if known is not None and known.is_usable(client):
            how, shared = "extended", _common(known.keys, keys)
            if shared < len(known.keys):
                # The conversation goes on from an earlier place than its end.
                known, before = _Open(client, known.session.fork(shared), known.keys[:shared]), known
                before.session.close()
        elif parent is not None and parent.is_usable(client) and (shared := _common(parent.keys, keys)):
            how, known = "forked", _Open(client, parent.session.fork(shared), parent.keys[:shared])
        else:
            how, shared = "opened", len(keys)
            session = client.session(pages, keys, columns=self._columns, shared_blocks=min(turn.shared, len(keys)), lease=LEASE)
            known = _Open(client, session, keys)
        if shared < len(keys):
            known.session.extend(keys[shared:])
        known.session.hold()
        known.keys, known.until = keys, time.monotonic() + LEASE
        self._open[turn.name] = known
        self._count += len(keys)
        return how

    def _forgotten(self, name):
        known = self._open.pop(name, None)
        if known is not None:
            self._count -= len(known.keys)
        return known

    def _end(self, client, name):
        known = self._forgotten(name)
        if known.is_usable(client):
            known.session.close()


def _common(one, other):
    """How many leading blocks both have."""
    return next((at for at, (own, their) in enumerate(zip(one, other)) if own != their), min(len(one), len(other)))
