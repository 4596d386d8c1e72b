"""Kvarts as the disk behind vLLM's offloading of KV caches.

    --kv-transfer-config '{"kv_connector": "Kvarts", "kv_connector_module_path": "kvarts.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 8000000000, "server": "/run/kvarts/kvarts.sock"}}'

`Kvarts` is vLLM's own `OffloadingConnector` with one secondary tier, `KvartsTier`. KV blocks are copied from the device to host
memory, and from host memory to disk. Loads take the opposite path. Guarantees:

- A loaded block has the bytes that an engine of the same identity (`identity_of`) stored under its hash and group. Otherwise vLLM
  recomputes the block. If some blocks of a promotion failed, the result names the good blocks.
- The scheduler never waits: it submits requests and collects results later. A look-up ends within half of `timeout` seconds. A load
  ends if no part of it has arrived for half of `timeout` seconds, or at most a second later. Both limits also hold if the server
  has stopped.
- While the server cannot be reached, every block is a miss, and stores are dropped. The connector restores the connection without a
  restart. The engine also starts without a server.
"""

import json
import time

import kvarts

from .link import PART, Link, Silence, allowed, brief, logger, revision_of, token_of
from .shared import adopt
from .steps import Steps
from .vllm_compat import (
    JobResult,
    KVConnectorRole,
    LookupResult,
    Medium,
    OffloadingConnector,
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingWorkerMetadata,
    RequestOffloadingContext,
    SecondaryTierManager,
    get_offload_block_hash,
    get_offload_group_idx,
    probe,
    tiers_of,
)
from .vllm_identity import identity_of, layout_version
from .vllm_steps import Watch
from .vllm_tier_requests import Held, Requests

#: Settings of the connector that are passed to the tier.
_FOR_THE_TIER = ("server", "token_file", "timeout", "pause", "durable", "identity", "backpressure", "times")
_BLOCKS = "vllm:kv_offload_kvarts_failed_blocks"
_PINNED, _UNPINNED = "vllm:kv_offload_kvarts_pinned_blocks", "vllm:kv_offload_kvarts_unpinned_blocks"
#: Seconds after which the engine's times are sent again, because a restarted store does not know them.
_TOLD = 60.0
#: The key of a block that is never stored.
_NONE = kvarts.key("kvarts", "none")
#: The limits of parts of one load or store, and of batches under way.
_PARTS, _BATCHES = 64, 8192


