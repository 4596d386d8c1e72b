"""Chains that are held against eviction because requests asked for it.

A chain has one lease, however many requests ask for it, because a server counts each lease in full. All of this runs in the link's thread.
"""

import time

import kvarts


class Pins:
    def __init__(self):
        self._leases = {}  # last key of a chain -> (lease, blocks, when it ends)

    def hold(self, pages, keys, seconds):
        """Holds of this chain what can be restored now, for so long at least; how many leading blocks that is."""
        now = time.monotonic()
        for key in [key for key, (*_, until) in self._leases.items() if until <= now]:
            del self._leases[key]
        lease, blocks, until = self._leases.get(keys[-1], (None, 0, 0.0))
        seconds = max(seconds, until - now)
        if blocks < len(keys) or not self._renew(lease, seconds):
            match = pages.match(keys, hold=seconds)
            if lease is not None:
                lease.end()
            lease, blocks = match.lease, match.blocks
        if lease is not None:
            self._leases[keys[-1]] = lease, blocks, now + seconds
            self._end_covered(set(keys[:blocks]) - {keys[-1]}, now + seconds)
        else:
            self._leases.pop(keys[-1], None)
        return blocks

    def _end_covered(self, keys, until):
        """What is held no longer than a chain that has it."""
        for key in [key for key, (*_, ends) in self._leases.items() if key in keys and ends <= until]:
            self._leases.pop(key)[0].end()

    @staticmethod
    def _renew(lease, seconds):
        try:
            lease.renew(seconds)
        except (kvarts.Refused, kvarts.Invalid, kvarts.Miss):
            # It ended, or the server was started again and knows nothing of it.
            return False
        return True
