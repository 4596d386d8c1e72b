"""Kvarts behind vLLM's KV caches layer by layer, without a tier in host memory (`KVConnectorBase_V1`).

    --no-async-scheduling --kv-transfer-config '{"kv_connector": "KvartsLayers", "kv_connector_module_path": "kvarts.vllm_layers",
        "kv_role": "kv_both", "kv_connector_extra_config": {"server": "/run/kvarts/kvarts.sock"}}'

A request computes its first layer as soon as that layer of its prefix is there, while the next ones are still being read. What
holds:

- A block comes back with the bytes that were stored under its hash by an engine of the same identity (`Plan`), in every layer, or
  vLLM is told that its load failed. What then becomes of the request is the operator's to say: vLLM's `kv_load_failure_policy`,
  which this connector leaves as it is. `recompute` is refused where vLLM cannot take back what it has begun (`Plan`).
- A layer that the forward pass did not wait for counts as one that was not loaded: nothing says when it was read.
- What a failed load leaves in the engine's cache is taken out of the prefix cache, also where the request was given up meanwhile.
  No other request is admitted on blocks before their load is known to be good, and nothing is stored of a request that has one
  that was not.
- What is stored was computed by steps of which every load was good: a block is handed to the store after vLLM has taken the
  output of the step that computed it, and its memory is kept until it was copied. What a worker did not take is offered again.
- A look-up is answered within half of `timeout` seconds. A load ends when nothing came for as long, and for the time that a layer
  of it takes at 64 MiB a second; one that goes on coming is waited for. Stores wait for nothing, and one that fails makes no load
  a miss. While the server is away, every prefix is a miss; it comes back by itself. The engine starts without a server, too.

Models with one kind of KV cache, in one process or with tensor parallelism; what else there is, is refused at the start, with its
name. KV caches in host memory are read into directly; those of a device through host memory, a layer at a time.
"""

import time
from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvarts

from .link import Link, Silence, allowed, brief, differing, logger, token_of
from .vllm_identity import identity_of, layout_version

#: Bytes that a step copies for the store; what is more waits for the next step.
_STEP_BYTES = 256 << 20
#: Bytes that are on their way to the store; what is more waits until some of them are there.
_UNDER_WAY_BYTES = 1 << 30
#: How often blocks of a request are offered again after a store that failed.
_TRIES = 3
#: Of how many timeouts the blocks of a request that is over are kept for a store that is busy.
_KEPT = 5

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
        self._expect_that_loads_may_fail(vllm_config)
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
        identity = {**identity_of(vllm_config, extra.get("revision"), kv_cache_config), **extra.get("identity", {})}
        layout = kv_cache_config.kv_cache_layout
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
            layout=f"layers-{layout}",
            layout_version=layout_version(differing(spec), self.layers, layout, alike),
            block_tokens=self.block_tokens,
            tp_size=self.ranks,
            extras=brief(identity),
        )

    @staticmethod
    def _expect_that_loads_may_fail(vllm_config):
        """A load that failed is known after the step that computed with it. vLLM's model runner V2 then goes on at the tokens behind the
        failed blocks (it takes back the scheduler's count and not the device's), so `recompute` gives wrong tokens there; a request
        that is ended (`fail`) gives none."""
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute" or not transfer.is_kv_consumer:
            return
        if getattr(vllm_config, "use_v2_model_runner", True):
            raise ValueError(
                "kv_load_failure_policy: recompute: vLLM's model runner V2 computes wrong tokens after a load that failed; "
                "set it to fail, or VLLM_USE_V2_MODEL_RUNNER=0, or take kvarts.vllm"
            )

    def link(self):
        return Link(lambda: kvarts.connect(self._server, token_of(self._token_file), timeout=self.timeout, of_cluster=True), self._pause)

    def pages(self, client, rank=0):
        """The handle. A look-up takes half of the time that there is for a request; what moves bytes says itself how long."""
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
    """Blocks of a request, from its block `first` on, that are to be read into places of the KV cache."""

    keys: list
    blocks: list
    first: int = 0


@dataclass
class Save:
    """Consecutive blocks of a request that are to be stored; `parent` is the key before them."""

    keys: list
    blocks: list
    parent: bytes
    number: int = 0


