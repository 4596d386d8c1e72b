from collections.abc import Sequence
from typing import TypeAlias, final

import kvarts
from kvarts import Buffer, Draft, Memory, Stage

#: Positions of blocks in a pool, as `Stage.stretches` returns them.
Stretches: TypeAlias = Sequence[tuple[int, int, int, int]]
#: A level of rows: their number, the stride between them in a chunk of the block, and the stride in a page, in bytes.
Rows: TypeAlias = tuple[int, int, int]
#: The position of a block's part in pages: index of the memory; offset of its rows in a chunk; offset of slot zero in the memory; stride
#: of the slots; outer rows; inner rows; bytes of a row. If the bytes of a page are contiguous in the block and in the page, the rows
#: are `(1, 0, 0), (1, 0, 0)`, and the single row has all bytes of the page.
Part: TypeAlias = tuple[int, int, int, int, Rows, Rows, int]

@final
class Device:
    """A device. `cuda:0`, `cuda:1` and so on are devices in the primary context of this process. `emulated` is memory of this
    process, for tests and for engines that compute on the CPU. Raises `Retry` if the device does not exist."""

    def __new__(cls, name: str) -> Device: ...
    @property
    def name(self) -> str: ...
    def stream(self) -> Stream:
        """Creates a stream, for programs without streams. Engines pass the handles of their own streams instead
        (`torch.cuda.current_stream().cuda_stream`)."""

@final
class Stream:
    """A stream of a device, for programs without their own streams. `Device.stream` creates it."""

    @property
    def handle(self) -> int: ...
    def synchronize(self) -> None:
        """Waits until all work on the stream has ended."""

@final
class Pages:
    """The positions of an engine's blocks. `Lander.pages` creates it."""

@final
class Lander:
    """Moves blocks between pools and the memory of one device. A worker needs one lander for all of its requests. A lander
    allocates three rings of `ring_bytes` each on the device: for landings, for landings whose pages are in use at their start,
    and for saves. A request is stuck if it has not ended `timeout` seconds after the end of the previous request. The resources
    of a stuck request are never freed, and every later call raises its error."""

    def __new__(cls, device: Device, *, ring_bytes: int = ..., timeout: float = 30.0) -> Lander: ...
    def pin(self, memory: Memory) -> None:
        """Registers a pool's memory with the device. Make this call once for each pool: copies from or to unregistered memory may
        wait inside the driver."""

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
        """Describes the positions of the engine's blocks. `memories`: (address, bytes) on the device, where the address is
        `data_ptr()` of a tensor. For an emulated device they are buffers. `parts`: one element for each part of a block, for all
        layers in order. `slots`: `per_block` slots (numbers of pages) for each block, in the order of its tokens. Raises `Invalid`
        if a row exceeds its memory, or if two rows overlap."""

    def land(
        self, memory: Memory, columns: Sequence[tuple[Stretches, Pages]], *, after: int | None = None, stage: Stage | None = None
    ) -> Landed:
        """Begins to copy all layers of blocks from a pool's memory into pages. The copies run after the queued work of the stream
        `after`. Without `after` the pages must not be in use. The pages are in use until the landing is done, even if the caller
        drops the returned object. Two landings into the same pages have no order. A `stage` of this process is held until the
        blocks have landed."""

    def save(self, memory: Memory, columns: Sequence[tuple[Stretches, Pages]], *, draft: Draft | None = None) -> Saving:
        """Begins to copy layers from pages into a pool's memory, into the room of a draft (`Pool.draft`). Put the draft after all
        layers have been copied. A `draft` of this process is held until all layers have been copied."""

@final
class Landed:
    """A copy of layers from a pool to an engine's pages. `Lander.land` creates it."""

    def wait(self, layer: int, stream: int) -> None:
        """Makes the stream wait for this layer: later work on the stream runs after the layer has landed. Raises an error if the layer
        has already failed."""

    def done(self, timeout: float = 0.0) -> bool:
        """Waits at most `timeout` seconds. Returns whether all layers have landed. If the result is true, nothing reads the pool's
        memory any more. Raises an error if the device failed."""

@final
class Saving:
    """A copy of layers from an engine's pages to a pool. `Lander.save` creates it."""

    def layer(self, layer: int, stream: int) -> None:
        """Copies this layer after the queued work of the stream. Later work on the stream may overwrite the pages. Make this call for
        all layers in order."""

    def finish(self) -> Saved:
        """Ends the save after its last layer. Raises an error if layers are missing."""

@final
class Saved:
    """A save whose last layer is queued. `Saving.finish` creates it."""

    def done(self, timeout: float = 0.0) -> bool:
        """Waits at most `timeout` seconds. Returns whether all layers are in the pool. Raises an error if the device failed."""
