"""How fast blocks came lately, where that was too slow to pay.

A plan knows a disk by the reads that ended. Of one that answers late or not at all it goes on to expect what it was before, and each request would
wait for that anew. So what a stage had to be cut short for is remembered for a while; then the plan is believed once more.
"""

#: Seconds for which a slow stage is remembered, the first time; each further one doubles it, up to the second number.
_FIRST, _MOST = 5.0, 320.0


class Pace:
    def __init__(self):
        self._rate, self._until, self._wait = 0.0, 0.0, _FIRST

    def was_slow(self, nbytes, seconds, now):
        """Of what a request waited for so many bytes came in so many seconds."""
        self._rate, self._until = nbytes / max(seconds, 1e-6), now + self._wait
        self._wait = min(2 * self._wait, _MOST)

    def was_good(self):
        """All of it came, in less time than it would have taken to compute."""
        self._until, self._wait = 0.0, _FIRST

    def pays(self, nbytes, milliseconds, now):
        """Whether so many bytes are expected in less time than computing takes."""
        return now >= self._until or 1000 * nbytes <= milliseconds * self._rate
