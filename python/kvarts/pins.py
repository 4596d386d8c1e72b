"""Protects chains from eviction for requests that set `pin`.

A chain has one lease for all of its requests, because the server counts each lease in full. All methods run in the link's thread.
"""

import time

import kvarts


class Pins:
    def __init__(self):
        self._leases = {}  # last key of a chain -> (lease, blocks, when it ends)

    def hold(self, pages, keys, seconds):
        """Holds the blocks of this chain that can be restored now, for at least `seconds`; returns the number of these leading blocks."""
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
        """Ends leases of shorter chains that this chain covers for at least as long."""
        for key in [key for key, (*_, ends) in self._leases.items() if key in keys and ends <= until]:
            self._leases.pop(key)[0].end()

    @staticmethod
    def _renew(lease, seconds):
        try:
            lease.renew(seconds)
        except (kvarts.Refused, kvarts.Invalid, kvarts.Miss):
            # The lease has ended, or the server was restarted.
            return False
        return True
