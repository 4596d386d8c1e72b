"""KV-cache blocks on disk, shared between processes and kept across restarts.

What holds everywhere:

- A read gives exactly the bytes that one producer put under that key and identity, or it is an error or a miss: never other
  bytes, never a mix of two producers' bytes, never another tenant's.
- Memory that was handed over is held by this module until no disk and no thread touches it any more, also if the caller drops
  it, closes the handle, or exits. It must not be used between the submission and the completion of its batch.
- The interpreter's lock is released around everything that waits or digests, and there is no thread for each request.
- Wrong arguments raise an exception that names the argument. Nothing that is passed in can crash the process, addresses
  (`int`) outside registered memory included.
- After `os.fork` a client belongs to the parent: in the child each call raises `Invalid` (reason `Forked`), and dropping the
  objects does nothing. Connect again in the child.
- At interpreter exit what is under way is cancelled and waited for, for at most two seconds; memory that a disk still writes
  to then is leaked, not freed.

All methods may be called from any thread.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, final

from typing_extensions import Self

__version__: str

class Error(Exception):
    """What a caller is told when something did not work. Each error is of one of the subclasses below, by what the caller must
    do. `reason` says why, in one word that does not change (`NotHere`, `Quota`, `Digest`, ...); the text is for people."""

    reason: str
    kind: Literal["miss", "retry", "refused", "invalid", "deadline", "corrupt", "read_only", "bug"]

    def __init__(self, text: str = "", reason: str = "") -> None: ...

class Miss(Error):
    """The bytes are not here: recompute them."""

class Retry(Error):
    """Not now: ask again. A server that is away gives this, too: the connection comes back by itself with a later call."""

class Refused(Error):
    """Not allowed: a quota, the budget, a right."""

class Invalid(Error, ValueError):
    """The request can never succeed as it is: fix it."""

class Deadline(Error, TimeoutError):
    """The time that was given passed first."""

class Corrupt(Error):
    """Bytes on disk were not what was written: recompute them. It has been reported and counted."""

class ReadOnly(Error):
    """The store takes no writes after a fault; reads go on."""

class Bug(Error):
    """A defect in Kvarts: report it."""

class _SupportsDLPack(Protocol):
    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

#: Anything with the buffer protocol (memoryview, numpy, mmap, bytearray), a DLPack tensor on the CPU (torch, bfloat16
#: included), or an address: an `int` inside memory that came from `Client.memory` or was given to `Client.adopt`. It is
#: contiguous, and writable if it is read into. It may begin at any address.
Buffer: TypeAlias = Any | _SupportsDLPack | int

#: 32 bytes as `key` or `chain` give them. Anything else (`str`, or `bytes` of another length, up to 4096) is taken as
#: `key(it)` would.
Key: TypeAlias = bytes | str

def key(*parts: bytes | str | int) -> bytes:
    """The 32 bytes that name a block, from what an engine calls it. Equal parts give equal keys on every machine, and other
    parts other keys: `key("a", "b")` is not `key("ab")`. One single part of exactly 32 bytes is kept as it is. What has a field
    of its own (model, revision, dtype, group, rank) does not belong into the key."""

def chain(
    tokens: Sequence[int] | Buffer, block_tokens: int, *, parent: bytes | None = None, extra: bytes | None = None
) -> list[bytes]:
    """The keys of all full blocks of a text: each names its block and everything before it. `tokens` is a sequence of numbers
    below 2**32, or a buffer of uint32. `parent` is the key of the block before, `extra` what else decides every block (an
    adapter, a salt, an image)."""

def kept_windows(every: int, window: int, first: int, last: int, block_tokens: int) -> list[tuple[int, int]]:
    """Which of the blocks `first` to `last` of a chain are to be kept of a group of which a prefix needs the last `window` tokens only: ranges.
    Kept is what a prefix needs that ends at the first boundary at or behind a multiple of `every` tokens; 0: at every boundary."""

def window_interval(
    nbytes: int, block_tokens: int, tokens_per_second: int = 10_000, bytes_per_second: int = 2_000_000_000
) -> int:
    """The `every` at which writing the `nbytes` of a boundary takes as long as replaying half of the way to the next; 0: at every boundary."""

def connect(
    server: str | None = None,
    token: str | None = None,
    *,
    via: Literal["best", "local", "grpc"] = "best",
    timeout: float = 60.0,
    authority: bytes | None = None,
    certificate: bytes | None = None,
    private_key: bytes | None = None,
    server_name: str | None = None,
    server_uid: int | None = None,
    threads: int = 2,
    of_cluster: bool = False,
) -> Client:
    """A client of a server (`kvarts serve`).

    `server`: the path of its socket, `HOST:PORT`, or `http(s)://HOST:PORT`; else `$KVARTS_SERVER`, else `127.0.0.1:7440`. A
    server on this host is reached through shared memory: name its socket. `token`: else the content of the file
    `$KVARTS_TOKEN_FILE`. `timeout` bounds connecting and every call that does not give its own. TLS: `authority`,
    `certificate` and `private_key` are PEM. `threads`: those of this client that copy and digest, 1 to 1024. `of_cluster`: look-ups
    without a hold, and matches without a plan, also find what other nodes of the server's cluster have; loads take it from there.
    A hold of a match holds what the server itself has.

    It connects again by itself after the server was away. Raises `Retry` (reason `Away`) if it is away now."""

def open(
    dirs: str | PathLike[str] | Sequence[str | PathLike[str]],
    budget: int,
    *,
    executors: int | None = None,
) -> Client:
    """A store inside this process, without a server. While it is open, another process that opens its directories gets
    `Refused` (reason `Locked`), and so does this call if another process has them.

    `dirs`: one directory for each device, made if absent. `budget`: bytes on disk, never exceeded. It is closed by `close`, by
    `with`, and at interpreter exit; a process that dies loses nothing that was acknowledged."""

@final
class Client:
    """A store: somewhere else (`connect`), or in this process (`open`). The interface is the same."""

    @property
    def path(self) -> Literal["local", "grpc", "embedded"]:
        """The way that blocks take."""

    @property
    def held_bytes(self) -> int:
        """Bytes of shared memory that are kept from being used, because a connection ended while disks were writing to them."""

    def pages(
        self,
        page_bytes: int | Mapping[int, int] | None = None,
        *,
        model: str,
        revision: str,
        dtype: str,
        engine: str,
        layout: str,
        layout_version: str = "1",
        block_tokens: int = 1,
        tokenizer: str = "none",
        adapter: str = "none",
        quantisation: str = "none",
        scales: str = "none",
        rope: str = "none",
        window: str = "none",
        extras: Mapping[str, str] | None = None,
        spec: str | None = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        windows: Mapping[int, int] | None = None,
        durable: bool = False,
        ttl: float | None = None,
        lanes: bool = False,
        batches_max: int = 1024,
        timeout: float | None = None,
    ) -> Pages:
        """A handle on the blocks of one identity. Everything from `model` to `extras` decides bytes: handles that differ in any
        of it, in the page sizes or in `tp_size`, never see each other's blocks. What an engine does not have is "none"; model,
        revision, dtype, engine, layout and the layout's version are always named.

        `page_bytes`: one size, or one for each group (`{0: 65536, 1: 4096}`) where an engine has several groups of KV caches.
        Each block is then one opaque page. Or `spec`: the name of a shipped model or the text of a spec (TOML), whose blocks
        have layers and parts. `tp_rank` of `tp_size`: which part of the state this process has; ranks never see each other's
        pages, unless `rank` is given with a batch. `windows`: of which groups a prefix needs only the blocks of its last tokens, and of how
        many (`{1: 128}`); 0 is its last block alone. Of the others it needs all.

        `durable`: puts are acknowledged after a flush; else when they are written. `ttl`: seconds that a block lives at most.
        `lanes`: three eventfds (store, lookup, load) instead of one. `timeout`: of batches that give none; `None` is the
        client's. It registers the model: a call to the server."""

    def memory(self, nbytes: int) -> Memory:
        """Memory into which the server's disks write directly: verified where it lies, without a copy on the host. Where there is no
        such way (gRPC), memory like any other. It stays until its last user is gone, views of it included."""

    def shared_pool(self, nbytes: int) -> Pool:
        """Memory that the processes of one engine share: see `Pool`. Over the local path alone. It counts once as memory of the tenant,
        and is gone with the last process that has it."""

    def attach(self, name: str) -> Memory:
        """The memory of a pool that another process of the same tenant has taken on this server."""

    def adopt(self, buffer: Buffer, *, fd: int | None = None, offset: int = 0, nbytes: int | None = None) -> Memory:
        """Makes memory of an engine's known, once, so that its pages can be named by buffers or addresses in it from then on
        without being pinned and looked at one by one.

        `fd`: the file in memory (`memfd_create`, or a file of `/dev/shm`) that `buffer` maps from `offset` on, whole pages of
        4 KiB. The server's disks then write into it directly, and this process verifies. It is sealed against shrinking if it
        was made to allow that; in any case the engine must not shorten it before `Memory.close` has returned. Without `fd`, bytes are copied once on their way (embedded: not at all). `nbytes` is needed where `buffer`
        is an address: then the caller promises that it stays mapped until `Memory.close` has returned."""

    def watch(
        self, *, after: tuple[int, int] | None = None, namespace: bytes | None = None, snapshot: bool = False, runs: bool = False
    ) -> Events:
        """What happens to the blocks of the caller's tenant, or of one model that this client has registered (`Pages.namespace`), without a
        gap between two events; raises `Retry` (reason `EventGap`) where events were missed. It waits for the next one.

        `after`: behind this event. `snapshot`: where no event is named, and after each gap, which is told of and not raised, first what
        is here: `present` for each block, then `complete`. `runs`: an event may be of several blocks of one column."""

    def stats(self) -> dict[str, Any]:
        """What the store is and has done."""

    def models(self) -> list[dict[str, Any]]:
        """The models of the caller's tenant that were registered since the server started, or that it has blocks of: `namespace`, `model`,
        `revision`, `dtype`, `engine`, `layout`, `block_tokens`, `layers`, `registered`, `last_used_ms`. Of a server only."""

    def route(
        self,
        nodes: Sequence[dict[str, Any]],
        *,
        times: Times,
        prompt_tokens: int,
        namespace: bytes | None = None,
        keys: Sequence[Key] | None = None,
        owner: tuple[int, int] | None = None,
        shared_tokens: int = 0,
        forked: bool = False,
        token_bytes: float = 0.0,
        layers: int = 0,
    ) -> dict[str, Any]:
        """Where a request should go. Of a server only.

        Each of `nodes` says what its caller knows: `node` (its number), `store` (16 bytes: the store of the server beside it, which that
        server says as `here`), `decodes`, `queue_ms`, `decoding`, `memory_tokens`, `device_tokens`, `memory_bytes_per_ms`; and where
        it knows better, `disk_tokens`, `disk_bytes_per_ms`, `disk_queue_ms`, `network_bytes_per_ms`, `network_queue_ms`: what is given
        stands, the rest the server fills in for nodes with a `store`. `namespace` and `keys` name the blocks of the prompt (of group
        0, whole); without them the server knows of no blocks. `owner`: a node's number and the leading tokens that it has.

        The answer: `class`; `candidates`, the least `cost_ms` first, each with `node`, `action`, `cached_tokens` and the terms of its
        cost; `nodes`, of each with a `store` its leading `blocks` (`None`: not known), what was assumed and the `trouble`; `here`, `owner`,
        `owner_has_lease`, `leased_by`, `bucket_blocks` (`None`: not known), `unasked` (blocks that the directory was not asked for in time)."""

    def session(
        self,
        pages: Pages,
        keys: Sequence[Key],
        *,
        columns: Sequence[tuple[int, int | None]] | None = None,
        shared_blocks: int = 0,
        lease: float = 60.0,
        prompt_tokens: int = 0,
        engine_blocks: int | None = None,
        times: Times | None = None,
    ) -> Session:
        """Opens a session: a conversation that begins with these blocks, which the server holds against eviction as far as they are
        there. Of a server only; it needs the right to write.

        `columns`: of which groups and ranks (`None`: this process's) blocks are held; otherwise of every group, of this rank; `[]` holds
        nothing. `shared_blocks`: how many leading blocks are others' as well, as a system prompt is; in a cluster the chain behind them
        is claimed for the server's node. `lease`: seconds that the session lasts without a renewal, so what it costs if this process
        dies; more than ten minutes need the right to pin.

        What is said of the turn that comes decides its class and advice (`Session.told`): `prompt_tokens` (0: those of the blocks),
        `engine_blocks` (leading blocks that the engine has in its own memory; otherwise those that the session had before) and `times`."""

    def close(self, timeout: float | None = None) -> None:
        """Closes all handles (see `Pages.close`) and ends the connection or the store. Sessions end with their lease."""

    def __enter__(self) -> Client: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Session:
    """A conversation whose blocks a server holds. It lasts until `close`, the end of `with`, or the end of its lease: no thread renews it, so
    that a process that stands still keeps nothing. A session that is over, or whose server was started again, raises `Refused` (reason
    `LeaseEnded`): open another one. One call at a time; others wait for it."""

    @property
    def id(self) -> int:
        """The number that names it on its server, and on the one that it is handed over to."""

    @property
    def keys(self) -> list[bytes]:
        """Its blocks, from the first on."""

    @property
    def told(self) -> dict[str, Any]:
        """What the server said last: `held` (of the blocks of that call those that are held in all columns), `class`, `tail`, `owner` (16
        bytes: in a cluster the node that owns its chain, where its turns should go; else `None`) and `is_owner` (whether that is this
        server's). `tail` is advice on what to keep of windows and states: `keep` ("nothing", "every_block", "every_blocks", "replay"),
        `every_blocks`, `tip` (whether at the turn's end), `replay_tokens`, `replay_ms`, `write_ms`."""

    def fork(
        self,
        blocks: int | None = None,
        *,
        prompt_tokens: int = 0,
        engine_blocks: int | None = None,
        times: Times | None = None,
    ) -> Session:
        """A session that goes on from the first blocks of this one, by default from all. What both share is held once, and as long as either
        lasts."""

    def extend(
        self,
        keys: Sequence[Key],
        *,
        prompt_tokens: int = 0,
        engine_blocks: int | None = None,
        times: Times | None = None,
    ) -> dict[str, Any]:
        """Blocks that follow, and the lease anew; gives `told`. Say them before they are computed, and `hold` them when they were put."""

    def hold(self, first: int = 0) -> dict[str, Any]:
        """Holds what is there by now of its own blocks from this one on, and the lease anew; gives `told`. Say its beginning: each call that
        begins elsewhere is another lease of the server's until one covers it."""

    def renew(self) -> None:
        """The lease anew, from now on."""

    def hand_over(self, to: Client) -> dict[str, Any]:
        """Goes on at another server, under the same number, with this object; gives `told`. That client must have registered the model
        (`Client.pages`). Its chain is given up here first, and what is held here let go of last. Where the other one refuses it, it stays
        handed over: it can be handed over again, until its lease ends."""

    def close(self) -> bool:
        """Ends it; false if it had ended."""

    def __enter__(self) -> Session: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Memory:
    """Memory that the store knows: `memoryview(memory.view)`, `numpy.frombuffer(memory.view, ...)`, or addresses in it."""

    @property
    def mode(self) -> Literal["adopted", "copied", "embedded"]:
        """How bytes get into it: written by disks and verified here; through one copy; or by the store in this process."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def view(self) -> memoryview:
        """The bytes. A view keeps the memory."""

    def close(self, timeout: float | None = None) -> None:
        """Forgets it: returns when no batch uses it any more (raises `Deadline` if that takes longer). Its pages are named by
        buffers like any other memory afterwards."""

@final
class Pool:
    """Memory that the processes of one engine share, and the blocks that are staged in it. The scheduler has it; workers attach to
    its memory by its name (`Client.attach`)."""

    @property
    def name(self) -> str:
        """32 hexadecimal digits that cannot be guessed. Another tenant's client finds nothing by it."""

    @property
    def memory(self) -> Memory:
        """All of it, as this process has it."""

    @property
    def counts(self) -> dict[str, int]:
        """What it has and has done: `bytes`, `free_bytes`, and blocks: `hits` (asked for and here), `shared` (on their way for another
        stage), `read`, `came`, `no_room`, `kept` (saved here and stored), `withdrawn` (deleted since, expired or evicted on the server), `evicted`; and stages that were
        `silent`."""

    def clear(self) -> None:
        """Forgets every block that no stage holds; the next stage reads it again."""

    def stage(
        self,
        columns: Sequence[tuple[Pages, int, int | None]],
        keys: Sequence[bytes | str],
        *,
        first_block: int = 0,
        silence: float = 10.0,
    ) -> Stage:
        """Holds and reads blocks that follow each other in a chain, the same ones in every column: (handle, group, rank; `None` for the
        handle's own). `first_block`: how many blocks of the chain stand before. It waits for nothing."""

    def draft(
        self,
        handle: Pages,
        keys: Sequence[bytes | str],
        *,
        group: int = 0,
        rank: int | None = None,
        first_block: int = 0,
        wait: bool = True,
    ) -> Draft:
        """Room for blocks that an engine saves and that are put from there. Raises `Retry` where there is none. Without `wait` also where
        another thread uses the pool at this moment: one that begins a read may wait there for a connection."""

