"""Kvarts behind SGLang's radix tree. It loads blocks layer by layer into the pools of the device (`UnifiedCacheLinker`).

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic --unified-cache-external-linker-config
        '{"linker": "KvartsLinker", "linker_module_path": "kvarts.sglang_linker", "linker_extra_config":
        {"server": "/run/kvarts/kvarts.sock", "pool_bytes": 8000000000}}'

Each process of SGLang with a radix tree has a pool of host memory, and copies blocks from the pool to its own device. Guarantees:

- A look-up reports only verified blocks that are in the pool. No failure of a disk, a network or a server can therefore make the load of these blocks
  fail. A page has the bytes that an engine of the same identity stored under its hash.
- SGLang's look-ups block the scheduler. All look-ups of one pass of the scheduler together wait at most `wait` seconds. Then they report the blocks
  that have arrived. While the server cannot be reached, and for `pause` seconds after a look-up without any block, look-ups return at once.
- An offload stores the bytes that the engine computed. It reads pages after the forward pass that wrote them, and SGLang keeps the pages until then.
  An offload is reported as done after all of its pages are stored.

Supported pools: attention with heads or latents, sliding windows, recurrent states, DeepSeek's pools. The connector refuses pipeline parallelism and
context parallelism.
"""

import time

import kvarts

from . import acts
from .landing import Device, Dock, Processor
from .link import Link, logger, token_of
from .sglang_compat import PoolName, UnifiedCacheLinker, probe
from .sglang_identity import expect_namespaces, names_of
from .sglang_offloads import Offloads
from .sglang_pools import Pools
from .staging import Desk
from .steps import Steps

#: Bytes of a pool, by default.
_POOL_BYTES = 4 << 30
#: Seconds after which an unused result of a look-up is dropped. SGLang does not report requests that it gives up.
_KEPT = 5.0
#: The limit of blocks of one look-up.
_BLOCKS_MAX = 65536


class _Found:
    """The result of a request's look-up."""

    def __init__(self, keys, staging):
        self.keys, self.staging = keys, staging
        #: A second staging of the same keys, for a request that waits long.
        self.renewal = None
        self.began = self.asked = time.monotonic()
        self._places = None

    @property
    def stagings(self):
        return [staging for staging in (self.staging, self.renewal) if staging is not None]

    def at(self, keys):
        """The position of these keys among those of the look-up, or `None` if they are not consecutive keys of it. The device may have received some of
        the blocks meanwhile, and SGLang asks both with and without the last token."""
        if self._places is None:
            self._places = {key: at for at, key in enumerate(self.keys)}
        at = self._places.get(keys[0])
        return at if at is not None and self.keys[at : at + len(keys)] == keys else None


class _Batch:
    """Loads that were started together."""

    def __init__(self, landings, stagings, is_whole):
        self.landings, self.stagings, self.is_whole = landings, stagings, is_whole
        self.waited = {}  # stream -> number of layers for which it has waited


class LayerCounter:
    """The counter that SGLang's pools call before they read a layer. `order`: for each layer, (group, index of the layer in the group)."""

    def __init__(self, order, streams):
        self.num_layers, self.consumer_index = len(order), -1
        self._order, self._streams = order, streams
        self._batches, self._last = {}, -1

    def begin(self, batch):
        self._last += 1
        self._batches[self._last] = batch
        return self._last

    def end(self, index):
        return self._batches.pop(index, None)

    def set_consumer(self, index):
        self.consumer_index = index

    def wait_until(self, threshold):
        """Makes later work of the current stream run after this layer and all earlier ones have landed."""
        batch = self._batches.get(self.consumer_index)
        if batch is None:
            return
        stream = self._streams.now()
        first = batch.waited.get(stream, 0)
        for layer in range(first, threshold + 1):
            for landing in batch.landings:
                for place in self._order[layer]:
                    landing.await_layer(*place)
        batch.waited[stream] = max(first, threshold + 1)

    def reset(self):
        self._batches.clear()
        self.consumer_index = -1


