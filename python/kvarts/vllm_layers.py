"""Kvarts behind vLLM's KV caches layer by layer, without a tier in host memory (`KVConnectorBase_V1`).

    --no-async-scheduling --kv-transfer-config '{"kv_connector": "KvartsLayers", "kv_connector_module_path": "kvarts.vllm_layers",
        "kv_role": "kv_both", "kv_connector_extra_config": {"server": "/run/kvarts/kvarts.sock"}}'

A request computes its first layer as soon as that layer of its prefix is there, while the next ones are still being read. What
holds:

- A block comes back with the bytes that were stored under its hash by an engine of the same identity (`Plan`), in every layer, or
  vLLM recomputes it: this connector sets vLLM's `kv_load_failure_policy` to `recompute`.
- What is stored was computed by steps of which every load was good: a block is handed to the store after vLLM has taken the
  output of the step that computed it, and its memory is kept until it was copied.
- No request waits longer than `timeout` seconds for look-up and load together (a second more at most), also if the server has
  stopped. Stores wait for nothing. While the server is away, every prefix is a miss; it comes back by itself. The engine starts
  without a server, too.

Models with one kind of KV cache, in one process or with tensor parallelism; what else there is, is refused at the start, with its
name. KV caches in host memory are read into directly; those of a device through host memory, a layer at a time.
"""

import time
from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.version import __version__ as vllm_version

import kvarts

from .link import Link, logger, token_of
from .vllm import identity_of

#: Bytes that a step copies for the store; what is more waits for the next step.
_STEP_BYTES = 256 << 20
#: Bytes that are on their way to the store; what is more is dropped.
_UNDER_WAY_BYTES = 1 << 30

_COUNTERS = {
    "loaded": ("vllm:kvarts_loaded_blocks", "Blocks that were read from Kvarts, in every layer."),
    "stored": ("vllm:kvarts_stored_blocks", "Blocks that Kvarts has taken, or had already."),
    "layers": ("vllm:kvarts_layers", "Layers of loads that the forward pass was given."),
    "early": ("vllm:kvarts_early_layers", "Of these, layers that were given before the last layer of their load had been read."),
}
_FAILED = "vllm:kvarts_failed_blocks"
_FAILED_TEXT = "Blocks that were not stored, found or loaded for another reason than that they are not there."


class Plan:
    """What both sides agree on: which bytes a block has, and how it is called."""

    def __init__(self, vllm_config, kv_cache_config):
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        parallel = vllm_config.parallel_config
        for part in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
            if getattr(parallel, part, 1) != 1:
                raise ValueError(f"{part}: kvarts.vllm_layers does not support it; kvarts.vllm does")
        if vllm_config.scheduler_config.async_scheduling:
            # A step that was begun before a failed load is known would be taken for good.
            raise ValueError("async_scheduling: a load that fails layer by layer needs --no-async-scheduling")
        if vllm_config.speculative_config is not None:
            raise ValueError("speculative_config: kvarts.vllm_layers does not support it; kvarts.vllm does")
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
            raise ValueError("kv_cache_groups: kvarts.vllm_layers needs one kind of KV cache; kvarts.vllm takes hybrid models")
        [group] = groups
        spec = group.kv_cache_spec
        self.layers = list(group.layer_names)
        self.block_tokens = spec.block_size
        self.per_block = spec.block_size // (kv_cache_config.hash_block_size or spec.block_size)
        self.layer_bytes = spec.unpadded_page_size_bytes
        self.block_bytes = self.layer_bytes * len(self.layers)
        self.ranks = parallel.tensor_parallel_size
        self.rank = parallel.rank % self.ranks
        self.timeout = float(extra.get("timeout", 2.0))
        self._durable = bool(extra.get("durable", False))
        self._server, self._token_file = extra.get("server"), extra.get("token_file")
        self._pause = float(extra.get("pause", 1.0))
        identity = {**identity_of(vllm_config, extra.get("revision")), **extra.get("identity", {})}
        # Every rank of a model with latent attention has the same bytes.
        alike = self.ranks == 1 or isinstance(spec, MLAAttentionSpec)
        self._named = dict(
            spec=_TEXT.format(
                layers=len(self.layers),
                heads=0 if alike else self.ranks,
                bytes=self.layer_bytes * (1 if alike else self.ranks),
                tokens=self.block_tokens,
            ),
            model=vllm_config.model_config.model,
            revision=identity.pop("revision"),
            dtype=f"{vllm_config.cache_config.cache_dtype}/{spec.dtype}".replace("torch.", ""),
            engine="vllm",
            layout=f"layers-{kv_cache_config.kv_cache_layout}",
            layout_version=vllm_version,
            block_tokens=self.block_tokens,
            tp_size=self.ranks,
            extras={**{name: str(value) for name, value in identity.items()}, "cache": repr(spec), "names": ",".join(self.layers)},
        )

    def link(self):
        return Link(lambda: kvarts.connect(self._server, token_of(self._token_file), timeout=self.timeout, of_cluster=True), self._pause)

    def pages(self, client, rank=0):
        """The handle. What is asked of it takes half of the time that there is for a request: a look-up and a load."""
        return client.pages(tp_rank=rank, durable=self._durable, timeout=self.timeout / 2, **self._named)

    def keys(self, request, first, last):
        """The hash of a block is that of the last of its tokens."""
        return [bytes(request.block_hashes[(n + 1) * self.per_block - 1]) for n in range(first, last)]


