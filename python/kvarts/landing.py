"""The worker's side of a connector: it copies blocks from a pool into the pages of the engine's KV caches, and back.

Blocks that land are in the pool already, so no failure of a disk, a network or a server affects a landing. A failure of the device fails the
engine. Guarantees:

- After a wait for a layer, the layer is in its pages before the engine's next kernel reads them. On a device, the stream waits and no thread
  does; on a CPU, the calling thread waits, because it computes the layer.
- A save reads what the engine had written when the layer was saved, and nothing that the engine writes after `join`.
"""

import time
from typing import NamedTuple

from kvarts import gpu

from .link import logger

#: Bytes of each of the three rings on the device.
_RING_BYTES = 64 << 20


class Rows(NamedTuple):
    """The layout of a page in memory: rows, in an inner and an outer level of (count, stride in the block, stride in the memory)."""

    outer: tuple
    inner: tuple
    row_bytes: int

    @property
    def nbytes(self):
        return self.outer[0] * self.inner[0] * self.row_bytes


def rows_of(sizes, strides, item):
    """The rows of a tensor, from its sizes, its strides and the bytes of an element. A block has the elements in the same order as memory, without
    gaps."""
    dims = sorted(((stride * item, size) for size, stride in zip(sizes, strides) if size > 1), reverse=True)
    merged = []
    for stride, size in [*dims, (item, 1)]:
        if merged and merged[-1][0] == stride * size:
            merged[-1] = (stride, merged[-1][1] * size)
        elif size > 1 or not merged:
            merged.append((stride, size))
    row_bytes = item
    if merged[-1][0] == item:
        row_bytes *= merged.pop()[1]
    if len(merged) > 2:
        raise ValueError(f"the rows of a page ({row_bytes} bytes each) have {len(merged)} different strides, but Kvarts supports at most two")
    levels, packed = [], row_bytes
    for stride, count in reversed(merged):
        levels.append((count, packed, stride))
        packed *= count
    inner, outer = [*levels, (1, 0, 0), (1, 0, 0)][:2]
    return Rows(outer, inner, row_bytes)


def order_of(sizes, strides):
    """The order of a block's bytes: its dimensions and their sizes, beginning with the dimension that changes most slowly."""
    return [[at, size] for _, at, size in sorted((-stride, at, size) for at, (size, stride) in enumerate(zip(sizes, strides)) if size > 1)]


class Page(NamedTuple):
    """A part of an engine's blocks: index of the memory, offset of block zero in the memory, stride of the blocks in bytes, and the rows of a
    block."""

    memory: int
    first: int
    stride: int
    rows: Rows


class Device:
    """Torch's streams of a device. `computes`: the stream on which the engine computes, if that is not always the current stream."""

    def __init__(self, index, computes=None):
        import torch

        self._cuda, self._index, self._computes = torch.cuda, index, computes
        self.device = gpu.Device(f"cuda:{index}")
        self._side = torch.cuda.Stream(index)
        self._before = None if computes is None else torch.cuda.Stream(index)

    def memory(self, whole):
        """The memory of a cache, in the form that a lander takes."""
        return whole.data_ptr(), whole.numel()

    def now(self):
        """The handle of the stream on which the engine computes."""
        return self._cuda.current_stream(self._index).cuda_stream

    def free(self):
        """A stream whose later work may overwrite pages that the engine has just allocated: earlier uses of the pages are queued before it."""
        if self._before is None:
            return self.now()
        self._before.wait_stream(self._computes)
        self._before.wait_stream(self._cuda.current_stream(self._index))
        return self._before.cuda_stream

    def await_layer(self, landed, layer):
        # ends: at once: the stream waits, not the thread
        landed.wait(layer, self.now())

    def behind(self):
        """The connector's own stream; its later work runs after the work that is queued on the engine's stream now."""
        self._side.wait_stream(self._cuda.current_stream(self._index))
        return self._side.cuda_stream

    def join(self):
        """Makes later work of the engine run after the work that is queued on the connector's stream."""
        self._cuda.current_stream(self._index).wait_stream(self._side)


class Processor:
    """The interface of `Device` for an engine that computes on the CPU, in the calling thread."""

    def __init__(self):
        self.device = gpu.Device("emulated")
        self._ours, self._side = self.device.stream(), self.device.stream()

    def memory(self, whole):
        return whole

    def now(self):
        return self._ours.handle

    free = now

    def await_layer(self, landed, layer):
        # ends: at once: the stream waits, not the thread
        landed.wait(layer, self._ours.handle)
        # ends: the lander's thread lands the layer, or fails it after its timeout
        self._ours.synchronize()

    def behind(self):
        return self._side.handle

    def join(self):
        # ends: copies in memory, by the emulated device's thread
        self._side.synchronize()


