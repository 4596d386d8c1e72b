"""A store with faults behind the layerwise connector, and what vLLM does around it, both in one thread and in virtual time.

`Scheduler` follows vLLM's: blocks are in the prefix cache from the moment that they are allocated, requests are computed in pieces,
preempted, given up between steps and while a step runs; after a load that failed, `recompute` truncates what runs, and `fail` ends
it. A block's bytes are a digest over those of the block before it as they lie in the cache at that moment: what is computed from
garbage is garbage, and anything can be told from it."""

import hashlib
import itertools
import types
from collections import deque

import doubles

doubles.install()

import torch  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

import kvarts  # noqa: E402
from kvarts import link, vllm_layers  # noqa: E402

TOKENS, LAYERS, WIDTH = 4, 3, 32
NAMES = [f"layer.{n}" for n in range(LAYERS)]


class Time:
    """Stands for the module `time`: nothing passes unless a step or a wait lets it."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def bytes_of(tensor):
    return bytes(tensor.tolist())


def tensor_of(content):
    return torch.tensor(list(content), dtype=torch.uint8)


def digest(*parts):
    return hashlib.sha256(b"".join(parts)).digest()[:WIDTH]


def right(keys, at, layer, rank):
    """The bytes of block `at` in a run without a fault. Its key says all that is before it."""
    known = keys[at], layer, rank
    if known not in _RIGHT:
        before = right(keys, at - 1, layer, rank) if at else bytes(WIDTH)
        _RIGHT[known] = digest(before, keys[at], bytes([layer, rank]))
    return _RIGHT[known]


_RIGHT = {}


class Store:
    """Blocks that were put, for every rank, and the faults of a server."""

    def __init__(self, chance, clock, ranks):
        self.chance, self.clock, self.ranks = chance, clock, ranks
        self.blocks = {}  # (rank, key) -> bytes of each layer
        self.away = False
        self.calm = False
        self.numbers = itertools.count(1)

    def happens(self, probability):
        return not self.calm and self.chance.random() < probability

    def expect_there(self):
        if self.away:
            raise kvarts.Retry("away", "Away")

    def churn(self):
        """Some of what is stored goes."""
        for name in [name for name in self.blocks if self.happens(0.3)]:
            del self.blocks[name]


class Reading:
    """Layers of a load: each is written to the cache when it comes, which may be late, or never."""

    def __init__(self, store, rank, keys, paged):
        parts, slots = paged
        self.store, self.reasons, self.closed, self._came = store, {}, False, deque()
        found = [store.blocks.get((rank, key)) for key in keys]
        good = found.index(None) if None in found else len(found)
        if good < len(found):
            self.reasons["NotHere"] = (kvarts.Miss("gone", "NotHere"), len(found) - good)
        at, self.events = store.clock.now, deque()
        for layer in range(LAYERS):
            at += store.chance.choice((0.0, 0.01, 0.3)) if not store.happens(0.05) else 1000.0
            if good and store.happens(0.05):
                good -= 1
                self.reasons["Digest"] = (kvarts.Corrupt("damaged", "Digest"), 1)
            if not good:
                break
            self.events.append((at, layer, good, [(slots[n], found[n][layer]) for n in range(good)], parts[layer]))
        self.taken = 0
        if store.happens(0.5):  # what comes before its time
            self._write()

    def _write(self):
        """Whatever has come by now is in memory."""
        while self.events and self.events[0][0] <= self.store.clock.now and not self.closed:
            at, layer, good, blocks, (whole, first, stride) = self.events[0]
            for slot, content in blocks:
                whole.reshape(-1)[first + slot * stride : first + slot * stride + WIDTH] = tensor_of(content)
            self.events.popleft()
            self._came.append(types.SimpleNamespace(layer=layer, blocks=good))

    @property
    def _waiting(self):
        self._write()
        return self._came

    @property
    def arrived(self):
        return self.taken + len(self._waiting)

    def wait(self, timeout):
        if self._waiting or not self.events:
            return True
        if self.store.away:
            self.events.clear()
            self.reasons["Away"] = (kvarts.Retry("broken", "Away"), 1)
            return True
        if self.events[0][0] > self.store.clock.now + timeout:
            self.store.clock.now += timeout
            return False
        self.store.clock.now = self.events[0][0]
        return True

    def __next__(self):
        assert self.wait(0), "a wait that nothing bounds"
        if not self._waiting:
            raise StopIteration
        self.taken += 1
        return self._came.popleft()

    def close(self):
        self.closed = True


class Pages:
    """A handle of one rank."""

    def __init__(self, store, rank):
        self.store, self.rank = store, rank
        self.under = {}  # batch -> (number of keys, results, reasons, when)

    def match(self, keys, hold=None):
        self.store.expect_there()
        if self.store.happens(0.05):
            raise kvarts.Deadline("slow", "DeadlinePassed")
        found = 0
        while found < len(keys) and all((rank, keys[found]) in self.store.blocks for rank in range(self.store.ranks)):
            found += 1
        return types.SimpleNamespace(blocks=found)

    def layers(self, keys, paged, timeout=None):
        self.store.expect_there()
        return Reading(self.store, self.rank, keys, paged)

    def submit_put(self, keys, paged, parent=None, timeout=None):
        self.store.expect_there()
        if self.store.happens(0.05):
            raise kvarts.Retry("full", "Busy")
        (parts, slots), results, reasons = paged, [], {}
        for key, slot in zip(keys, slots):
            content = [bytes_of(whole[first + slot * stride : first + slot * stride + WIDTH]) for whole, first, stride in parts]
            fault = "DeadlinePassed" if self.store.happens(0.05) else "NoSpace" if self.store.happens(0.02) else None
            # An answer that is lost says nothing of what was stored.
            if fault is None or self.store.happens(0.3):
                self.store.blocks.setdefault((self.rank, key), content)
            if fault:
                kind = kvarts.Deadline if fault == "DeadlinePassed" else kvarts.Refused
                reasons[fault] = (kind(fault, fault), 1 + reasons.get(fault, (None, 0))[1])
            results.append(fault is None)
        batch = next(self.store.numbers)
        late = self.store.chance.choice((0.0, 0.1, 5.0)) if not self.store.calm else 0.0
        self.under[batch] = (results, reasons, self.store.clock.now + late)
        return batch

    def drain(self):
        done = [batch for batch, (_, _, at) in self.under.items() if at <= self.store.clock.now]
        given = []
        for batch in done:
            results, reasons, _ = self.under.pop(batch)
            given.append(types.SimpleNamespace(id=batch, kind="put", results=results, reasons=reasons))
        return given

    def wait(self, timeout):
        self.store.clock.now += timeout
        return self.drain()

    def cancel(self, batch):
        if batch in self.under:
            results, _, _ = self.under[batch]
            reasons = {"Cancelled": (kvarts.Retry("cancelled", "Cancelled"), len(results))}
            self.under[batch] = [False] * len(results), reasons, self.store.clock.now

    def close(self, timeout=None):
        pass


class Link(link.Link):
    """Its work is done when the driver says so."""

    def __init__(self, store):
        self._store, self._pause, self._client, self.work = store, 1.0, None, deque()
        self._away_until = self._puts_until = 0.0
        self._was_away = False

    def do(self, work, failed):
        self.work.append((work, failed))

    def run(self):
        while self.work:
            work, failed = self.work.popleft()
            try:
                self._store.expect_there()
                work(self)
            except kvarts.Error as error:
                self.failed(error)
                failed(error)

    def pages(self, tp_rank=0, **named):
        return Pages(self._store, tp_rank)

    def stop(self, timeout=None):
        pass

    def close(self, timeout=None):
        pass


class Request:
    """A prompt; `stays`: steps that it goes on after it was computed."""

    def __init__(self, name, keys, stays=0):
        self.request_id, self.block_hashes, self.stays = name, keys, stays
        self.num_tokens = len(keys) * TOKENS + 1
        self.num_computed_tokens = self.num_in_flight_tokens = self.unhashed = 0
        self.state = "waiting"


class Worker:
    """A rank's cache and what the forward pass does with it."""

    def __init__(self, connector, rank, blocks):
        self.connector, self.rank = connector, rank
        whole = torch.zeros(LAYERS, blocks, WIDTH, dtype=torch.uint8)
        self.caches = {name: whole[n] for n, name in enumerate(NAMES)}
        connector.register_kv_caches(self.caches)


