from collections.abc import Sequence
from typing import TypeAlias, final

import kvarts
from kvarts import Buffer, Draft, Memory, Stage

#: Positions of blocks in a pool, as `Stage.stretches` returns them.
Stretches: TypeAlias = Sequence[tuple[int, int, int, int]]
#: A level of rows: their number, the stride between them in a chunk of the block, and the stride in a page, in bytes.
Rows: TypeAlias = tuple[int, int, int]
#: The position of a block's part in pages: index of the memory; offset of its rows in a chunk; offset of slot zero in the memory; stride
#: of the slots; outer rows; inner rows; bytes of a row. A page that is contiguous on both sides has `(1, 0, 0), (1, 0, 0)` and all of
#: its bytes in one row.
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
    """Moves blocks between pools and the memory of one device. A worker needs one lander for all of its requests. A lander
    allocates three rings of `ring_bytes` each on the device: for landings, for landings whose pages are in use at their start,
    and for saves. A request counts as stuck if it has not ended `timeout` seconds after the end of the previous one: its
    resources are then never freed, and every later call raises the cause."""

    def __new__(cls, device: Device, *, ring_bytes: int = ..., timeout: float = 30.0) -> Lander: ...
    def pin(self, memory: Memory) -> None:
        """Registers a pool's memory with the device. Call it once for each pool: copies from or to unregistered memory may wait inside
        the driver."""

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
        """Describes the positions of the engine's blocks. `memories`: (address, bytes) on the device, with the address of
        `data_ptr()`; or buffers if the device is emulated. `parts`: one for each part of a block, through all layers. `slots`:
        `per_block` slots for each block, in the order of its tokens. Raises `Invalid` if a row exceeds its memory, or two rows
        overlap."""

    def land(
        self, memory: Memory, columns: Sequence[tuple[Stretches, Pages]], *, after: int | None = None, stage: Stage | None = None
    ) -> Landed:
        """Begins to copy all layers of blocks from a pool's memory into pages. The copies run after the queued work of the stream
        `after`; without `after` the pages must be idle. The pages are in use until the landing is done, even if the caller drops
        the returned object. Two landings into the same pages have no order. `stage`, if this process made it, is held until the
        blocks have landed."""

    def save(self, memory: Memory, columns: Sequence[tuple[Stretches, Pages]], *, draft: Draft | None = None) -> Saving:
        """Begins to copy layers into a pool's memory, into the room of a draft (`Pool.draft`). Put the draft when all layers have
        been copied. `draft`, if this process made it, is held until then."""

@final
class Landed:
    """A copy of layers from a pool to an engine's pages. Made by `Lander.land`."""

    def wait(self, layer: int, stream: int) -> None:
        """Makes later work on the stream run after this layer has landed. Raises if the layer is known to have failed."""

    def done(self, timeout: float = 0.0) -> bool:
        """Waits for `timeout` seconds at most; returns whether all layers have landed. If so, the pool's memory is no longer read.
        Raises if the device failed."""

@final
class Saving:
    """A copy of layers from an engine's pages to a pool. Made by `Lander.save`."""

    def layer(self, layer: int, stream: int) -> None:
        """Copies this layer after the queued work of the stream; later work on the stream may overwrite the pages. Call it in the
        order of layers."""

    def finish(self) -> Saved:
        """Ends the save after its last layer. Raises if layers are missing."""

@final
class Saved:
    """A save whose last layer is queued. Made by `Saving.finish`."""

    def done(self, timeout: float = 0.0) -> bool:
        """Waits for `timeout` seconds at most; returns whether all layers are in the pool. Raises if the device failed."""