class Landing:
    """A copy of blocks to the engine's pages, by group."""

    def __init__(self, streams, number, slots, blocks, parts):
        #: The engine's slots, and the number of blocks that the copy writes to them.
        self.number, self.slots, self.blocks = number, slots, blocks
        self._streams, self._parts = streams, parts

    def await_layer(self, group, layer):
        if group in self._parts:
            self._streams.await_layer(self._parts[group], layer)

    def is_done(self, timeout=0.0):
        return all(landed.done(timeout) for landed in self._parts.values())


class Saving:
    """A copy of blocks to the pool, by group. Call `layer` for the layers of each group in their order, then `finish`."""

    def __init__(self, streams, number, parts):
        self.number = number
        self._streams, self._parts = streams, parts  # group -> (copy to the pool, number of layers)
        self._next = dict.fromkeys(parts, 0)
        self._saved = []

    def layer(self, group, layer):
        """Queues the copy of this layer, if all earlier layers of the group are queued; otherwise `finish` queues it."""
        if self._next.get(group) == layer:
            self._leave(group, self._streams.behind())

    def _leave(self, group, stream):
        saving, _ = self._parts[group]
        saving.layer(self._next[group], stream)
        self._next[group] += 1

    def finish(self):
        stream = self._streams.behind()
        for group, (saving, layers) in self._parts.items():
            while self._next[group] < layers:
                self._leave(group, stream)
            self._saved.append(saving.finish())

    def is_done(self, timeout=0.0):
        return all(saved.done(timeout) for saved in self._saved)


class Columned(NamedTuple):
    """A group's pages in a worker's memories. `columns`: rank -> the pages of each layer, for the columns that this worker has."""

    number: int
    columns: dict
    saves: bool  # whether this worker saves the group

    @property
    def layers(self):
        """The number of layers."""
        return len(next(iter(self.columns.values())))


class Dock:
    """Lands and saves the blocks of a worker. `memories`: those of its caches; `groups`: number -> `Columned`."""

    def __init__(self, link, streams, memories, groups, ring_bytes=_RING_BYTES):
        self.streams = streams
        self._link, self._groups, self._ring_bytes = link, groups, ring_bytes
        self._memories = [streams.memory(whole) for whole in memories]
        self._lander = self._memory = self._pages = self._wanted = self._why = None
        self._again = 0.0
        #: The name of the pool that this worker is attached to.
        self.name = None

    def attach(self, name, naming):
        """Begins to attach to a pool, in the link's thread."""
        if name is None or name in (self._wanted, self.name) or time.monotonic() < self._again:
            return

        def attach(client):
            self.take(client.pages(**naming), client.attach(name))
            self.name, self._wanted = name, None
            self._link.answered()

        def failed(error):
            self._wanted, self._again = None, time.monotonic() + self._link.pause
            if str(error) != self._why:
                logger.warning("kvarts: this worker could not attach to the engine's pool; no block is loaded or saved until a retry succeeds: %s", error)
            self._why = str(error)

        self._wanted = name
        self._link.do(attach, failed)

    def take(self, pages, memory):
        """Uses a pool's memory from now on. Only the link's thread may call it."""
        lander = self._lander or gpu.Lander(self.streams.device, ring_bytes=self._ring_bytes)
        lander.pin(memory)
        self._lander, self._pages, self._memory = lander, pages, memory

    def _moves(self, stretches, slots):
        """Yields (group, a pair for each column: its blocks in the pool, its pages) for the groups that this worker has."""
        for group, places in slots.items():
            if (mine := self._groups.get(group)) is not None:  # otherwise a group of another pipeline stage
                yield group, [self._move(group, rank, layers, stretches[group][rank], places) for rank, layers in mine.columns.items()]

    def _move(self, group, rank, layers, own, places):
        per_block = len(places) // sum(count for *_, count in own)
        parts = [(page.memory, 0, page.first, page.stride, *page.rows) for layer in layers for page in layer]
        return own, self._lander.pages(self._pages, self._memories, parts, places, per_block=per_block, group=group, rank=rank)

    def land(self, number, stretches, slots):
        """Begins to land blocks, after the work that is queued on the engine's stream now."""
        after, parts, most = self.streams.free(), {}, 0
        for group, columns in self._moves(stretches, slots):
            parts[group] = self._lander.land(self._memory, columns, after=after)
            most = max(most, sum(count for *_, count in columns[0][0]))
        return Landing(self.streams, number, [place for places in slots.values() for place in places], most, parts)

    def save(self, number, stretches, slots):
        parts = {}
        mine = {group: places for group, places in slots.items() if group in self._groups and self._groups[group].saves}
        for group, columns in self._moves(stretches, mine):
            parts[group] = self._lander.save(self._memory, columns), self._groups[group].layers
        return Saving(self.streams, number, parts)

    def close(self, timeout):
        self._link.stop(timeout)
        self._lander = self._pages = self._memory = None
        self._link.close(timeout)