class Scheduler:
    """vLLM's steps. `deaf`: a layer whose attention does not wait for its load, or none."""

    def __init__(self, chance, clock, store, ranks=1, blocks=24, policy="recompute", deaf=None):
        self.chance, self.clock, self.store, self.policy, self.deaf = chance, clock, store, policy, deaf
        self.block_pool = None
        self.limits = None  # (blocks of a step, of a request in it)
        self.free, self.hashes, self.of_hash, self.users = deque(range(blocks)), {}, {}, {}
        self.held = {}  # request -> its blocks
        self.running, self.waiting, self.kept, self.finished_ids = [], deque(), {}, set()
        self.done, self.failed, self.promised = [], [], []
        configs = [self._configuration(ranks, rank) for rank in range(ranks)]
        self.connector = vllm_layers.KvartsLayers(configs[0], KVConnectorRole.SCHEDULER, configs[0].caches)
        self.workers = [
            Worker(vllm_layers.KvartsLayers(config, KVConnectorRole.WORKER, config.caches), rank, blocks)
            for rank, config in enumerate(configs)
        ]
        self.connector.bind_kv_cache_manager(self)

    def _configuration(self, ranks, rank):
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=WIDTH // TOKENS // 4, dtype=torch.bfloat16)
        group = types.SimpleNamespace(kv_cache_spec=spec, layer_names=list(NAMES))
        transfer = dict(is_kv_consumer=True, is_kv_producer=True, kv_load_failure_policy=self.policy)
        transfer["kv_connector_extra_config"] = {"revision": "1", "timeout": 2.0}
        model = dict(model="test/model", revision=None, dtype="bfloat16", quantization=None, hf_overrides={})
        space = types.SimpleNamespace
        return space(
            kv_transfer_config=space(**transfer),
            parallel_config=space(tensor_parallel_size=ranks, rank=rank, pipeline_parallel_size=1),
            scheduler_config=space(async_scheduling=False),
            model_config=space(**model),
            load_config=space(load_format="auto"),
            cache_config=space(cache_dtype="auto"),
            speculative_config=None,
            use_v2_model_runner=False,
            caches=space(kv_cache_groups=[group], hash_block_size=TOKENS, kv_cache_layout="LBNHC"),
        )

    # The cache manager.

    def get_block_ids(self, name):
        return (list(self.held[name]),)

    def evict_blocks(self, blocks):
        for block in blocks:
            key = self.hashes.pop(block, None)
            if key is not None and self.of_hash.get(key) == block:
                del self.of_hash[key]

    def _take(self, count):
        taken = [self.free.popleft() for _ in range(count)]
        self.evict_blocks(taken)
        self.users.update(dict.fromkeys(taken, 1))
        return taken

    def _release(self, blocks):
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    def _hit(self, request):
        found = []
        for key in request.block_hashes:
            if key not in self.of_hash:
                break
            found.append(self.of_hash[key])
        return found[: (request.num_tokens - 1) // TOKENS]

    # A step.

    def add(self, request):
        self.waiting.append(request)

    def give_up(self, request):
        """The client has gone."""
        if request.state == "running":
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return
        self._finish(request, "given up")

    def _finish(self, request, how):
        request.state = how
        blocks = self.held.get(request.request_id, [])
        keeps, _ = self.connector.request_finished(request, list(blocks))
        self.finished_ids.add(request.request_id)
        if keeps:
            self.kept[request.request_id] = blocks
        elif request.request_id in self.held:
            self._release(self.held.pop(request.request_id))

    def _preempt(self, request):
        self.running.remove(request)
        self._release(self.held.pop(request.request_id))
        request.num_computed_tokens, request.unhashed, request.state = 0, 0, "waiting"
        self.waiting.appendleft(request)

    def _admit(self, request):
        hit = self._hit(request)
        found, is_late = self.connector.get_num_new_matched_tokens(request, len(hit) * TOKENS)
        assert not is_late
        if found is None:
            return None
        count = len(request.block_hashes) + 1 - len(hit)
        for block in hit:
            if not self.users.get(block):
                self.free.remove(block)
            self.users[block] = self.users.get(block, 0) + 1
        if len(self.free) < count:
            self._release(hit)
            return False
        blocks = hit + self._take(count)
        self.held[request.request_id] = blocks
        self.connector.update_state_after_alloc(request, types.SimpleNamespace(get_block_ids=lambda: (blocks,)), found)
        request.num_computed_tokens = len(hit) * TOKENS + found
        request.state = "running"
        self.running.append(request)
        self.promised += [(request, at) for at in range(len(hit), len(hit) + found // TOKENS)]
        return True

    def schedule(self):
        self.promised, scheduled, skipped = [], [], deque()
        if len(self.running) > 1 and self.chance.random() < 0.1 and not self.store.calm:
            self._preempt(self.running[-1])
        room, self.bound = self.limits or (self.chance.choice((2, 4, 8)), self.chance.choice((1, 2, 8)))
        for request in list(self.running):
            room -= self._compute_some(request, room, scheduled)
        while self.waiting and room > 0:
            request = self.waiting.popleft()
            admitted = self._admit(request)
            if not admitted:
                skipped.append(request)
                if admitted is False:
                    break
                continue
            room -= self._compute_some(request, room, scheduled)
        self.waiting.extendleft(reversed(skipped))
        return scheduled

    def _compute_some(self, request, room, scheduled):
        left = request.num_tokens - request.num_computed_tokens
        count = min(left, room * TOKENS, self.bound * TOKENS)
        if count <= 0:
            return 0
        scheduled.append((request, request.num_computed_tokens, count))
        # In the prefix cache from now on, whatever becomes of it.
        for at in range((request.num_computed_tokens + count) // TOKENS):
            key, block = request.block_hashes[at], self.held[request.request_id][at]
            if block not in self.hashes and key not in self.of_hash and at >= request.unhashed:
                self.hashes[block], self.of_hash[key] = key, block
        # After a load that failed vLLM does not enter them again.
        request.unhashed = max(request.unhashed, (request.num_computed_tokens + count) // TOKENS)
        return -(-count // TOKENS)

    def step(self, given_up=()):
        """One step; `given_up` are requests whose clients go while it runs."""
        scheduled = self.schedule()
        meta = self.connector.build_connector_meta(types.SimpleNamespace())
        counts = {}
        for request, _, count in scheduled:
            request.num_in_flight_tokens = count
            request.num_computed_tokens += count
            counts[request.request_id] = count
        over, invalid, told = None, set(), None
        for worker in self.workers:
            one = self._forward(worker, meta, scheduled)
            over = one[0] if over is None else over & one[0]
            invalid |= one[1]
            told = one[2] if told is None else told.aggregate(one[2])
        self._judge_promises(invalid)
        for request in given_up:
            self.give_up(request)
        self._update(scheduled, counts, invalid)
        output = types.SimpleNamespace(invalid_block_ids=invalid, kv_connector_worker_meta=told)
        self.connector.update_connector_output(output)
        for name in over:
            if name not in self.kept:
                raise AssertionError(f"let go, and not kept: {name}")
            self._release(self.kept.pop(name))
            self.held.pop(name, None)
        self.clock.now += 0.01

    def _forward(self, worker, meta, scheduled):
        connector = worker.connector
        connector.bind_connector_metadata(meta)
        if meta.loads:
            connector.start_load_kv(None)
        for layer, name in enumerate(NAMES):
            if scheduled:
                if layer != self.deaf:
                    connector.wait_for_layer_load(name)
                for request, first, count in scheduled:
                    self._compute(worker, layer, name, request, first, count)
                connector.save_kv_layer(name, None, None)
        connector.wait_for_save()
        ended = connector.get_finished(set(self.finished_ids))[0]
        assert ended <= self.finished_ids
        answer = ended, connector.get_block_ids_with_load_errors(), connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return answer

    def _compute(self, worker, layer, name, request, first, count):
        held, cache = self.held[request.request_id], worker.caches[name]
        for at in range(first // TOKENS, (first + count) // TOKENS):
            before = bytes_of(cache[held[at - 1]]) if at else bytes(WIDTH)
            cache[held[at]] = tensor_of(digest(before, request.block_hashes[at], bytes([layer, worker.rank])))

    def _update(self, scheduled, counts, invalid):
        skip = self._handle_invalid(counts, invalid) if invalid else set()
        for request, _, count in scheduled:
            if request.state != "running":
                continue
            request.num_in_flight_tokens -= count
            if request.request_id in skip:
                if self.policy == "fail":
                    self.running.remove(request)
                    self.failed.append(request)
                    self._finish(request, "failed")
                continue
        for request in list(self.running):
            if request.num_computed_tokens == request.num_tokens and request.stays:
                request.stays -= 1
            elif request.num_computed_tokens == request.num_tokens:
                self._judge(request)
                self.running.remove(request)
                self.done.append(request)
                self._finish(request, "done")

    def _handle_invalid(self, counts, invalid):
        """As vLLM does it with blocks that were loaded within a step: requests that are no longer there are not looked at."""
        affected, marked, evicted = set(), set(), set()
        for request in self.running:
            computed = request.num_computed_tokens - counts.get(request.request_id, 0)
            own, is_cut = self.held[request.request_id], False
            for at in range(-(-computed // TOKENS)):
                if own[at] not in invalid:
                    continue
                affected.add(request.request_id)
                if own[at] in marked:
                    continue  # another one computes it again
                marked.add(own[at])
                if is_cut:
                    continue
                is_cut = True
                request.num_computed_tokens = at * TOKENS
                evicted.update(own[at:])
            if request.request_id in affected and not is_cut:
                request.num_computed_tokens = computed
        if self.policy == "fail":
            self.evict_blocks(evicted)
        return affected

    # What must hold.

    def _judge_promises(self, invalid):
        """A block that was promised is in the cache in every layer, or it was reported in this very step."""
        for request, at in self.promised:
            block = self.held[request.request_id][at]
            if block in invalid:
                continue
            for worker in self.workers:
                for layer, name in enumerate(NAMES):
                    content = bytes_of(worker.caches[name][block])
                    if content != right(request.block_hashes, at, layer, worker.rank):
                        raise AssertionError(f"promised, and not there: block {at} of {request.request_id}")

    def _judge(self, request):
        """What a request that ends well has computed with."""
        for at, block in enumerate(self.held[request.request_id][: len(request.block_hashes)]):
            for worker in self.workers:
                for layer, name in enumerate(NAMES):
                    content = bytes_of(worker.caches[name][block])
                    if content != right(request.block_hashes, at, layer, worker.rank):
                        raise AssertionError(f"wrong answer: block {at} of {request.request_id}")
