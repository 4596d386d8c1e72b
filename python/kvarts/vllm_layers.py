"""Kvarts behind vLLM's KV caches, with loads layer by layer, on a device or on a CPU (`KVConnectorBase_V1`).

    --kv-transfer-config '{"kv_connector": "KvartsLayers", "kv_connector_module_path": "kvarts.vllm_layers", "kv_role": "kv_both",
        "kv_connector_extra_config": {"server": "/run/kvarts/kvarts.sock", "pool_bytes": 8000000000}}'

The scheduler stages a prefix: it reads the blocks of the prefix into a pool that it shares with its workers. When the blocks are in the pool, the
scheduler promises the prefix to the request (`vllm_scheduler`). The workers copy the blocks to their KV caches layer by layer, while the engine computes
earlier layers (`vllm_worker`). Guarantees:

- A promised block has, in every layer, the bytes that an engine of the same identity stored under its hash. No failure of a disk, a network or a
  server can make a promised load fail, and no batch waits for a disk.
- A look-up returns `None` while blocks are being read, so only the request of this look-up waits. The look-up ends within half of `timeout` if no
  block is found. It also ends if no block has arrived for `timeout`.
- While the server cannot be reached, every prefix is a miss. The connector restores the connection without a restart. The engine also starts without a
  server.
- Stored blocks have the bytes that the engine computed. Each layer is copied after its computation, and its pages are overwritten only after the copy.
  If blocks of a chain are dropped, they are always the last blocks of the chain. Blocks that the server did not store are offered again.
- At first, a forward pass waits for its whole load before it begins. After one pass has shown that every layer waits for its own load, later passes
  wait layer by layer. A pass that is one CUDA graph always waits for its whole load. So does every pass of an engine with a draft model.

The connector supports attention, latent attention, sliding windows and recurrent states, with tensor and pipeline parallelism on one host. At the
start, it refuses other features, such as context parallelism, with an error that names the feature. A request of a model with recurrent states is
scheduled when its whole prefix has landed.
"""

import kvarts

from .link import Link, token_of, whole_number
from .steps import Steps
from .vllm_compat import CacheHitSource, KVConnectorBase_V1, KVConnectorRole, SupportsHMA, probe, runs_by_layer
from .vllm_pages import Plan
from .vllm_scheduler import Finder
from .vllm_stats import PromMetrics, Stats
from .vllm_worker import Mover

#: Bytes of a pool, by default.
_POOL_BYTES = 4 << 30


class KvartsLayers(KVConnectorBase_V1, SupportsHMA):
    """The connector. Settings in `kv_connector_extra_config`:

    - `server`, `token_file`: as for `kvarts.connect`.
    - `pool_bytes`: host memory that scheduler and workers share.
    - `timeout`: the longest time in seconds for which the server may send no data.
    - `pause`: after the server did not answer, the connector sends no requests for this number of seconds.
    - `durable`: stores are acknowledged after a flush.
    - `windows`: selects the blocks of sliding windows to keep: `full`, `turn`, `none`, `auto`, or the number of tokens from one kept window to the next.
    - `times`: arguments of `kvarts.Times` for the planner, in addition to the measured times of the engine's steps.
    - `plans`: whether the planner leaves out blocks that load slower than the engine computes them.
    - `head_ranges`: the number of ranges of the model's heads. Engines with different tensor parallelism share blocks if they set the same number.
    - `revision`: the revision of the model. Required if the model's name does not determine the revision.
    - `identity`: other settings that determine the bytes.
    - `store_after`: the number of uses after which a block is stored.
    - `minimum_blocks`: the blocks of requests with fewer blocks are not stored.

    `vllm_terms` describes the `kv_transfer_params` of requests."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        plan = Plan(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = Settings(transfer.kv_connector_extra_config)
        self._prefills = transfer.kv_role == "kv_producer"
        if role is KVConnectorRole.SCHEDULER:
            probe(__name__)
            self._side = Finder(plan, settings, transfer.is_kv_consumer, transfer.is_kv_producer, _announcer_of(vllm_config))
        else:
            self._side = Mover(plan, settings)

    @property
    def requires_kv_delivery(self):
        # For a prefill engine, a dropped save is wasted computation; for other engines, it is only a later miss.
        return self._prefills

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        # A pass that is one graph waits for all layers before it begins.
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config):
        # The connector keeps addresses of the KV cache, which are the same after a sleep.
        return True

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager):
        super().bind_kv_cache_manager(kv_cache_manager)
        self._side.blocks_of, self._side.manager = kv_cache_manager.get_block_ids, kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        self._side.meet(metadata)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        found = self._side.find(request, num_computed_tokens)
        return found, bool(found and self._side.plan.states)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self._side.step(scheduler_output)

    def update_connector_output(self, connector_output):
        self._side.ran()
        told = getattr(connector_output, "kv_connector_worker_meta", None)
        if told is not None:
            self._side.learn(told)

    def request_finished_all_groups(self, request, block_ids):
        handed = self._side.handed_over(request)
        return self._side.finished(request, block_ids), handed

    def has_pending_push_work(self):
        return self._side.is_behind()

    def take_events(self):
        return self._side.take_events()

    def reset_cache(self):
        self._side.forget()
        return True

    # The workers' side.

    def register_kv_caches(self, kv_caches):
        self._side.register(kv_caches)

    def get_handshake_metadata(self):
        return self._side.facts

    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self._side.begin(connector_metadata)

    def start_load_kv(self, forward_context, **kwargs):
        self._side.load(runs_by_layer(forward_context, kwargs))

    def wait_for_layer_load(self, layer_name):
        self._side.wait_for(layer_name)

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self._side.save(layer_name)

    def wait_for_save(self):
        self._side.end()

    def get_finished(self, finished_req_ids):
        return set(self._get_connector_metadata().over), self._side.take_landed()

    def get_block_ids_with_load_errors(self):
        return self._side.take_unwaited()

    def build_connector_worker_meta(self):
        return self._side.tell()

    # Both.

    def shutdown(self):
        self._side.close()

    def get_kv_connector_stats(self):
        return self._side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _announcer_of(vllm_config):
    """The class that reports stored blocks to routers, if vLLM's own KV events are enabled."""
    events = getattr(vllm_config, "kv_events_config", None)
    if events is None or not events.enable_kv_cache_events:
        return None
    from .vllm_events import Announcer

    return Announcer


class Settings:
    """The operator's settings, except those that determine the bytes."""

    def __init__(self, extra):
        self.server, self._token_file = extra.get("server"), extra.get("token_file")
        self.timeout, self.pause = float(extra.get("timeout", 2.0)), float(extra.get("pause", 1.0))
        self.pool_bytes = int(extra.get("pool_bytes", _POOL_BYTES))
        self.durable = bool(extra.get("durable", False))
        self.store_after = whole_number(extra, "store_after", 1)
        self.minimum_blocks = whole_number(extra, "minimum_blocks", 0)
        self.steps, self.plans = Steps(extra.get("times")), bool(extra.get("plans", True))

    def link(self):
        # Only over the local path: a pool is shared memory. A client that once connected over another path would never have a pool.
        def connect():
            return kvarts.connect(self.server, token_of(self._token_file), via="local", timeout=self.timeout, of_cluster=True)

        return Link(connect, self.pause)

    def asking(self, naming):
        """A separate connection and handle, for the blocks of the server itself."""
        client = kvarts.connect(self.server, token_of(self._token_file), timeout=self.timeout)
        try:
            return client, client.pages(timeout=self.timeout / 2, **naming)
        except BaseException:
            client.close(self.timeout)
            raise
