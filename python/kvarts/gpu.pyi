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
    """`cuda:0` and so on, in the primary context of this process; or `emulated`: memory of this process, for engines that compute on the
    processor and for tests. Raises `Retry` where there is none."""

    def __new__(cls, name: str) -> Device: ...
    @property
    def name(self) -> str: ...
    def stream(self) -> Stream:
        """A stream of its own. Engines give handles of theirs (`torch.cuda.current_stream().cuda_stream`)."""

@final
class Stream:
    @property
    def handle(self) -> int: ...
    def synchronize(self) -> None:
        """Waits until everything that it was given is done."""

@final
class Pages:
    """Where an engine has blocks. Made by `Lander.pages`."""

@final
class Lander:
    """Moves blocks between pools and the memory of one device: one for each worker, whatever requests it has. Three times `ring_bytes`
    of the device's memory are taken: for landings, for landings whose pages are in use when they come, and for saves. A request that takes longer than `timeout` seconds once the one before it has ended is stuck: what
    it uses is kept for good, and every later call says so."""

    def __new__(cls, device: Device, *, ring_bytes: int = ..., timeout: float = 30.0) -> Lander: ...
    def pin(self, memory: Memory) -> None:
        """Registers a pool's memory with the device, once: copies with memory that is not may wait inside the driver."""

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
        """Describes where the engine has blocks: its memories (address and bytes on the device, of `data_ptr()`; or buffers where the device is
        emulated), a part for each part of a block through all layers, and `per_block` slots for each block in the order of its tokens. Raises
        `Invalid` if a row leaves its memory, or two share a byte."""

    def land(
        self, memory: Memory, columns: Sequence[tuple[Stretches, Pages]], *, after: int | None = None, stage: Stage | None = None
    ) -> Landed:
        """Begins to land all layers of blocks that lie in a pool's memory. Pages are written behind what the stream `after` was given so far; without
        it they must be idle. They are in use until the landing is done, also if it was dropped: two landings into the same pages are in no order.
        `stage`, if it is of this process, is held until they have landed."""

    def save(self, memory: Memory, columns: Sequence[tuple[Stretches, Pages]], *, draft: Draft | None = None) -> Saving:
        """Begins to take layers into a pool's memory, where a draft has room for them (`Pool.draft`). When all have left the draft is put. `draft`,
        if it is of this process, is held until they have."""

@final
class Landed:
    def wait(self, layer: int, stream: int) -> None:
        """What the stream is given from now on runs when this layer has landed. Raises if it is known that it cannot."""

    def done(self, timeout: float = 0.0) -> bool:
        """Whether all layers have landed, by then: the pool's memory is not read any more. Raises if the device failed."""

@final
class Saving:
    def layer(self, layer: int, stream: int) -> None:
        """This layer leaves behind what the stream was given so far; what it is given from now on may write the pages. In the order of layers."""

    def finish(self) -> Saved:
        """All layers are on their way. Raises if some are not."""

@final
class Saved:
    def done(self, timeout: float = 0.0) -> bool:
        """Whether all layers are in the pool, by then. Raises if the device failed."""
