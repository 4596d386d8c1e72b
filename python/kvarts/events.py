"""Events for routers: the engine reports which of its blocks the store holds, and which ones the store no longer holds.

The engine knows the content of a block (its tokens and its parent), and the server knows whether the block is stored. A `Ledger` combines both, and
a `Follower` keeps the ledger up to date from the server's events. Guarantees, for blocks that this engine has described:

- After the follower has read all of the server's events and the engine has published the ledger's reports, routers know exactly the blocks that
  the store holds. Limits on memory restrict this to the blocks that were described last.
- Events, answers and this engine's own puts may arrive in any order. The newest event of a block counts, and an answer does not override an event
  that arrived after its question.
- After lost events (the server ended, or this engine was too slow), the follower looks up every block again. Absent blocks are reported as removed.
- No thread of the engine waits in this module.
"""

import threading
import time
from collections import OrderedDict

import kvarts

from .link import logger

#: The limit of reported blocks. For each block beyond it, the oldest one is reported as removed.
TOLD = 1 << 20
#: The limit of descriptions. A described block can be reported without its request.
DESCRIBED = 1 << 16
#: Blocks of one look-up.
_SOME = 4096
#: Seconds that the thread waits for events before it checks for pending look-ups.
_LOOK = 0.02
#: Seconds after which the blocks of an unreachable server are reported as removed.
_AWAY = 30.0


class _Block:
    """A described block. `columns`: for each column with an event, whether it is stored, and the time of the event (`None`: no events); `rest`:
    whether all other columns are stored, or `None` if unknown; `emptied`: the time at which all columns were removed; `asked`: the time of the
    question that was answered last."""

    __slots__ = ("asked", "columns", "description", "emptied", "rest")

    def __init__(self, description):
        self.description, self.columns, self.rest, self.emptied, self.asked = description, None, None, 0, 0


class Ledger:
    """The blocks that routers should know. `columns`: the number of columns of a block; a block counts as stored if all of them are. `told`,
    `described`: the limits of reported and of described blocks. Methods may be called from any thread."""

    def __init__(self, columns, told=TOLD, described=DESCRIBED):
        self._count, self._most, self._described = columns, told, described
        self._lock = threading.Lock()
        self._known = OrderedDict()  # key -> _Block
        self._here = set()  # stored blocks, among those that are described or reported
        # Ordered, because the oldest block is dropped at the limit: a plain dict would search for it from its beginning each time.
        self._told = OrderedDict()  # reported key -> the part of its description that a removal needs
        self._changed = {}  # keys with a pending report, in order
        self._doubted = {}  # keys to look up
        self._time = 0

    # Calls of the engine.

    def lacks(self, keys):
        """Returns the positions of the blocks that are neither described nor reported to routers."""
        with self._lock:
            return [at for at, key in enumerate(keys) if key not in self._known and key not in self._told]

    def describe(self, blocks):
        """Adds descriptions of blocks: pairs of a key and the description that `take` returns. Call it before `ask`, so that no later change of
        these blocks is missed."""
        with self._lock:
            for key, description in blocks:
                block = self._known.get(key)
                if block is None:
                    block = self._known[key] = _Block(description)
                    # A block that is reported without a description is stored.
                    block.rest = key in self._here or None
                else:
                    self._known.move_to_end(key)
            while len(self._known) > self._described:
                key, _ = self._known.popitem(last=False)
                if key not in self._told:
                    self._here.discard(key)

    def ask(self):
        """Begins a question (a look-up or a put); returns its time, which `answer` takes."""
        with self._lock:
            self._time += 1
            return self._time

    def answer(self, asked, keys, found):
        """Takes the server's answer: for each block, whether all of its columns are stored."""
        with self._lock:
            known, here, changed = self._known, self._here, self._changed
            for key, is_here in zip(keys, found):
                block = known.get(key)
                if block is None:
                    if not is_here:
                        self._place(key, False)
                elif asked < block.asked:
                    # A later answer or event exists: the present state is unknown.
                    self._doubted[key] = None
                else:
                    block.rest, block.asked = is_here if block.emptied < asked else None, asked
                    if block.columns:
                        block.columns = {column: seen for column, seen in block.columns.items() if seen[1] >= asked}
                        self._place(key, self._is_whole(block))
                        if not is_here and block.columns:
                            # The block was stored during the look-up.
                            self._doubted[key] = None
                    elif block.rest:
                        here.add(key)
                        changed[key] = None
                    else:
                        self._place(key, False)

    def doubt(self, keys):
        """Marks blocks whose state is unknown. The follower looks them up."""
        with self._lock:
            self._doubted.update(dict.fromkeys(keys))

    def cleared(self):
        """Records that routers have dropped all reported blocks."""
        with self._lock:
            self._told.clear()
            self._here.intersection_update(self._known)
            self._changed.update(dict.fromkeys(key for key in self._known if key in self._here))

    def take(self):
        """Returns the pending reports: (key, name) of removed blocks, and the descriptions of stored blocks."""
        gone, there = [], []
        with self._lock:
            changed, self._changed = self._changed, {}
            for key in changed:
                is_here, is_told = key in self._here, key in self._told
                if is_told and not is_here:
                    gone.append((key, self._told.pop(key)))
                elif is_here and not is_told and key in self._known:
                    description = self._known[key].description
                    self._told[key] = getattr(description, "name", None)
                    there.append(description)
            while len(self._told) > self._most:
                key, name = self._told.popitem(last=False)
                gone.append((key, name))
                self._here.discard(key)
        return gone, there

    @property
    def has_news(self):
        return bool(self._changed)

    # Calls of the follower.

    def happened(self, is_stored, column, keys):
        """Takes an event of each of these blocks."""
        with self._lock:
            known, told, now = self._known, self._told, self._time
            for key in keys:
                block = known.get(key)
                if block is not None:
                    if block.columns is None:
                        block.columns = {}
                    block.columns[column] = is_stored, now
                    if not is_stored or self._is_whole(block):
                        self._place(key, is_stored)
                    elif block.rest is False:
                        # Some column was absent, possibly this one.
                        self._doubted[key] = None
                elif not is_stored and key in told:
                    self._place(key, False)

    def emptied(self):
        """Records that the server removed every block."""
        with self._lock:
            for block in self._known.values():
                block.columns, block.rest, block.emptied = None, None, self._time
            self._changed.update(dict.fromkeys(self._told))
            self._here.clear()

    def lost(self):
        """Records lost events: every block is looked up again."""
        with self._lock:
            self._time += 1
            for block in self._known.values():
                # Answers to earlier questions do not count.
                block.columns, block.rest, block.asked = None, None, self._time
            # Reported blocks stay reported until their state is known. Other blocks are not reported.
            self._here.intersection_update(self._told)
            self._doubted = dict.fromkeys([*self._told, *self._known])

    def away(self):
        """Reports all blocks as removed while the server cannot be reached. `lost` follows once the server is back."""
        with self._lock:
            for block in self._known.values():
                block.columns, block.rest = None, None
            self._changed.update(dict.fromkeys(self._told))
            self._here.clear()

    def doubted(self):
        """Takes up to `_SOME` blocks whose state is unknown, for a look-up."""
        with self._lock:
            keys = []
            while self._doubted and len(keys) < _SOME:
                keys.append(self._doubted.popitem()[0])
            return keys

    def _is_whole(self, block):
        seen = block.columns or {}
        return all(is_here for is_here, _ in seen.values()) and (block.rest or len(seen) >= self._count)

    def _place(self, key, is_here):
        if is_here:
            self._here.add(key)
        else:
            self._here.discard(key)
        self._changed[key] = None


