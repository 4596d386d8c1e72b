"""What the connectors take from torch, vLLM and SGLang, for tests where an engine is not installed.

`install()` puts modules in the place of those that are absent, with the names and signatures that the connectors use, and nothing
that computes: arrays of numpy stand for tensors, and what an engine does around its connector is in the tests. What an engine itself
does is tried with the real ones (scripts/engines)."""

import dataclasses
import enum
import importlib
import sys
import types
from dataclasses import dataclass, field

import numpy


class Dtype:
    """A type of elements. There is no bfloat16 in numpy: one of the same size stands for it."""

    def __init__(self, name, kind):
        self.name, self.kind = name, numpy.dtype(kind)
        self.itemsize, self.is_floating_point = self.kind.itemsize, self.kind.kind == "f"

    def __str__(self):
        return f"torch.{self.name}"

    __repr__ = __str__


def _kind(dtype):
    return dtype.kind if isinstance(dtype, Dtype) else dtype


class Tensor(numpy.ndarray):
    """An array with the methods of a tensor on the processor."""

    device = types.SimpleNamespace(type="cpu")

    def element_size(self):
        return self.itemsize

    def numel(self):
        return self.size

    def dim(self):
        return self.ndim

    def stride(self, at):
        return self.strides[at] // self.itemsize

    def permute(self, *order):
        return self.transpose(order[0] if len(order) == 1 and not isinstance(order[0], int) else order)

    def is_contiguous(self):
        return self.flags.c_contiguous

    def contiguous(self):
        return _tensor(numpy.ascontiguousarray(self))

    def data_ptr(self):
        return self.__array_interface__["data"][0]

    def _whole(self):
        whole = self
        while isinstance(whole.base, numpy.ndarray):
            whole = whole.base
        return _tensor(whole)

    def untyped_storage(self):
        return self._whole()

    def storage_offset(self):
        return (self.data_ptr() - self._whole().__array_interface__["data"][0]) // self.itemsize

    def set_(self, storage):
        return _tensor(numpy.frombuffer(storage.reshape(-1, order="A").data.cast("B"), dtype=numpy.uint8))

    def as_strided(self, shape, strides, first):
        flat = numpy.lib.stride_tricks.as_strided(self[first:], shape, [n * self.itemsize for n in strides])
        return _tensor(flat)

    def copy_(self, other):
        self[...] = other
        return self

    def zero_(self):
        self[...] = 0
        return self

    def to(self, what):
        return _tensor(self.astype(what.kind)) if isinstance(what, Dtype) else self

    def view(self, *what):
        if what and isinstance(what[0], int):
            return self.reshape(what)
        return super().view(*map(_kind, what))


def _tensor(array):
    return array.view(Tensor) if not isinstance(array, Tensor) else array


def _torch():
    generator = numpy.random.default_rng(1)

    def manual_seed(seed):
        nonlocal generator
        generator = numpy.random.default_rng(seed)

    def shaped(shape):
        return shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape

    dtypes = {"bfloat16": "f2", "float16": "f2", "float32": "f4", "uint8": "u1", "int64": "i8"}
    dtypes = {name: Dtype(name, kind) for name, kind in dtypes.items()}

    def empty(*shape, dtype=dtypes["float32"], device=None, pin_memory=False):
        return _tensor(numpy.zeros(shaped(shape), dtype=_kind(dtype)))

    return dict(
        dtypes,
        Tensor=Tensor,
        dtype=Dtype,
        cpu=types.SimpleNamespace(),
        manual_seed=manual_seed,
        empty=empty,
        zeros=empty,
        tensor=lambda values, device=None, dtype=None: _tensor(numpy.array(values, dtype=None if dtype is None else dtype.kind)),
        arange=lambda *of: _tensor(numpy.arange(*of)),
        cat=lambda parts: _tensor(numpy.concatenate(parts)),
        equal=lambda one, other: one.shape == other.shape and numpy.asarray(one).tobytes() == numpy.asarray(other).tobytes(),
        frombuffer=lambda buffer, dtype: _tensor(numpy.frombuffer(buffer, dtype=_kind(dtype))),
        randn=lambda *shape: _tensor(generator.standard_normal(shaped(shape)).astype("f4")),
        randn_like=lambda other: _tensor(generator.standard_normal(other.shape).astype(numpy.asarray(other).dtype)),
        randint=lambda low, high, shape: _tensor(generator.integers(low, high, shape)),
    )


# vLLM


@dataclass
class _Stats:
    data: dict = field(default_factory=dict)


class _Offloaded(_Stats):
    def increase_counter(self, name, count, labels):
        self.data[(name, *labels)] = self.data.get((name, *labels), 0) + count


class _PromMetrics:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self.per_engine_labelvalues = per_engine_labelvalues


