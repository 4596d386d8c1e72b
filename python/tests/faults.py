"""A pool, a store and a device with faults behind the layerwise connector, and what vLLM does around it, in one thread and in virtual time.

`Scheduler` follows vLLM's: blocks are in the prefix cache from the moment that they are allocated, prompts are computed in pieces, a step is
scheduled before the output of the one before is taken, requests are preempted and given up between steps and while a step runs,
windows are let go of when they have passed, and a recurrent state is copied on at the beginning of a step and kept where a piece of a prompt ends. A block's bytes are a digest over those of the block before it as they lie in the cache at
that moment: what is computed from garbage is garbage, and anything can be told from it. What a device was given it does some time before it is
waited for. Only the link's thread may do what waits for a server: in the scheduler's it is an error."""

import hashlib
import itertools
import types
from collections import deque

import doubles

doubles.install()

import torch  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec  # noqa: E402

import kvarts  # noqa: E402
from kvarts import link, vllm_layers  # noqa: E402

TOKENS, LAYERS, WIDTH = 4, 3, 32
#: A window that needs the two blocks before a boundary.
WINDOW = 2 * TOKENS
POOL = 40 * LAYERS * WIDTH


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


def right(keys, at, layer, column):
    """The bytes of block `at` in a run without a fault. Its key says all that is before it; `column`: the group and the rank."""
    known = keys[at], layer, column
    if known not in _RIGHT:
        before = right(keys, at - 1, layer, column) if at else bytes(WIDTH)
        _RIGHT[known] = digest(before, keys[at], bytes([layer, *column]))
    return _RIGHT[known]


_RIGHT = {}


class Store:
    """Blocks that were put, in every column, and the faults of a server."""

    def __init__(self, chance, clock):
        self.chance, self.clock = chance, clock
        self.blocks = {}  # (group, rank, key) -> bytes of each layer
        self.is_away = False
        #: Whether the server knows of the pool: a client shares it again with the first thing that it asks of a new server.
        self.is_shared = False
        self.calm = False
        self.is_links = False  # whether the link's thread runs
        self.names = itertools.count(1)

    def happens(self, probability):
        return not self.calm and self.chance.random() < probability

    @property
    def away(self):
        return self.is_away

    @away.setter
    def away(self, away):
        self.is_away, self.is_shared = away, self.is_shared and not away

    def expect_there(self, shares=True):
        assert self.is_links, "the scheduler waits for a server"
        if self.away:
            raise kvarts.Retry("away", "Away")
        self.is_shared = self.is_shared or shares

    def churn(self):
        """Some of what is stored goes."""
        for name in [name for name in self.blocks if self.happens(0.3)]:
            del self.blocks[name]

    def judge(self, texts):
        """Every block that is stored is what an engine without faults stores of these texts."""
        known = {text[at]: (text, at) for text in texts for at in range(len(text))}
        for (group, rank, key), layers in self.blocks.items():
            text, at = known[key]
            if layers != [right(text, at, layer, (group, rank)) for layer in range(LAYERS)]:
                raise AssertionError(f"stored wrong: block {at}")


class Client:
    def __init__(self, store, is_schedulers):
        self._store, self._is_schedulers = store, is_schedulers

    def pages(self, **naming):
        self._store.expect_there(self._is_schedulers)
        return Pages(self._store, naming)

    def shared_pool(self, nbytes):
        self._store.expect_there()
        self._store.pools = Pool(self._store, nbytes)
        return self._store.pools

    def attach(self, name):
        self._store.expect_there(False)
        if not self._store.is_shared or name != self._store.pools.name:
            raise kvarts.Refused("no session has a pool of this name", "NotFound")
        if self._store.happens(0.2):
            raise kvarts.Refused("limits.shared", "Limit")
        return self._store.pools


#: Of all engines of a course.
NAMESPACE = bytes(32)


