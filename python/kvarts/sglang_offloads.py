"""What SGLang's tree offloads: pages go into the pool piece by piece, and from there to the store.

An offload is answered in its turn: `True` when every page of it is stored. Until then SGLang keeps its pages; so a large one waits for room and
needs no more of the pool at a time than there is.
"""

import queue
import threading
import time
from collections import deque

import kvarts

from .link import logger, reason_of

#: Bytes of a piece.
_PIECE = 32 << 20
#: How often what is under way is looked at, in seconds.
_LOOK = 0.002


class _Offload:
    def __init__(self, transfers, ready):
        self.transfers, self.ready = transfers, ready
        self.blocks, self.open, self.is_whole, self.why = 0, 1, True, None

    @property
    def is_over(self):
        return self.open == 0


class Offloads:
    """`stats(what, count, label)` is told what became of blocks."""

    def __init__(self, pools, desk, dock, link, timeout, stats):
        self._pools, self._desk, self._dock, self._link = pools, desk, dock, link
        self._timeout, self._stats = timeout, stats
        self._in_turn = deque()
        self._queue = queue.SimpleQueue()
        self._lock, self._freed = threading.Lock(), threading.Event()
        #: What was begun before that is given up.
        self._turn = self._idle_at = 0
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvarts-offload", daemon=True)
        self._thread.start()

    # Of the scheduler's thread.

    def add(self, transfers, ready):
        """`ready`: events behind which the pages are written. Without transfers it is done."""
        offload = _Offload(transfers, ready)
        self._in_turn.append(offload)
        if transfers:
            self._queue.put((self._turn, offload))
        else:
            offload.open = 0

    def ended(self):
        """How many leading ones have ended."""
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
        self._turn += 1
        self._freed.set()
        self._queue.put((self._turn, None))
        with self._idle:
            self._idle.wait_for(lambda: self._idle_at == self._turn)
        self._in_turn.clear()

    def close(self):
        self.give_up()
        self._queue.put(None)
        self._thread.join()

    # Of its own.

    def _run(self):
        while (item := self._queue.get()) is not None:
            turn, offload = item
            if offload is None:
                with self._idle:
                    self._idle_at = turn
                    self._idle.notify_all()
                continue
            try:
                for event in offload.ready:
                    event.synchronize()
                for group, keys, slots in self._pieces(offload.transfers):
                    offload.blocks += len(keys)
                    if offload.why is None:
                        self._take(turn, offload, group, keys, slots)
                why = None
            except Exception as error:  # a defect here must not leave a node that waits for its answer
                logger.exception("kvarts: an offload failed")
                why = error
            self._ended(offload, 0, why)

    def _pieces(self, transfers):
        """(group, keys, pages), of all attention before its windows: they are of no use without it."""
        for name, keys, indices in transfers:
            for pool in self._pools.of(name):
                slots = pool.slots(indices)
                nbytes = sum(page.rows.nbytes for layer in self._pools.columns[pool.group.number].layers for page in layer)
                count = max(1, _PIECE // nbytes)
                for at in range(0, len(keys), count):
                    yield pool.group, keys[at : at + count], slots[at : at + count]

    def _take(self, turn, offload, group, keys, slots):
        room = self._room(turn, group, keys)
        if isinstance(room, str):
            offload.why, offload.is_whole = room, False
            self._stats("dropped", len(keys), room)
            return
        saving = self._dock.save(0, {group.number: room.stretches()}, {group.number: slots})
        saving.finish()
        # The lander ends by itself what takes too long.
        while not saving.is_done(1.0):
            pass
        with self._lock:
            offload.open += 1

        def put(stored, why):
            self._freed.set()
            self._stats("saved", stored)
            if stored < len(keys):
                self._stats("dropped", len(keys) - stored, reason_of(why))
                if isinstance(why, kvarts.Error):
                    self._link.put_failed(why)
            else:
                self._link.answered()
            self._ended(offload, stored - len(keys), why)

        self._desk.put(room, put)

    def _room(self, turn, group, keys):
        """Room in the pool, once there is; or why not."""
        until = time.monotonic() + self._timeout
        while True:
            self._freed.clear()
            if turn != self._turn:
                return "GivenUp"
            if self._desk.name is None or self._link.puts_away:
                return "away"
            if (room := self._desk.room_for(group, keys, 0, b"")) is not None:
                return room
            if time.monotonic() > until:
                return "busy"
            self._freed.wait(_LOOK)

    def _ended(self, offload, missing, why):
        with self._lock:
            offload.open -= 1
            if missing or why is not None:
                offload.is_whole, offload.why = False, offload.why or why