@dataclass
class Step(KVConnectorMetadata):
    """What the scheduler tells the workers for a step."""

    loads: list = field(default_factory=list)
    saves: list = field(default_factory=list)
    #: Requests that are over and of which `saves` has the last blocks.
    over: set = field(default_factory=set)


@dataclass
class Told(KVConnectorWorkerMetadata):
    """What the workers tell the scheduler after a step: `room` is that of the fullest one."""

    room: int = 0
    away: bool = False
    #: Whether the model has layers that do not wait for their loads: then nothing is to be loaded any more.
    unwaited: bool = False
    #: Saves that were not taken, or that failed later: {number: whether another try may go better}.
    back: dict = field(default_factory=dict)

    def aggregate(self, other):
        back = {**self.back, **{number: again and self.back.get(number, True) for number, again in other.back.items()}}
        return Told(min(self.room, other.room), self.away or other.away, self.unwaited or other.unwaited, back)


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

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config):
        # The places of the KV cache are learned once.
        return False

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager):
        super().bind_kv_cache_manager(kv_cache_manager)
        evict = getattr(kv_cache_manager, "evict_blocks", None)
        if evict is None:
            raise ValueError("evict_blocks: this vLLM cannot forget the blocks of a load that failed")
        self._side.bind(lambda request: kv_cache_manager.get_block_ids(request)[0], evict)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self._side.find(request, num_computed_tokens), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._side.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self._side.step()

    def update_connector_output(self, connector_output):
        told = getattr(connector_output, "kv_connector_worker_meta", None)
        self._side.learn(set(connector_output.invalid_block_ids or ()), told)

    def request_finished(self, request, block_ids):
        return self._side.finished(request, block_ids), None

    def has_pending_push_work(self):
        return self._side.is_behind()

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

    def build_connector_worker_meta(self):
        return self._side.tell()

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
    """A look-up of a request's blocks up to `last`, of which vLLM has those before `first`."""

    def __init__(self, first, last, found=None):
        self.first, self.last = first, last
        self.found, self.failed = found, None  # blocks, and why it has no answer: written by the thread of the link
        self.at = time.monotonic()


class _Known:
    """A request that has blocks."""

    def __init__(self, request, saved):
        self.request = request
        self.saved = saved  # blocks before that were handed over, or are there already
        self.last = None  # (blocks, how many of them are computed), once it is over
        self.until = 0.0  # how long they are kept then
        # Saves, number -> its first block: of the step that runs, and those that the workers took and may yet fail.
        self.sent, self.taken = {}, {}
        self.tries = 0
        self.is_new = True
        # From where on it computes again what a failed load left, up to where and until when others wait for that.
        self.cut = self.cut_end = None
        self.cut_until = 0.0
        self.never = None  # where it rests on such blocks of another one: the first of its own
        self.asked = None  # what the store has of the blocks before `first`, once it is known


