"""The parts of Kvarts' connectors that depend on SGLang's version: modules of its names, attributes of its objects, and hooks that are not overridden.

`from .sglang_compat import NAME` imports a name from its module in SGLang, on first use. `needed` imports names that only some models need. The error
for a missing name has the version of SGLang.
"""

import importlib
import importlib.metadata
import logging

from . import hooks

#: Versions that were tested with both connectors.
TRIED = ("0.5.23",)
#: The first version whose sources were compared. The connectors check interfaces, and not this number.
_SINCE = "0.5.21"
#: version -> the first version whose blocks have the same bytes, as tested.
ALIKE: dict[str, str] = {}

_CACHE = "sglang.srt.mem_cache"
ASSEMBLER = f"{_CACHE}.hybrid_cache.linker_pool_assembler"
_LINKERS = f"{_CACHE}.unified_cache.unified_cache_linker"
HYBRID = f"{_CACHE}.hybrid_cache.hybrid_pool_assembler"
_STORAGE = {
    "HiCacheStorage": f"{_CACHE}.hicache_storage",
    "PoolHitPolicy": f"{_CACHE}.hicache_storage",
    "PoolName": f"{_CACHE}.hicache_storage",
    "PoolTransferResult": f"{_CACHE}.hicache_storage",
}
_LINKER = {
    "PoolName": f"{_CACHE}.hicache_storage",
    "UnifiedCacheLinker": _LINKERS,
}
_NAMES = {**_STORAGE, **_LINKER}
#: Names for both connectors: the model's settings, and page hashes that depend on adapters and salts.
_IDENTITY = (
    "sglang.srt.runtime_context:get_model",
    f"{_CACHE}.utils:storage_namespace_seed",
    f"{_CACHE}.utils:get_storage_hash_str",
)
_CONFIG = f"{_CACHE}.hicache_storage:HiCacheStorageConfig"
_STORAGE_READ = (
    *(f"{_CONFIG}.{name}" for name in ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model", "extra_config")),
    f"{_CACHE}.hicache_storage:HiCacheStorageExtraInfo.prefix_keys",
    f"{_CACHE}.hicache_storage:PoolTransfer.hit_policy",
    f"{_CACHE}.hicache_storage:PoolTransfer.host_indices",
    f"{_CACHE}.hicache_storage:PoolTransfer.keys",
    f"{_CACHE}.hicache_storage:PoolTransferResult.restorable_prefix_pages",
)
_LINKER_READ = (
    f"{ASSEMBLER}:DevicePoolEntry.kv_buffer",
    f"{ASSEMBLER}:DevicePoolEntry.layer_mapping",
    f"{ASSEMBLER}:DevicePoolGroup.entries",
    f"{ASSEMBLER}:DevicePoolGroup.rank_replicated",
    f"{ASSEMBLER}:_mamba_device_pool_entry",
    f"{ASSEMBLER}:_mha_device_pool_entry",
    f"{ASSEMBLER}:resolve_hybrid_device_pool_group",
    f"{HYBRID}:_stage_local_layer_mapping",
    f"{HYBRID}:_swa_layer_mappings",
    f"{_CACHE}.unified_cache.linker_factory:",
)

ENGINE = hooks.Engine(
    package="sglang",
    distributions=("sglang",),
    tried=TRIED,
    parts=(
        hooks.Part(
            module="kvarts.sglang",
            names=(*(f"{module}:{name}" for name, module in _STORAGE.items()), *_IDENTITY),
            reads=_STORAGE_READ,
            overridden=(
                hooks.Overridden(
                    "sglang:Kvarts", (f"{_CACHE}.hicache_storage:HiCacheStorage",), ("get_stats", "on_host_pools_registered"), later=("close",)
                ),
            ),
        ),
        hooks.Part(
            module="kvarts.sglang_linker",
            names=(*(f"{module}:{name}" for name, module in _LINKER.items()), *_IDENTITY),
            reads=_LINKER_READ,
            overridden=(hooks.Overridden("sglang_linker:KvartsLinker", (f"{_LINKERS}:UnifiedCacheLinker",), ("record_offload_ready",)),),
        ),
    ),
)


def version():
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:  # from its sources
        return getattr(importlib.import_module("sglang"), "__version__", "unknown")


def needed(module, name):
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        found = None
    if found is None:
        raise ValueError(f"sglang {version()}: this version has no {module}.{name}: install sglang {_SINCE} or later")
    return found


def __getattr__(name):
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(name)
    try:
        return needed(module, name)
    except ValueError as error:
        raise ImportError(f"{error} (python -m kvarts.probe sglang lists all missing interfaces)") from None


def probe(part):
    """Logs differences between the installed SGLang and the tested ones for this connector when an engine starts. Never raises."""
    hooks.tell(ENGINE, part, logging.getLogger("kvarts"))


class Shard:
    """The part of a page that this process has, from fields of SGLang's configuration. Only later versions have some of the fields."""

    def __init__(self, config):
        self.dcp = (getattr(config, "dcp_size", None), getattr(config, "dcp_rank", None))
        if None in self.dcp:
            parallel = needed("sglang.srt.runtime_context", "get_parallel")()
            if getattr(parallel, "attn_dcp_size", 1) != 1:
                raise ValueError(
                    "dcp_size: this version of SGLang does not report which part of a page a worker has: run SGLang without decode context parallelism, "
                    "or install a later version"
                )
            self.dcp = (1, 0)
        parts = ("pp_size", "pp_rank", "attn_cp_size", "attn_cp_rank")
        self.parts = {part: str(getattr(config, part)) for part in parts}
        self.parts.update(dcp_size=str(self.dcp[0]), dcp_rank=str(self.dcp[1]))
        # One of the ranks with the same bytes writes: the one that SGLang names, or else the first of each shard.
        alike = not config.is_mla_model or config.tp_rank == self.dcp[1]
        self.writes = getattr(config, "is_storage_writer", alike)