class Kvarts(OffloadingConnector):
    """vLLM's offloading connector with Kvarts as its secondary tier. Settings in `kv_connector_extra_config`:

    - The settings of `OffloadingConnector`; `cpu_bytes_to_use` is required.
    - The settings `server`, `token_file`, `timeout`, `pause`, `durable` and `times` of `KvartsTier`.
    - `revision`: the revision of the model. Required if the model's name does not determine the revision.
    - `identity`: other settings that determine the bytes.
    - `backpressure`: vLLM's detector of a slow tier, which skips stores while they take too long."""

    def __init__(self, vllm_config, role, kv_cache_config):
        _complete(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        tiers = tiers_of(self, KvartsTier) if role is KVConnectorRole.SCHEDULER and OffloadingWorkerMetadata is not None else []
        self._watch = Watch(tiers[0].steps) if tiers else None

    # The connector measures steps, because a tier does not see them.

    def update_state_after_alloc(self, request, *args, **kwargs):
        if self._watch is not None:
            self._watch.let_in(request)
        return super().update_state_after_alloc(request, *args, **kwargs)

    def build_connector_meta(self, scheduler_output):
        if self._watch is not None:
            self._watch.begin(scheduler_output.num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    def build_connector_worker_meta(self):
        # vLLM reports the end of a step without a forward pass only together with worker metadata.
        told = super().build_connector_worker_meta()
        return told if told is not None or OffloadingWorkerMetadata is None else OffloadingWorkerMetadata()

    def update_connector_output(self, connector_output):
        if self._watch is not None:
            self._watch.end()
        return super().update_connector_output(connector_output)

    def request_finished(self, request, *args, **kwargs):
        if self._watch is not None:
            self._watch.over(request)
        return super().request_finished(request, *args, **kwargs)

    def request_finished_all_groups(self, request, *args, **kwargs):
        if self._watch is not None:
            self._watch.over(request)
        return super().request_finished_all_groups(request, *args, **kwargs)

    @classmethod
    def build_prom_metrics(cls, vllm_config, *args, **kwargs):
        _complete(vllm_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)


def _complete(vllm_config, kv_cache_config=None):
    """Writes the tier into the configuration. The tier is complete only if the caches are known, as they are where vLLM makes a tier."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra.setdefault("spec_name", "TieringOffloadingSpec")
    if getattr(getattr(vllm_config, "kv_events_config", None), "enable_kv_cache_events", False):
        # Without it vLLM's events name chunks without their tokens.
        extra.setdefault("self_describing_kv_events", True)
    tiers = extra.setdefault("secondary_tiers", [])
    tier = next((tier for tier in tiers if tier.get("module_path") == __name__), None)
    if tier is not None and not tier.get("incomplete"):
        return
    if tier is None:
        tier = {name: extra[name] for name in _FOR_THE_TIER if name in extra}
        tiers.append(tier)
    named = identity_of(vllm_config, extra.get("revision"), kv_cache_config)
    tier.update({"type": "KvartsTier", "module_path": __name__, "identity": {**named, **extra.get("identity", {})}})
    tier.pop("incomplete", None)
    if kv_cache_config is None:
        tier["incomplete"] = True


class _Job:
    """A load or a store under way, in parts."""

    def __init__(self, job, page_bytes, request=None):
        self.id = job.job_id
        self.request = request  # of a store, if the request has terms of its own
        self.keys = list(job.keys)
        self.is_load = job.is_promotion
        self.began = time.monotonic()
        self.page_bytes = page_bytes
        self.results = [False] * len(self.keys)
        self.open = 0  # parts

    def parts(self):
        """(first, last) of the parts, which are answered separately. Their number is bounded for a job of any size."""
        step = max(1, PART // self.page_bytes, -(-len(self.keys) // _PARTS))
        return [(first, min(first + step, len(self.keys))) for first in range(0, len(self.keys), step)]

    def result(self):
        """The result for vLLM. The result of a load names the good blocks, because vLLM recomputes the others."""
        good = [key for key, here in zip(self.keys, self.results) if here]
        return JobResult(
            job_id=self.id,
            success=len(good) == len(self.keys),
            successful_keys=tuple(good) if self.is_load and good else None,
            transfer_time=time.monotonic() - self.began,
            transfer_bytes=len(good) * self.page_bytes,
        )


class _Lookups:
    """The results of look-ups, kept until the last request with the key has ended."""

    def __init__(self):
        self.found = {}  # key -> True, False, or None: look-up under way
        self.to_ask = []
        self.forgotten = 0  # keys
        self._requests = {}  # request -> its keys
        self._askers = {}  # key -> number of requests

    def of(self, key, request):
        keys = self._requests.setdefault(request, {})
        if key not in keys:
            keys[key] = True
            self._askers[key] = self._askers.get(key, 0) + 1
        if key not in self.found:
            self.found[key] = None
            self.to_ask.append(key)
        return self.found[key]

    def learn(self, keys, results, forgotten=None):
        """Takes the results of a look-up that began when `forgotten` keys had been dropped. It makes no call for each key, because the scheduler's thread
        takes thousands of keys at a time."""
        gone = () if forgotten == self.forgotten else [key for key in keys if key not in self.found]
        self.found.update(zip(keys, results))
        for key in gone:
            self.found.pop(key, None)

    def forget(self, request):
        """Drops a request that has ended; returns the keys that it looked up."""
        keys = self._requests.pop(request, ())
        for key in keys:
            self._askers[key] -= 1
            if not self._askers[key]:
                del self._askers[key], self.found[key]
                self.forgotten += 1
        return keys


class KvartsTier(SecondaryTierManager):
    """A secondary tier of `TieringOffloadingSpec`, for configurations with explicit tiers:
    `{"type": "KvartsTier", "module_path": "kvarts.vllm", "server": ..., "identity": {"revision": ...}}`.

    - `server`, `token_file`: as for `kvarts.connect`.
    - `identity`: settings that determine the bytes and are not in the offloading configuration. If the model is not a directory, they
      must include the model's `revision`.
    - `timeout`: the longest time in seconds without any data from the server, for a look-up and a load together.
    - `pause`: after the server did not answer, the tier sends no requests for this number of seconds.
    - `durable`: stores are acknowledged after a flush.
    - `times`: arguments of `kvarts.Times`, in addition to the times that the connector `Kvarts` measures. The store values a block by
      the computing time that the block saves.

    `vllm_tier_requests` describes the `kv_transfer_params` of requests."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec,
        primary_kv_view,
        tier_type,
        backpressure_detector=None,
        server=None,
        token_file=None,
        timeout=2.0,
        pause=1.0,
        durable=False,
        identity=None,
        incomplete=False,
        times=None,
    ):
        if incomplete:
            raise ValueError("identity: vLLM created the tier before it had configured its KV caches, which Kvarts does not support: use a tested version of vLLM")
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        probe(__name__)
        self._timeout = float(timeout)
        self._durable = bool(durable)
        groups = offloading_spec.config.groups
        self._group = groups[0].group_id if len(groups) == 1 else None
        self._named = self._naming(offloading_spec.config, dict(identity or {}))
        self._host = primary_kv_view.cast("B")
        self._memory = self._pages = None
        self._opening = False
        self._jobs = {}  # batch -> (_Job, first)
        # The timeout limits silence of the server, and not the time of a large transfer.
        self._silence = {"get": Silence(self._timeout / 2), "put": Silence(self._timeout)}
        self._asked = {}  # batch -> keys, and the number of dropped keys at its begin
        self._finished = []
        self._lookups = _Lookups()
        self._requests, self._held = Requests(self._hold), Held()
        self.steps, self._told = Steps(times), (None, 0.0)
        self._failures = {}  # reason -> blocks, since the last `get_stats`
        self._link = Link(lambda: kvarts.connect(server, token_of(token_file), timeout=self._timeout, of_cluster=True), float(pause))
        self._routers = None
        if offloading_spec.kv_events_config.enable_kv_cache_events:
            from .vllm_tier_events import Announcer

            self._routers = Announcer(lambda: self._following(server, token_file), [group.group_id for group in groups], float(pause))
        self._open()
        deadline = time.monotonic() + self._timeout
        while self._opening and time.monotonic() < deadline:
            # ends: its argument; the loop, at the `deadline` above
            time.sleep(0.005)

    def _following(self, server, token_file):
        """A separate client and handle, for the events of this tier's own server."""
        client = kvarts.connect(server, token_of(token_file), timeout=self._timeout)
        return client, client.pages(timeout=self._timeout, **self._named)

    def _naming(self, config, identity):
        """The identity of the blocks, as arguments of `Client.pages`. Engines with different identities share no blocks."""
        revision = identity.pop("revision", None) or revision_of(config.model.name)
        # vLLM reports whether the bytes of blocks depend on the number of workers.
        alone = config.parallel.is_parallelism_agnostic or config.replicated_layout
        parallel = [1] * 4 if alone else [getattr(config.parallel, part + "_size") for part in ("tp", "pp", "pcp", "dcp")]
        groups = [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups]
        facts = {
            "groups": json.dumps(groups),
            "hash": str(config.cache.tokens_per_hash),
            "chunk": str(config.cache.blocks_per_chunk),
            "workers": json.dumps([*parallel, bool(config.replicated_layout)]),
        }
        return dict(
            page_bytes={n: self.block_size_bytes for n in range(1 + max(group.group_id for group in config.groups))},
            model=config.model.name,
            revision=revision,
            dtype=str(config.model.dtype),
            engine="vllm",
            block_tokens=groups[0][1] * config.cache.blocks_per_chunk,
            layout=f"{config.kv_cache_layout}{'-canonical' if config.canonical_layout else ''}",
            layout_version=layout_version(groups, identity.get("caches"), config.kv_cache_layout),
            extras=brief({**identity, **facts}),
        )

    def _open(self):
        """Begins to open the handle, in the link's thread."""
        self._opening = True
        self._link.do(self._opened, self._not_opened)

    def _opened(self, client):
        pages = client.pages(durable=self._durable, timeout=self._timeout, batches_max=_BATCHES, **self._named)
        # Pages can then be passed by address, and disks write into them if the memory is a file.
        self._memory = adopt(client, self._host)
        self._pages, self._opening = pages, False

    def _not_opened(self, error):
        logger.warning("kvarts: the store could not be opened; every block is a miss until a retry succeeds: %s", error)
        self._opening = False

    def _usable(self, kind):
        """Whether requests of this kind may be submitted now."""
        if self._link.puts_away if kind == "put" else self._link.away:
            return False
        if self._pages is None and not self._opening:
            self._open()
        return self._pages is not None

    # Look-ups: one batch in each step, for all keys of the step.

    def lookup(self, key, req_context):
        found = self._lookups.of(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context):
        self._tell_times()
        keys, self._lookups.to_ask = self._lookups.to_ask, []
        keys = [key for key in keys if key in self._lookups.found]
        if not keys:
            return
        batch = self._submit("exists", keys, self._timeout / 2)
        if batch is None:
            self._lookups.learn(keys, [False] * len(keys))
        else:
            self._asked[batch] = keys, self._lookups.forgotten

    def _tell_times(self):
        """Sends the engine's times for a chunk to the store."""
        (told, until), times = self._told, self.steps.times
        if times is None or times is told and time.monotonic() < until or not self._usable("get"):
            return
        self._told, pages = (times, time.monotonic() + _TOLD), self._pages
        self._link.do(lambda client: pages.match([_NONE], times=times) and None, lambda error: None)

    # Requests.

    def on_new_request(self, req_context):
        self._requests.begin(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context):
        self._requests.end(req_context, self._lookups.forget(req_context.req_id))

    def _hold(self, keys, seconds):
        pages = self._pages

        def hold(client):
            if pages is None:
                raise kvarts.Retry("the store is not open yet", "Away")
            self._held.hold(pages, keys, seconds)

        self._link.do(hold, lambda error: self._held.failed(keys, error))

    # Transfers.

    def submit_store(self, job_metadata):
        terms = self._requests.terms_of(job_metadata.req_context)
        if terms.skip_save:
            # The blocks stay in vLLM's host memory, until their room is needed.
            self._finished.append(JobResult(job_id=job_metadata.job_id, success=True, transfer_time=0.0, transfer_bytes=0))
            return
        request = self._requests.storing(job_metadata.req_context, job_metadata.keys)
        lives = {} if terms.ttl is None else {"ttl": terms.ttl}
        self._transfer("put", _Job(job_metadata, self.block_size_bytes, request), job_metadata, self._timeout, **lives)

    def submit_load(self, job_metadata):
        self._transfer("get", _Job(job_metadata, self.block_size_bytes), job_metadata, self._timeout / 2)

    def _transfer(self, kind, job, job_metadata, timeout, **terms):
        silence = self._silence[kind]
        for first, last in job.parts():
            nbytes = (last - first) * self.block_size_bytes
            # The batch is queued behind the bytes that are under way already.
            within = allowed(timeout, silence.nbytes + nbytes)
            asked = self._routers.storing(job.keys[first:last]) if self._routers is not None and not job.is_load else None
            batch = self._submit(kind, job.keys[first:last], within, job_metadata.chunk_ids[first:last], **terms)
            if batch is not None:
                self._jobs[batch] = job, first, asked
                silence.began(batch, nbytes)
                job.open += 1
        if not job.open:
            self._end(job)

    def _submit(self, kind, keys, timeout, chunks=None, **terms):
        """Submits a batch; returns its number, or `None` if no request can be submitted now."""
        if not self._usable(kind):
            self._count("away", len(keys))
            return None
        places = () if chunks is None else ([self._memory.address + int(n) * self.block_size_bytes for n in chunks],)
        try:
            return getattr(self._pages, "submit_" + kind)(
                list(map(get_offload_block_hash, keys)),
                *places,
                group=self._group if self._group is not None else list(map(get_offload_group_idx, keys)),
                timeout=timeout,
                **terms,
            )
        except kvarts.Error as error:
            (self._link.put_failed if kind == "put" else self._link.failed)(error)
            self._count(error.reason, len(keys))
            logger.warning("kvarts: the %s of %d blocks could not begin: %s", kind, len(keys), error)
            return None

    def _end(self, job):
        if job.is_load:
            # Another look-up would find these blocks again, so they count as misses for the requests that asked.
            bad = [key for key, good in zip(job.keys, job.results) if not good]
            self._lookups.learn(bad, [False] * len(bad))
        self._requests.stored(job.request)
        self._finished.append(job.result())

    def _take(self, wait=None):
        """Takes the completed batches. With `wait`, it waits for them for `wait` seconds at most."""
        if self._pages is None:
            return
        # ends: `wait`, the caller's seconds
        for done in self._pages.drain() if wait is None else self._pages.wait(wait):
            results, reasons = done.results, done.reasons
            for silence in self._silence.values():
                silence.heard(done.id, True in results, reasons)
            self._link.learn(True in results, reasons, put=done.kind == "put")
            for reason, (error, count) in reasons.items():
                if not isinstance(error, kvarts.Miss):
                    self._count(reason, count)
            if (asked := self._asked.pop(done.id, None)) is not None:
                self._lookups.learn(asked[0], results, asked[1])
                if self._routers is not None:
                    self._routers.found(asked[0], results)
            else:
                self._part_done(done.id, results)
        self._give_up()

    def _part_done(self, batch, results):
        job, first, asked = self._jobs.pop(batch)
        job.results[first : first + len(results)] = results
        if asked is not None:
            self._routers.stored(asked, job.keys[first : first + len(results)], results)
        job.open -= 1
        if not job.open:
            self._end(job)

    def _give_up(self):
        """Cancels batches after a silence of the server that was too long. They complete soon, when their memory is no longer accessed."""
        for kind, silence in self._silence.items():
            if parts := silence.broken():
                error = kvarts.Deadline(f"the server sent no data for {len(parts)} batches ({kind}) within the timeout", "Silence")
                (self._link.put_failed if kind == "put" else self._link.failed)(error)
                for batch in parts:
                    self._pages.cancel(batch)

    def get_finished_jobs(self):
        self._take()
        finished, self._finished = self._finished, []
        return finished

    def has_pending_work(self):
        return bool(self._asked or self._jobs) or self._routers is not None and self._routers.has_news

    def take_events(self):
        """The pending events for routers."""
        return self._routers.take() if self._routers is not None else ()

    def drain_jobs(self):
        while self._jobs:
            self._take(wait=1.0)

    def shutdown(self):
        if self._routers is not None:
            self._routers.close(2 * self._timeout)
        self._link.stop()
        if self._pages is not None:
            self._pages.close()
        if self._memory is not None:
            self._memory.close()
        # Nothing accesses the host memory any more. Drop all references, so that it can be unmapped.
        self._pages = self._memory = None
        self._link.close()
        self._host.release()

    # What Prometheus shows.

    @classmethod
    def build_metric_definitions(cls, extra_config):
        text = "Blocks that Kvarts failed to store, find or load, by reason; misses are not counted."
        held = "Blocks that were pinned because their request set `pin`."
        unheld = "Blocks that could not be pinned although their request set `pin`, by reason."
        return {
            _BLOCKS: OffloadingCounterMetadata(documentation=text, labelnames=("reason",)),
            _PINNED: OffloadingCounterMetadata(documentation=held),
            _UNPINNED: OffloadingCounterMetadata(documentation=unheld, labelnames=("reason",)),
        }

    def _count(self, reason, blocks):
        self._failures[reason] = self._failures.get(reason, 0) + blocks

    def get_stats(self):
        counts = [(_BLOCKS, blocks, (reason,)) for reason, blocks in self._failures.items()]
        self._failures = {}
        for held, unheld, why in self._held.take():
            counts += [(_PINNED, held, ()), (_UNPINNED, unheld, (why,))]
        counts = [count for count in counts if count[1]]
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for count in counts:
            stats.increase_counter(*count)
        return stats
