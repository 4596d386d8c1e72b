"""Counters of the connectors (blocks staged, promised, landed and saved), with the names and help texts of their metrics."""

COUNTERS = {
    "promised": ("promised_blocks", "Blocks that were in the pool when their request was scheduled."),
    "waited": ("waited_seconds", "Seconds from the first look-up of a request with promised blocks until the engine scheduled the request."),
    "landed": ("landed_blocks", "Blocks that workers copied into the engine's memory; each worker counts its own part."),
    "layers": ("layers", "Layers of forward passes that loaded blocks."),
    "layered": ("overlapped_layers", "Layers of forward passes that loaded blocks, copied while the engine computed earlier layers."),
    "saved": ("saved_blocks", "Blocks that Kvarts stored for the engine, including blocks that were already stored."),
    "pinned": ("pinned_blocks", "Blocks that were pinned because their request set `pin`."),
    "handed": ("handed_blocks", "Blocks that another engine computed for a request of this engine, and that arrived in time."),
}
LABELLED = {
    "staged": ("staged_blocks", "Blocks staged for requests, by source: found in the `pool`, or `read` from the store. Each rank counts its own part.", "source"),
    "unstaged": ("unstaged_blocks", "Blocks that requests needed and did not get, by reason.", "reason"),
    "unhanded": ("unhanded_blocks", "Blocks that another engine computed for a request of this engine, and that did not arrive, by reason.", "reason"),
    "unpinned": ("unpinned_blocks", "Blocks that could not be pinned although their request set `pin`, by reason.", "reason"),
    "turns": ("session_turns", "Turns of sessions, by outcome: `opened`, `forked`, `extended`, or the reason for which the turn did not continue a session.", "outcome"),
    "dropped": ("dropped_blocks", "Blocks that were computed and not saved, by reason.", "reason"),
}


class Metrics:
    """Counters in the engine's own metrics. `made(name, text, labels)` creates a counter with these labels beside the common ones."""

    def __init__(self, made, engine):
        self._counters = {what: made(f"{engine}:kvarts_{name}", text, ()) for what, (name, text) in COUNTERS.items()}
        self._labelled = {what: made(f"{engine}:kvarts_{name}", text, (label,)) for what, (name, text, label) in LABELLED.items()}

    def add(self, counts, labels):
        """Adds counts. A key is the name of the event, followed by a space and the label's value if the event has a label. `labels`: the values of
        the common labels."""
        for name, count in counts.items():
            what, _, label = name.partition(" ")
            if label:
                self._labelled[what].labels(*labels, label).inc(count)
            else:
                self._counters[what].labels(*labels).inc(count)


def count(counts, what, number, label=None):
    """Adds `number` to the count of an event and its label."""
    name = what if label is None else f"{what} {label}"
    if number:
        counts[name] = counts.get(name, 0) + number