class KvartsLinker(UnifiedCacheLinker):
    """The linker. Settings in `linker_extra_config`:

    - `server`, `token_file`: as for `kvarts.connect`.
    - `pool_bytes`: host memory of each process.
    - `wait`: the number of seconds that all look-ups of one pass together may take.
    - `timeout`: the longest time in seconds for which the server may send no data.
    - `pause`: after the server did not answer, the linker sends no requests for this number of seconds.
    - `durable`: stores are acknowledged after a flush.
    - `times`: arguments of `kvarts.Times`, for the planner.
    - `plans`: whether the planner leaves out blocks that load slower than the engine computes them.
    - `loads`, `stores`: whether the linker loads blocks, and whether it stores blocks.
    - `head_ranges`: the number of ranges of the model's heads. Engines with different tensor parallelism share blocks if they set the same number.
    - `revision`: the revision of the model. Required if the model's path does not determine the revision.
    - `draft`: the revision of the draft model.
    - `identity`: other settings that determine the bytes."""

    def __init__(self, server_args, params, *, components, extra_config=None, forward_stream=None):
        extra = dict(extra_config or {})
        probe(__name__)
        expect_namespaces()
        self.forward_stream = forward_stream
        self.timeout, self.pause = float(extra.get("timeout", 2.0)), float(extra.get("pause", 1.0))
        self.pool_bytes, self.durable = int(extra.get("pool_bytes", _POOL_BYTES)), bool(extra.get("durable", False))
        # SGLang does not report its steps to a linker.
        self.steps, self.plans = Steps(extra.get("times")), bool(extra.get("plans", True))
        self._wait = float(extra.get("wait", 0.5))
        self._loads, self._stores = bool(extra.get("loads", True)), bool(extra.get("stores", True))
        self._pools = Pools(params, components, *_place_of(params), extra)
        self.pools = self._pools.entries
        self._counts, self._counted, self._metrics = {}, {}, _metrics_of(params)
        server, token_file = extra.get("server"), extra.get("token_file")

        def connect():
            # Only over the local path: a pool is shared memory.
            return kvarts.connect(server, token_of(token_file), via="local", timeout=self.timeout, of_cluster=True)

        self._link = Link(connect, self.pause)
        self._streams = Processor() if self._pools.device is None else Device(self._pools.device, forward_stream)
        self._dock = Dock(self._link, self._streams, self._pools.memories, self._pools.columns)
        take = lambda pages, pool: self._dock.take(pages, pool.memory)  # noqa: E731
        self._desk = Desk(self._link, self._pools.naming(getattr(server_args, "speculative_draft_model_path", None)), self._pools.groups, self._pools.block_tokens, self, opened=take)
        self._offloads = Offloads(self._pools, self._desk, self._dock, self._link, self.timeout, self._count, self._make_room)
        self.layer_done_counter = LayerCounter(self._pools.order, self._streams)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._found, self._queued = {}, {}
        #: Seconds that the look-ups of this pass may still wait.
        self._left = self._wait
        self._silent_until = 0.0
        # So that the first requests find stored blocks, too.
        self._desk.settle(self.timeout)
        self._windows = [window for group in self._pools.groups if (window := self._pools.window_of(group)) is not None]

    # Before a request is scheduled.

    def lookup(self, rid, transfers):
        keys = next((list(transfer.keys)[:_BLOCKS_MAX] for transfer in transfers if transfer.name == PoolName.KV), [])
        if not keys or not self._loads:
            return []
        found = self._found.get(rid)
        if found is not None and self._is_other(found, keys):
            self._let_go(rid)
            found = None
        if found is None:
            if not self._is_there():
                return []
            names = names_of(keys)
            self._offloads.follow(names)
            found = self._found[rid] = _Found(keys, self._staged(names))
        elif found.renewal is None and self._is_stale(found) and self._is_there():
            found.renewal = self._staged(names_of(found.keys))
        found.asked = time.monotonic()
        self._wait_for(found)
        if not found.staging.is_over:
            return []
        found.staging.answer()
        return self._lengths(found, found.at(keys), len(keys))

    def _staged(self, names):
        return self._desk.stage(names, 0, len(names) * self._pools.block_tokens + 1, within=self._wait)

    def _is_other(self, found, keys):
        """Whether these keys need another look-up. Windows and states must end at the last of the keys."""
        at = found.at(keys)
        return at is None or bool(self._windows) and at + len(keys) != len(found.keys)

    def _wait_for(self, found):
        """Waits for the latest staging, as long as this pass may still wait."""
        staging, before = found.stagings[-1], time.monotonic()
        if not staging.is_over and self._left > 0:
            # Another thread ends the staging, with a small delay: the wait is a little longer for the first staging.
            # ends: its argument: what this pass may still wait
            staging.over.wait(min(self._left, max(0.0, found.began + 1.1 * self._wait - before)) if found.renewal is None else self._left)
            now = time.monotonic()
            self._left -= now - before
            if now >= staging.began + self._wait and not (staging.is_over and staging.blocks):
                # No block arrived in this time.
                self._silent_until = time.monotonic() + self.pause
        if found.renewal is not None and found.renewal.is_over:
            self._renewed(found)

    def _renewed(self, found):
        """Replaces a request's `Staging` by a newer `Staging`. If the server did not answer the newer one, the earlier `Staging` stays valid."""
        renewal, found.renewal = found.renewal, None
        if renewal.stored is None:
            found.staging.answered = None
        else:
            renewal, found.staging = found.staging, renewal
        self._desk.let_go(renewal)

    def _is_there(self):
        return self._desk.name is not None and not self._link.away and time.monotonic() >= self._silent_until

    def _is_stale(self, found):
        """Whether the result is too old: blocks may have been stored since an empty result, or deleted since another one."""
        is_empty = found.staging.is_over and not found.staging.blocks
        return found.staging.is_old or is_empty and time.monotonic() > found.began + self.pause

    def _lengths(self, found, at, asked):
        """The numbers of pages behind `at` that can be restored from the staged blocks. If shorter prefixes need other windows or states, only the longest
        number."""
        last = found.staging.blocks - at
        if last <= 0:
            return []
        shorter = range(1, min(last, asked + 1)) if all(found.staging.blocks <= window for window in self._windows) else ()
        return [*shorter, *([last] if last <= asked else [])]

    def _forget_old(self):
        """Drops results of look-ups for requests that SGLang has given up. SGLang does not report such requests."""
        now = time.monotonic()
        for rid in [rid for rid, found in self._found.items() if now > found.asked + _KEPT and rid not in self._queued]:
            self._let_go(rid)

    def _make_room(self):
        """Releases the staged blocks of the waiting request whose last look-up is the oldest. Waiting requests may fill the pool, while offloads need room
        there and keep SGLang's pages. The request's next look-up stages its blocks again."""
        waiting = [(found.asked, rid) for rid, found in self._found.items() if rid not in self._queued and found.staging.is_over]
        if waiting:
            self._let_go(min(waiting)[1])

    def _let_go(self, rid):
        found = self._found.pop(rid, None)
        for staging in found.stagings if found is not None else ():
            self._desk.let_go(staging)

    # Loads.

    def load(self, rid, transfers):
        wanted = [(transfer.name, list(transfer.keys), self._slots(transfer)) for transfer in transfers if transfer.keys]
        if not any(slots for *_, slots in wanted):
            return False
        if rid in self._queued:
            raise RuntimeError(f"SGLang queued two loads for request {rid} in one batch: report it")
        self._queued[rid] = wanted
        return True

    def _slots(self, transfer):
        return [(pool, pool.slots(transfer.device_indices)) for pool in self._pools.of(transfer.name)]

    def cancel_queued_load(self, rid):
        self._let_go(rid)
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self):
        queued, self._queued = self._queued, {}
        if not queued:
            return -1
        landings, stagings, is_whole = [], [], True
        for rid, wanted in queued.items():
            found = self._found.pop(rid, None)
            move = self._move(found, wanted)
            if found is not None:
                stagings += found.stagings
            if move is None:
                # SGLang loads more than it looked up, or looked it up long ago. SGLang gives this batch up.
                logger.error("kvarts: SGLang started a load for request %s, but the blocks of the request are not staged, so the batch fails", rid)
                is_whole = False
                continue
            landings.append(self._dock.land(0, *move))
            self._count("promised", landings[-1].blocks)
            self._count("waited", time.monotonic() - found.began)
            self._count("landed", landings[-1].blocks)
            for why, blocks in found.staging.reasons().items():
                self._count("unstaged", blocks, why)
        self._count("layers", self._pools.layers)
        return self.layer_done_counter.begin(_Batch(landings, stagings, is_whole))

    def _move(self, found, wanted):
        """The positions of the wanted blocks in the pool and their slots on the device, by group. `None` if some of the blocks are not staged."""
        if found is None or not found.staging.is_over:
            return None
        places = {key: at for at, key in enumerate(found.keys)}
        stretches, slots = {}, {}
        for _, keys, pools in wanted:
            first = places.get(keys[0])
            if first is None or found.keys[first : first + len(keys)] != keys or first + len(keys) > found.staging.blocks:
                return None
            for pool, own in pools:
                columns = {rank: (pool.group.number, rank) for rank in pool.group.ranks}
                if any(found.staging.columns.get(column, (len(found.keys), ()))[0] > first for column in columns.values()):
                    return None
                last = first + len(keys)
                stretches[pool.group.number] = {rank: found.staging.stretches(column, first, last) for rank, column in columns.items()}
                slots[pool.group.number] = own
        return stretches, slots

    def finish_layer_wise_loading(self, counter_index):
        batch = self.layer_done_counter.end(counter_index)
        return batch is None or self._finish(batch)

    def _finish(self, batch):
        for landing in batch.landings:
            try:
                while not landing.is_done(1.0):
                    pass
            except kvarts.Error as error:
                logger.error("kvarts: copying loaded blocks to the device failed: %s", error)
                batch.is_whole = False
        if batch.landings and self.layer_done_counter.num_layers in batch.waited.values():
            self._count("layered", self._pools.layers)
        for staging in batch.stagings:
            self._desk.let_go(staging)
        return batch.is_whole

    # Offloads.

    def offload(self, transfers, session_id=None):
        wanted = [(transfer.name, names_of(transfer.keys), transfer.device_indices) for transfer in transfers if transfer.keys]
        if not wanted:
            return False
        # Not if another rank stores the same bytes, or the operator has switched stores off.
        is_wanted = self._stores and self._pools.saves
        self._offloads.add(wanted if is_wanted else [], self.record_offload_ready() if is_wanted else [])
        return True

    def num_completed_offloads(self):
        # SGLang calls this in each of its passes, also when it is idle.
        self._left = self._wait
        self._forget_old()
        self._desk.open()
        self._tell()
        return self._offloads.ended()

    def pop_completed_offload(self):
        return self._offloads.pop()

    # All of it.

    def reset(self):
        self._queued.clear()
        self._offloads.give_up()
        for index in list(self.layer_done_counter._batches):
            self.finish_layer_wise_loading(index)
        self.layer_done_counter.reset()
        for rid in list(self._found):
            self._let_go(rid)
        # Stored blocks stay in the store. The pool drops its copies, as SGLang drops its own.
        self._desk.forget()

    def close(self):
        self.reset()
        try:
            self._desk.close(self.timeout)
            self._dock.close(self.timeout)
        except kvarts.Error as error:
            logger.warning("kvarts: the connector did not close in time: %s", error)

    # Counts.

    def _count(self, what, number, label=None):
        acts.count(self._counts, what, number, label)

    def _tell(self):
        """Adds the counts since the last call to SGLang's metrics."""
        for source, count in (("pool", self._desk.found), ("read", self._desk.came)):
            self._count("staged", count - self._counted.get(source, 0), source)
            self._counted[source] = count
        if self._metrics is not None and self._counts:
            counts, self._counts = self._counts, {}
            self._metrics.add(counts)


def _place_of(params):
    """(rank, number of ranks) among the ranks that share the heads of the model's attention."""
    import torch.distributed as distributed

    group = params.attn_tp_cache_group or params.tp_cache_group
    if group is None or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(group=group), distributed.get_world_size(group=group)


class _Labelled:
    """Counters in SGLang's own metrics, which its processes share through a directory."""

    def __init__(self, rank):
        from prometheus_client import Counter

        self._metrics = acts.Metrics(lambda name, text, more: Counter(name, text, ["tp_rank", *more]), "sglang")
        self._labels = (str(rank),)

    def add(self, counts):
        self._metrics.add(counts, self._labels)


def _metrics_of(params):
    return _Labelled(_place_of(params)[0]) if getattr(params, "enable_metrics", False) else None