@dataclass
class BlockStored:
    block_hashes: list
    parent_block_hash: object
    token_ids: list
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


@dataclass
class BlockRemoved:
    block_hashes: list
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


def _resolved(hashes, hash_tokens, tokens):
    return hashes if hash_tokens == tokens else hashes[tokens // hash_tokens - 1 :: tokens // hash_tokens]


def _kind_name(spec):
    return types.SimpleNamespace(value={"FullAttentionSpec": "full_attention"}[type(spec).__name__])


class _Connector:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._bound = None

    def bind_kv_cache_manager(self, manager):
        pass

    def bind_connector_metadata(self, metadata):
        self._bound = metadata

    def clear_connector_metadata(self):
        self._bound = None

    def _get_connector_metadata(self):
        return self._bound


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: object
    sliding_window: int | None = None

    @property
    def unpadded_page_size_bytes(self):
        return self.block_size * self.num_kv_heads * self.head_size * 2 * self.dtype.itemsize


class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: object
    sliding_window: int

    unpadded_page_size_bytes = page_size_bytes = FullAttentionSpec.unpadded_page_size_bytes


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    """A recurrent state: parts of these shapes."""

    block_size: int
    shapes: tuple
    dtypes: tuple
    mamba_cache_mode: str = "align"
    tp_replicated: bool = False

    @property
    def state_content_size_bytes(self):
        return sum(int(numpy.prod(shape)) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes))

    page_size_bytes = state_content_size_bytes


def _kernel_blocks(cache, blocks):
    """The same memory: a dimension for blocks, and one for the parts of a block."""
    return cache.reshape(blocks, -1, *cache.shape[1:])


@dataclass(frozen=True)
class _Group:
    tokens_per_block: int
    layer_names: tuple
    group_id: int


@dataclass(frozen=True)
class _Parallel:
    rank: int
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int
    data_parallel_index: int
    data_parallel_size: int
    data_parallel_rank_local: int | None
    is_parallelism_agnostic: bool


@dataclass
class _Offloading:
    groups: tuple
    worker_kv_bytes_per_block: int
    enable_kv_cache_events: bool
    extra_config: dict
    engine_id: str
    model: object
    cache: object
    parallel: object
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = None


def _fields(name, *names):
    return dataclass(type(name, (), {"__annotations__": dict.fromkeys(names, object)}))


@dataclass
class _JobResult:
    job_id: int
    success: bool
    successful_keys: object = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass
class _Request:
    req_id: str
    kv_transfer_params: dict | None = None
    _offload_key_positions: dict = dataclasses.field(default_factory=dict, init=False)

    def set_offload_key_position(self, key, end):
        self._offload_key_positions[key] = end


@dataclass
class _WorkerMetadata:
    completed_jobs: dict = dataclasses.field(default_factory=dict)


class _OffloadingConnector(_Connector):
    """vLLM's, as far as a connector above it is asked. `manager`: of the scheduler's side."""

    manager = None

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.connector_scheduler = types.SimpleNamespace(manager=self.manager)
        self.asked, self.worker_meta = [], None

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.asked.append(("let in", request.request_id))

    def build_connector_meta(self, scheduler_output):
        self.asked.append(("step", len(scheduler_output.num_scheduled_tokens)))

    def build_connector_worker_meta(self):
        return self.worker_meta

    def update_connector_output(self, connector_output):
        self.asked.append(("ran",))

    def request_finished(self, request, block_ids):
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return False, None


class _Tier:
    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self.block_size_bytes = primary_kv_view.strides[0]


#: Fields of an event of vLLM 0.32 and 0.33, the last three with defaults.
_EVENT = ["keys", "medium", "removed", *((name, object, None) for name in ("locality", "ownership", "removal_expected"))]


class _Factory:
    @staticmethod
    def create_secondary_tier(config, view, spec):
        config = dict(config)
        tier = getattr(importlib.import_module(config.pop("module_path")), config.pop("type"))
        return tier(offloading_spec=spec, primary_kv_view=view, tier_type="tier", **config)