class Follower:
    """Keeps a ledger up to date from a server's events, in its own thread. `connect()` returns a client and a handle for look-ups; `columns`:
    (group, rank) of each column; `pause`: seconds between two attempts."""

    def __init__(self, ledger, connect, columns, pause=1.0):
        self._ledger, self._connect, self._pause = ledger, connect, pause
        self._columns, self._groups = columns, {group for group, _ in columns}
        self._over = threading.Event()
        self._after = None  # the last event that was read
        self._heard, self._is_away, self._why = time.monotonic(), False, None
        self._thread = threading.Thread(target=self._run, name="kvarts-events", daemon=True)
        self._thread.start()

    def close(self, timeout=10.0):
        self._over.set()
        self._thread.join(timeout)

    def _run(self):
        while not self._over.is_set():
            try:
                self._follow()
            except kvarts.Error as error:
                if str(error) != self._why:
                    logger.warning("kvarts: the server's events cannot be read; routers receive no events of the store until a retry succeeds: %s", error)
                self._why = str(error)
            except Exception:  # a defect here must not end the thread
                logger.exception("kvarts: the server's events cannot be read because of a defect in Kvarts; report it")
            if not self._is_away and time.monotonic() > self._heard + _AWAY:
                self._is_away = True
                self._ledger.away()
            # ends: after `_pause` seconds, or with `close`
            self._over.wait(self._pause)

    def _follow(self):
        client, pages = self._connect()
        try:
            stream = client.watch(after=self._after, namespace=pages.namespace, runs=True)
            if self._after is None or self._is_away:
                self._ledger.lost()
            self._is_away, self._why = False, None
            while not self._over.is_set():
                for event in stream.take(_LOOK):
                    self._happened(event)
                while doubted := self._ledger.doubted():
                    self._ask(pages, doubted)
                self._heard = time.monotonic()
        finally:
            client.close(self._pause)

    def _happened(self, event):
        self._after = event.sequence
        if event.what == "gap":
            self._ledger.lost()
        elif not event.keys:
            self._ledger.emptied()
        elif event.group in self._groups:
            self._ledger.happened(event.what == "stored", *self._happened_to(event))

    # Names of blocks in the ledger.

    def _happened_to(self, event):
        """The column and the blocks of an event."""
        return (event.group, event.coordinate), event.keys

    def _here(self, pages, keys):
        found = [True] * len(keys)
        for group, rank in self._columns:
            found = [one and other for one, other in zip(found, pages.exists(keys, group=group, rank=rank))]
        return found

    def _ask(self, pages, keys):
        """Looks up whether the server itself stores these blocks, in every column."""
        asked = self._ledger.ask()
        try:
            found = self._here(pages, keys)
        except BaseException:
            self._ledger.doubt(keys)
            raise
        self._ledger.answer(asked, keys, found)