@final
class Stage:
    """What one request needs of a pool, held and on its way. It ends when all is here, when the next block cannot come, or when nothing has
    come for `silence` seconds. What is staged stays where it is until `close`, whatever happens to disks, networks and servers."""

    @property
    def staged(self) -> int:
        """Leading blocks that are here in every column, with what has arrived by now."""

    @property
    def is_over(self) -> bool:
        """Whether there will not be more."""

    @property
    def why(self) -> Error | None:
        """Why it is over before the last block."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it is over, or so long; gives `staged`."""

    def stretches(self, column: int = 0) -> list[tuple[int, int, int, int]]:
        """Where the staged blocks of a column are, in their order: (where an extent begins in the pool, blocks of the extent, the first of
        these, how many these are). An extent lies `[part][block]`, with the parts of all layers in the order of the shape."""

    def places(self, part: int, column: int = 0) -> list[tuple[int, int]]:
        """The same for one part: (where it begins in the pool, bytes), one after the other."""

    def close(self) -> None:
        """Lets go of what it holds, and stops reads that no other stage waits for."""

@final
class Draft:
    """Room in a pool for blocks that an engine saves: workers write them there (`kvarts.gpu`), and when the last one has, they are put. Keep it
    for as long as a device may write there; a save of this process that is given it keeps the room by itself."""

    def stretches(self) -> list[tuple[int, int, int, int]]:
        """Where the blocks lie, in the order of the keys, as `Stage.stretches` says it."""

    def put(
        self, *, parent: bytes | None = None, durable: bool = True, ttl: float | None = None, timeout: float | None = None
    ) -> list[bool]:
        """Puts the blocks from where they lie, and waits for the answer: of each, whether it is stored, now or already. `parent`: the block before
        the first; without it the first begins the prompt. What was stored here stays in the pool for later stages. Once."""

    @property
    def why(self) -> Error | None:
        """Why the first block of the put that is not stored is not."""

    def close(self) -> None:
        """Gives the room back."""