def _vllm():
    connector = "vllm.distributed.kv_transfer.kv_connector.v1"
    offload = "vllm.v1.kv_offload"
    lookups, media = enum.Enum("LookupResult", "MISS HIT HIT_PENDING RETRY"), enum.Enum("Medium", "CPU STORAGE")
    return {
        connector + ".base": dict(
            KVConnectorBase_V1=_Connector,
            KVConnectorHandshakeMetadata=type("KVConnectorHandshakeMetadata", (), {}),
            KVConnectorMetadata=type("KVConnectorMetadata", (), {}),
            SupportsHMA=type("SupportsHMA", (), {}),
            KVConnectorWorkerMetadata=type("KVConnectorWorkerMetadata", (), {}),
            KVConnectorRole=enum.Enum("KVConnectorRole", "SCHEDULER WORKER"),
        ),
        connector + ".metrics": dict(KVConnectorPromMetrics=_PromMetrics, KVConnectorStats=_Stats),
        connector + ".offloading.common": dict(OffloadingWorkerMetadata=_WorkerMetadata),
        connector + ".offloading.metrics": dict(OffloadingConnectorStats=_Offloaded),
        connector + ".offloading_connector": dict(OffloadingConnector=_OffloadingConnector),
        "vllm.distributed.kv_events": dict(
            MEDIUM_STORAGE="STORAGE",
            BlockStored=BlockStored,
            BlockRemoved=BlockRemoved,
            AllBlocksCleared=type("AllBlocksCleared", (), {}),
        ),
        "vllm.v1.core.kv_cache_utils": dict(
            generate_block_hash_extra_keys=lambda request, first, last, at: (None, at),
            maybe_convert_block_hash=lambda name: name,
            resolve_block_hashes=_resolved,
            to_event_extra_keys=lambda keys: list(keys),
        ),
        "vllm.platforms": dict(current_platform=types.SimpleNamespace(device_type="cpu")),
        "vllm.version": dict(__version__="0.33.0"),
        "vllm.v1.kv_cache_interface": dict(
            FullAttentionSpec=FullAttentionSpec,
            MLAAttentionSpec=MLAAttentionSpec,
            SlidingWindowSpec=SlidingWindowSpec,
            ChunkedLocalAttentionSpec=type("ChunkedLocalAttentionSpec", (), {}),
            MambaSpec=MambaSpec,
            group_kernel_blocks=_kernel_blocks,
            get_kv_cache_spec_kind=_kind_name,
            get_kv_cache_spec_sliding_window=lambda spec: getattr(spec, "sliding_window", None),
        ),
        "vllm.v1.metrics.cache_hit_source": dict(CacheHitSource=enum.Enum("CacheHitSource", "HOST DISK")),
        offload + ".base": dict(
            LookupResult=lookups,
            Medium=media,
            OffloadingEvent=dataclasses.make_dataclass("OffloadingEvent", _EVENT),
            Locality=enum.Enum("Locality", "LOCAL REMOTE"),
            OffloadingCounterMetadata=lambda documentation, labelnames=(): (documentation, labelnames),
            RequestOffloadingContext=type("RequestOffloadingContext", (), {}),
            ReqContext=_Request,
            ScheduleEndContext=lambda new, preempted: (new, preempted),
            get_offload_block_hash=lambda key: key[:-4],
            get_offload_group_idx=lambda key: int.from_bytes(key[-4:], "big"),
            make_offload_key=lambda name, group: name + group.to_bytes(4, "big"),
        ),
        offload + ".config": dict(
            OffloadingCacheConfig=_fields("Cache", "tokens_per_hash", "blocks_per_chunk"),
            OffloadingConfig=_Offloading,
            OffloadingGroupConfig=_Group,
            OffloadingModelConfig=_fields("Model", "name", "dtype"),
            OffloadingParallelConfig=_Parallel,
        ),
        offload + ".tiering.base": dict(
            JobResult=_JobResult,
            SecondaryTierManager=_Tier,
            TransferJob=_fields("TransferJob", "job_id", "keys", "chunk_ids", "is_promotion", "req_context"),
        ),
        offload + ".tiering.factory": dict(SecondaryTierFactory=_Factory),
    }


# SGLang


class _Storage:
    def register_mem_pool_host(self, pool):
        self.mem_pool_host = pool

    def register_mem_host_pool_v2(self, pool, name):
        pass

    def on_host_pools_registered(self):
        pass


