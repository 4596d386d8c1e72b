"""Pages that a look-up of SGLang's has found, held against eviction until they are read.

SGLang asks what is there, and reads it some time later: what is evicted in between makes it read half a prefix, or pages of one pool without those
of another.
"""

import threading
import time

#: Seconds by which an answer may come later than its deadline.
_LATE = 0.6


class Holds:
    """`pages`: a handle of its own, of which nothing else drains; `seconds`: how long they are held where nothing reads them."""

    def __init__(self, pages, seconds):
        self._pages, self._seconds, self._lock = pages, seconds, threading.Lock()

    def hold(self, names, timeout):
        """Whether all of these pages are held now. What only another node has is not."""
        with self._lock:
            batch, deadline = self._pages.submit_lock(names, hold=self._seconds, timeout=timeout), time.monotonic() + timeout + _LATE
            while (left := deadline - time.monotonic()) > 0:
                # ends: `left`, what the caller gave
                for done in self._pages.wait(left):
                    # What was too late for its caller is let go of by its time.
                    if done.id == batch:
                        return done.ok
        return False

    def let_go(self, names):
        """These were read. It does not wait."""
        self._pages.unlock(names)
