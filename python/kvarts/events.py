"""What routers are told of a store's blocks, by the engine whose blocks they are: which are there, and which are not any more.

The engine knows what a block is (its tokens, the block before it), and the server knows whether it is there. A `Ledger` brings both together,
a `Follower` keeps it at what the server says. What holds, of blocks that this engine has described:

- Once the follower has come to the end of the server's events, and what the ledger gave was told, routers have been told of blocks that the store has
  and of no others; and of all of these, but for what memory bounds: the blocks that were described last.
- Whatever order events, answers and this engine's own puts arrive in: of a block the newest event counts, and of answers those that were
  asked for before no event of the block came.
- Where events were lost, after a server's end or where this engine was too slow, every block is asked for again; what is gone is told as gone.
- No thread of the engine's waits here.
"""

import threading
import time
from collections import OrderedDict

import kvarts

from .link import logger

#: Blocks of which routers are told at most: of one more the oldest is told as gone.
TOLD = 1 << 20
#: Blocks that can be told of, or told of again, without their request.
DESCRIBED = 1 << 16
#: Blocks that are asked for at once.
_SOME = 4096
#: How long the thread waits for events before it looks for questions.
_LOOK = 0.02
#: Seconds after which the blocks of a server that is away are told as gone.
_AWAY = 30.0


class _Block:
    """A block of which it is known what it is. `columns`: of those of which events told, whether they are there, and when that came (`None`: of none); `rest`: whether
    all others are, or `None`; `emptied`: when all of them went; `asked`: when what was answered last was asked for."""

    __slots__ = ("asked", "columns", "description", "emptied", "rest")

    def __init__(self, description):
        self.description, self.columns, self.rest, self.emptied, self.asked = description, None, None, 0, 0


class Ledger:
    """`columns`: how many columns a block has; all of them must be there. `told`, `described`: how many blocks at most. For several threads."""

    def __init__(self, columns, told=TOLD, described=DESCRIBED):
        self._count, self._most, self._described = columns, told, described
        self._lock = threading.Lock()
        self._known = OrderedDict()  # key -> _Block
        self._here = set()  # of those that are known or told
        # In order, because the oldest goes where there are too many: a plain dict would look for it from its beginning each time.
        self._told = OrderedDict()  # key -> its description, as far as a removal needs it
        self._changed = {}  # keys of which something is to be told, in order
        self._doubted = {}  # keys that are to be asked for
        self._time = 0

    # Of the engine.

    def lacks(self, keys):
        """Those of these blocks that nothing is known of, and that routers were not told of."""
        with self._lock:
            return [at for at, key in enumerate(keys) if key not in self._known and key not in self._told]

    def describe(self, blocks):
        """What blocks are: pairs of their keys and of what `take` is to give. A question from then on finds whatever happens to them."""
        with self._lock:
            for key, description in blocks:
                block = self._known.get(key)
                if block is None:
                    block = self._known[key] = _Block(description)
                    # What was told without it is there.
                    block.rest = key in self._here or None
                else:
                    self._known.move_to_end(key)
            while len(self._known) > self._described:
                key, _ = self._known.popitem(last=False)
                if key not in self._told:
                    self._here.discard(key)

    def ask(self):
        """A question begins, as a put does: what `answer` takes."""
        with self._lock:
            self._time += 1
            return self._time

    def answer(self, asked, keys, found):
        """What the server answered: of each block, whether all of it is there."""
        with self._lock:
            known, here, changed = self._known, self._here, self._changed
            for key, is_here in zip(keys, found):
                block = known.get(key)
                if block is None:
                    if not is_here:
                        self._place(key, False)
                elif asked < block.asked:
                    # Which of two holds, or what happened since, is not known.
                    self._doubted[key] = None
                else:
                    block.rest, block.asked = is_here if block.emptied < asked else None, asked
                    if block.columns:
                        block.columns = {column: seen for column, seen in block.columns.items() if seen[1] >= asked}
                        self._place(key, self._is_whole(block))
                        if not is_here and block.columns:
                            # It was stored while it was asked for.
                            self._doubted[key] = None
                    elif block.rest:
                        here.add(key)
                        changed[key] = None
                    else:
                        self._place(key, False)

    def doubt(self, keys):
        """It is not known whether these are there: they are asked for."""
        with self._lock:
            self._doubted.update(dict.fromkeys(keys))

    def cleared(self):
        """Routers have forgotten all that they were told."""
        with self._lock:
            self._told.clear()
            self._here.intersection_update(self._known)
            self._changed.update(dict.fromkeys(key for key in self._known if key in self._here))

    def take(self):
        """What is to be told: what was told of blocks that are gone, and descriptions of those that are there."""
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

    # Of the follower.

    def happened(self, is_stored, column, keys):
        """An event of each of these blocks."""
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
                        # Some column was not there; it may have been this one.
                        self._doubted[key] = None
                elif not is_stored and key in told:
                    self._place(key, False)

    def emptied(self):
        """Every block is gone."""
        with self._lock:
            for block in self._known.values():
                block.columns, block.rest, block.emptied = None, None, self._time
            self._changed.update(dict.fromkeys(self._told))
            self._here.clear()

    def lost(self):
        """Events were lost: what holds from now on is asked for."""
        with self._lock:
            self._time += 1
            for block in self._known.values():
                # What was asked before does not count.
                block.columns, block.rest, block.asked = None, None, self._time
            # What was told stays told until it is known; of others nothing is told.
            self._here.intersection_update(self._told)
            self._doubted = dict.fromkeys([*self._told, *self._known])

    def away(self):
        """Nothing can be loaded any more; `lost` follows once the server is back."""
        with self._lock:
            for block in self._known.values():
                block.columns, block.rest = None, None
            self._changed.update(dict.fromkeys(self._told))
            self._here.clear()

    def doubted(self):
        """Some blocks that are to be asked for."""
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
    """Keeps a ledger at what a server says, in a thread of its own. `connect()` gives a client and a handle of the blocks that are asked for;
    `columns`: (group, rank) of each column; `pause`: seconds between two tries."""

    def __init__(self, ledger, connect, columns, pause=1.0):
        self._ledger, self._connect, self._pause = ledger, connect, pause
        self._columns, self._groups = columns, {group for group, _ in columns}
        self._over = threading.Event()
        self._after = None  # the event up to which all is known
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
                    logger.warning("kvarts: the server's events cannot be read, so routers get no events of the store: %s", error)
                self._why = str(error)
            except Exception:  # a defect here must not end the thread
                logger.exception("kvarts: the server's events cannot be read")
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

    # What the ledger calls blocks.

    def _happened_to(self, event):
        """The column and the blocks of an event."""
        return (event.group, event.coordinate), event.keys

    def _here(self, pages, keys):
        found = [True] * len(keys)
        for group, rank in self._columns:
            found = [one and other for one, other in zip(found, pages.exists(keys, group=group, rank=rank))]
        return found

    def _ask(self, pages, keys):
        """Whether the server itself has these, in every column."""
        asked = self._ledger.ask()
        try:
            found = self._here(pages, keys)
        except BaseException:
            self._ledger.doubt(keys)
            raise
        self._ledger.answer(asked, keys, found)
