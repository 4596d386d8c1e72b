"""What a connector counts of the four acts (staged, promised, landed, saved), and what an operator's metrics call it."""

COUNTERS = {
    "promised": ("promised_blocks", "Blocks that were in the pool and that a request was let in with."),
    "waited": ("waited_seconds", "Seconds from when such a request was first asked for until it was let in."),
    "landed": ("landed_blocks", "Blocks that workers have landed, each of its own part."),
    "layers": ("layers", "Layers of loads."),
    "layered": ("overlapped_layers", "Of these, layers that only their own computation waited for."),
    "saved": ("saved_blocks", "Blocks that Kvarts has taken, or had already."),
    "pinned": ("pinned_blocks", "Blocks that are held against eviction because a request asked for it."),
    "handed": ("handed_blocks", "Blocks that another engine had computed for a request of this one, and that came in time."),
}
LABELLED = {
    "staged": ("staged_blocks", "Blocks that were brought for requests, of each rank its part: `pool` had them, or `read`.", "source"),
    "unstaged": ("unstaged_blocks", "Blocks that requests asked for and did not get, by why.", "reason"),
    "unhanded": ("unhanded_blocks", "Blocks that another engine had computed for a request of this one, and that did not come, by why.", "reason"),
    "unpinned": ("unpinned_blocks", "Blocks that a request wanted held against eviction and that are not, by why.", "reason"),
    "turns": ("session_turns", "Turns of sessions: `opened`, `forked` or `extended` one, or why none went on.", "outcome"),
    "dropped": ("dropped_blocks", "Blocks that were computed and not saved, by why.", "reason"),
}


class Metrics:
    """Counters of the engine's own metrics: `made(name, text, labels)` makes one, `labels` are those that all of them have."""

    def __init__(self, made, engine):
        self._counters = {what: made(f"{engine}:kvarts_{name}", text, ()) for what, (name, text) in COUNTERS.items()}
        self._labelled = {what: made(f"{engine}:kvarts_{name}", text, (label,)) for what, (name, text, label) in LABELLED.items()}

    def add(self, counts, labels):
        """Counts as `Counts` has them: the name of what happened, and of some behind a space why."""
        for name, count in counts.items():
            what, _, label = name.partition(" ")
            if label:
                self._labelled[what].labels(*labels, label).inc(count)
            else:
                self._counters[what].labels(*labels).inc(count)


def count(counts, what, number, label=None):
    """Adds to counts of what happened."""
    name = what if label is None else f"{what} {label}"
    if number:
        counts[name] = counts.get(name, 0) + number
