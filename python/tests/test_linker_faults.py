"""SGLang's linker under faults, by seeds: blocks are late or never come, puts are refused or not answered, servers go away, blocks go, the pool is full,
requests are given up when they have been looked up, queued, or have waited long; the tree is flushed, the engine killed, and a device does things late.

`Tree` follows SGLang's: a look-up in every process with the lengths that all of them have, loads into places of the request's own that join the tree
behind the forward pass, offloads that keep a node's pages until they are answered, in their order. The store, the pool and the device are those of
`faults`.

Whatever happens: what is stored under a key is what a run without faults would have stored; what a request computes, it computes with nothing else; no
load fails that was answered with; the scheduler waits in look-ups only, and not longer than it said; and when the faults are over everything is
stored, and nothing is kept."""

import contextlib
import random
import types
import unittest
from unittest import mock

import doubles

doubles.install()

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup  # noqa: E402
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker  # noqa: E402

import faults  # noqa: E402
from faults import LAYERS, TOKENS, WIDTH, Link, Putters, Store, Time, bytes_of, digest, right, tensor_of  # noqa: E402
from kvarts import landing, link, sglang_linker, sglang_offloads, sglang_pools, staging  # noqa: E402
from seeded import Seeded  # noqa: E402

#: A window needs so many pages before a boundary.
WINDOW = 2
WAIT, PAGES = 0.4, 14


class Over:
    """Stands for an event of `threading`: who waits for it lets time pass, and threads go on."""

    threads = clock = None

    def __init__(self):
        self._is_set = False

    def set(self):
        self._is_set = True

    def is_set(self):
        return self._is_set

    def wait(self, timeout):
        until = Over.clock.now + timeout
        while not self._is_set and Over.clock.now < until:
            Over.clock.now += 0.02
            Over.threads.run()
        return self._is_set


class Event:
    """What a stream was given so far, as an engine's events tell it."""

    def __init__(self, stream):
        self._stream, self._end = stream, stream.end

    def query(self):
        self._stream.synchronize() if self._stream.device.store.calm else self._stream.some()
        return self._stream.ran >= self._end


class Card(faults.Card):
    """SGLang schedules on another stream than it computes on: the current one knows nothing of the computation."""

    def free(self):
        return self.compute.handle

    def behind(self):
        return self.side.handle


@contextlib.contextmanager
def in_virtual_time(store, clock, ranks, groups, is_device):
    threads = types.SimpleNamespace(links=[], putters=[])

    def link_of(connect, pause):
        threads.links.append(Link(store))
        return threads.links[-1]

    def putters(*of, **named):
        threads.putters.append(Putters(store))
        return threads.putters[-1]

    def run():
        for one in [*threads.links, *threads.putters]:
            one.run()

    def ready(linker):
        return [Event(linker._streams.compute)] if is_device else []

    take = landing.Dock.take
    threads.run = run
    windows = {group: WINDOW * TOKENS for group in range(1, groups)}
    naming = dict(groups=range(groups), ranks=ranks, windows=windows)
    faults.Device.of, Over.threads, Over.clock = store, threads, clock
    with contextlib.ExitStack() as stack:
        for where, name, what in (
            *((module, "time", clock) for module in (staging, link, landing, sglang_linker, sglang_offloads)),
            (staging, "threading", types.SimpleNamespace(Event=Over)),
            (landing, "gpu", types.SimpleNamespace(Device=faults.Device, Lander=faults.Lander)),
            (staging.concurrent.futures, "ThreadPoolExecutor", putters),
            (sglang_linker, "Link", link_of),
            (sglang_linker, "Processor", Card if is_device else sglang_linker.Processor),
            # The pool that stands here is its own memory.
            (landing.Dock, "take", lambda dock, pages, memory: take(dock, pages, store.pools)),
            (sglang_linker, "_place_of", lambda params: params.place),
            (sglang_pools, "assembled", lambda params, components: params.entries),
            (sglang_pools.Pools, "naming", lambda pools, draft: naming),
            (staging.Desk, "settle", lambda desk, timeout: None),
            (UnifiedCacheLinker, "record_offload_ready", ready),
            # Pieces of two pages.
            (sglang_offloads, "_PIECE", 2 * LAYERS * WIDTH),
        ):
            stack.enter_context(mock.patch.object(where, name, what))
        stack.enter_context(mock.patch.object(link.logger, "disabled", True))
        yield threads