class Finder(_Side):
    """The scheduler's side: what is there, what is to be read, and what may be stored."""

    def __init__(self, plan, reads=True, writes=True):
        super().__init__(plan)
        self._reads, self._writes = reads, writes
        self._asked = {}  # request -> _Asked
        self._loads = {}  # request -> Load: those of the step that is being made
        self._under = {}  # request -> (Load, its blocks once it is over): those of the step that runs
        self._known = {}  # request -> _Known
        self._again = {}  # those of them that compute again what a failed load left
        self._numbers = 0
        self._told = Told(room=_UNDER_WAY_BYTES)
        #: Blocks of the engine's cache with bytes that a failed load left, or that were computed from such: until they are another's.
        self._tainted = set()
        self._ended = []  # requests with such blocks that were over in the step that runs
        self._blocks_of = self._evict = None

    def bind(self, blocks_of, evict):
        self._blocks_of, self._evict = blocks_of, evict

    def find(self, request, computed):
        """How many tokens can be read beyond those that are computed; `None` until it is known. At least one token is left."""
        size = self.plan.block_tokens
        first, last = computed // size, (request.num_tokens - 1) // size
        if self._rests_on_a_load(request, first):
            return None
        asked = self._asked.get(request.request_id)
        if not self._reads or last <= first or computed % size or self._link.away:
            if asked is None or (asked.first, asked.last) != (first, first):
                asked = self._asked[request.request_id] = _Asked(first, first, first if self._link.away or not first else None)
                if asked.found is None:
                    # No request waits for it: it says which of the blocks that vLLM has the store has not.
                    self._ask(asked, self.plan.keys(request, 0, first))
            return 0
        stale = asked is not None and asked.found is not None and time.monotonic() - asked.at > self.plan.timeout
        if asked is None or (asked.first, asked.last) != (first, last) or stale:
            # What waited for memory for long may have been evicted meanwhile: it is held for twice as long, and asked for again.
            asked = self._asked[request.request_id] = _Asked(first, last)
            self._ask(asked, self.plan.keys(request, 0, last))
        if asked.found is None:
            return None
        if asked.failed is not None:
            self.stats.add("failed", asked.last - asked.first, asked.failed)
            asked.failed = None
        return max(0, asked.found - first) * size

    def _rests_on_a_load(self, request, first):
        """vLLM has blocks in its prefix cache before they are loaded. Whether this request would be given some of this very step: if
        that load failed it would compute from what is not there. Or some that another one is computing again after a failed load:
        a step later it is known that they are good, and this request may be stored, too."""
        others = [(load.first, load.keys[0]) for load in self._loads.values()]
        now = time.monotonic()
        for known in self._again.values():
            if now < known.cut_until:
                others.append((known.cut, self.plan.keys(known.request, known.cut, known.cut + 1)[0]))
        return any(at < first and self.plan.keys(request, at, at + 1) == [key] for at, key in others)

    def _ask(self, asked, keys):
        def ask(client):
            self._open(client)
            # Held until they are read: a step later, if vLLM has room.
            found = self._pages.match(keys, hold=2 * self.plan.timeout).blocks
            asked.at = time.monotonic()
            asked.found = found
            self._link.answered()

        def failed(error):
            asked.failed = getattr(error, "reason", type(error).__name__)
            asked.found = asked.first

        self._link.do(ask, failed)

    def allocated(self, request, blocks, external):
        asked = self._asked.pop(request.request_id, None) or _Asked(0, 0, 0)
        count, first = external // self.plan.block_tokens, asked.first
        if count:
            keys = self.plan.keys(request, first, first + count)
            self._loads[request.request_id] = Load(keys, list(blocks[first : first + count]), first)
        self._forget(request.request_id)
        known = self._known[request.request_id] = _Known(request, first + count)
        known.asked = asked if not count else None
        if self._tainted.isdisjoint(blocks[:first]):
            self._tainted.difference_update(blocks[first:])
        else:
            # It was given what is not to be relied on: nothing of it is stored, and nothing that is computed from it.
            known.never = first
            self.stats.add("failed", len(blocks), "Tainted")

    def finished(self, request, blocks):
        """Whether its memory is to be kept until the workers have copied it."""
        name = request.request_id
        self._asked.pop(name, None)
        self._loads.pop(name, None)
        load, _ = self._under.get(name, (None, None))
        if load is not None:
            self._under[name] = load, list(blocks)
        known = self._known.get(name)
        if known is None:
            return False
        # If a load of this step turns out to have failed, `learn` takes back what rests on it.
        known.last = (list(blocks), self._computed(request))
        if known.never is not None:
            self._tainted.update(blocks[known.never :])
        if known.cut is not None:
            # Given up while a step runs, it has what that step computes, if none of its own loads fails.
            self._ended.append((known, known.cut, list(blocks), request.num_computed_tokens // self.plan.block_tokens))
        known.until = time.monotonic() + _KEPT * self.plan.timeout
        if self._writes and known.never is None and (known.last[1] > known.saved or known.sent):
            return True
        self._forget(name)
        return False

    def _computed(self, request):
        """Full blocks of which vLLM has taken the output of the step that computed them."""
        return max(0, request.num_computed_tokens - request.num_in_flight_tokens) // self.plan.block_tokens

    def _vouch(self, known, blocks, computed):
        """Blocks of its own that a request has computed again are what their hashes say."""
        self._tainted.difference_update(blocks[known.cut : computed])
        known.cut = max(known.cut, computed)
        if known.cut >= known.cut_end:
            self._again.pop(known.request.request_id, None)

    def _forget(self, name):
        self._known.pop(name, None)
        self._again.pop(name, None)

    def is_behind(self):
        """Whether requests that are over have blocks that are not copied: steps must go on, also without a request."""
        return any(known.last is not None for known in self._known.values())

    # After a step.

    def learn(self, invalid, told):
        """What the workers say of a step: which blocks were not loaded, and which saves they did not take."""
        under, self._under = self._under, {}
        for name, (load, blocks) in under.items() if invalid else ():
            at = next((n for n, block in enumerate(load.blocks) if block in invalid), None)
            if at is not None:
                self._take_back(name, load.first + at, self._blocks_of(name) if blocks is None else blocks)
        for known, cut, blocks, computed in self._ended:
            if known.cut == cut:
                self._vouch(known, blocks, computed)
        self._ended = []
        if told is None:
            return
        self._told = told
        self._reads = self._reads and not told.unwaited
        for known in list(self._known.values()):
            self._saves_done(known, told)

    def _take_back(self, name, first, blocks):
        """The blocks of a request from `first` on are not what their hashes say. vLLM leaves them in its prefix cache, where it is to
        recompute them or where the request was given up while the step ran."""
        bad = set(blocks[first:])
        self._tainted |= bad
        self._evict(bad)
        known = self._known.get(name)
        if known is None:
            return
        known.saved, known.cut = min(known.saved, first), first
        known.cut_end = min(len(blocks), len(known.request.block_hashes) // self.plan.per_block)
        known.cut_until = time.monotonic() + self.plan.timeout
        if known.cut < known.cut_end:
            self._again[name] = known
        if known.last is not None:
            known.last = (known.last[0], min(known.last[1], first))
        elif known.request.num_computed_tokens > first * self.plan.block_tokens:
            # vLLM goes on as if it were computed; with `fail` it will end the request.
            self._forget(name)

    def _saves_done(self, known, told):
        known.taken.update(known.sent)
        known.sent = {}
        for number in [number for number in known.taken if number in told.back]:
            known.saved = min(known.saved, known.taken.pop(number))
            known.tries += not told.back[number]
        if known.tries >= _TRIES:
            # What lies behind a hole is of no use.
            if known.last is None:
                self._forget(known.request.request_id)
            else:
                known.last = (known.last[0], known.saved)

    # Before a step.

    def step(self):
        step = Step(loads=list(self._loads.values()))
        self._under = {name: (load, None) for name, load in self._loads.items()}
        self._loads.clear()
        room = min(_STEP_BYTES, self._told.room) // self.plan.block_bytes
        if not self._told.away and self._told.room >= _UNDER_WAY_BYTES:
            room = max(1, room)  # a block of any size, where nothing is under way
        for name, known in list(self._known.items()) if self._writes else ():
            if known.asked is not None and known.asked.found is not None:
                # Blocks that vLLM has and the store has not are offered: the request that computed them could not hand them over.
                known.saved, known.asked = min(known.saved, known.asked.found), None
            if known.is_new:
                # What it was given by vLLM may be computed by another request in this very step.
                known.is_new = False
                continue
            blocks, computed = known.last or (None, self._computed(known.request))
            # Fewer than before: what was read was not good, or the request has lost its memory.
            known.saved = min(known.saved, computed)
            if known.never is not None:
                self._tainted.update(self._blocks_of(name)[known.never :])
                continue
            if known.cut is not None and known.last is None and computed > known.cut:
                self._vouch(known, self._blocks_of(name), computed)
            count = 0 if self._told.away else min(computed - known.saved, room)
            if count:
                blocks = self._blocks_of(name) if blocks is None else blocks
                step.saves.append(self._save(known, blocks, count))
                room -= count
            if known.last is not None:
                self._let_go(name, known, step, computed, bool(count))
        return step

    def _let_go(self, name, known, step, computed, sends):
        """Ends a request whose blocks were taken, or are not kept any longer."""
        left = computed - known.saved
        late = left and (self._told.away or time.monotonic() > known.until)
        if late:
            self.stats.add("failed", left, "away" if self._told.away else "busy")
        if not sends and (not left or late):
            step.over.add(name)
            self._forget(name)

    def _save(self, known, blocks, count):
        first, last = known.saved, known.saved + count
        parent = self.plan.keys(known.request, first - 1, first)[0] if first else b""
        known.saved = last
        self._numbers += 1
        known.sent[self._numbers] = first
        return Save(self.plan.keys(known.request, first, last), list(blocks[first:last]), parent, self._numbers)


class _Reading:
    """A load that is under way."""

    def __init__(self, load, reading, staging, layer_bytes):
        self.load = load
        self.reading = reading
        self.staging = staging  # of each layer, where the KV cache is not in host memory
        self.good = len(load.blocks) if reading is not None else 0
        self.came = False  # whether any layer did
        self.layer_bytes = len(load.blocks) * layer_bytes


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
        self._waited = set()  # layers that the forward pass asked for
        self._arrived, self._heard_at = 0, 0.0
        self._unwaited = False
        self._copies = []  # (Save, its bytes by layers)
        self._copied = 0  # layers
        self._puts = {}  # batch -> Save
        self._silence = Silence(plan.timeout)
        self._back = {}  # saves that were not taken: number -> whether another try may go better
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
        known = {kv_caches[name].data_ptr() for name in self.plan.layers}
        for name, cache in kv_caches.items():
            # Layers may share the cache of another one; one of its own that is in no group would be lost.
            if cache.data_ptr() not in known:
                raise ValueError(f"kv_cache_groups: {name} has a cache of its own and is in no group")
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

    def _usable(self, writes=False):
        if self._link.puts_away if writes else self._link.away:
            return False
        if self._pages is None and not self._opening:
            self._link_open()
        return self._pages is not None

    def begin(self, step):
        for reading in self._readings:  # of a step that was given up
            self._stop(reading, "GivenUp")
        self._end_loads(whole=False)
        self._step = step
        self._given = 0
        self._waited = set()
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
                # Silence ends it long before this does.
                within = allowed(self.plan.timeout, sum(len(one.blocks) for one in self._step.loads) * self.plan.block_bytes)
                try:
                    reading = self._pages.layers(load.keys, kvarts.Paged(parts, slots), timeout=within)
                except kvarts.Error as error:
                    self._link.failed(error)
                    self.stats.add("failed", len(load.blocks), error.reason)
            else:
                self.stats.add("failed", len(load.blocks), "away")
            self._readings.append(_Reading(load, reading, staging, self.plan.layer_bytes))
        self._arrived, self._heard_at = 0, time.monotonic()

    def _staging(self, blocks):
        # Memory that a device copies from and to is kept by torch for the next time.
        return torch.empty(len(self._caches), blocks, self.plan.layer_bytes, dtype=torch.uint8, pin_memory=self._parts is None)

    def wait_for(self, name):
        """Until this layer, and those before it, are in the KV cache, or are known not to come."""
        at = self._order.get(name)
        if at is None:
            return  # it has no cache of its own
        self._waited.add(name)
        while self._readings and self._given <= at:
            for reading in self._readings:
                self._next_layer(reading)
            self._given += 1

    def _next_layer(self, reading):
        if not reading.good:
            return
        layer = next(reading.reading, None) if self._comes(reading) else None
        reading.good = layer.blocks if layer is not None and layer.layer == self._given else 0
        if not reading.good:
            return
        reading.came = True
        self.stats.add("layers", 1)
        if reading.reading.arrived < len(self._caches):
            self.stats.add("early", 1)
        if reading.staging is not None:
            cache = self._caches[self._given]
            where = torch.tensor(reading.load.blocks[: reading.good], device=cache.device)
            cache[where] = reading.staging[self._given][: reading.good].to(cache.device)

    def _comes(self, reading):
        """Waits until something comes of a load; not, where nothing came of any load for too long."""
        within = allowed(self.plan.timeout / 2, sum(one.layer_bytes for one in self._readings))
        while not reading.reading.wait(max(0.0, self._heard_at + within - time.monotonic())):
            arrived = sum(one.reading.arrived for one in self._readings if one.reading is not None)
            if arrived == self._arrived:
                self._stop(reading, "Silence")
                self._link.failed(kvarts.Deadline("nothing comes any more of a load", "Silence"))
                return False
            self._arrived, self._heard_at = arrived, time.monotonic()
        self._heard_at = time.monotonic()
        return True

    def _stop(self, reading, reason):
        """Ends a load. Its blocks are computed again: nothing may write to them any more."""
        if reading.reading is not None:
            while True:
                try:
                    reading.reading.close()
                    break
                except kvarts.Deadline as error:
                    logger.warning("kvarts: %s", error)
            reading.reading = None
            self.stats.add("failed", len(reading.load.blocks), reason)
        reading.good = 0

    def _end_loads(self, whole=True):
        """After the forward pass: what it did not wait for, it computed without, or before it was there."""
        if whole and self._readings and len(self._waited) < len(self._order):
            missed = next(name for name in self.plan.layers if name not in self._waited)
            if not self._unwaited:
                self._unwaited = True
                logger.error("kvarts: the forward pass does not wait for %s: nothing is loaded any more. Take kvarts.vllm", missed)
            for reading in self._readings:
                self._stop(reading, "Unwaited")
        for reading in self._readings:
            if reading.good:
                self.stats.add("loaded", reading.good)
            self._failed.update(reading.load.blocks[reading.good :])
            if reading.reading is not None:
                self._end_load(reading)
        self._readings = []

    def _end_load(self, reading):
        # The end of the iteration says why blocks are not there.
        while self._comes(reading) and next(reading.reading, None) is not None:
            pass
        if reading.reading is None:
            return
        reasons = reading.reading.reasons
        self._link.learn(reading.came, reasons)
        for reason, (error, count) in reasons.items():
            if not isinstance(error, kvarts.Miss):
                self.stats.add("failed", count, reason)

    def take_failed(self):
        failed, self._failed = self._failed, set()
        return failed

    # Storing.

    def _under_way(self):
        return (sum(len(save.blocks) for save in self._puts.values()) + sum(len(save.blocks) for save, _ in self._copies)) * (
            self.plan.block_bytes
        )

    def _begin_copy(self, save):
        under_way, more = self._under_way(), len(save.blocks) * self.plan.block_bytes
        if not self._usable(writes=True) or (under_way and under_way + more > _UNDER_WAY_BYTES):
            self._back[save.number] = True
        else:
            self._copies.append((save, self._staging(len(save.blocks))))

    def copy(self, name):
        """Copies the blocks that are to be stored, up to this layer."""
        at = self._order.get(name, -1)
        while self._copies and self._copied <= at:
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
            self._put(save, staging)
        self._copies = []
        self._take()

    def _put(self, save, staging):
        nbytes = len(save.keys) * self.plan.block_bytes
        within = allowed(self.plan.timeout, self._silence.nbytes + nbytes)
        try:
            places = kvarts.Paged(_parts_of(staging), range(len(save.keys)))
            batch = self._pages.submit_put(save.keys, places, parent=save.parent, timeout=within)
        except kvarts.Error as error:
            self._link.put_failed(error)
            self.stats.add("failed", len(save.keys), error.reason)
            self._back[save.number] = False
        else:
            self._puts[batch] = save
            self._silence.began(batch, nbytes)

    def _take(self, wait=None):
        if self._pages is None:
            return
        for done in self._pages.drain() if wait is None else self._pages.wait(wait):
            save, results, reasons = self._puts.pop(done.id), done.results, done.reasons
            self._silence.heard(done.id, True in results, reasons)
            self._link.learn(True in results, reasons, put=True)
            for reason, (error, count) in reasons.items():
                self.stats.add("failed", count, reason)
            if reasons:
                self._back[save.number] = False
            if good := sum(results):
                self.stats.add("stored", good)
        if silent := self._silence.broken():
            self._link.put_failed(kvarts.Deadline("the server takes nothing any more", "Silence"))
            for batch in silent:
                self._pages.cancel(batch)

    def tell(self):
        """What the scheduler should know after a step."""
        back, self._back = self._back, {}
        return Told(max(0, _UNDER_WAY_BYTES - self._under_way()), not self._usable(writes=True), self._unwaited, back)

    def close(self):
        deadline = time.monotonic() + self.plan.timeout
        while self._puts and (left := deadline - time.monotonic()) > 0:
            self._take(wait=left)
        super().close()


def _parts_of(staging):
    """A part for each layer of (layers, blocks, bytes)."""
    layers, blocks, size = staging.shape
    return [(staging.view(-1), layer * blocks * size, size) for layer in range(layers)]