_TEXT = """
name = "vllm-layers"
source = "the KV cache's specification"
block_tokens = {tokens}
layers = [{{ repeat = {layers}, of = ["layer"] }}]
[layer]
layer = ["page"]
[part.page]
kind = "dense_kv"
role = "page"
bytes = {bytes}
heads = {heads}
dtype = "opaque"
"""


@dataclass
class Load:
    """Blocks of a request that are to be read into places of the KV cache."""

    keys: list
    blocks: list


@dataclass
class Save:
    """Consecutive blocks of a request that are to be stored; `parent` is the key before them."""

    keys: list
    blocks: list
    parent: bytes


@dataclass
class Step(KVConnectorMetadata):
    """What the scheduler tells the workers for a step."""

    loads: list = field(default_factory=list)
    saves: list = field(default_factory=list)
    #: Requests that are over and of which `saves` has the last blocks.
    over: set = field(default_factory=set)


class Stats(KVConnectorStats):
    """Counts since the last report."""

    def add(self, what, count, reason=None):
        name = what if reason is None else f"{what} {reason}"
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
        self._counters = {
            what: self._counter_cls(name=name, documentation=text, labelnames=labelnames) for what, (name, text) in _COUNTERS.items()
        }
        self._failed = self._counter_cls(name=_FAILED, documentation=_FAILED_TEXT, labelnames=[*labelnames, "reason"])

    def observe(self, transfer_stats_data, engine_idx=0):
        values = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            what, _, reason = name.partition(" ")
            if what == "failed":
                self._failed.labels(*values, reason).inc(count)
            else:
                self._counters[what].labels(*values).inc(count)


