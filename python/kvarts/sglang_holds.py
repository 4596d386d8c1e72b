"""Protects pages that SGLang's look-ups have found from eviction until they are read.

SGLang reads the pages some time after the look-up. If some were evicted in between, SGLang would read only a part of the prefix, or the pages of one
pool without those of another.
"""

import threading
import time

#: Seconds by which an answer may arrive after its deadline.
_LATE = 0.6


class Holds:
    """The held pages of a pool. `pages`: a separate handle that no other code drains; `seconds`: how long unread pages are held."""

    def __init__(self, pages, seconds):
        self._pages, self._seconds, self._lock = pages, seconds, threading.Lock()

    def hold(self, names, timeout):
        """Holds pages; returns whether all of them are held now. Pages that are only on another node cannot be held."""
        with self._lock:
            batch, deadline = self._pages.submit_lock(names, hold=self._seconds, timeout=timeout), time.monotonic() + timeout + _LATE
            while (left := deadline - time.monotonic()) > 0:
                # ends: `left`, what the caller gave
                for done in self._pages.wait(left):
                    # A lock that came too late for its caller ends after `hold` seconds.
                    if done.id == batch:
                        return done.ok
        return False

    def let_go(self, names):
        """Releases pages that were read. The call does not wait."""
        self._pages.unlock(names)
