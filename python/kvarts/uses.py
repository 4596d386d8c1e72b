"""Counts the uses of recent blocks, so that only blocks with repeated uses are stored (`store_after`)."""

from collections import OrderedDict

#: The limit of remembered blocks. The least recently used ones are dropped first; their counts start again at 0.
_KEPT = 1 << 17


class Uses:
    """The counts. `least`: the number of uses after which a block is worth storing."""

    def __init__(self, least, kept=_KEPT):
        self.least = least
        self._kept, self._counts = kept, OrderedDict()

    def use(self, keys):
        """Counts one use of each of these consecutive blocks; returns the number of leading blocks with at least `least` uses."""
        leading, is_leading = 0, True
        for key in keys:
            count = self._counts.pop(key, 0) + 1
            self._counts[key] = count
            is_leading = is_leading and count >= self.least
            leading += is_leading
        while len(self._counts) > self._kept:
            self._counts.popitem(last=False)
        return leading