class KvartsLayers(KVConnectorBase_V1):
    """`kv_connector_extra_config`: `server` and `token_file` as for `kvarts.connect`; `timeout`: seconds for a look-up and a load
    together; `pause`: seconds for which a server that did not answer is left alone; `durable`: stores are acknowledged after a
    flush; `revision` where the model's name does not say it; `identity` for whatever else decides bytes."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        plan = Plan(vllm_config, kv_cache_config)
        # A block that is not there any more is recomputed; it is no reason to fail a request.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        transfer = vllm_config.kv_transfer_config
        if role is KVConnectorRole.SCHEDULER:
            self._side = Finder(plan, transfer.is_kv_consumer, transfer.is_kv_producer)
        else:
            self._side = Mover(plan)

    @property
    def requires_kv_delivery(self):
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        return True

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager):
        super().bind_kv_cache_manager(kv_cache_manager)
        self._side.blocks_of = lambda request: kv_cache_manager.get_block_ids(request)[0]

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self._side.find(request, num_computed_tokens), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._side.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self._side.step()

    def request_finished(self, request, block_ids):
        return self._side.finished(request, block_ids), None

    def reset_cache(self):
        # Nothing of the cache is kept here; what is on disk belongs to the model's revision.
        return True

    # The workers' side.

    def register_kv_caches(self, kv_caches):
        self._side.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self._side.begin(connector_metadata)

    def start_load_kv(self, forward_context, **kwargs):
        self._side.load()

    def wait_for_layer_load(self, layer_name):
        self._side.wait_for(layer_name)

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self._side.copy(layer_name)

    def wait_for_save(self):
        self._side.finish()

    def get_finished(self, finished_req_ids):
        return set(self._get_connector_metadata().over), None

    def get_block_ids_with_load_errors(self):
        return self._side.take_failed()

    # Both.

    def shutdown(self):
        self._side.close()

    def get_kv_connector_stats(self):
        return self._side.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class _Side:
    """What both sides have: a link, a handle, counts."""

    def __init__(self, plan, rank=0):
        self.plan = plan
        self.stats = Stats()
        self._link = plan.link()
        self._rank = rank
        self._pages = None

    def _open(self, client):
        """In the thread of the link."""
        if self._pages is None:
            self._pages = self.plan.pages(client, self._rank)

    def close(self):
        try:
            self._link.stop()
            if self._pages is not None:
                self._pages.close(self.plan.timeout)
            self._link.close(self.plan.timeout)
        except kvarts.Error as error:
            logger.warning("kvarts: %s", error)


class _Asked:
    """A look-up: of blocks from `first` on."""

    def __init__(self, first, count):
        self.first, self.count = first, count
        self.found = self.failed = None  # blocks, and why it has no answer: written by the thread of the link


class _Known:
    """A request that has blocks."""

    def __init__(self, request, saved):
        self.request = request
        self.saved = saved
        self.last = None  # (blocks, how many of them are computed), once it is over


class Finder(_Side):
    """The scheduler's side: what is there, what is to be read, and what may be stored."""

    def __init__(self, plan, reads=True, writes=True):
        super().__init__(plan)
        self._reads, self._writes = reads, writes
        self._asked = {}  # request -> _Asked
        self._loads = {}  # request -> Load
        self._known = {}  # request -> _Known
        self.blocks_of = None

    def find(self, request, computed):
        """How many tokens can be read beyond those that are computed; `None` until it is known. At least one token is left."""
        first, last = computed // self.plan.block_tokens, (request.num_tokens - 1) // self.plan.block_tokens
        if not self._reads or last <= first or self._link.away:
            return 0
        asked = self._asked.get(request.request_id)
        if asked is None or (asked.first, asked.count) != (first, last - first):
            asked = self._asked[request.request_id] = _Asked(first, last - first)
            self._ask(asked, self.plan.keys(request, first, last))
        if asked.found is None:
            return None
        if asked.failed is not None:
            self.stats.add("failed", asked.count, asked.failed)
            asked.failed = None
        return asked.found * self.plan.block_tokens

    def _ask(self, asked, keys):
        def ask(client):
            self._open(client)
            # Held until they are read: a step later, if vLLM has room.
            asked.found = self._pages.match(keys, hold=2 * self.plan.timeout).blocks
            self._link.answered()

        def failed(error):
            asked.failed = getattr(error, "reason", type(error).__name__)
            asked.found = 0

        self._link.do(ask, failed)

    def allocated(self, request, blocks, external):
        asked = self._asked.pop(request.request_id, None)
        count = external // self.plan.block_tokens
        first = asked.first if asked is not None else 0
        if count:
            keys = self.plan.keys(request, first, first + count)
            self._loads[request.request_id] = Load(keys, list(blocks[first : first + count]))
        self._known[request.request_id] = _Known(request, first + count)

    def finished(self, request, blocks):
        """Whether its memory is to be kept until the workers have copied it."""
        self._asked.pop(request.request_id, None)
        self._loads.pop(request.request_id, None)
        known = self._known.get(request.request_id)
        if known is None:
            return False
        known.last = (list(blocks), self._computed(request))
        if self._writes and known.last[1] > known.saved:
            return True
        del self._known[request.request_id]
        return False

    def _computed(self, request):
        """Full blocks of which vLLM has taken the output of the step that computed them."""
        return max(0, request.num_computed_tokens - request.num_in_flight_tokens) // self.plan.block_tokens

    def step(self):
        step = Step(loads=list(self._loads.values()))
        self._loads.clear()
        room = max(1, _STEP_BYTES // self.plan.block_bytes)
        for name, known in list(self._known.items()) if self._writes else ():
            blocks, computed = known.last or (None, self._computed(known.request))
            # Fewer than before: what was read was not good, or the request has lost its memory.
            known.saved = min(known.saved, computed)
            count = min(computed - known.saved, room)
            if count:
                blocks = self.blocks_of(name) if blocks is None else blocks
                step.saves.append(self._save(known, blocks, count))
                room -= count
            if known.last is not None and known.saved == computed:
                step.over.add(name)
                del self._known[name]
        return step

    def _save(self, known, blocks, count):
        first, last = known.saved, known.saved + count
        parent = self.plan.keys(known.request, first - 1, first)[0] if first else b""
        known.saved = last
        return Save(self.plan.keys(known.request, first, last), list(blocks[first:last]), parent)


class _Reading:
    """A load that is under way."""

    def __init__(self, load, reading, staging):
        self.load = load
        self.reading = reading
        self.staging = staging  # of each layer, where the KV cache is not in host memory
        self.good = len(load.blocks) if reading is not None else 0


class Mover(_Side):
    """A worker's side: it reads and stores."""

    def __init__(self, plan):
        super().__init__(plan, plan.rank)
        self._order = {name: n for n, name in enumerate(plan.layers)}
        self._caches = []  # of each layer: a row of bytes for each block
        self._parts = None  # where blocks lie, for a KV cache in host memory
        self._step = Step()
        self._readings = []
        self._given = 0  # layers
        self._copies = []  # (Save, its bytes by layers)
        self._copied = 0  # layers
        self._puts = {}  # batch -> blocks
        self._failed = set()
        self._opening = False

    def register(self, kv_caches):
        parts = []
        for name in self.plan.layers:
            cache = kv_caches[name]
            size = cache.element_size()
            block = cache[0]
            block = block.permute(*sorted(range(block.dim()), key=lambda at: -block.stride(at)))
            if block.numel() * size != self.plan.layer_bytes or not block.is_contiguous():
                raise ValueError(f"kv_cache_layout: a block of {name} is not {self.plan.layer_bytes} bytes in one piece")
            whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
            first, stride = cache.storage_offset() * size, cache.stride(0) * size
            self._caches.append(whole.as_strided((cache.shape[0], self.plan.layer_bytes), (stride, 1), first))
            parts.append((whole, first, stride))
        if all(cache.device.type == "cpu" for cache in self._caches):
            self._parts = parts
        self._link_open()

    def _link_open(self):
        def opened(client):
            self._open(client)
            self._opening = False

        def failed(error):
            logger.warning("kvarts: no store: %s", error)
            self._opening = False

        self._opening = True
        self._link.do(opened, failed)

    def _usable(self):
        if self._link.away:
            return False
        if self._pages is None and not self._opening:
            self._link_open()
        return self._pages is not None

    def begin(self, step):
        self._end_loads()  # of a step that was given up
        self._step = step
        self._given = 0
        self._copies, self._copied = [], 0
        self._take()
        for save in step.saves:
            self._begin_copy(save)

    # Reading.

    def load(self):
        for load in self._step.loads:
            reading = staging = None
            if self._usable():
                slots, parts = load.blocks, self._parts
                if parts is None:
                    staging = self._staging(len(load.blocks))
                    slots, parts = range(len(load.blocks)), _parts_of(staging)
                try:
                    reading = self._pages.layers(load.keys, kvarts.Paged(parts, slots))
                except kvarts.Error as error:
                    self._link.failed(error)
                    self.stats.add("failed", len(load.blocks), error.reason)
            else:
                self.stats.add("failed", len(load.blocks), "away")
            self._readings.append(_Reading(load, reading, staging))

    def _staging(self, blocks):
        # Memory that a device copies from and to is kept by torch for the next time.
        return torch.empty(len(self._caches), blocks, self.plan.layer_bytes, dtype=torch.uint8, pin_memory=self._parts is None)

    def wait_for(self, name):
        """Until this layer, and those before it, are in the KV cache, or are known not to come."""
        while self._readings and self._given <= self._order[name]:
            for reading in self._readings:
                self._next_layer(reading)
            self._given += 1

    def _next_layer(self, reading):
        if not reading.good:
            return
        layer = next(reading.reading, None)
        reading.good = layer.blocks if layer is not None and layer.layer == self._given else 0
        if not reading.good:
            return
        self.stats.add("layers", 1)
        if reading.reading.arrived < len(self._caches):
            self.stats.add("early", 1)
        if reading.staging is not None:
            cache = self._caches[self._given]
            where = torch.tensor(reading.load.blocks[: reading.good], device=cache.device)
            cache[where] = reading.staging[self._given][: reading.good].to(cache.device)

    def _end_loads(self):
        if self._readings:
            self.wait_for(self.plan.layers[-1])
        for reading in self._readings:
            self._failed.update(reading.load.blocks[reading.good :])
            if reading.good:
                self.stats.add("loaded", reading.good)
            if reading.reading is not None:
                # The end of the iteration says why blocks are not there.
                for _ in reading.reading:
                    pass
                errors = reading.reading.errors.values()
                self._link.learn([True] * reading.good, errors)
                for error in errors:
                    if not isinstance(error, kvarts.Miss):
                        self.stats.add("failed", 1, error.reason)
        self._readings = []

    def take_failed(self):
        failed, self._failed = self._failed, set()
        return failed

    # Storing.

    def _begin_copy(self, save):
        under_way = sum(self._puts.values()) + sum(len(copied.blocks) for copied, _ in self._copies)
        if not self._usable():
            self.stats.add("failed", len(save.blocks), "away")
        elif (under_way + len(save.blocks)) * self.plan.block_bytes > _UNDER_WAY_BYTES:
            self.stats.add("failed", len(save.blocks), "busy")
        else:
            self._copies.append((save, self._staging(len(save.blocks))))

    def copy(self, name):
        """Copies the blocks that are to be stored, up to this layer."""
        while self._copies and self._copied <= self._order[name]:
            cache = self._caches[self._copied]
            for save, staging in self._copies:
                staging[self._copied].copy_(cache[torch.tensor(save.blocks, device=cache.device)])
            self._copied += 1

    def finish(self):
        """After the forward pass, also if there was none."""
        self._end_loads()
        if self._copies:
            self.copy(self.plan.layers[-1])
        for save, staging in self._copies:
            slots = range(len(save.keys))
            try:
                batch = self._pages.submit_put(save.keys, kvarts.Paged(_parts_of(staging), slots), parent=save.parent)
                self._puts[batch] = len(save.keys)
            except kvarts.Error as error:
                self._link.failed(error)
                self.stats.add("failed", len(save.keys), error.reason)
        self._copies = []
        self._take()

    def _take(self, wait=None):
        if self._pages is None:
            return
        for done in self._pages.drain() if wait is None else self._pages.wait(wait):
            self._puts.pop(done.id, None)
            self._link.learn(done.results, done.errors.values())
            for error in done.errors.values():
                self.stats.add("failed", 1, error.reason)
            if good := sum(done.results):
                self.stats.add("stored", good)

    def close(self):
        deadline = time.monotonic() + self.plan.timeout
        while self._puts and (left := deadline - time.monotonic()) > 0:
            self._take(wait=left)
        super().close()


def _parts_of(staging):
    """A part for each layer of (layers, blocks, bytes)."""
    layers, blocks, size = staging.shape
    return [(staging.view(-1), layer * blocks * size, size) for layer in range(layers)]
