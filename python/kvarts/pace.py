"""The rate of slow stages: loads that took longer than computing would have taken.

The planner measures a disk only by reads that have ended. If a disk suddenly answers late or not at all, the planner still assumes its earlier rate,
and each request would wait for it. The rate of a stage that was cut short is therefore remembered for a while and limits later plans.
"""

#: Seconds for which a slow stage is remembered: the first time, and at most. Each further slow stage doubles the time.
_FIRST, _MOST = 5.0, 320.0


class Pace:
    def __init__(self):
        self._rate, self._until, self._wait = 0.0, 0.0, _FIRST

    def was_slow(self, nbytes, seconds, now):
        """Records that only `nbytes` of a stage arrived in `seconds`, before the stage was cut short."""
        self._rate, self._until = nbytes / max(seconds, 1e-6), now + self._wait
        self._wait = min(2 * self._wait, _MOST)

    def was_good(self):
        """Records that all of a stage arrived, in less time than computing would have taken."""
        self._until, self._wait = 0.0, _FIRST

    def pays(self, nbytes, milliseconds, now):
        """Whether `nbytes` are expected to arrive within the `milliseconds` that computing takes."""
        return now >= self._until or 1000 * nbytes <= milliseconds * self._rate