class Pages:
    """A handle: which blocks a prefix needs of which groups."""

    def __init__(self, store, naming):
        self._store, self._windows = store, naming["windows"]
        self.groups = sorted(naming["groups"])
        self.ranks = naming["ranks"]
        self.namespace = NAMESPACE

    def _is_here(self, group, key):
        return all((group, rank, key) in self._store.blocks for rank in range(self.ranks))

    def exists(self, keys):
        self._store.expect_there()
        return [False] * len(keys)

    def match(self, keys, hold=None):
        self._store.expect_there()
        if self._store.happens(0.05):
            raise kvarts.Deadline("slow", "DeadlinePassed")
        best = 0
        for blocks in range(1, len(keys) + 1):
            needs = [(group, at) for group in self.groups for at in range(self._first(group, blocks), blocks)]
            if all(self._is_here(group, keys[at]) for group, at in needs):
                best = blocks
        missing = types.SimpleNamespace(evicted=0, expired=0, deleted=0, out_of_service=0, never_stored=len(keys) - best, cut_off=0)
        lease = Lease(self._store, keys[:best]) if hold is not None and best else None
        return types.SimpleNamespace(blocks=best, plan=None, missing=missing, lease=lease)

    def _first(self, group, blocks):
        window = self._windows.get(group)
        return 0 if window is None else max(0, blocks - max(1, -(-window // TOKENS)))

    def block_bytes(self, group=0):
        return LAYERS * WIDTH


class Lease:
    """Blocks that the store does not evict."""

    def __init__(self, store, keys):
        self._store, self.blocks = store, len(keys)

    def renew(self, hold):
        self._store.expect_there()
        if self._store.happens(0.2):
            raise kvarts.Refused("it has ended", "LeaseEnded")

    def end(self):
        return True


class Pool:
    """Memory, and who has what of it. What was let go of is overwritten: nobody may read it any more."""

    def __init__(self, store, nbytes):
        self.store, self.name = store, f"pool-{next(store.names)}"
        self.memory = bytearray(nbytes)
        self.used = {}  # where it begins -> bytes
        self.counts = dict(hits=0, shared=0, came=0)

    def take(self, blocks):
        """Room for so many blocks, or none."""
        nbytes, at = blocks * LAYERS * WIDTH, 0
        for begin in sorted(self.used):
            if begin - at >= nbytes:
                break
            at = begin + self.used[begin]
        if at + nbytes > len(self.memory):
            return None
        self.used[at] = nbytes
        return at

    def give(self, at):
        nbytes = self.used.pop(at)
        self.memory[at : at + nbytes] = b"\xee" * nbytes

    def place(self, at, blocks, block, layer):
        begin = at + (layer * blocks + block) * WIDTH
        return begin, begin + WIDTH

    def clear(self):
        assert self.store.is_links, "the scheduler waits for the pool"

    def stage(self, columns, keys, first_block=0, silence=None):
        self.store.expect_there()
        return Stage(self, [column[1:] for column in columns], keys, silence)

    def draft(self, pages, keys, group=0, rank=None, first_block=0, wait=True):
        assert not wait, "the scheduler waits for the pool"
        if self.store.happens(0.05):
            raise kvarts.Retry("in use", "Busy")
        at = self.take(len(keys))
        if at is None:
            raise kvarts.Retry("no room", "Busy")
        return Draft(self, at, keys, group, rank)


class Stage:
    """Blocks that come, each at its time, or never."""

    def __init__(self, pool, columns, keys, silence):
        self.pool, self.store, self.keys, self.columns = pool, pool.store, keys, columns
        self.at = {}
        for column in columns:
            at = pool.take(len(keys))
            if at is None:
                break
            self.at[column] = at
        found, self.due = self.store.clock.now, []
        self.why = None
        for key in keys if len(self.at) == len(columns) else ():
            here = [self.store.blocks.get((*column, key)) for column in columns]
            if None in here or self.store.happens(0.06):
                self.why = kvarts.Miss("gone", "NotHere")
                break
            found += self.store.chance.choice((0.0, 0.001, 0.1)) if not self.store.happens(0.15) else 1000.0
            self.due.append((found, here))
        if len(self.at) < len(columns):
            self.why = kvarts.Retry("no room", "Busy")
        self.silence, self.heard = silence, self.store.clock.now
        self.staged, self.is_closed, self.is_over = 0, False, False
        self._look()

    def _look(self):
        assert not self.is_closed, "a stage that was let go of"
        if self.is_over:
            return
        now = self.store.clock.now
        while self.staged < len(self.due) and self.due[self.staged][0] <= now:
            for column, content in zip(self.columns, self.due[self.staged][1]):
                for layer, one in enumerate(content):
                    begin, end = self.pool.place(self.at[column], len(self.keys), self.staged, layer)
                    self.pool.memory[begin:end] = one
            self.staged += 1
            self.pool.counts["came"] += 1
            self.heard = now
        if self.staged == len(self.due):
            self.is_over = True
        elif now - self.heard > self.silence:
            self.is_over, self.why = True, kvarts.Retry("no more data arrived in time", "Silence")

    def wait(self, timeout):
        self.store.is_links or self._wrong()
        self._look()

    def _wrong(self):
        raise AssertionError("the scheduler waits for a stage")

    def stretches(self, column):
        at = self.at.get(self.columns[column])
        return [] if at is None else [(at, len(self.keys), 0, self.staged)]

    def close(self):
        assert self.store.is_links, "the scheduler lets go of a stage"
        if not self.is_closed:
            for at in self.at.values():
                self.pool.give(at)
        self.is_closed = True

    def __getattribute__(self, name):
        if name in ("staged", "is_over") and "is_closed" in object.__getattribute__(self, "__dict__"):
            store = object.__getattribute__(self, "store")
            if store.is_links and not object.__getattribute__(self, "_looking"):
                self._looking = True
                try:
                    object.__getattribute__(self, "_look")()
                finally:
                    self._looking = False
        return object.__getattribute__(self, name)

    _looking = False


class Draft:
    def __init__(self, pool, at, keys, group, rank):
        self.pool, self.at, self.keys, self.column = pool, at, keys, (group, rank)
        self.why, self.is_closed = None, False

    def stretches(self):
        return [(self.at, len(self.keys), 0, len(self.keys))]

    def put(self, parent=None, durable=True, ttl=None, timeout=None):
        store, results = self.pool.store, []
        store.expect_there()
        if store.happens(0.05):
            raise kvarts.Deadline("full", "DeadlinePassed")
        for block, key in enumerate(self.keys):
            places = [self.pool.place(self.at, len(self.keys), block, layer) for layer in range(LAYERS)]
            fault = store.happens(0.03)
            # An answer that is lost says nothing of what was stored.
            if not fault or store.happens(0.3):
                store.blocks.setdefault((*self.column, key), [bytes(self.pool.memory[begin:end]) for begin, end in places])
            results.append(not fault)
            if fault:
                self.why = kvarts.Refused("no room", "NoSpace")
        self._give()
        return results

    def close(self):
        assert self.pool.store.is_links, "the scheduler gives room back"
        self._give()

    def _give(self):
        if not self.is_closed:
            self.pool.give(self.at)
        self.is_closed = True


# The device.


class Stream:
    """What it was given is done in its order, some time before it is waited for."""

    def __init__(self, device):
        self.device, self.handle, self.given, self.ran = device, len(device.streams), deque(), 0
        device.streams.append(self)

    @property
    def end(self):
        return self.ran + len(self.given)

    def give(self, work):
        self.given.append(work)

    def run_to(self, end):
        while self.given and self.ran < end:
            self.ran += 1
            self.given.popleft()()

    def some(self):
        """Nothing, some of it, or all."""
        if self.device.store.happens(0.2):
            self.synchronize()
        while self.given and self.device.store.happens(0.5):
            self.run_to(self.ran + 1)

    def synchronize(self):
        self.run_to(self.end)


class Card:
    """Stands for a device's streams: a thread that gives them something waits for nothing."""

    def __init__(self):
        self.device = Device("emulated")
        self.compute, self.side = self.device.stream(), self.device.stream()

    def memory(self, whole):
        return whole

    def now(self):
        return self.compute.handle

    free = now

    def await_layer(self, landed, layer):
        landed.wait(layer, self.compute.handle)

    def behind(self):
        end = self.compute.end
        self.side.give(lambda: self.compute.run_to(end))
        return self.side.handle

    def join(self):
        end = self.side.end
        self.compute.give(lambda: self.side.run_to(end))


class Device:
    def __init__(self, name):
        assert name == "emulated"
        self.store, self.streams = Device.of, []

    def stream(self):
        return Stream(self)


class Lander:
    def __init__(self, device, ring_bytes):
        self.device = device

    def pin(self, memory):
        pass

    def pages(self, pages, memories, parts, places, per_block, group, rank):
        assert per_block == 1 and len(set(places)) == len(places) and all(places)
        return types.SimpleNamespace(memories=memories, parts=parts, places=places)

    def _places(self, pool, stretches, pages, layer):
        """Of each block, where a layer lies in the engine's memory, and in the pool."""
        memory, _, first, stride, *_ = pages.parts[layer]
        whole, blocks = pages.memories[memory].reshape(-1), iter(pages.places)
        for at, extent, begin, count in stretches:
            for block in range(begin, begin + count):
                place = first + next(blocks) * stride
                yield whole[place : place + WIDTH], slice(*pool.place(at, extent, block, layer))

    def _spread(self, pool, *of):
        for there, here in self._places(pool, *of):
            there[...] = tensor_of(pool.memory[here])

    def _gather(self, pool, *of):
        """Takes a layer off the pages; gives what brings it to the pool some time later."""
        taken = [(bytes_of(there), here) for there, here in self._places(pool, *of)]

        def arrive():
            for content, here in taken:
                pool.memory[here] = content

        return arrive

    def land(self, pool, columns, after):
        [(stretches, pages)] = columns
        assert sum(count for *_, count in stretches) == len(pages.places)
        behind = self.device.streams[after]
        end = behind.end
        layers = [lambda layer=layer: self._spread(pool, stretches, pages, layer) for layer in range(len(pages.parts))]
        return Landed(self, lambda: behind.run_to(end), layers)

    def save(self, pool, columns):
        [(stretches, pages)] = columns
        return Saving(self, [lambda layer=layer: self._gather(pool, stretches, pages, layer) for layer in range(len(pages.parts))])


class Landed:
    def __init__(self, lander, behind, layers):
        self.lander, self.behind, self.layers, self.at = lander, behind, layers, 0
        self.some()

    def some(self):
        while self.at < len(self.layers) and self.lander.device.store.happens(0.3):
            self._next()

    def _next(self):
        # Pages may be in use by what the engine's stream was given before.
        self.behind()
        layer, self.at = self.at, self.at + 1
        self.layers[layer]()

    def wait(self, layer, stream):
        def arrive():
            while self.at <= layer:
                self._next()

        self.lander.device.streams[stream].give(arrive)

    def done(self, timeout=0.0):
        self.some()
        if self.lander.device.store.calm or timeout:
            while self.at < len(self.layers):
                self._next()
        return self.at == len(self.layers)


class Saving:
    def __init__(self, lander, layers):
        self.lander, self.layers, self.left, self.at, self.coming = lander, layers, 0, 0, deque()

    def layer(self, layer, stream):
        assert layer == self.at, "layers out of their order"
        self.at += 1

        def leave():
            self.coming.append(self.layers[layer]())

        one = self.lander.device.streams[stream]
        one.give(leave)
        one.some()

    def finish(self):
        assert self.at == len(self.layers), "a save that is not whole"
        return self

    def done(self, timeout=0.0):
        is_all = self.lander.device.store.calm or timeout
        for stream in self.lander.device.streams:
            stream.synchronize() if is_all else stream.some()
        while self.coming and (is_all or self.lander.device.store.happens(0.6)):
            self.coming.popleft()()
            self.left += 1
        return self.left == len(self.layers)


class Link(link.Link):
    """Its work is done when the driver says so."""

    def __init__(self, store, is_schedulers=True):
        self._store, self.pause, self._client, self.work = store, 1.0, Client(store, is_schedulers), deque()
        self._is_schedulers = is_schedulers
        self._away_until = self._puts_until = 0.0
        self._was_away, self._watched = False, None

    def do(self, work, failed):
        self.work.append((work, failed))

    def then(self, work):
        self.work.append((lambda client: work(), None))

    def run(self):
        self._store.is_links = True
        try:
            while self.work:
                work, failed = self.work.popleft()
                try:
                    if failed is not None:
                        # What a worker asks brings no pool back.
                        self._store.expect_there(*(() if self._is_schedulers else (False,)))
                    work(self._client)
                except kvarts.Error as error:
                    self.failed(error)
                    failed(error)
            if self._watched is not None and not self._watched():
                self._watched = None
        finally:
            self._store.is_links = False

    def stop(self, timeout=None):
        pass

    def close(self, timeout=None):
        pass


class Putters:
    """Stands for threads that put: they come to it when the driver says so."""

    def __init__(self, store):
        self.store, self.work = store, deque()

    def submit(self, work, *of):
        self.work.append((work, of))

    def run(self):
        self.store.is_links = True
        try:
            while self.work and not self.store.happens(0.3):
                work, of = self.work.popleft()
                work(*of)
        finally:
            self.store.is_links = False

    def shutdown(self, wait=True, cancel_futures=False):
        pass


class Request:
    """A prompt; `stays`: steps that it goes on after it was computed."""

    def __init__(self, name, keys, stays=0):
        self.request_id, self.block_hashes, self.stays = name, keys, stays
        self.num_tokens = self.num_prompt_tokens = len(keys) * TOKENS + 1
        self.num_computed_tokens = self.num_in_flight_tokens = 0
        self.kv_transfer_params = None
        self.state = "waiting"

    def handed(self, blocks):
        """Another engine has computed so many blocks for it."""
        told = {"namespace": NAMESPACE.hex(), "tokens": blocks * TOKENS, "last_key": self.block_hashes[blocks - 1].hex()}
        self.kv_transfer_params = {"do_remote_prefill": True, "kvarts": told}


class Worker:
    """A worker's caches and what the forward pass does with them."""

    def __init__(self, connector, names, stage, rank, blocks):
        self.connector, self.names, self.stage, self.rank = connector, names, stage, rank
        whole = torch.zeros(sum(map(len, names)), blocks, WIDTH, dtype=torch.uint8)
        self.caches = dict(zip([name for own in names for name in own], whole))
        # A state has parts.
        connector.register_kv_caches({name: [cache] if "state" in name else cache for name, cache in self.caches.items()})
        streams = connector._side._dock.streams
        self.compute = streams.compute if isinstance(streams, Card) else None

    def do(self, work):
        """What the model does: on a device some time later."""
        self.compute.give(work) if self.compute is not None else work()

    def wait(self, end):
        if self.compute is not None:
            self.compute.run_to(end)


class Scheduler:
    """vLLM's steps. `groups`: with a window's layers beside the others, or without; `states`: or with a state's; `deaf`: a layer whose attention does not wait for its
    load, or none; `ahead`: whether a step is scheduled before the output of the one before is taken."""

    def __init__(self, chance, clock, store, ranks=1, stages=1, groups=1, blocks=24, deaf=None, ahead=False, windows="full", states=False):
        self.chance, self.clock, self.store, self.deaf, self.ahead = chance, clock, store, deaf, ahead
        self.block_pool = None
        self.limits = None  # (blocks of a step, of a request in it)
        self.groups, self.windows = groups, windows
        self.state = 1 if states and groups > 1 else None  # the group of the states
        self.remote, self.landed, self.offers = [], {}, {}  # requests whose loads are on their way; by how many workers they have landed
        # Place zero is none.
        self.free, self.hashes, self.of_hash, self.users = deque(range(1, blocks)), {}, {}, {}
        self.held = {}  # request -> of each group its places
        self.running, self.waiting, self.kept, self.finished_ids = [], deque(), {}, set()
        self.done, self.promised, self.late = [], [], deque()
        places = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
        configs = [self._configuration(stages, ranks, stage, rank, blocks) for stage, rank in places]
        self.connector = vllm_layers.KvartsLayers(configs[0], KVConnectorRole.SCHEDULER, configs[0].caches)
        self.workers = []
        for (stage, rank), config in zip(places, configs):
            connector = vllm_layers.KvartsLayers(config, KVConnectorRole.WORKER, config.caches)
            names = [group.layer_names for group in config.caches.kv_cache_groups]
            self.workers.append(Worker(connector, names, stage, rank, blocks))
        self.connector.bind_kv_cache_manager(self)
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {place: worker.connector.get_handshake_metadata() for place, worker in zip(places, self.workers)}
        )

    def _configuration(self, stages, ranks, stage, rank, blocks):
        space = types.SimpleNamespace
        sizes = dict(block_size=TOKENS, num_kv_heads=1, head_size=WIDTH // TOKENS // 4, dtype=torch.bfloat16)
        kinds = ["group", "group" if self.state is None else "state"]
        names = [[f"stage.{stage}.{kinds[group]}.{group}.layer.{n}" for n in range(LAYERS)] for group in range(self.groups)]
        state = MambaSpec(block_size=TOKENS, shapes=((WIDTH,),), dtypes=(torch.uint8,))
        specs = [FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=WINDOW) if self.state is None else state]
        transfer = dict(kv_role="kv_both", is_kv_consumer=True, is_kv_producer=True)
        transfer["kv_connector_extra_config"] = {"revision": "1", "timeout": 2.0, "pool_bytes": POOL, "windows": self.windows, "plans": False}
        model = dict(model="test/model", revision=None, dtype="bfloat16", quantization=None, hf_overrides={})
        return space(
            kv_transfer_config=space(**transfer),
            parallel_config=space(tensor_parallel_size=ranks, rank=stage * ranks + rank, pipeline_parallel_size=stages),
            model_config=space(**model),
            load_config=space(load_format="auto"),
            cache_config=space(cache_dtype="auto"),
            speculative_config=None,
            caches=space(
                kv_cache_groups=[space(kv_cache_spec=spec, layer_names=own) for spec, own in zip(specs, names)],
                hash_block_size=TOKENS,
                kv_cache_layout="LBNHC",
                num_blocks=blocks,
            ),
        )

    # The cache manager.

    def get_block_ids(self, name):
        return tuple(list(own) for own in self.held[name])

    def _forget(self, blocks):
        for block in blocks:
            known = self.hashes.pop(block, None)
            if known is not None and self.of_hash.get(known) == block:
                del self.of_hash[known]

    def _take(self, count):
        taken = [self.free.popleft() for _ in range(count)]
        self._forget(taken)
        self.users.update(dict.fromkeys(taken, 1))
        return taken

    def _release(self, held):
        for block in [block for own in held for block in reversed(own) if block]:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    def _skipped(self, group, tokens):
        """How many blocks of a group are needed no more when so many tokens are computed."""
        if group == self.state:
            return max(0, tokens - 1) // TOKENS
        return max(0, tokens - WINDOW + 1) // TOKENS if group else 0

    def _hit(self, request):
        """The longest prefix that every group has, as each group's places."""
        for blocks in range((request.num_tokens - 1) // TOKENS, 0, -1):
            found = []
            for group in range(self.groups):
                skipped = self._skipped(group, blocks * TOKENS)
                found.append([0] * skipped + [self.of_hash.get((group, key)) for key in request.block_hashes[skipped:blocks]])
            if all(None not in own for own in found):
                return blocks, found
        return 0, [[] for _ in range(self.groups)]

    # A step.

    def add(self, request):
        self.waiting.append(request)

    def give_up(self, request):
        """The client has gone."""
        if request.state == "running":
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request in self.remote:
            # Its places stay until all workers have landed what was on its way.
            self.remote.remove(request)
            assert not self.connector.request_finished_all_groups(request, [list(own) for own in self.held[request.request_id]])[0]
            self.finished_ids.add(request.request_id)
            request.state = "given up"
            self._free_landed(request.request_id)
            return
        else:
            return
        self._finish(request, "given up")

    def _finish(self, request, how):
        request.state = how
        held = self.held.get(request.request_id, [[] for _ in range(self.groups)])
        keeps, _ = self.connector.request_finished_all_groups(request, [list(own) for own in held])
        self.finished_ids.add(request.request_id)
        if keeps:
            self.kept[request.request_id] = held
        elif request.request_id in self.held:
            self._release(self.held.pop(request.request_id))

    def _preempt(self, request):
        self.running.remove(request)
        self._release(self.held.pop(request.request_id))
        request.num_computed_tokens, request.state = 0, "waiting"
        request.stale = request.num_in_flight_tokens
        self.waiting.appendleft(request)

    def _admit(self, request):
        if request.num_in_flight_tokens:
            return None  # what it was scheduled for has not come back yet
        hit, places = self._hit(request)
        if hit and self.state is not None and places[self.state][-1] in self.fresh:
            return None  # computed in this very step: too late to be copied on
        found, is_late = self.connector.get_num_new_matched_tokens(request, hit * TOKENS)
        assert is_late == bool(found and self.state is not None)
        if found is None:
            return None
        last, total = hit + found // TOKENS, len(request.block_hashes) + 1
        adopted = [block for own in places for block in own if block]
        for block in adopted:
            if not self.users.get(block):
                self.free.remove(block)
            self.users[block] = self.users.get(block, 0) + 1
        held = []
        for group, own in enumerate(places):
            skipped = min(self._skipped(group, last * TOKENS), last)
            # States get places as they are computed.
            held.append((own + [0] * max(0, skipped - len(own)), last if group == self.state else total))
        if len(self.free) < sum(count - len(own) for own, count in held):
            self._release([adopted])
            return False
        held = [own + self._take(count - len(own)) for own, count in held]
        self.held[request.request_id] = held
        self.connector.update_state_after_alloc(request, types.SimpleNamespace(get_block_ids=lambda: [list(own) for own in held]), found)
        request.num_computed_tokens = last * TOKENS
        if is_late:
            request.state = "remote"
            self.remote.append(request)
            self.landed[request.request_id], request.hit = 0, hit
            return None
        request.state = "running"
        self.running.append(request)
        for group in range(self.groups):
            self.promised += [(request, group, at) for at in range(hit, last) if held[group][at]]
        return True

    def _let_in(self):
        """Those go on whose loads have landed."""
        for request in [one for one in self.remote if self.landed[one.request_id] == len(self.workers)]:
            self.remote.remove(request)
            del self.landed[request.request_id]
            held, last = self.held[request.request_id], request.num_computed_tokens // TOKENS
            for group, own in enumerate(held):
                for at in range(last):
                    if own[at]:
                        self._cache(own[at], (group, request.block_hashes[at]))
                        self.promised += [(request, group, at)] if at >= request.hit else []
            self.connector.update_state_after_alloc(request, types.SimpleNamespace(get_block_ids=lambda held=held: [list(own) for own in held]), 0)
            request.state = "running"
            self.running.append(request)

    def _cache(self, block, known):
        if block not in self.hashes and known not in self.of_hash:
            self.hashes[block], self.of_hash[known] = known, block
            self.fresh.add(block)

    def _let_pass(self, request):
        """Windows that have passed are let go of, on what has come back."""
        held = self.held[request.request_id]
        for group in range(self.groups):
            for at in range(self._skipped(group, request.num_computed_tokens - request.num_in_flight_tokens)):
                if group != self.state and at < len(held[group]) and held[group][at]:
                    self._release([[held[group][at]]])
                    held[group][at] = 0

    def schedule(self):
        self.promised, self.fresh, scheduled, skipped = [], set(), [], deque()
        if len(self.running) > 1 and self.chance.random() < 0.1 and not self.store.calm:
            self._preempt(self.running[-1])
        room, self.bound = self.limits or (self.chance.choice((2, 4, 8)), self.chance.choice((1, 2, 8)))
        self._let_in()
        for request in list(self.running):
            self._let_pass(request)
            room -= self._compute_some(request, room, scheduled)
        while self.waiting and room > 0:
            request = self.waiting.popleft()
            admitted = self._admit(request)
            if request in self.remote:
                continue
            if not admitted:
                skipped.append(request)
                if admitted is False:
                    break
                continue
            room -= self._compute_some(request, room, scheduled)
        self.waiting.extendleft(reversed(skipped))
        if self.running and not scheduled and not self.free:
            self._preempt(self.running[-1])
            self.promised = [one for one in self.promised if one[0] in self.running]
        return scheduled

    def _compute_some(self, request, room, scheduled):
        left = request.num_tokens - request.num_computed_tokens
        count = min(left, room * TOKENS, self.bound * TOKENS)
        if count <= 0 or self.state is not None and not self._go_on(request, request.num_computed_tokens, count):
            return 0
        scheduled.append((request, request.num_computed_tokens, count))
        # In the prefix cache from now on, whatever becomes of it.
        for group, held in enumerate(self.held[request.request_id]):
            for at in range(min((request.num_computed_tokens + count) // TOKENS, len(held))):
                if held[at]:
                    self._cache(held[at], (group, request.block_hashes[at]))
        return -(-count // TOKENS)

    def _go_on(self, request, first, count):
        """A place for the state at the end of what is computed now; where that is the end of a block, it is offered."""
        own, end = self.held[request.request_id][self.state], first + count
        last, before = -(-end // TOKENS) - 1, (first - 1) // TOKENS
        if last >= len(own) or not own[last]:
            if not self.free:
                return False
            own += [0] * (last + 1 - len(own))
            [own[last]] = self._take(1)
        # The one that is copied on is needed once more; in a step that is scheduled ahead the one before it, too.
        for at in range(before - 1):
            if own[at] and not request.num_in_flight_tokens:
                self._release([[own[at]]])
                own[at] = 0
        if end % TOKENS == 0:
            self.offers.setdefault(request.request_id, []).append((self.state, own[last], end))
        return True

    def step(self, given_up=()):
        """One step; `given_up` are requests whose clients go while it runs."""
        scheduled = self.schedule()
        counts = {request.request_id: count for request, _, count in scheduled}
        offers, self.offers = types.SimpleNamespace(boundary_state_offloads=self.offers), {}
        meta = self.connector.build_connector_meta(types.SimpleNamespace(num_scheduled_tokens=counts, kv_connector_block_state=offers))
        for request, _, count in scheduled:
            request.num_in_flight_tokens += count
            request.num_computed_tokens += count
        over, told = None, None
        held = {request.request_id: [list(own) for own in self.held[request.request_id]] for request, *_ in scheduled}
        promised = [(request, group, at, self.held[request.request_id][group][at]) for request, group, at in self.promised]
        for worker in self.workers:
            one = self._forward(worker, meta, scheduled, held, promised)
            over = one[0] if over is None else over & one[0]
            for name in one[2]:
                self._has_landed(name)
            told = one[1] if told is None else told.aggregate(one[1])
        for request in given_up:
            self.give_up(request)
        ends = [worker.compute.end if worker.compute is not None else 0 for worker in self.workers]
        self.late.append((scheduled, told, over, ends))
        while len(self.late) > (1 if self.ahead and not self.store.happens(0.3) and scheduled else 0):
            self._update(*self.late.popleft())
        self.clock.now += 0.01

    def _has_landed(self, name):
        self.landed[name] += 1
        if not any(request.request_id == name for request in self.remote):
            self._free_landed(name)

    def _free_landed(self, name):
        """What was given up while it was landed gives its places back when it has."""
        if self.landed[name] == len(self.workers):
            del self.landed[name]
            self._release(self.held.pop(name))

    def _forward(self, worker, meta, scheduled, held, promised):
        connector = worker.connector
        # Each worker has its own copy of what it is told.
        connector.bind_connector_metadata(types.SimpleNamespace(**vars(meta)))
        for request, first, count in scheduled if self.state is not None else ():
            own = held[request.request_id][self.state]
            before, last = (first - 1) // TOKENS, -(-(first + count) // TOKENS) - 1
            if first and before != last:
                worker.do(lambda before=own[before], last=own[last]: self._copy(worker, before, last))
        if meta.loads:
            connector.start_load_kv(types.SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=None))
        names = list(enumerate(name for own in zip(*worker.names) for name in own))
        for at, name in names if scheduled else ():
            layer, group = divmod(at, self.groups)
            if layer != self.deaf:
                connector.wait_for_layer_load(name)
                self._judge_promises(worker, name, layer, group, promised)
            for request, first, count in scheduled:
                what = worker, name, layer, group, held[request.request_id], request.block_hashes, first, count
                worker.do(lambda what=what: self._compute(*what))
            if layer != self.deaf:
                connector.save_kv_layer(name, None, None)
        connector.wait_for_save()
        for at, name in names if scheduled else ():
            self._judge_promises(worker, name, *divmod(at, self.groups), promised)
        ended, landed = connector.get_finished(set(self.finished_ids))
        assert ended <= self.finished_ids
        assert not connector.get_block_ids_with_load_errors(), "a load that was promised has failed"
        answer = ended, connector.build_connector_worker_meta(), landed or ()
        connector.clear_connector_metadata()
        return answer

    def _copy(self, worker, before, last):
        for name in worker.names[self.state]:
            worker.caches[name][last] = worker.caches[name][before]

    def _column(self, worker, group):
        return worker.stage * self.groups + group, worker.rank

    def _compute(self, worker, name, layer, group, held, keys, first, count):
        cache = worker.caches[name]
        if group == self.state:
            place = held[group][-(-(first + count) // TOKENS) - 1]
            content = bytes_of(cache[place]) if first else bytes(WIDTH)
            for at in range(first // TOKENS, (first + count) // TOKENS):
                content = digest(content, keys[at], bytes([layer, *self._column(worker, group)]))
            cache[place] = tensor_of(content)
            return
        for at in range(first // TOKENS, (first + count) // TOKENS):
            before = bytes_of(cache[held[group][at - 1]]) if at else bytes(WIDTH)
            content = digest(before, keys[at], bytes([layer, *self._column(worker, group)]))
            cache[held[group][at]] = tensor_of(content)

    def _update(self, scheduled, told, over, ends):
        for worker, end in zip(self.workers, ends):
            worker.wait(end)
        for request, _, count in scheduled:
            request.num_in_flight_tokens -= count
        for request in list(self.running):
            if request.num_in_flight_tokens or request.num_computed_tokens < request.num_tokens:
                continue
            if request.stays:
                request.stays -= 1
                continue
            self._judge(request)
            self.running.remove(request)
            self.done.append(request)
            self._finish(request, "done")
        self.connector.update_connector_output(types.SimpleNamespace(kv_connector_worker_meta=told))
        for name in over:
            if name not in self.kept:
                raise AssertionError(f"let go, and not kept: {name}")
            self._release(self.kept.pop(name))
            self.held.pop(name, None)

    # What must hold.

    def _judge_promises(self, worker, name, layer, group, promised):
        """A block that was promised is in the cache when its layer is computed."""

        def judge():
            for request, of, at, block in promised:
                if of == group and bytes_of(worker.caches[name][block]) != right(request.block_hashes, at, layer, self._column(worker, group)):
                    raise AssertionError(f"promised, and not there: block {at} of {request.request_id}")

        worker.do(judge)

    def _judge(self, request):
        """What a request that ends well has computed with."""
        for worker in self.workers:
            for at, name in enumerate(name for own in zip(*worker.names) for name in own):
                layer, group = divmod(at, self.groups)
                for at, block in enumerate(self.held[request.request_id][group][: len(request.block_hashes)]):
                    if block and bytes_of(worker.caches[name][block]) != right(request.block_hashes, at, layer, self._column(worker, group)):
                        raise AssertionError(f"wrong answer: block {at} of {request.request_id}")