@dataclass
class StorageConfig:
    """Of version 0.5.23: the fields after `model_name` came with it."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    extra_config: dict | None = None
    dcp_size: int = 1
    dcp_rank: int = 0

    @property
    def is_storage_writer(self):
        return not self.is_mla_model or self.tp_rank == self.dcp_rank


class _Pools(str, enum.Enum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"

    __str__ = str.__str__


class _Policies(str, enum.Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


@dataclass
class _Transfer:
    name: object
    host_indices: object = None
    device_indices: object = None
    keys: object = None
    hit_policy: object = _Policies.ALL_PAGES


@dataclass
class _Transferred:
    kv_hit_pages: int
    extra_pool_hit_pages: dict
    restorable_prefix_pages: list


class _Backends:
    @staticmethod
    def create_backend(name, config, pool):
        given = config.extra_config
        return getattr(importlib.import_module(given["module_path"]), given["class_name"])(config, {})


class _Linker:
    """The interface of a linker. On a processor there are no events."""

    def record_offload_ready(self):
        return []


class _Entry:
    """A pool of a device as SGLang describes it to linkers: `components` of buffers, a row for each token, or for each page."""

    def __init__(self, *, name, indices_from_pool, device_pool, components, layer_mapping, page_size, rows_are_pages):
        self.name, self.indices_from_pool, self.device_pool = name, indices_from_pool, device_pool
        self.components, self.layer_mapping, self.page_size = components, layer_mapping, page_size
        self._span = 1 if rows_are_pages else page_size
        self.kv_buffer = [buffer for component in components for buffer in component]
        self.buffer_meta = [[(buffer.data_ptr(), buffer.strides[0], buffer.nbytes // buffer.shape[0] * self._span) for buffer in c] for c in components]

    def translate_indices(self, indices):
        return indices

    def prepare_locations(self, indices):
        starts = [int(place) for place in indices.reshape(-1, self.page_size)[:, 0]]
        return [start // self.page_size for start in starts] if self._span == 1 else starts


class _Entries:
    """The pools of a device."""

    def __init__(self, entries, num_layers, page_size, *, rank_replicated=False):
        self.entries, self.entry_map = entries, {entry.name: entry for entry in entries}
        self.num_layers, self.page_size, self.rank_replicated = num_layers, page_size, rank_replicated


def _dense(name, pool, layer_mapping, page_size, indices_from_pool=None):
    count = len(pool.k_buffer)
    named = dict(name=name, indices_from_pool=indices_from_pool or name, device_pool=pool, components=[[*pool.k_buffer, *pool.v_buffer]])
    layers = {layer: (at, count + at) for layer, at in layer_mapping.items()}
    return _Entry(**named, layer_mapping=layers, page_size=page_size, rows_are_pages=False)


def _windowed(cache):
    full = {layer: at for layer, (at, is_windowed) in cache.layers_mapping.items() if not is_windowed}
    return full, {layer: at for layer, (at, is_windowed) in cache.layers_mapping.items() if is_windowed}


def _not_described(**named):
    raise ValueError("no such pools")


#: What SGLang runs with. Tests change it.
SGLANG = types.SimpleNamespace()


def of_sglang(**settings):
    """Makes these the settings of SGLang, and all others as by default."""
    SGLANG.__dict__.clear()
    plain = dict(model_path="test/model", revision=None, dtype="bfloat16", quantization=None, kv_cache_dtype="auto")
    SGLANG.__dict__.update(plain, json_model_override_args="{}", load_format="auto", model_impl="auto")
    SGLANG.__dict__.update(settings)


def _seed(extra_key, salt):
    return None if extra_key is None and salt is None else repr((extra_key, salt))


def _sglang():
    of_sglang()
    cache = "sglang.srt.mem_cache"
    return {
        cache + ".hicache_storage": dict(
            HiCacheStorage=_Storage,
            HiCacheStorageConfig=StorageConfig,
            PoolHitPolicy=_Policies,
            PoolName=_Pools,
            PoolTransfer=_Transfer,
            PoolTransferResult=_Transferred,
        ),
        cache + ".storage": dict(StorageBackendFactory=_Backends),
        cache + ".unified_cache.unified_cache_linker": dict(UnifiedCacheLinker=_Linker),
        cache + ".hybrid_cache.linker_pool_assembler": dict(
            DevicePoolEntry=_Entry,
            DevicePoolGroup=_Entries,
            _mha_device_pool_entry=_dense,
            resolve_hybrid_device_pool_group=_not_described,
        ),
        cache + ".hybrid_cache.hybrid_pool_assembler": dict(_swa_layer_mappings=_windowed),
        cache + ".utils": dict(storage_namespace_seed=_seed, get_storage_hash_str=lambda *of: ""),
        "sglang": dict(__version__="0.5.23"),
        "sglang.srt.runtime_context": dict(get_model=lambda: SGLANG, get_parallel=lambda: types.SimpleNamespace(attn_dcp_size=1)),
    }


def _is_absent(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return True
    return getattr(sys.modules[name], "is_double", False)


def install():
    """Puts doubles in the place of what is not installed. Returns which of "torch", "vllm" and "sglang" they are."""
    made = []
    for name, modules in (("torch", lambda: {"torch": _torch()}), ("vllm", _vllm), ("sglang", _sglang)):
        if not _is_absent(name):
            continue
        made.append(name)
        if name in sys.modules:
            continue
        for path, names in modules().items():
            parts = path.split(".")
            for at in range(1, len(parts) + 1):
                module = sys.modules.setdefault(".".join(parts[:at]), types.ModuleType(".".join(parts[:at])))
                module.is_double, module.__path__ = True, []
                if at > 1:
                    setattr(sys.modules[".".join(parts[: at - 1])], parts[at - 1], module)
            module.__dict__.update(names)
    return made
