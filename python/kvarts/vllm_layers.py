"""Kvarts behind vLLM's KV caches layer by layer, on a device or on a processor (`KVConnectorBase_V1`).

    --kv-transfer-config '{"kv_connector": "KvartsLayers", "kv_connector_module_path": "kvarts.vllm_layers", "kv_role": "kv_both",
        "kv_connector_extra_config": {"server": "/run/kvarts/kvarts.sock", "pool_bytes": 8000000000}}'

The scheduler stages a prefix in a pool that it shares with its workers, and promises it when it is there (`vllm_scheduler`); the workers land
it in their KV caches layer by layer, under the computation of the layers before (`vllm_worker`). What holds:

- A block comes back with the bytes that were stored under its hash by an engine of the same identity, in every layer, or it was not
  promised. Nothing that a disk, a network or a server does can make a load fail that was promised; no batch waits for a disk.
- A look-up answers `None` while blocks come: that request waits, and no other one does. It ends within half of `timeout` where
  nothing is found, and when nothing came for `timeout`. While the server is away every prefix is a miss; it comes back by itself. The engine
  starts without a server, too.
- What is stored is what the engine had computed: each layer leaves behind its own computation, and pages are written again only behind that.
  Of a chain the tail is dropped where something is, never the middle; what a server did not take is offered again.
- A pass waits for the whole load before it begins until one pass has shown that every layer waits for its own; and always where it is one CUDA
  graph, or there is a draft model.

Models with attention, latent attention, sliding windows and recurrent states, with tensor and pipeline parallelism on one host; what else there is
(context parallelism) is refused at the start, with its name. A request of a model with states is let in when all of its prefix has landed.
"""

import kvarts

from .link import Link, token_of, whole_number
from .steps import Steps
from .vllm_compat import CacheHitSource, KVConnectorBase_V1, KVConnectorRole, SupportsHMA, probe, runs_by_layer
from .vllm_pages import Plan
from .vllm_scheduler import Finder
from .vllm_stats import PromMetrics, Stats
from .vllm_worker import Mover

#: Bytes of a pool where none are named.
_POOL_BYTES = 4 << 30


class KvartsLayers(KVConnectorBase_V1, SupportsHMA):
    """`kv_connector_extra_config`: `server` and `token_file` as for `kvarts.connect`; `pool_bytes`: of host memory that scheduler and workers
    share; `timeout`: seconds of silence; `pause`: seconds for which a server that did not answer is left alone; `durable`: stores are
    acknowledged after a flush; `windows`: what is kept of sliding windows (`full`, `turn`, `none`, `auto`, or a
    number of tokens from one place to the next); `times`: what `kvarts.Times` takes, for the planner, beside what the engine's own steps
    tell; `plans`: whether of what is stored that is left which takes longer to load than to compute; `head_ranges`: into how many ranges the
    model's heads are split, by engines that share over different tensor parallelism; `revision` where the model's name does
    not say it; `identity` for whatever else decides bytes; `store_after`: blocks are stored that were used so often; `minimum_blocks`: of
    requests with fewer blocks nothing is stored. What a request's `kv_transfer_params` may have is in `vllm_terms`."""

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
        # What an engine that only prefills does not hand over was computed for nothing; elsewhere a save that is dropped is a miss later.
        return self._prefills

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        # A pass that is one graph waits for all layers before it begins.
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config):
        # Of the KV cache addresses are kept, which are the same after it.
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
    """What tells routers of what is stored, where vLLM tells them of its own blocks."""
    events = getattr(vllm_config, "kv_events_config", None)
    if events is None or not events.enable_kv_cache_events:
        return None
    from .vllm_events import Announcer

    return Announcer


class Settings:
    """What the operator says, apart from what decides bytes."""

    def __init__(self, extra):
        self.server, self._token_file = extra.get("server"), extra.get("token_file")
        self.timeout, self.pause = float(extra.get("timeout", 2.0)), float(extra.get("pause", 1.0))
        self.pool_bytes = int(extra.get("pool_bytes", _POOL_BYTES))
        self.durable = bool(extra.get("durable", False))
        self.store_after = whole_number(extra, "store_after", 1)
        self.minimum_blocks = whole_number(extra, "minimum_blocks", 0)
        self.steps, self.plans = Steps(extra.get("times")), bool(extra.get("plans", True))

    def link(self):
        # Over no other path: a pool is shared memory, and what has gone another way once, while a server came up, has none for good.
        def connect():
            return kvarts.connect(self.server, token_of(self._token_file), via="local", timeout=self.timeout, of_cluster=True)

        return Link(connect, self.pause)

    def asking(self, naming):
        """A connection of its own, and a handle: of what the server itself has."""
        client = kvarts.connect(self.server, token_of(self._token_file), timeout=self.timeout)
        try:
            return client, client.pages(timeout=self.timeout / 2, **naming)
        except BaseException:
            client.close(self.timeout)
            raise
