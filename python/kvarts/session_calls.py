"""Calls for sessions, in their own thread and queue, so that no look-up waits for a slow call of a session.

A turn takes up to five calls. Calls run in their order. The queue is bounded, and calls beyond the bound are dropped at once: the next turn of a
conversation makes up for a dropped turn, and a session that was not closed ends with its lease.
"""

import threading
import time
from collections import deque

import kvarts

from .link import logger, of_server

#: The limits of waiting turns, and of their blocks together (the keys of waiting turns stay in memory).
TURNS, BLOCKS = 256, 1 << 18


class Calls:
    """The queue of calls. While the server of `link` cannot be reached, no call is made. If the server does not answer a call, no call is made for the
    link's `pause`; look-ups continue."""

    def __init__(self, link, turns=TURNS, blocks=BLOCKS):
        self._link, self._turns, self._blocks = link, turns, blocks
        self._waiting, self._held = deque(), 0  # (work, failed, blocks); blocks of all of them
        self._changed = threading.Condition()
        self._thread, self._is_ending = None, False
        self._away_until = 0.0

    def give(self, work, failed, blocks=0):
        """Calls `work()` in the thread of this object, or `failed(error)` if the work failed. Beyond the bound, and after `end`, it calls `failed` at
        once, in the caller's thread. It does not wait."""
        with self._changed:
            error = self._why_not(blocks)
            if error is None:
                self._waiting.append((work, failed, blocks))
                self._held += blocks
                if self._thread is None:
                    # The thread starts with the first call, because most engines have no sessions.
                    self._thread = threading.Thread(target=self._run, name="kvarts-sessions", daemon=True)
                    self._thread.start()
                self._changed.notify()
        if error is not None:
            failed(error)

    def _why_not(self, blocks):
        if self._is_ending:
            return kvarts.Retry("the connector is closed", "Closed")
        if len(self._waiting) >= self._turns or self._waiting and self._held + blocks > self._blocks:
            return kvarts.Retry(f"{len(self._waiting)} turns of sessions already wait for the server: this turn is not recorded", "Behind")
        return None

    def end(self):
        """Ends the queue: later calls fail."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def join(self, timeout):
        """Waits for `timeout` seconds at most until the calls in the queue are done; the calls that still wait then fail."""
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
                failed(kvarts.Retry("the server cannot be reached; Kvarts retries after a pause", "Away"))
                continue
            try:
                work()
            except kvarts.Error as error:
                self._notice(error)
                failed(error)
            except Exception as error:  # a defect here must not end the thread, and with it all sessions
                logger.exception("kvarts: a turn of a session failed because of a defect in Kvarts; report it")
                failed(error)

    def _notice(self, error):
        # `Busy`: the server has no room for sessions, but it answers.
        if not of_server(error) or error.reason == "Busy":
            return
        logger.warning("kvarts: the server does not answer calls for sessions; Kvarts sends no such calls for %g seconds: %s", self._link.pause, error)
        self._away_until = time.monotonic() + self._link.pause
