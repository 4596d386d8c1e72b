"""Batches of blocks for asyncio: the promises of `kvarts.Pages`, and no thread beside those that it has."""

from collections.abc import Sequence

from . import Completion, Key, Pages, Places

class AsyncPages:
    """Batches as coroutines, on the running loop. It takes all completions of the handle: other code must not drain the
    handle meanwhile. A task that is cancelled cancels its batch, and goes on when nothing touches its buffers any more."""

    def __init__(self, pages: Pages) -> None: ...
    async def put(
        self,
        keys: Sequence[Key],
        buffers: Places,
        *,
        group: int | Sequence[int] = 0,
        rank: int | Sequence[int] | None = None,
        parent: bytes | None = None,
        timeout: float | None = None,
    ) -> Completion: ...
    async def get(
        self,
        keys: Sequence[Key],
        buffers: Places,
        *,
        group: int | Sequence[int] = 0,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Completion: ...
    async def exists(
        self,
        keys: Sequence[Key],
        *,
        group: int | Sequence[int] = 0,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Completion: ...
    async def delete(
        self,
        keys: Sequence[Key],
        *,
        group: int | Sequence[int] = 0,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Completion: ...
    async def close(self) -> None:
        """Gives the handle back, and closes it."""

    async def __aenter__(self) -> AsyncPages: ...
    async def __aexit__(self, kind: object, error: object, trace: object) -> None: ...