@final
class Completion:
    """The answer to one batch."""

    @property
    def id(self) -> int: ...
    @property
    def kind(self) -> Literal["put", "get", "exists", "lock", "delete"]: ...
    @property
    def ok(self) -> bool:
        """Whether every key went well."""

    @property
    def results(self) -> list[bool]:
        """One for each key, in the order of the request. A put: the page is stored, now or already. A get: it is complete and
        verified in its buffer; other buffers may have been written to. Exists and lock: it can be read now. Delete: it was
        here and is not any more."""

    @property
    def errors(self) -> dict[int, Error]:
        """Why, for each key that did not go well. Of exists and delete, what is merely absent is a `Miss`."""

    @property
    def reasons(self) -> dict[str, tuple[Error, int]]:
        """The same by reason: one error of each, and how many keys it concerns. `errors` makes an exception for each key, which
        takes long where thousands are absent."""

    @property
    def error(self) -> Error | None:
        """The first of them."""

    @property
    def prefix(self) -> int:
        """How many leading keys went well."""

    @property
    def written(self) -> int:
        """Pages that a put wrote; those that were here already are not counted."""

@final
class Paged:
    """Blocks in the slots of a pool: part `p` of block `i` lies at `parts[p][0]`, `parts[p][1] + slots[i] * parts[p][2]` bytes
    after its beginning. A part is (buffer, offset, stride); there is one for each part of a block, in the order of the spec
    (for pages: one). `None` for parts of layers that are not read."""

    def __new__(cls, parts: Sequence[tuple[Buffer, int, int] | None], slots: Sequence[int]) -> Self: ...

