"""What SGLang's tree offloads: pages go into the pool piece by piece, and from there to the store.

An offload is answered in its turn: `True` when every page of it is stored. Until then SGLang keeps its pages; so a large one waits for room and
needs no more of the pool at a time than there is. All of this is done in the scheduler's thread, which waits for none of it, each time that
it looks; only puts have threads of their own.
"""

import time
from collections import OrderedDict, deque

import kvarts

from .link import logger, reason_of

#: Bytes of a piece.
_PIECE = 32 << 20
#: Pages of which it is known which page is before them.
_ORDERED = 1 << 17


class _Offload:
    """Pages of one node. `transfers`: (pool of the tree, keys, places)."""

    def __init__(self, transfers, ready, until):
        self.transfers, self.ready = transfers, ready
        self.pieces = None  # those that are not taken yet
        self.next = None  # the one for which there was no room
        self.until = until  # how long it waits for that
        self.is_taken, self.is_whole = not transfers, True
        self.open = 0  # pieces that are under way

    @property
    def is_over(self):
        return self.is_taken and not self.open


class Offloads:
    """`stats(what, count, label)` is told what became of blocks; `make_room()` is asked for room in the pool."""

    def __init__(self, pools, desk, dock, link, timeout, stats, make_room):
        self._pools, self._desk, self._dock, self._link = pools, desk, dock, link
        self._timeout, self._stats, self._make_room = timeout, stats, make_room
        self._in_turn = deque()
        self._saves = []  # (offload, room, what saves)
        self._answers = deque()  # of threads that put
        self._before = OrderedDict()  # page -> the page before it, of those that were seen last

    def follow(self, names):
        """These pages follow each other in a prompt. SGLang offloads its nodes without the pages before them, which look-ups have named."""
        for before, name in zip(names, names[1:]):
            self._before.pop(name, None)
            self._before[name] = before
        while len(self._before) > _ORDERED:
            self._before.popitem(last=False)

    def add(self, transfers, ready):
        """`ready`: events behind which the pages are written. Without transfers it is done."""
        self._in_turn.append(_Offload(transfers, ready, time.monotonic() + self._timeout))
        self.look()

    def ended(self):
        """How many leading ones have ended."""
        self.look()
        count = 0
        for offload in self._in_turn:
            if not offload.is_over:
                break
            count += 1
        return count

    def pop(self):
        return self._in_turn.popleft().is_whole

    def give_up(self):
        """Returns when no page is read any more. What was taken is stored, and nobody is told."""
        self._in_turn.clear()
        while self._saves:
            self._put_saved(1.0)

    def look(self):
        """Goes on with what can go on."""
        while self._answers:
            self._learn(*self._answers.popleft())
        self._put_saved(0.0)
        for offload in self._in_turn:
            if not offload.is_taken and not self._take(offload):
                break

    def _put_saved(self, timeout):
        for one in list(self._saves):
            offload, room, saving = one
            try:
                if not saving.is_done(timeout):
                    continue
            except kvarts.Error as error:
                # What the device has of it may still be written to: the room is lost with it.
                self._answers.append((offload, len(room.keys), 0, error))
            else:
                self._desk.put(room, lambda stored, why, one=offload, of=len(room.keys): self._answers.append((one, of, stored, why)))
            self._saves.remove(one)

    def _take(self, offload):
        """Takes pieces while there is room; whether all of them are taken, or given up."""
        try:
            if not all(event.query() for event in offload.ready):
                return False
            if offload.pieces is None:
                offload.pieces = self._pieces(offload.transfers)
            while True:
                piece = offload.next or next(offload.pieces, None)
                if piece is None:
                    break
                group, keys, slots = offload.next = piece
                room, why = self._room(offload, group, keys)
                if why == "wait":
                    return False
                if room is None:
                    self._fail(offload, why)
                    break
                saving = self._dock.save(0, {group.number: room.stretches()}, {group.number: slots})
                saving.finish()
                self._saves.append((offload, room, saving))
                offload.open += 1
                offload.next, offload.until = None, time.monotonic() + self._timeout
        except Exception as error:  # a defect here must not leave a node that waits for its answer
            logger.exception("kvarts: an offload failed")
            self._fail(offload, reason_of(error))
        offload.is_taken = True
        return True

    def _pieces(self, transfers):
        """(group, keys, pages), of all attention before its windows: they are of no use without it."""
        for name, keys, indices in transfers:
            self.follow(keys)
            for pool in self._pools.of(name):
                slots = pool.slots(indices)
                nbytes = sum(page.rows.nbytes for layers in self._pools.columns[pool.group.number].columns.values() for layer in layers for page in layer)
                count = max(1, _PIECE // nbytes)
                for at in range(0, len(keys), count):
                    yield pool.group, keys[at : at + count], slots[at : at + count]

    def _room(self, offload, group, keys):
        """Room in the pool; or none and why."""
        if self._desk.name is None or self._link.away:
            return None, "away"
        if not self._link.puts_away and (room := self._desk.room_for(group, keys, 0, self._before.get(keys[0], b""))) is not None:
            return room, None
        if not self._saves and not self._link.puts_away:
            # Nothing that is under way gives room back.
            self._make_room()
        # All that wait do so at the same time: SGLang cannot use their pages meanwhile.
        return None, "wait" if time.monotonic() < offload.until else "busy"

    def _fail(self, offload, why):
        left = sum(len(keys) for _, keys, _ in offload.pieces or ())
        left += len(offload.next[1]) if offload.next else 0
        offload.is_whole, offload.next = False, None
        self._stats("dropped", left, why)

    def _learn(self, offload, count, stored, why):
        """What became of a put."""
        offload.open -= 1
        self._stats("saved", stored)
        if stored == count:
            self._link.answered()
            return
        offload.is_whole = False
        self._stats("dropped", count - stored, reason_of(why))
        if isinstance(why, kvarts.Error):
            self._link.put_failed(why)
