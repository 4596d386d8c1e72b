"""Kvarts behind SGLang's radix tree, layer by layer into the pools of the device (`UnifiedCacheLinker`).

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic --unified-cache-external-linker-config
        '{"linker": "KvartsLinker", "linker_module_path": "kvarts.sglang_linker", "linker_extra_config":
        {"server": "/run/kvarts/kvarts.sock", "pool_bytes": 8000000000}}'

Each process of SGLang's that has a tree has a pool, and lands from it into its own device. What holds:

- A look-up answers with what lies in the pool, verified. Nothing that a disk, a network or a server does can make a load fail that
  was answered with; a page comes back with the bytes that were stored under its hash by an engine of the same identity.
- SGLang's look-ups wait where they are called, so those of one scheduler's pass take at most `wait` seconds together: then they answer with what has
  come. While the server is away, and for `pause` seconds after a look-up for which nothing came, they answer at once.
- What is stored is what the engine had computed: pages are read behind the forward pass that wrote them, and SGLang keeps them until then. An
  offload is answered as done when every page of it is stored.

Kinds of pools: attention with heads or latents, windows beside it, recurrent states, DeepSeek's. Pipelines and parallel contexts are refused.
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

#: Bytes of a pool where none are named.
_POOL_BYTES = 4 << 30
#: Seconds for which what was looked up is kept though nobody asks for it again: SGLang does not tell of requests that are given up.
_KEPT = 5.0
#: Blocks that are asked for at once.
_BLOCKS_MAX = 65536


class _Found:
    """What a look-up of a request has found."""

    def __init__(self, keys, staging):
        self.keys, self.staging = keys, staging
        #: The same once more, of one that waits long.
        self.renewal = None
        self.began = self.asked = time.monotonic()
        self._places = None

    @property
    def stagings(self):
        return [staging for staging in (self.staging, self.renewal) if staging is not None]

    def at(self, keys):
        """From where on these keys are some of those that were looked up; `None` if they are others. The device may have got some of them
        since, and SGLang asks with the last token and without."""
        if self._places is None:
            self._places = {key: at for at, key in enumerate(self.keys)}
        at = self._places.get(keys[0])
        return at if at is not None and self.keys[at : at + len(keys)] == keys else None


class _Batch:
    """Loads that began together."""

    def __init__(self, landings, stagings, is_whole):
        self.landings, self.stagings, self.is_whole = landings, stagings, is_whole
        self.waited = {}  # stream -> layers that it has waited for


class LayerCounter:
    """What SGLang's pools call before a layer is read. `order`: of each layer its groups, and which of their layers it is."""

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
        """What the current stream computes from here on, it computes with this layer and all before it."""
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
    """`linker_extra_config`: `server` and `token_file` as for `kvarts.connect`; `pool_bytes`: of host memory, of each process; `wait`: seconds that
    a look-up may take; `timeout`: seconds of silence; `pause`: seconds for which a server that did not answer is left alone; `durable`: stores are
    acknowledged after a flush; `times`: what `kvarts.Times` takes, for the planner, and `plans`: whether then what takes longer to load than to compute is left; `loads`, `stores`: whether it does; `head_ranges`: into how many ranges the
    model's heads are split, by engines that share over different tensor parallelism; `revision`, where the
    model's path does not say it, and `draft`, that of a draft model; `identity`: whatever else decides bytes."""

    def __init__(self, server_args, params, *, components, extra_config=None, forward_stream=None):
        extra = dict(extra_config or {})
        probe(__name__)
        expect_namespaces()
        self.forward_stream = forward_stream
        self.timeout, self.pause = float(extra.get("timeout", 2.0)), float(extra.get("pause", 1.0))
        self.pool_bytes, self.durable = int(extra.get("pool_bytes", _POOL_BYTES)), bool(extra.get("durable", False))
        # SGLang does not tell a linker of its steps.
        self.steps, self.plans = Steps(extra.get("times")), bool(extra.get("plans", True))
        self._wait = float(extra.get("wait", 0.5))
        self._loads, self._stores = bool(extra.get("loads", True)), bool(extra.get("stores", True))
        self._pools = Pools(params, components, *_place_of(params), extra)
        self.pools = self._pools.entries
        self._counts, self._counted, self._metrics = {}, {}, _metrics_of(params)
        server, token_file = extra.get("server"), extra.get("token_file")

        def connect():
            # Over no other path: a pool is shared memory.
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
        #: Seconds that look-ups of this pass may still wait.
        self._left = self._wait
        self._silent_until = 0.0
        # The first requests find what is stored, too.
        self._desk.settle(self.timeout)
        self._windows = [window for group in self._pools.groups if (window := self._pools.window_of(group)) is not None]

    # Before a request is let in.

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
        """Whether these keys need another look-up. A window or a state must end where they do."""
        at = found.at(keys)
        return at is None or bool(self._windows) and at + len(keys) != len(found.keys)

    def _wait_for(self, found):
        """Waits until what is staged last is there, as long as this pass may still wait."""
        staging, before = found.stagings[-1], time.monotonic()
        if not staging.is_over and self._left > 0:
            # It is looked at some time later by another thread: it may be just about to end.
            # ends: its argument: what this pass may still wait
            staging.over.wait(min(self._left, max(0.0, found.began + 1.1 * self._wait - before)) if found.renewal is None else self._left)
            now = time.monotonic()
            self._left -= now - before
            if now >= staging.began + self._wait and not (staging.is_over and staging.blocks):
                # Nothing came all that time.
                self._silent_until = time.monotonic() + self.pause
        if found.renewal is not None and found.renewal.is_over:
            self._renewed(found)

    def _renewed(self, found):
        """What was staged once more takes the place of what was staged before; where the server did not answer, that stays good."""
        renewal, found.renewal = found.renewal, None
        if renewal.stored is None:
            found.staging.answered = None
        else:
            renewal, found.staging = found.staging, renewal
        self._desk.let_go(renewal)

    def _is_there(self):
        return self._desk.name is not None and not self._link.away and time.monotonic() >= self._silent_until

    def _is_stale(self, found):
        """Whether nothing was found some time ago, and by now there may be something; or something was, which may have been deleted."""
        is_empty = found.staging.is_over and not found.staging.blocks
        return found.staging.is_old or is_empty and time.monotonic() > found.began + self.pause

    def _lengths(self, found, at, asked):
        """Numbers of pages behind `at` that can be restored with what is staged: all of them, or the longest where what is shorter needs windows or
        states that end there."""
        last = found.staging.blocks - at
        if last <= 0:
            return []
        shorter = range(1, min(last, asked + 1)) if all(found.staging.blocks <= window for window in self._windows) else ()
        return [*shorter, *([last] if last <= asked else [])]

    def _forget_old(self):
        """What was looked up for requests that were given up: nobody tells."""
        now = time.monotonic()
        for rid in [rid for rid, found in self._found.items() if now > found.asked + _KEPT and rid not in self._queued]:
            self._let_go(rid)

    def _make_room(self):
        """Requests that wait may hold all of the pool, while what is offloaded waits for it and holds SGLang's pages: the one that was asked for
        longest ago is staged again when it is asked for."""
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
            raise RuntimeError(f"a load of {rid} is queued already")
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
                # SGLang asked for less than it loads, or long ago. It gives this batch up by itself.
                logger.error("kvarts: a load of %s was started, but no block is staged for it", rid)
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
        """Where in the pool what is wanted lies, and where it goes to: by group. `None` if not all of it is there."""
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
                logger.error("kvarts: a load failed: %s", error)
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
        # Another rank stores what this one has, too; or the operator wants nothing to be stored.
        is_wanted = self._stores and self._pools.saves
        self._offloads.add(wanted if is_wanted else [], self.record_offload_ready() if is_wanted else [])
        return True

    def num_completed_offloads(self):
        # SGLang asks for this in each of its passes, also when it is idle.
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
        # What is stored stays; what the pool has of it is forgotten, as SGLang's own is.
        self._desk.forget()

    def close(self):
        self.reset()
        try:
            self._desk.close(self.timeout)
            self._dock.close(self.timeout)
        except kvarts.Error as error:
            logger.warning("kvarts: %s", error)

    # Counts.

    def _count(self, what, number, label=None):
        acts.count(self._counts, what, number, label)

    def _tell(self):
        """Moves what was counted to SGLang's metrics."""
        for source, count in (("pool", self._desk.found), ("read", self._desk.came)):
            self._count("staged", count - self._counted.get(source, 0), source)
            self._counted[source] = count
        if self._metrics is not None and self._counts:
            counts, self._counts = self._counts, {}
            self._metrics.add(counts)


def _place_of(params):
    """(rank, ranks) among those that share the heads of the model's attention."""
    import torch.distributed as distributed

    group = params.attn_tp_cache_group or params.tp_cache_group
    if group is None or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(group=group), distributed.get_world_size(group=group)


class _Labelled:
    """SGLang's own metrics, which its processes share through a directory."""

    def __init__(self, rank):
        from prometheus_client import Counter

        self._metrics = acts.Metrics(lambda name, text, more: Counter(name, text, ["tp_rank", *more]), "sglang")
        self._labels = (str(rank),)

    def add(self, counts):
        self._metrics.add(counts, self._labels)


def _metrics_of(params):
    return _Labelled(_place_of(params)[0]) if getattr(params, "enable_metrics", False) else None
