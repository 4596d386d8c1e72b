"""Sessions that requests name: the server holds a conversation's blocks from one turn to the next, counts once what its forks share, and in a
cluster gives the conversation's chain an owner.

A turn counts when its request is over and its blocks are stored. All of this runs in one thread (`session_calls`).
"""

import time
from collections import OrderedDict
from typing import NamedTuple

import kvarts

#: Seconds that a session lasts after a turn: a longer lease needs the right to pin.
LEASE = 600.0
#: Open sessions, and their blocks together, that one engine knows at most; the session whose last turn was the earliest is closed first.
SESSIONS, BLOCKS = 4096, 1 << 20
#: How often a turn is tried again after others have made way.
_TRIES = 16


class Turn(NamedTuple):
    """A request of a conversation. `parent`: the conversation that it was forked from; `shared`: leading blocks that other conversations have, too;
    `ends`: whether it is the last turn."""

    name: str
    parent: str | None = None
    shared: int = 0
    ends: bool = False


class _Open:
    """A session on the server. `keys`: its blocks, of which the first `base` are its parent's; `until`: when its lease ends."""

    def __init__(self, client, session, keys, base=0):
        self.client, self.session, self.keys, self.base, self.until = client, session, keys, base, time.monotonic() + LEASE

    def is_usable(self, client):
        return self.client is client and time.monotonic() < self.until

    def close(self):
        try:
            self.session.close()
        except kvarts.Error:
            # Then its lease ends it.
            pass


class Sessions:
    """`columns`: group and rank of each column whose blocks are held."""

    def __init__(self, columns, sessions=SESSIONS, blocks=BLOCKS):
        self._columns, self._sessions, self._blocks = columns, sessions, blocks
        self._open, self._count = OrderedDict(), 0  # name -> _Open; blocks of all of them

    def go_on(self, client, pages, keys, turn):
        """A turn is over and has these blocks, by keys of 32 bytes. Says whether the session was `opened`, `forked` or `extended` for it. Raises what
        the server answers."""
        # Others make way for no more blocks than this turn has.
        left = len(keys)
        for tried in range(_TRIES):
            try:
                how = self._gone_on(client, pages, keys, turn)
                break
            except kvarts.Refused as error:
                if error.reason == "LeaseEnded":
                    # This session's ended meanwhile, or the server was started again; or, as it seems then, its parent's.
                    if tried:
                        self._forgotten(turn.parent)
                elif error.reason == "PinCap" and left > 0 and (oldest := self._oldest_but(turn.parent)) is not None:
                    # Conversations that went on more recently are worth more.
                    left -= len(self._open[oldest].keys)
                    self.end(client, oldest)
                else:
                    raise
        else:
            how = self._gone_on(client, pages, keys, turn)
        if turn.ends:
            self.end(client, turn.name)
        while self._open and (len(self._open) > self._sessions or self._count > self._blocks):
            self.end(client, next(iter(self._open)))
        return how

    def _oldest_but(self, name):
        return next((other for other in self._open if other != name), None)

    def _gone_on(self, client, pages, keys, turn):
        known = self._forgotten(turn.name)
        if known is not None and not known.is_usable(client):
            known = None
        how, before = "extended", None
        try:
            if known is not None and _common(known.keys, keys) < len(known.keys):
                # The conversation goes on from an earlier place than its end.
                before, known = known, None
                known = self._forked(client, before, keys)
            parent = self._open.get(turn.parent)
            if known is None and parent is not None and parent.is_usable(client):
                how, known = "forked", self._forked(client, parent, keys)
            if known is None:
                # Behind the shared blocks there must be one of its own.
                how, shared = "opened", min(turn.shared, len(keys) - 1)
                known = _Open(client, client.session(pages, keys, columns=self._columns, shared_blocks=shared, lease=LEASE), keys)
            if len(known.keys) < len(keys):
                known.session.extend(keys[len(known.keys) :])
            # What is its parent's is held for as long as either lasts.
            known.session.hold() if known.base < len(keys) else known.session.renew()
        except (kvarts.Refused, kvarts.Invalid):
            # Nothing is held for a session that does not go on.
            if known is not None:
                known.close()
            raise
        finally:
            if before is not None:
                before.close()
        known.keys, known.until = keys, time.monotonic() + LEASE
        self._open[turn.name] = known
        self._count += len(keys)
        return how

    @staticmethod
    def _forked(client, parent, keys):
        """A session that goes on from what both begin with; `None` where that is nothing, or where forks of forks are too many."""
        shared = _common(parent.keys, keys)
        try:
            return _Open(client, parent.session.fork(shared), parent.keys[:shared], shared) if shared else None
        except kvarts.Invalid:
            return None

    def _forgotten(self, name):
        known = self._open.pop(name, None)
        if known is not None:
            self._count -= len(known.keys)
        return known

    def end(self, client, name):
        """The conversation has no further turn."""
        known = self._forgotten(name)
        if known is not None and known.is_usable(client):
            known.close()


def _common(one, other):
    """How many leading blocks both have."""
    return next((at for at, (own, their) in enumerate(zip(one, other)) if own != their), min(len(one), len(other)))
