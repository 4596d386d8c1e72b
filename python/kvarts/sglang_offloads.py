"""Offloads of SGLang's tree: pages are copied to the pool in pieces, and stored from there.

Offloads are answered in their order: `True` when every page is stored. Until then SGLang keeps the pages, so a large offload can wait for room and does
not need room for all of its pages at the same time. The work is done in the scheduler's thread, a part in each pass, and never waits. Only puts have
their own threads.
"""

import time
from collections import OrderedDict, deque

import kvarts

from .link import logger, reason_of

#: Bytes of a piece.
_PIECE = 32 << 20
#: The limit of pages whose preceding page is remembered.
_ORDERED = 1 << 17


class _Offload:
    """The pages of one node of the tree. `transfers`: (pool of the tree, keys, indices)."""

    def __init__(self, transfers, ready, until):
        self.transfers, self.ready = transfers, ready
        self.pieces = None  # the pieces that are not taken yet
        self.next = None  # the piece for which there was no room
        self.until = until  # the end of the wait for room
        self.is_taken, self.is_whole = not transfers, True
        self.open = 0  # pieces under way

    @property
    def is_over(self):
        return self.is_taken and not self.open


class Offloads:
    """The offloads of a tree. `stats(what, count, label)` counts the outcome of blocks; `make_room()` frees room in the pool."""

    def __init__(self, pools, desk, dock, link, timeout, stats, make_room):
        self._pools, self._desk, self._dock, self._link = pools, desk, dock, link
        self._timeout, self._stats, self._make_room = timeout, stats, make_room
        self._in_turn = deque()
        self._saves = []  # (offload, room, copy to the pool)
        self._answers = deque()  # results of puts, from their threads
        self._before = OrderedDict()  # page -> the page before it, for the pages seen last

    def follow(self, names):
        """Remembers the order of a prompt's pages. SGLang offloads a node without the pages before it; look-ups name those."""
        for before, name in zip(names, names[1:]):
            self._before.pop(name, None)
            self._before[name] = before
        while len(self._before) > _ORDERED:
            self._before.popitem(last=False)

    def add(self, transfers, ready):
        """Adds an offload. `ready`: events of the device after which the pages are complete. An offload without transfers is done."""
        self._in_turn.append(_Offload(transfers, ready, time.monotonic() + self._timeout))
        self.look()

    def ended(self):
        """The number of leading offloads that have ended."""
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
        """Drops all offloads; returns when no page is read any more. Pieces in the pool are still stored, without a report."""
        self._in_turn.clear()
        while self._saves:
            self._put_saved(1.0)

    def look(self):
        """Continues all offloads that can continue without waiting."""
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
                # The device may still write to the room, so the room is lost.
                self._answers.append((offload, len(room.keys), 0, error))
            else:
                self._desk.put(room, lambda stored, why, one=offload, of=len(room.keys): self._answers.append((one, of, stored, why)))
            self._saves.remove(one)

    def _take(self, offload):
        """Takes pieces while there is room; returns whether all of them are taken or given up."""
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
        except Exception as error:  # after a defect here, the node must still get its answer
            logger.exception("kvarts: an offload failed because of a defect in Kvarts; report it")
            self._fail(offload, reason_of(error))
        offload.is_taken = True
        return True

    def _pieces(self, transfers):
        """Yields (group, keys, pages). Groups with attention over all tokens come before windows, which are useless without them."""
        for name, keys, indices in transfers:
            self.follow(keys)
            for pool in self._pools.of(name):
                slots = pool.slots(indices)
                nbytes = sum(page.rows.nbytes for layers in self._pools.columns[pool.group.number].columns.values() for layer in layers for page in layer)
                count = max(1, _PIECE // nbytes)
                for at in range(0, len(keys), count):
                    yield pool.group, keys[at : at + count], slots[at : at + count]

    def _room(self, offload, group, keys):
        """(room in the pool, None), or (None, the reason)."""
        if self._desk.name is None or self._link.away:
            return None, "away"
        if not self._link.puts_away and (room := self._desk.room_for(group, keys, 0, self._before.get(keys[0], b""))) is not None:
            return room, None
        if not self._saves and not self._link.puts_away:
            # No save under way will free room.
            self._make_room()
        # All offloads wait at the same time, because SGLang cannot use their pages meanwhile.
        return None, "wait" if time.monotonic() < offload.until else "busy"

    def _fail(self, offload, why):
        left = sum(len(keys) for _, keys, _ in offload.pieces or ())
        left += len(offload.next[1]) if offload.next else 0
        offload.is_whole, offload.next = False, None
        self._stats("dropped", left, why)

    def _learn(self, offload, count, stored, why):
        """Takes the result of a put."""
        offload.open -= 1
        self._stats("saved", stored)
        if stored == count:
            self._link.answered()
            return
        offload.is_whole = False
        self._stats("dropped", count - stored, reason_of(why))
        if isinstance(why, kvarts.Error):
            self._link.put_failed(why)
