"""How often blocks were used, of the latest ones: for an operator who wants only that stored which comes again."""

from collections import OrderedDict

#: Blocks that are remembered. Those that were not used for longest are forgotten first, and count from nothing again.
_KEPT = 1 << 17


class Uses:
    """`least`: what is used so often is worth to be stored."""

    def __init__(self, least, kept=_KEPT):
        self.least = least
        self._kept, self._counts = kept, OrderedDict()

    def use(self, keys):
        """Blocks that follow each other are used once more; how many leading ones were used often enough, now included."""
        leading, is_leading = 0, True
        for key in keys:
            count = self._counts.pop(key, 0) + 1
            self._counts[key] = count
            is_leading = is_leading and count >= self.least
            leading += is_leading
        while len(self._counts) > self._kept:
            self._counts.popitem(last=False)
        return leading
