"""Calls for sessions, in a thread and a queue of their own: however long a server takes for them, no look-up waits behind them.

A turn takes up to five calls. They run in the order in which they were given. A few may wait; what is more is dropped at once, because a turn that
was not told is told by the next one of its conversation, and a session that was not closed ends with its lease.
"""

import threading
import time
from collections import deque

import kvarts

from .link import logger, of_server

#: Turns that wait at most, and their blocks together: their keys are held until then.
TURNS, BLOCKS = 256, 1 << 18


class Calls:
    """`link`: while its server is away nothing is asked. A server that does not answer these calls is left alone with them for the link's `pause`, and
    look-ups go on."""

    def __init__(self, link, turns=TURNS, blocks=BLOCKS):
        self._link, self._turns, self._blocks = link, turns, blocks
        self._waiting, self._held = deque(), 0  # (work, failed, blocks); blocks of all of them
        self._changed = threading.Condition()
        self._thread, self._is_ending = None, False
        self._away_until = 0.0

    def give(self, work, failed, blocks=0):
        """Calls `work()` in the thread of this object, or `failed(error)` if that did not work. What is over the bound, or comes behind `end`, has failed
        at once, in the caller's thread. Waits for nothing."""
        with self._changed:
            error = self._why_not(blocks)
            if error is None:
                self._waiting.append((work, failed, blocks))
                self._held += blocks
                if self._thread is None:
                    # Most engines have no sessions.
                    self._thread = threading.Thread(target=self._run, name="kvarts-sessions", daemon=True)
                    self._thread.start()
                self._changed.notify()
        if error is not None:
            failed(error)

    def _why_not(self, blocks):
        if self._is_ending:
            return kvarts.Retry("the connector is closed", "Closed")
        if len(self._waiting) >= self._turns or self._waiting and self._held + blocks > self._blocks:
            return kvarts.Retry("too many turns of sessions wait for the server", "Behind")
        return None

    def end(self):
        """Nothing is taken any more."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def join(self, timeout):
        """Waits for `timeout` seconds at most until what was taken is done; what still waits then has failed."""
        if self._thread is not None:
            self._thread.join(timeout)
        with self._changed:
            left, self._waiting = self._waiting, deque()
        for _, failed, _ in left:
            failed(kvarts.Retry("the connector is closed", "Closed"))

    # Of the thread of this object.

    def _next(self):
        with self._changed:
            while not self._waiting:
                if self._is_ending:
                    return None
                # ends: `give` and `end` notify; the thread is a daemon
                self._changed.wait()
            work, failed, blocks = self._waiting.popleft()
            self._held -= blocks
            return work, failed

    def _run(self):
        while (item := self._next()) is not None:
            work, failed = item
            if self._link.away or time.monotonic() < self._away_until:
                failed(kvarts.Retry("the server is away", "Away"))
                continue
            try:
                work()
            except kvarts.Error as error:
                self._notice(error)
                failed(error)
            except Exception as error:  # a defect here must not end the thread, and with it all sessions
                logger.exception("kvarts: a turn of a session failed")
                failed(error)

    def _notice(self, error):
        # `Busy`: there is no room for sessions; the server is there.
        if not of_server(error) or error.reason == "Busy":
            return
        logger.warning("kvarts: the server does not answer calls for sessions: %s", error)
        self._away_until = time.monotonic() + self._link.pause
