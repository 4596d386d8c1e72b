"""`kvarts.Pages` and `kvarts.Session` for asyncio, with the same guarantees. Batches need no additional thread. Look-ups, reads
by layers and calls of sessions wait in threads of the loop's executor."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from . import Buffer, Client, Completion, Key, Layer, Lease, Match, Missing, Pages, Places, Session, Times

class AsyncPages:
    """A handle on blocks whose calls are coroutines on the running loop. This object drains all completions of `pages`, so other
    code must not drain `pages`. If a task is cancelled, its batch is cancelled too. The cancelled task continues when its buffers
    are no longer accessed."""

    def __init__(self, pages: Pages) -> None: ...
    async def put(
        self,
        keys: Sequence[Key],
        buffers: Places,
        *,
        group: int | Sequence[int] = 0,
        rank: int | Sequence[int] | None = None,
        parent: bytes | None = None,
        ttl: float | None = None,
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
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[bool]:
        """As `Pages.exists`."""

    async def delete(
        self,
        keys: Sequence[Key],
        *,
        group: int | Sequence[int] = 0,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Completion: ...
    async def delete_all(self) -> int:
        """As `Pages.delete_all`."""

    async def match(
        self,
        keys: Sequence[Key],
        *,
        hold: float | None = None,
        times: Times | None = None,
        prompt_tokens: int | None = None,
        hbm_blocks: int = 0,
        hbm_boundaries: Sequence[int] = ...,
        overlap: Literal["layers", "none"] = "layers",
    ) -> Match:
        """As `Pages.match`. The lease of a cancelled task expires after `hold` seconds."""

    async def missing(
        self, keys: Sequence[Key], *, group: int = 0, rank: int | None = None, timeout: float | None = None
    ) -> Missing:
        """As `Pages.missing`."""

    async def pin(
        self, keys: Sequence[Key], *, hold: float, group: int = 0, rank: int | None = None, timeout: float | None = None
    ) -> Lease:
        """As `Pages.pin`."""

    def layers(
        self,
        keys: Sequence[Key],
        buffers: Places | None = None,
        *,
        layer_buffers: Sequence[Buffer | None] | None = None,
        layers: range | None = None,
        group: int = 0,
        rank: int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Layer]:
        """As `Pages.layers`: `async for layer in ...`. The read ends if the loop is left or cancelled. The task continues when
        nothing writes to its buffers any more."""

    async def close(self) -> None:
        """Stops draining the handle, and closes the handle."""

    async def __aenter__(self) -> AsyncPages: ...
    async def __aexit__(self, kind: object, error: object, trace: object) -> None: ...

class AsyncSession:
    """A session whose calls are coroutines. If a task is cancelled, its call on the server continues. A session that such a call
    opens ends with its lease."""

    def __init__(self, session: Session) -> None: ...
    @classmethod
    async def open(
        cls,
        client: Client,
        pages: Pages,
        keys: Sequence[Key],
        *,
        columns: Sequence[tuple[int, int | None]] | None = None,
        shared_blocks: int = 0,
        lease: float = 60.0,
        prompt_tokens: int = 0,
        engine_blocks: int | None = None,
        times: Times | None = None,
    ) -> AsyncSession:
        """As `Client.session`."""

    @property
    def session(self) -> Session:
        """The underlying session, with its `id`, `keys` and `told`."""

    async def fork(
        self,
        blocks: int | None = None,
        *,
        prompt_tokens: int = 0,
        engine_blocks: int | None = None,
        times: Times | None = None,
    ) -> AsyncSession: ...
    async def extend(
        self,
        keys: Sequence[Key],
        *,
        prompt_tokens: int = 0,
        engine_blocks: int | None = None,
        times: Times | None = None,
    ) -> dict[str, Any]: ...
    async def hold(self, first: int = 0) -> dict[str, Any]: ...
    async def renew(self) -> None: ...
    async def hand_over(self, to: Client) -> dict[str, Any]: ...
    async def close(self) -> bool: ...
    async def __aenter__(self) -> AsyncSession: ...
    async def __aexit__(self, kind: object, error: object, trace: object) -> None: ...
