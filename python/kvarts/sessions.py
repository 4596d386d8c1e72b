"""Sessions that requests name. The server holds a conversation's blocks from one turn to the next, counts blocks that forks share once, and in a
cluster assigns an owner to the conversation's chain.

A turn is recorded when its request has ended and its blocks are stored. All methods run in one thread (`session_calls`).
"""

import time
from collections import OrderedDict
from typing import NamedTuple

import kvarts

#: Seconds that a session lasts after a turn. A longer lease requires the right to pin.
LEASE = 600.0
#: The limits of an engine's open sessions, and of their blocks together. Beyond a limit, the session with the oldest last turn is closed.
SESSIONS, BLOCKS = 4096, 1 << 20
#: The limit of attempts of a turn, each after another session was closed to make room.
_TRIES = 16


class Turn(NamedTuple):
    """A request of a conversation. `parent`: the conversation from which it was forked; `shared`: the number of leading blocks that other conversations
    share; `ends`: whether it is the last turn."""

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
            # The session then ends with its lease.
            pass


class Sessions:
    """The open sessions of an engine. `columns`: group and rank of each column whose blocks are held."""

    def __init__(self, columns, sessions=SESSIONS, blocks=BLOCKS):
        self._columns, self._sessions, self._blocks = columns, sessions, blocks
        self._open, self._count = OrderedDict(), 0  # name -> _Open; blocks of all of them

    def go_on(self, client, pages, keys, turn):
        """Records a turn that has ended, with its blocks as keys of 32 bytes. Returns whether the turn `opened`, `forked` or `extended` the session.
        Raises the server's errors."""
        # Other sessions are closed for at most as many blocks as this turn has.
        left = len(keys)
        for tried in range(_TRIES):
            try:
                how = self._gone_on(client, pages, keys, turn)
                break
            except kvarts.Refused as error:
                if error.reason == "LeaseEnded":
                    # The lease of this session has ended, or the server was restarted. After a second such error, the parent's lease has ended, too.
                    if tried:
                        self._forgotten(turn.parent)
                elif error.reason == "PinCap" and left > 0 and (oldest := self._oldest_but(turn.parent)) is not None:
                    # The session with the oldest last turn is closed first.
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
                # The conversation continues from a block before its end.
                before, known = known, None
                known = self._forked(client, before, keys)
            parent = self._open.get(turn.parent)
            if known is None and parent is not None and parent.is_usable(client):
                how, known = "forked", self._forked(client, parent, keys)
            if known is None:
                # The session must have at least one block behind the shared ones.
                how, shared = "opened", min(turn.shared, len(keys) - 1)
                known = _Open(client, client.session(pages, keys, columns=self._columns, shared_blocks=shared, lease=LEASE), keys)
            if len(known.keys) < len(keys):
                known.session.extend(keys[len(known.keys) :])
            # The server holds the parent's blocks as long as either session lasts.
            known.session.hold() if known.base < len(keys) else known.session.renew()
        except (kvarts.Refused, kvarts.Invalid):
            # A session that cannot continue must not hold blocks.
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
        """A session that continues from the common prefix of both. `None` if there is no common prefix, or too many forks of forks."""
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
    """The number of leading blocks that both have."""
    return next((at for at, (own, their) in enumerate(zip(one, other)) if own != their), min(len(one), len(other)))
