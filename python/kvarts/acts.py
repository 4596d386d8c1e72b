"""What a connector counts of the four acts (staged, promised, landed, saved), and what an operator's metrics call it."""

COUNTERS = {
    "promised": ("promised_blocks", "Blocks that were in the pool when their request was scheduled."),
    "waited": ("waited_seconds", "Seconds from the first look-up of such a request until it was scheduled."),
    "landed": ("landed_blocks", "Blocks that workers copied into the engine's memory; each worker counts its own part."),
    "layers": ("layers", "Layers of loads."),
    "layered": ("overlapped_layers", "Layers of these blocks that were copied while the engine computed earlier layers."),
    "saved": ("saved_blocks", "Blocks that Kvarts stored, or had stored already."),
    "pinned": ("pinned_blocks", "Blocks that are pinned because their request demanded it."),
    "handed": ("handed_blocks", "Blocks that another engine computed for a request of this engine and that arrived in time."),
}
LABELLED = {
    "staged": ("staged_blocks", "Blocks fetched for requests; each rank counts its part: from the `pool`, or `read` from the store.", "source"),
    "unstaged": ("unstaged_blocks", "Blocks that requests needed and did not get, by reason.", "reason"),
    "unhanded": ("unhanded_blocks", "Blocks that another engine computed for a request of this engine and that did not arrive, by reason.", "reason"),
    "unpinned": ("unpinned_blocks", "Blocks that could not be pinned although their request demanded it, by reason.", "reason"),
    "turns": ("session_turns", "Turns of sessions: the turn `opened`, `forked` or `extended` a session, or the reason why no session was continued.", "outcome"),
    "dropped": ("dropped_blocks", "Blocks that were computed and not saved, by reason.", "reason"),
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