class Rank:
    """A process: its linker, and its pools with what the forward pass does with them."""

    def __init__(self, rank, ranks, groups):
        names = [PoolName.KV, PoolName.SWA][:groups]
        self.rank = rank
        self.buffers = [[torch.zeros(PAGES * TOKENS, WIDTH // TOKENS, dtype=torch.uint8) for _ in range(LAYERS)] for _ in names]
        same = dict(layer_mapping={layer: layer for layer in range(LAYERS)}, page_size=TOKENS, rows_are_pages=False)
        entries = [
            DevicePoolEntry(name=name, indices_from_pool=name, device_pool=None, components=[buffers], **same) for name, buffers in zip(names, self.buffers)
        ]
        nothing = dict(mtp_draft_device_pools=(), sidecar_draft_device_pools=(), swa_retain_window=WINDOW * TOKENS)
        group = DevicePoolGroup(entries, LAYERS, TOKENS)
        params = types.SimpleNamespace(page_size=TOKENS, place=(rank, ranks), entries=group, **nothing)
        extra = {"timeout": 2.0, "wait": WAIT, "pool_bytes": faults.POOL}
        self.linker = sglang_linker.KvartsLinker(None, params, components=None, extra_config=extra)
        streams = self.linker._streams
        self._compute = streams.compute if isinstance(streams, faults.Card) else None

    def page(self, group, layer, page):
        return self.buffers[group][layer][page * TOKENS : (page + 1) * TOKENS]

    def compute(self, layer, work):
        """A layer of a batch: (keys, first, pages) of each request, of which those from `first` on are computed."""

        def run():
            for keys, first, pages in work:
                for group in range(len(self.buffers)):
                    for at in range(first, len(keys)):
                        before = bytes_of(self.page(group, layer, pages[at - 1]).reshape(-1)) if at else bytes(WIDTH)
                        there = self.page(group, layer, pages[at])
                        there[...] = tensor_of(digest(before, keys[at], bytes([layer, group, self.rank]))).reshape(there.shape)

        self.later(run)

    def later(self, work):
        """Does this behind what is computed."""
        self._compute.give(work) if self._compute is not None else work()

    def finish(self):
        if self._compute is not None:
            self._compute.synchronize()


class Request:
    def __init__(self, rid, keys):
        self.rid, self.keys, self.waited = rid, keys, 0


class Tree:
    """An engine: its tree, and its processes."""

    def __init__(self, chance, store, clock, ranks, groups):
        self.chance, self.store, self.clock, self.groups = chance, store, clock, groups
        self.ranks = [Rank(rank, ranks, groups) for rank in range(ranks)]
        self.free = list(range(1, PAGES))
        self.tree, self.windows = {}, set()  # key -> page; keys whose window is here, too
        self.locked, self.gone = [], set()  # (keys, pages) of each offload that is not answered; keys that have gone from the store
        self.waiting, self.seen, self.wrong = [], {}, []
        self.used = set()  # pages that the batch that is being made has

    def count(self, what, number=1):
        self.seen[what] = self.seen.get(what, 0) + number

    # A step.

    def step(self):
        self._answers()
        batch, self.used, began = [], set(), self.clock.now
        for request in list(self.waiting):
            request.waited += 1
            admitted = self._admit(request)
            if admitted is None:
                break
            self.waiting.remove(request)
            batch.append(admitted)
            if self.chance.random() < 0.5:
                break
        # Whatever is looked up.
        assert self.clock.now - began <= len(self.ranks) * (WAIT + 0.05), "the scheduler waits longer than it said"
        if batch:
            self._forward(batch)

    def _answers(self):
        counts = [rank.linker.num_completed_offloads() for rank in self.ranks]
        for _ in range(min(counts)):
            good = [rank.linker.pop_completed_offload() for rank in self.ranks]
            self.count("stored" if all(good) else "not stored")
            keys, _ = self.locked.pop(0)
            for key in keys if all(good) else ():
                if key not in self.gone and not all((0, rank, key) in self.store.blocks for rank in range(len(self.ranks))):
                    raise AssertionError("answered, and not stored")

    def _held(self):
        return {page for _, pages in self.locked for page in pages}

    def _room(self, count):
        """Pages, after some have been evicted from the ends of the tree; nothing if there are not so many."""
        held = self._held() | self.used
        inner = {before for before in self.parents.values()}
        while len(self.free) < count:
            ends = [key for key, page in self.tree.items() if key not in inner and page not in held]
            if not ends:
                return None
            key = self.chance.choice(sorted(ends))
            self.free.append(self.tree.pop(key))
            self.windows.discard(key)
            inner = {self.parents[one] for one in self.tree}
        return [self.free.pop(self.chance.choice((0, -1))) for _ in range(count)]

    @property
    def parents(self):
        return {key: self.before.get(key) for key in self.tree}

    #: key -> the one before it, of all texts
    before = {}

    def _on_device(self, keys):
        hit = 0
        while hit < len(keys) and keys[hit] in self.tree:
            hit += 1
        while hit and self.groups > 1 and not all(key in self.windows for key in keys[max(0, hit - WINDOW) : hit]):
            hit -= 1
        return hit

    def _transfers(self, keys, pages=None, windows=WINDOW):
        """Of all pages, and of the window at their end."""
        found = []
        for name, first in ((PoolName.KV, 0), (PoolName.SWA, max(0, len(keys) - windows)))[: self.groups]:
            names = [key.hex() for key in keys[first:]]
            places = None if pages is None else torch.tensor([page * TOKENS + at for page in pages[first:] for at in range(TOKENS)])
            found.append(PoolTransfer(name, device_indices=places, keys=names))
        return found

    def _admit(self, request):
        """(request, places of its keys, how many the device had, how many are loaded); nothing if there is no room."""
        hit = self._on_device(request.keys)
        tail = request.keys[hit:]
        lengths = [set(rank.linker.lookup(request.rid, self._transfers(tail))) for rank in self.ranks] if tail else [set()]
        count = max(set.intersection(*lengths), default=0)
        prefix = [self.tree[key] for key in request.keys[:hit]]
        self.used.update(prefix)
        own = self._room(len(tail)) if not self.store.happens(0.1) else None
        if own is None:
            return None
        if count:
            wanted = self._transfers(tail[:count], own[:count])
            assert all([rank.linker.load(request.rid, wanted) for rank in self.ranks]), "a load is refused"
            if self.store.happens(0.1):
                # Given up before the batch begins.
                assert all([rank.linker.cancel_queued_load(request.rid) for rank in self.ranks]), "a load that was queued is not known"
                self.free += own
                self.count("given up queued")
                return request, None, 0, 0
        return request, prefix + own, hit, count

    def _forward(self, batch):
        batch = [one for one in batch if one[1] is not None]
        indices = [rank.linker.start_layer_wise_loading() for rank in self.ranks]
        work = [(request.keys, hit + count, pages) for request, pages, hit, count in batch]
        for rank, index in zip(self.ranks, indices):
            counter = rank.linker.layer_done_counter
            counter.set_consumer(index)
            for layer in range(LAYERS):
                for _ in range(self.chance.choice((1, 2))):
                    counter.wait_until(layer)
                rank.compute(layer, work)
        if any(count for *_, count in batch):
            landed = [rank.linker.finish_layer_wise_loading(index) for rank, index in zip(self.ranks, indices)]
            assert all(landed), "a load that was answered with has failed"
        for request, pages, hit, count in batch:
            self._judge(request, pages, hit, count)
            self._insert(request.keys, pages, hit, count)
            self.count("restored", count)

    def _judge(self, request, pages, hit, count):
        """What it has computed, as soon as it has: the tree does not wait for that."""
        for rank in self.ranks:
            rank.later(lambda rank=rank: self._look(rank, request.keys, pages, hit, count))
            if self.store.happens(0.3):
                rank.finish()
        if self.wrong:
            raise AssertionError(self.wrong[0])

    def _look(self, rank, keys, pages, hit, count):
        for group in range(self.groups):
            for at in range(hit + max(0, count - WINDOW) if group else hit, len(keys)):
                for layer in range(LAYERS):
                    if bytes_of(rank.page(group, layer, pages[at]).reshape(-1)) != right(keys, at, layer, (group, rank.rank)):
                        self.wrong.append("computed wrong: " + ("loaded" if at < hit + count else "with what is not there"))

    def _insert(self, keys, pages, hit, count):
        """The pages join the tree where nobody else's did; what is new is offloaded."""
        fresh = [at for at in range(hit, len(keys)) if keys[at] not in self.tree]
        # Others may have inserted a beginning of it meanwhile: those pages are of no use.
        first = fresh[0] if fresh else len(keys)
        self.free += [pages[at] for at in range(hit, len(keys)) if at not in fresh]
        known = hit + max(0, count - WINDOW)
        for at in fresh:
            self.tree[keys[at]] = pages[at]
            if at >= known:
                self.windows.add(keys[at])
        if not fresh:
            return
        assert fresh == list(range(first, len(keys)))
        new, places = keys[first:], pages[first:]
        kept = len(keys) - max(first, known)
        transfers = self._transfers(new, places, windows=kept)
        if all([rank.linker.offload(transfers) for rank in self.ranks]):
            self.locked.append((new, places))

    def flush(self):
        for rank in self.ranks:
            rank.finish()  # SGLang flushes when it is idle
            rank.linker.reset()
        self.free += self.tree.values()
        self.tree.clear()
        self.windows.clear()
        self.locked.clear()


class Run:
    """One seed."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.clock = Time()
        self.store = Store(self.chance, self.clock)
        self.ranks, self.groups = self.chance.choice((1, 1, 2)), self.chance.choice((1, 2))
        self.is_device = self.chance.choice((False, True))
        self.names, self.seen = 0, {}
        self.texts = [self._text(self.chance.randrange(4), self.chance.randrange(1, 8)) for _ in range(6)]
        Tree.before = {key: before for text in self.texts for before, key in zip([None, *text], text)}

    def _text(self, kind, blocks):
        keys, branch = [b""], self.chance.randrange(1, 5)
        for at in range(blocks):
            keys.append(digest(keys[-1], bytes([at, 0 if at <= branch else kind])))
        return keys[1:]

    def go(self, steps=40):
        with in_virtual_time(self.store, self.clock, self.ranks, self.groups, self.is_device) as self.threads:
            self._begin()
            for _ in range(steps):
                self._something()
                if not self.store.happens(0.2):  # threads may be late
                    self.threads.run()
                self.tree.step()
                self.store.judge(self.texts)
            self._calm()
            self._count()

    def _begin(self):
        self.tree = Tree(self.chance, self.store, self.clock, self.ranks, self.groups)

    def _count(self):
        for counts in (self.tree.seen, *(rank.linker._counts for rank in self.tree.ranks)):
            for name, count in counts.items():
                self.seen[name] = self.seen.get(name, 0) + count

    def _ask(self, text):
        self.names += 1
        self.tree.waiting.append(Request(f"r{self.names}", text))

    def _something(self):
        happens = self.store.happens
        while happens(0.4):
            self._ask(self.chance.choice(self.texts))
        if happens(0.15):
            before = set(self.store.blocks)
            self.store.churn()
            self.tree.gone |= {key for *_, key in before - set(self.store.blocks)}
        if happens(0.05):
            self.store.away = not self.store.away
        if self.store.away and happens(0.3):
            self.store.away = False
        if happens(0.1) and self.tree.waiting:
            # Given up while it waits: no linker is told.
            self.tree.waiting.remove(self.chance.choice(self.tree.waiting))
            self.tree.count("given up waiting")
        if happens(0.25):
            self.clock.now += self.chance.choice((0.5, 3.0, 40.0))
        if happens(0.08):
            self.tree.flush()
            self.tree.count("flushed")
        if happens(0.05):
            # The engine is killed, and another one is started: only what is stored is left.
            self._count()
            del self.threads.links[:], self.threads.putters[:]
            self._begin()

    def _calm(self):
        """The faults are over: what is asked now is stored in the end, and nothing is kept."""
        self.store.calm, self.store.away = True, False
        for _ in range(2):  # answers that come late are faults, too, and so is a pool that is not open yet
            self._ask(self.texts[0])
            self._until_idle()
            self.clock.now += 100.0
        self.tree.flush()
        for text in self.texts:
            self._ask(text)
            self._until_idle()
            self.tree.flush()
        for text in self.texts:
            for at, key in enumerate(text):
                for rank in range(self.ranks):
                    if (0, rank, key) not in self.store.blocks:
                        raise AssertionError(f"never stored: block {at}")
        self.clock.now += 100.0
        self._until_idle()
        left = [(rank.linker._found, rank.linker._queued, rank.linker._desk._pool.used) for rank in self.tree.ranks]
        if any(map(any, left)) or len(self.tree.free) != PAGES - 1:
            raise AssertionError(f"kept for ever: {left}, {len(self.tree.free)} pages free")

    def _until_idle(self):
        for _ in range(400):
            self.threads.run()
            self.clock.now += 0.05
            self.tree.step()
            self.store.judge(self.texts)
            if self.tree.wrong:
                raise AssertionError(self.tree.wrong[0])
            if not self.tree.waiting and not self.tree.locked and not any(one.work for one in [*self.threads.links, *self.threads.putters]):
                return
        raise AssertionError("never idle")


class Faults(Seeded, unittest.TestCase):
    course = Run

    def test_what_is_stored_is_right_and_what_is_answered_is_there(self):
        seen = {}
        for run in self.every_seed(times=2):
            for name, count in run.seen.items():
                seen[name] = seen.get(name, 0) + count
        # That it has tried anything.
        for what in ("restored", "promised", "landed", "saved", "stored", "not stored", "given up queued", "given up waiting", "flushed",
                     "unstaged NotHere", "dropped away", "dropped busy", "dropped NoSpace"):  # fmt: skip
            self.assertGreater(seen.get(what, 0), 0, seen)

    def test_planted_a_layer_is_not_waited_for(self):
        self.expect_seen("computed wrong", (sglang_linker.LayerCounter, "wait_until", lambda counter, threshold: None))

    def test_planted_windows_count_where_they_are_not_staged(self):
        lengths = lambda linker, found, at, asked: list(range(1, found.staging.blocks - at + 1))  # noqa: E731
        self.expect_seen("a load that was answered with has failed", (sglang_linker.KvartsLinker, "_lengths", lengths))

    def test_planted_a_stage_is_let_go_of_before_it_has_landed(self):
        def start(linker):
            index = honest(linker)
            for batch in linker.layer_done_counter._batches.values():
                for one in batch.stagings:
                    linker._desk.let_go(one)
                for thread in Over.threads.links:
                    thread.run()
            return index

        honest = sglang_linker.KvartsLinker.start_layer_wise_loading
        self.expect_seen("computed wrong", (sglang_linker.KvartsLinker, "start_layer_wise_loading", start))

    def test_planted_an_offload_is_answered_before_it_has_left(self):
        wanted = "stored wrong", "answered, and not stored"
        self.expect_seen(wanted, (sglang_offloads._Offload, "is_over", property(lambda offload: offload.is_taken)))

    def test_planted_offloads_are_answered_out_of_turn(self):
        ended = lambda offloads: offloads.look() or sum(one.is_over for one in offloads._in_turn)  # noqa: E731
        wanted = "stored wrong", "answered, and not stored"
        self.expect_seen(wanted, (sglang_offloads.Offloads, "ended", ended))

    def test_planted_pages_leave_before_they_are_written(self):
        self.expect_seen("stored wrong", (Event, "query", lambda event: True))

    def test_planted_pages_are_put_before_they_have_left(self):
        self.expect_seen("stored wrong", (landing.Saving, "is_done", lambda saving, timeout=0.0: True))

    def test_planted_pages_are_landed_that_are_in_use(self):
        self.expect_seen("computed wrong", (Card, "free", lambda streams: streams.side.handle))

    def test_planted_what_was_not_stored_is_answered_as_if_it_was(self):
        self.expect_seen("answered, and not stored", (sglang_offloads.Offloads, "pop", lambda offloads: offloads._in_turn.popleft() and True))


if __name__ == "__main__":
    unittest.main()