#: Where blocks lie: a buffer for each key, exactly as long as a block (a longer one is refused, too); one buffer with all
#: blocks one after the other; or `Paged`.
Places: TypeAlias = Sequence[Buffer] | Buffer | Paged

@final
class Pages:
    """Batches of blocks: submitted from any thread without waiting, answered later, each exactly once, with one result for each
    key in the order of the keys. Beside them the same as calls that wait.

    - A batch that was refused (an exception) has no id and nothing of it was begun.
    - Once a batch is answered, nothing touches its buffers any more.
    - An eventfd is readable exactly while completions wait to be drained. `drain` empties it; who reads it does so before
      draining.
    - A key that stands again in one batch has the result of its first place; in a get it is `Invalid` (reason `Duplicate`)
      there and that buffer is left alone.
    - `timeout` (seconds): when it has passed, keys that are not there yet are answered with `Deadline`. That is soon after, also
      if the server has stopped; only a get straight into memory of mode adopted waits until the disk has let go.
    - `group` (default 0) and `rank` (default: this process's): one for all keys, or a sequence with one for each.
    """

    @property
    def namespace(self) -> bytes:
        """32 bytes: the name of the identity."""

    @property
    def under_way(self) -> int:
        """Batches that were submitted and not drained."""

    def block_bytes(self, group: int = 0) -> int: ...
    def parts(self, group: int = 0) -> list[tuple[int, int]]:
        """(layer, bytes) of each part of a block, in the order of the spec."""

    def submit_put(
        self,
        keys: Sequence[Key],
        buffers: Places,
        *,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        parent: bytes | None = None,
        timeout: float | None = None,
    ) -> int:
        """Stores a page under each key: once answered, the first that was put under a key is what every get gives. `parent`:
        the keys are consecutive blocks of one text, and this is the key before them (`b""`: none is before them)."""

    def submit_get(
        self,
        keys: Sequence[Key],
        buffers: Places,
        *,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Reads the page of each key into its buffer."""

    def submit_exists(
        self,
        keys: Sequence[Key],
        *,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Asks which pages can be read now."""

    def submit_lock(
        self,
        keys: Sequence[Key],
        *,
        hold: float = 60.0,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> int:
        """The same, and holds those that are here against eviction for `hold` seconds, or until `unlock`."""

    def unlock(self, what: int | Sequence[Key]) -> None:
        """Ends what the batch of this id holds, or takes one lock off each key. It does not wait."""

    def submit_delete(
        self,
        keys: Sequence[Key],
        *,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Deletes blocks: once answered, nothing brings them back."""

    def cancel(self, id: int) -> bool:
        """Ends a batch early: it is answered soon, once, with `Retry` (reason `Cancelled`) for keys that were not done. False
        if it was answered already."""

    def drain(self, lane: Literal["store", "lookup", "load"] | None = None) -> list[Completion]:
        """Takes the completions that wait, of all lanes or of one. It does not wait."""

    def wait(self, timeout: float | None = None) -> list[Completion]:
        """Drains; if nothing waits, waits for the first. An empty list after `timeout` seconds, and where nothing is under
        way."""

    def fileno(self) -> int:
        """The eventfd (`lanes=False`), for select, poll and asyncio. It belongs to this handle: do not close it."""

    def event_fd(self, lane: Literal["store", "lookup", "load"]) -> int:
        """The eventfd of a lane: three different ones with `lanes=True`, else one and the same."""

    def close(self, timeout: float | None = None) -> None:
        """Cancels what is under way, discards completions that were not drained, ends the locks. When it returns, nothing
        touches any buffer that was given to this handle. Raises `Deadline` if that takes longer than `timeout` (default: the
        client's): then the module goes on holding those buffers, and `close` may be called again. Later submissions raise
        `Retry` (reason `Closed`)."""

    # The same as calls that wait. They raise what concerns the whole call; what concerns single keys is in the answer.

    def put(
        self,
        keys: Sequence[Key],
        buffers: Places,
        *,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        parent: bytes | None = None,
        timeout: float | None = None,
    ) -> Completion: ...
    def get(
        self,
        keys: Sequence[Key],
        buffers: Places,
        *,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Completion: ...
    def exists(
        self,
        keys: Sequence[Key],
        *,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[bool]: ...
    def missing(
        self, keys: Sequence[Key], *, group: int = 0, rank: int | None = None, timeout: float | None = None
    ) -> Missing:
        """Why those of these blocks are not there that are not: for what a get did not find, as
        `pages.missing([keys[at] for at in answer.errors])`. It is a look-up; blocks that are here count in nothing."""

    def delete(
        self,
        keys: Sequence[Key],
        *,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Completion: ...
    def delete_all(self) -> int:
        """Deletes every block of this identity, of all groups and ranks; how many were here."""

    def match(
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
        """How long a prefix of these consecutive blocks can be restored now: up to the last block boundary at which every
        required part of every group and rank is here. With `hold`, the blocks that it needs are not evicted for `hold` seconds.

        With `times` the answer has a `plan`: what of it is worth restoring with the disks as they are now, and why. The prompt
        has `prompt_tokens` tokens (one more than the blocks, if it is not said), and of it `hbm_blocks` leading blocks are in
        device memory already; windows and states are at the boundaries `hbm_boundaries`, in blocks. `overlap`: what the engine
        computes of the prompt meanwhile; `layers`: each layer when it is loaded, `none`: nothing before everything is, as engines
        do that load whole blocks."""

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
    ) -> Layers:
        """Reads blocks layer by layer: an iterator that gives each layer when it is usable. Where to: either `buffers`, or
        `layer_buffers`, one for each layer of the blocks (`[part][block]` inside; `None` for layers that are not read). `layers`:
        of the model, consecutive; all if none are named."""

    def pin(
        self, keys: Sequence[Key], *, hold: float, group: int = 0, rank: int | None = None, timeout: float | None = None
    ) -> Lease:
        """Holds the blocks that are here against eviction for `hold` seconds."""

    def __enter__(self) -> Pages: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Match:
    """What a look-up found."""

    @property
    def blocks(self) -> int:
        """Leading blocks that can be restored now."""

    @property
    def pending(self) -> int:
        """Leading blocks of which puts under way, too, have the last parts."""

    @property
    def missing(self) -> Missing:
        """Why the blocks behind those cannot be restored."""

    @property
    def lease(self) -> Lease | None: ...
    @property
    def plan(self) -> Plan | None:
        """If it was asked for. A lease holds all of `blocks`, whatever the plan uses of them."""

@final
class Missing:
    """Why blocks cannot be restored: how many for each reason; its text names those that there are, and it is false if there is none.
    A store remembers a bounded number of departures since it was opened: what it forgot counts as never stored."""

    @property
    def evicted(self) -> int:
        """Stored, and evicted: other blocks needed their room, or their quota."""

    @property
    def expired(self) -> int:
        """Stored, and their time to live is over."""

    @property
    def deleted(self) -> int:
        """Stored, and deleted."""

    @property
    def out_of_service(self) -> int:
        """Damaged, or of a part of the store that failed."""

    @property
    def never_stored(self) -> int:
        """Never stored, as far as the store remembers."""

    @property
    def cut_off(self) -> int:
        """Of a match: here, behind a block that is not."""

    def __bool__(self) -> bool: ...

@final
class Times:
    """How long an engine computes a prefill: from measured ones (tokens that were there, new tokens, milliseconds), from the
    data sheet of `devices` devices for a model whose figures are known, or from both."""

    def __new__(
        cls,
        samples: Sequence[tuple[int, int, float]] | None = None,
        *,
        model: str | None = None,
        device: str | None = None,
        devices: int = 1,
    ) -> Self: ...
    def prefill_ms(self, cached: int, new: int) -> float: ...

@final
class Plan:
    """What of a prefix is worth restoring. Times are milliseconds."""

    @property
    def blocks(self) -> int:
        """Blocks to restore; the prompt goes on behind them. 0: a load would be slower than computing, or nothing is here."""

    @property
    def tokens(self) -> int: ...
    @property
    def recompute_tokens(self) -> int:
        """Tokens before that which are run again."""

    @property
    def disk_bytes(self) -> int:
        """Bytes to load."""

    @property
    def load_ms(self) -> float:
        """The wait for the first layer."""

    @property
    def recompute_ms(self) -> float: ...
    @property
    def stall_ms(self) -> float:
        """The waits for the other layers."""

    @property
    def first_token_ms(self) -> float: ...
    @property
    def recompute_all_ms(self) -> float:
        """To the first token with nothing restored."""

    @property
    def held_ms(self) -> float:
        """To the first token with what is in device memory alone."""

    @property
    def benefit_ms(self) -> float:
        """What `first_token_ms` is sooner than `held_ms`."""

    @property
    def reason(self) -> str: ...
    @property
    def actions(self) -> list[tuple[int, int, int, str, int]]:
        """Group, first block, the block behind the last, what is done (`use`, `disk`, `recompute`, `leave out`), bytes."""

    @property
    def disk_bytes_per_second(self) -> float:
        """What the store's disks deliver, as its reads find it."""

    @property
    def disk_outstanding_bytes(self) -> int: ...
    @property
    def disk_reads_measured(self) -> int:
        """0: nothing was measured, a drive is assumed."""

@final
class Lease:
    """Blocks that are held against eviction until its time is over, or `end`. Not ended by garbage collection."""

    @property
    def blocks(self) -> int:
        """How many of the keys it holds. Of a match that counted other nodes (`of_cluster`), as many as the match found: of these it
        holds what the server itself has."""

    def renew(self, hold: float) -> None: ...
    def end(self) -> bool:
        """False if it had ended by itself."""

@final
class Layer:
    """A layer that is usable now."""

    @property
    def layer(self) -> int:
        """Counted in the execution order of the model."""

    @property
    def blocks(self) -> int:
        """How many leading blocks of the request are complete and verified, in this and all layers before."""

@final
class Layers(Iterator[Layer]):
    """Layers of a read, in order. When the iteration is over (or `close` has returned), nothing touches the buffers any more.
    It stops early where no block is usable any more, and at the deadline; `errors` says why."""

    def __iter__(self) -> Layers: ...
    def __next__(self) -> Layer: ...
    @property
    def arrived(self) -> int:
        """How many layers are usable by now: those that were given, and those that can be taken without waiting. It does not
        wait."""

    @property
    def usable_blocks(self) -> int: ...
    @property
    def usable_layers(self) -> int: ...
    @property
    def errors(self) -> dict[int, Error]: ...
    @property
    def reasons(self) -> dict[str, tuple[Error, int]]:
        """The same by reason: one error of each, and how many blocks it concerns."""

    def wait(self, timeout: float) -> bool:
        """Whether anything has come of this read, or its end, waiting for `timeout` seconds at most. It takes nothing."""

    def close(self) -> None: ...

@final
class Event:
    """Something that happened to a block."""

    @property
    def what(self) -> Literal["stored", "evicted", "expired", "deleted", "damaged", "present", "complete", "gap"]: ...
    @property
    def namespace(self) -> bytes | None:
        """None: of all, as `complete` and `gap` are."""

    @property
    def key(self) -> bytes | None:
        """None: every block of the namespace."""

    @property
    def keys(self) -> list[bytes]:
        """Of a run, all; else `key`, or none."""

    @property
    def group(self) -> int: ...
    @property
    def coordinate(self) -> tuple[int, int, int] | None:
        """Of which heads: first, how many, of how many. None: the whole state."""

    @property
    def sequence(self) -> tuple[int, int] | None:
        """For `Client.watch(after=...)`. None: `present`."""

@final
class Events(Iterator[Event]):
    """Events as they happen."""

    def __iter__(self) -> Events: ...
    def __next__(self) -> Event: ...
    def take(self, timeout: float) -> list[Event]:
        """Those that are there, after waiting for the first for `timeout` seconds at most; a gap is one of them. Raises when they have
        ended."""
