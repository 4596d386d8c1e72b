from collections.abc import Sequence
from typing import TypeAlias, final

import kvarts
from kvarts import Buffer, Draft, Memory, Stage

#: Blocks of a pool, as `Stage.stretches` gives them.
Stretches: TypeAlias = Sequence[tuple[int, int, int, int]]
#: How often, bytes from one to the next in a chunk of the block, and in a page.
Rows: TypeAlias = tuple[int, int, int]
#: Where a part of a block lies in pages: which of the memories; where its rows begin in a chunk; where slot zero begins in the memory, and bytes
#: from one slot to the next; outer rows and inner rows; bytes of a row. A page that is one piece on both sides has
#: `(1, 0, 0), (1, 0, 0)` and all of its bytes in a row.
Part: TypeAlias = tuple[int, int, int, int, Rows, Rows, int]

@final
class Device:
    """`cuda:0` and so on, in the primary context of this process; or `emulated`: memory of this process, for engines that compute
    on the processor and for tests. Raises `Retry` if there is no such device."""

    def __new__(cls, name: str) -> Device: ...
    @property
    def name(self) -> str: ...
    def stream(self) -> Stream:
        """A new stream. Engines pass handles of their own (`torch.cuda.current_stream().cuda_stream`)."""

@final
class Stream:
    """A stream of a device, for programs without streams of their own. Made by `Device.stream`."""

    @property
    def handle(self) -> int: ...
    def synchronize(self) -> None:
        """Waits until all work on the stream is done."""

@final
class Pages:
    """The positions of an engine's blocks. Made by `Lander.pages`."""

@final
class Lander:
    """Moves blocks between pools and the memory of one device: one for each worker, for all of its requests. It takes three times
    `ring_bytes` of the device's memory: for landings, for landings whose pages are in use at their start, and for saves. A
    request is stuck if it takes longer than `timeout` seconds after the end of the one before: its resources are then kept for
    ever, and every later call raises the cause."""

    def __new__(cls, device: Device, *, ring_bytes: int = ..., timeout: float = 30.0) -> Lander: ...
    def pin(self, memory: Memory) -> None:
        """Registers a pool's memory with the device, once: copies with unregistered memory may wait inside the driver."""

    def pages(
        self,
        handle: kvarts.Pages,
        memories: Sequence[tuple[int, int] | Buffer],
        parts: Sequence[Part],
        slots: Sequence[int],
        *,
        per_block: int = 1,
        group: int = 0,
        rank: int | None = None,
    ) -> Pages:
        """Describes the positions of the engine's blocks: its memories (address and bytes on the device, of `data_ptr()`; or
        buffers if the device is emulated), a part for each part of a block through all layers, and `per_block` slots for each
        block in the order of its tokens. Raises `Invalid` if a row leaves its memory, or two rows share a byte."""

    def land(
        self, memory: Memory, columns: Sequence[tuple[Stretches, Pages]], *, after: int | None = None, stage: Stage | None = None
    ) -> Landed:
        """Begins to land all layers of blocks of a pool's memory. Pages are written behind the present work of the stream
        `after`; without it they must be idle. They are in use until the landing is done, even if it was dropped: two landings
        into the same pages have no order. `stage`, if it is of this process, is held until they have landed."""

    def save(self, memory: Memory, columns: Sequence[tuple[Stretches, Pages]], *, draft: Draft | None = None) -> Saving:
        """Begins to copy layers into a pool's memory, into the room of a draft (`Pool.draft`). Put the draft when all layers have
        been copied. `draft`, if it is of this process, is held until then."""

@final
class Landed:
    """Layers on their way from a pool to an engine's pages. Made by `Lander.land`."""

    def wait(self, layer: int, stream: int) -> None:
        """Later work on the stream runs after this layer has landed. Raises if the layer is known to have failed."""

    def done(self, timeout: float = 0.0) -> bool:
        """Whether all layers have landed within `timeout`; the pool's memory is then no longer read. Raises if the device failed."""

@final
class Saving:
    """Layers on their way from an engine's pages to a pool. Made by `Lander.save`."""

    def layer(self, layer: int, stream: int) -> None:
        """Copies this layer behind the present work of the stream; later work on it may write the pages. To be called in the
        order of layers."""

    def finish(self) -> Saved:
        """Ends the save after its last layer. Raises if layers are missing."""

@final
class Saved:
    """A save after the copy of its last layer was queued. Made by `Saving.finish`."""

    def done(self, timeout: float = 0.0) -> bool:
        """Whether all layers are in the pool within `timeout`. Raises if the device failed."""
