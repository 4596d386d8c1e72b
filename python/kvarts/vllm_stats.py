"""What `KvartsLayers` counts, for vLLM's metrics."""

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_COUNTERS = {
    "promised": ("vllm:kvarts_promised_blocks", "Blocks that were in the pool and that a request was let in with."),
    "waited": ("vllm:kvarts_waited_seconds", "Seconds from when such a request was first asked for until it was let in."),
    "landed": ("vllm:kvarts_landed_blocks", "Blocks that workers have landed, each of its own part."),
    "layers": ("vllm:kvarts_layers", "Layers of loads."),
    "layered": ("vllm:kvarts_overlapped_layers", "Of these, layers that only their own computation waited for."),
    "saved": ("vllm:kvarts_saved_blocks", "Blocks that Kvarts has taken, or had already."),
}
_LABELLED = {
    "staged": ("vllm:kvarts_staged_blocks", "Blocks that were brought for requests, of each rank its part: `pool` had them, or `read`.", "source"),
    "unstaged": ("vllm:kvarts_unstaged_blocks", "Blocks that requests asked for and did not get, by why the first of them is not there.", "reason"),
    "dropped": ("vllm:kvarts_dropped_blocks", "Blocks that were computed and not saved, by why.", "reason"),
}


class Stats(KVConnectorStats):
    """Counts since the last report."""

    def add(self, what, count, label=None):
        name = what if label is None else f"{what} {label}"
        if count:
            self.data[name] = self.data.get(name, 0) + count

    def take(self):
        taken, self.data = self.data, {}
        return Stats(data=taken) if taken else None

    def reset(self):
        self.data = {}

    def aggregate(self, other):
        for name, count in other.data.items():
            self.add(name, count)
        return self

    def reduce(self):
        return dict(self.data)

    def is_empty(self):
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made = lambda name, text, *more: self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, *more])  # noqa: E731
        self._counters = {what: made(name, text) for what, (name, text) in _COUNTERS.items()}
        self._labelled = {what: made(name, text, label) for what, (name, text, label) in _LABELLED.items()}

    def observe(self, transfer_stats_data, engine_idx=0):
        values = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            what, _, label = name.partition(" ")
            if label:
                self._labelled[what].labels(*values, label).inc(count)
            else:
                self._counters[what].labels(*values).inc(count)
