"""The counters of `KvartsLayers`, in vLLM's metrics."""

from .acts import Metrics, count
from .vllm_compat import KVConnectorPromMetrics, KVConnectorStats


class Stats(KVConnectorStats):
    """Counts since the last report."""

    def add(self, what, number, label=None):
        count(self.data, what, number, label)

    def take(self):
        taken, self.data = self.data, {}
        return Stats(data=taken) if taken else None

    def reset(self):
        self.data = {}

    def aggregate(self, other):
        for name, number in other.data.items():
            self.add(name, number)
        return self

    def reduce(self):
        return dict(self.data)

    def is_empty(self):
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def made(name, text, more):
            return self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, *more])

        self._metrics = Metrics(made, "vllm")

    def observe(self, transfer_stats_data, engine_idx=0):
        self._metrics.add(transfer_stats_data, self.per_engine_labelvalues[engine_idx])
