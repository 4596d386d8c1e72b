"""KV-cache blocks on disk, shared between processes and kept across restarts.

Guarantees of all calls:

- A read returns exactly the bytes that one producer put under that key and identity, or it is an error or a miss: never other
  bytes, never a mix of two producers' bytes, never another tenant's.
- The module keeps memory that was passed to it until no disk and no thread accesses it any more, even if the caller drops it,
  closes the handle, or exits. The caller must not use it between the submission and the completion of its batch.
- The interpreter's lock is released during waits and digests, and there is no thread for each request.
- Wrong arguments raise an exception that names the argument. No argument can crash the process, including addresses (`int`)
  outside registered memory.
- After `os.fork` a client belongs to the parent: in the child each call raises `Invalid` (reason `Forked`), and dropping the
  objects has no effect. Connect again in the child.
- At the exit of the interpreter, requests under way are cancelled and waited for, for at most two seconds; memory that a disk
  still writes to then is leaked, not freed.

All methods may be called from any thread.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, final

from typing_extensions import Self

__version__: str

class Error(Exception):
    """The base of all errors. The subclass gives the caller's reaction. `reason` names the cause in one word that does not change
    (`NotHere`, `Quota`, `Digest`, ...); the text is for people."""

    reason: str
    kind: Literal["miss", "retry", "refused", "invalid", "deadline", "corrupt", "read_only", "bug"]

    def __init__(self, text: str = "", reason: str = "") -> None: ...

class Miss(Error):
    """The block is not stored: compute it."""

class Retry(Error):
    """A temporary failure: retry. Also raised while a server is away: a later call connects again by itself."""

class Refused(Error):
    """Not permitted: a quota, the budget, a right."""

class Invalid(Error, ValueError):
    """The request can never succeed as it is: correct it."""

class Deadline(Error, TimeoutError):
    """The timeout passed before the result."""

class Corrupt(Error):
    """The block is damaged on disk: compute it. The damage has been logged and counted."""

class ReadOnly(Error):
    """The store refuses writes after a fault; reads continue."""

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
    """The key of a block, 32 bytes, computed from the engine's name for it. Equal parts give equal keys on every machine, and
    different parts different keys: `key("a", "b")` is not `key("ab")`. A single part of exactly 32 bytes is used unchanged.
    Values with a parameter of their own (model, revision, dtype, group, rank) do not belong into the key."""

def chain(
    tokens: Sequence[int] | Buffer, block_tokens: int, *, parent: bytes | None = None, extra: bytes | None = None
) -> list[bytes]:
    """The keys of all full blocks of a text: each names its block and everything before it. `tokens` is a sequence of numbers
    below 2**32, or a buffer of uint32. `parent` is the key of the preceding block; `extra` is further data that determines every
    block (an adapter, a salt, an image)."""

def kept_windows(every: int, window: int, first: int, last: int, block_tokens: int) -> list[tuple[int, int]]:
    """The blocks to keep, as ranges, out of `first` to `last` of a chain, for a group of which a prefix needs only the last
    `window` tokens. These are the blocks of prefixes that end at the first boundary at or behind a multiple of `every` tokens; 0:
    at every boundary."""

def window_interval(
    nbytes: int, block_tokens: int, tokens_per_second: int = 10_000, bytes_per_second: int = 2_000_000_000
) -> int:
    """The `every` at which writing the `nbytes` of a boundary takes as long as replaying half of the distance to the next; 0: at
    every boundary."""

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

    `server`: the path of its socket, `HOST:PORT`, or `http(s)://HOST:PORT`; else `$KVARTS_SERVER`, else `127.0.0.1:7440`. For
    shared memory with a server on this host, use its socket. `token`: else the content of the file `$KVARTS_TOKEN_FILE`.
    `timeout`: the limit for connecting and for every call without a timeout of its own. TLS: `authority`, `certificate` and
    `private_key` are PEM. `threads`: threads of this client that copy and digest, 1 to 1024. `of_cluster`: look-ups without a
    hold, and matches without a plan, also find blocks of other nodes of the server's cluster, and loads fetch them from there. A
    hold of a match covers the blocks of the server itself.

    The client reconnects by itself after the server was away. Raises `Retry` (reason `Away`) if the server is away now."""

def open(
    dirs: str | PathLike[str] | Sequence[str | PathLike[str]],
    budget: int,
    *,
    executors: int | None = None,
) -> Client:
    """A store inside this process, without a server. While it is open, another process that opens its directories gets `Refused`
    (reason `Locked`); this call raises the same if another process has them open.

    `dirs`: one directory for each device, created if absent. `budget`: bytes on disk, never exceeded. It is closed by `close`, by
    `with`, and at the exit of the interpreter; a process that dies loses no acknowledged block."""

@final
class Client:
    """A store: of a server (`connect`), or in this process (`open`). The interface is the same."""

    @property
    def path(self) -> Literal["local", "grpc", "embedded"]:
        """The path of blocks."""

    @property
    def held_bytes(self) -> int:
        """Bytes of shared memory that are blocked because a connection ended while disks were writing to them."""

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
        """A handle on the blocks of one identity. All arguments from `model` to `extras` determine the bytes: handles that differ
        in any of them, in the page sizes or in `tp_size`, never share blocks. For a feature that an engine does not have, use
        "none"; model, revision, dtype, engine, layout and the layout's version are always required.

        `page_bytes`: one size, or one for each group (`{0: 65536, 1: 4096}`) of an engine with several groups of KV caches. Each
        block is then one opaque page. Or `spec`: the name of a shipped model or the text of a spec (TOML), whose blocks have
        layers and parts. `tp_rank` of `tp_size`: this process's part of the state; ranks never share pages, unless a batch sets
        `rank`. `windows`: groups of which a prefix needs only the blocks of its last tokens, with the number of tokens
        (`{1: 128}`; 0: the last block alone). A prefix needs all blocks of the other groups.

        `durable`: puts are acknowledged after a flush, otherwise after the write. `ttl`: the time to live of blocks in seconds.
        `lanes`: three eventfds (store, lookup, load) instead of one. `timeout`: of batches without one of their own; `None` is
        the client's. The call registers the model with the server."""

    def memory(self, nbytes: int) -> Memory:
        """Memory into which the server's disks write directly: verified in place, without a copy on the host. Without such a path
        (gRPC), ordinary memory. It is freed with its last user, views of it included."""

    def shared_pool(self, nbytes: int) -> Pool:
        """Memory that the processes of one engine share: see `Pool`. Only over the local path. It counts once as memory of the
        tenant, and is freed with the last process that has it."""

    def attach(self, name: str) -> Memory:
        """The memory of a pool that another process of the same tenant has made on this server."""

    def adopt(self, buffer: Buffer, *, fd: int | None = None, offset: int = 0, nbytes: int | None = None) -> Memory:
        """Registers an engine's memory once, so that buffers or addresses in it can be used as pages without being pinned and
        checked one by one.

        `fd`: the file in memory (`memfd_create`, or a file of `/dev/shm`) that `buffer` maps from `offset` on, whole pages of 4
        KiB. The server's disks then write into it directly, and this process verifies the bytes. It is sealed against shrinking
        if it allows seals; in any case the engine must not shorten it before `Memory.close` has returned. Without `fd`, bytes are
        copied once on their way (embedded: not at all). `nbytes` is required if `buffer` is an address: the caller then
        guarantees that it stays mapped until `Memory.close` has returned."""

    def watch(
        self, *, after: tuple[int, int] | None = None, namespace: bytes | None = None, snapshot: bool = False, runs: bool = False
    ) -> Events:
        """Events of the blocks of the caller's tenant, or of one model that this client has registered (`Pages.namespace`),
        without a gap between two events; raises `Retry` (reason `EventGap`) if events were missed. The iterator waits for the
        next event.

        `after`: start behind this event. `snapshot`: without `after`, and after each gap, which is then an event and not raised,
        begin with the present blocks: `present` for each block, then `complete`. `runs`: an event may have several blocks of one
        column."""

    def stats(self) -> dict[str, Any]:
        """The state and the counters of the store."""

    def models(self) -> list[dict[str, Any]]:
        """The models of the caller's tenant that were registered since the server started, or that have blocks in the store:
        `namespace`, `model`, `revision`, `dtype`, `engine`, `layout`, `block_tokens`, `layers`, `registered`, `last_used_ms`.
        Only with a server."""

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
        """Chooses the node for a request. Only with a server.

        Each of `nodes` has the values that its caller knows: `node` (its number), `store` (16 bytes: the store of the server on
        that node, which that server returns as `here`), `decodes`, `queue_ms`, `decoding`, `memory_tokens`, `device_tokens`,
        `memory_bytes_per_ms`; and optionally `disk_tokens`, `disk_bytes_per_ms`, `disk_queue_ms`, `network_bytes_per_ms`,
        `network_queue_ms`: the server fills in absent ones for nodes with a `store`. `namespace` and `keys` name the blocks of
        the prompt: of those groups and ranks that the latest `match` of this model on the server required (before the first one:
        of its first group). Without them the server knows of no blocks. `owner`: a node's number and the leading tokens that
        it has.

        The result: `class`; `candidates` in the order of `cost_ms`, each with `node`, `action`, `cached_tokens` and the terms of
        its cost; `nodes`, for each with a `store` its leading `blocks` (`None`: unknown), assumed values and the `trouble`;
        `here`, `owner`, `owner_has_lease`, `leased_by`, `bucket_blocks` (`None`: unknown), `unasked` (blocks for which the
        directory did not answer in time)."""

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
        """Opens a session: a conversation that begins with these blocks. The server protects those that are stored from eviction.
        Only with a server; it needs the right to write.

        `columns`: groups and ranks (`None`: this process's) whose blocks are held; by default every group, of this rank; `[]`
        holds no blocks. `shared_blocks`: the number of leading blocks that other sessions share, such as a system prompt; in a
        cluster the chain behind them is claimed for the server's node. `lease`: seconds that the session lasts without a renewal,
        and therefore after the death of this process; more than ten minutes need the right to pin.

        The next turn's class and advice (`Session.told`) follow from `prompt_tokens` (0: those of the blocks), `engine_blocks`
        (leading blocks in the engine's own memory; by default those that the session had before) and `times`."""

    def close(self, timeout: float | None = None) -> None:
        """Closes all handles (see `Pages.close`) and ends the connection or the store. Sessions end with their lease."""

    def __enter__(self) -> Client: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Session:
    """A conversation whose blocks a server holds. It lasts until `close`, the end of `with`, or the end of its lease: no thread
    renews it, so that a stalled process holds no blocks. A session that has ended, or whose server was restarted, raises
    `Refused` (reason `LeaseEnded`): open another one. One call runs at a time; others wait for it."""

    @property
    def id(self) -> int:
        """Its number on its server, and on the server that takes it over."""

    @property
    def keys(self) -> list[bytes]:
        """Its blocks, from the first on."""

    @property
    def told(self) -> dict[str, Any]:
        """The server's last reply: `held` (blocks of that call that are held in all columns), `class`, `tail`, `owner` (16 bytes:
        in a cluster the node that owns its chain, where its turns should go; else `None`) and `is_owner` (whether that is this
        server's node). `tail` is advice on keeping windows and states: `keep` ("nothing", "every_block", "every_blocks",
        "replay"), `every_blocks`, `tip` (whether at the turn's end), `replay_tokens`, `replay_ms`, `write_ms`."""

    def fork(
        self,
        blocks: int | None = None,
        *,
        prompt_tokens: int = 0,
        engine_blocks: int | None = None,
        times: Times | None = None,
    ) -> Session:
        """A session that continues from the first blocks of this one, by default from all. Shared blocks are held once, as long
        as either session lasts."""

    def extend(
        self,
        keys: Sequence[Key],
        *,
        prompt_tokens: int = 0,
        engine_blocks: int | None = None,
        times: Times | None = None,
    ) -> dict[str, Any]:
        """Appends blocks and renews the lease; returns `told`. Call it before the blocks are computed, and `hold` after they were
        put."""

    def hold(self, first: int = 0) -> dict[str, Any]:
        """Holds the stored blocks of the session from this one on, and renews the lease; returns `told`. `first` should be the
        session's beginning: each call with another one is a further lease on the server until one covers it."""

    def renew(self) -> None:
        """Renews the lease from now on."""

    def hand_over(self, to: Client) -> dict[str, Any]:
        """Moves the session to another server, under the same number and with this object; returns `told`. That client must have
        registered the model (`Client.pages`). The chain is released here first, and the held blocks last. If the other server
        refuses the session, it stays handed over: the call can be repeated until its lease ends."""

    def close(self) -> bool:
        """Ends the session; false if it had ended."""

    def __enter__(self) -> Session: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Memory:
    """Registered memory: `memoryview(memory.view)`, `numpy.frombuffer(memory.view, ...)`, or addresses in it."""

    @property
    def mode(self) -> Literal["adopted", "copied", "embedded"]:
        """The path of bytes into it: written by disks and verified here; through one copy; or by the store in this process."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def view(self) -> memoryview:
        """The bytes. A view keeps the memory."""

    def close(self, timeout: float | None = None) -> None:
        """Ends the registration: returns when no batch uses the memory any more (raises `Deadline` if that takes longer).
        Afterwards its pages can be passed as buffers like any other memory."""

@final
class Pool:
    """Memory that the processes of one engine share, and the blocks that are staged in it. The scheduler makes it; workers attach
    to its memory by its name (`Client.attach`)."""

    @property
    def name(self) -> str:
        """32 hexadecimal digits that cannot be guessed. The name is not valid for other tenants."""

    @property
    def memory(self) -> Memory:
        """The whole memory, as mapped in this process."""

    @property
    def counts(self) -> dict[str, int]:
        """Its state and counters: `bytes`, `free_bytes`, and blocks: `hits` (found in the pool), `shared` (already being read for
        another stage), `read`, `came`, `no_room`, `kept` (saved here and stored), `withdrawn` (deleted since, expired or evicted
        on the server), `evicted`; and `silent` stages."""

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
        """Holds and reads consecutive blocks of a chain, the same ones in every column: (handle, group, rank; `None` for the
        handle's own). `first_block`: the index of the first block in the chain. The call does not wait."""

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
        """Room for blocks that an engine saves and then puts from there. Raises `Retry` if there is none. With `wait=False` it
        also raises if another thread uses the pool at this moment: a thread that begins a read may wait there for a connection."""

@final
class Stage:
    """The blocks of one request in a pool, held and being read. A stage ends when all blocks are present, when the next block
    cannot be read, or when no block arrives for `silence` seconds. Staged blocks stay in place until `close`, independent of
    disks, networks and servers."""

    @property
    def staged(self) -> int:
        """Leading blocks that are present in every column, including all that have arrived so far."""

    @property
    def is_over(self) -> bool:
        """Whether the stage has ended."""

    @property
    def why(self) -> Error | None:
        """The cause, if the stage ended before the last block."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the stage or for `timeout`; returns `staged`."""

    def stretches(self, column: int = 0) -> list[tuple[int, int, int, int]]:
        """The positions of the staged blocks of a column, in their order: (offset of an extent in the pool, blocks of the extent,
        index of the first of these blocks, their number). An extent has the form `[part][block]`, with the parts of all layers in
        the order of the shape."""

    def places(self, part: int, column: int = 0) -> list[tuple[int, int]]:
        """The same for one part: (offset in the pool, bytes), one after the other."""

    def close(self) -> None:
        """Releases its blocks, and stops reads that no other stage waits for."""

@final
class Draft:
    """Room in a pool for blocks that an engine saves: workers write them there (`kvarts.gpu`); after the last write they are put.
    Keep the draft as long as a device may write there; a save of this process that has the draft keeps the room by itself."""

    def stretches(self) -> list[tuple[int, int, int, int]]:
        """The positions of the blocks in the order of the keys, in the form of `Stage.stretches`."""

    def put(
        self, *, parent: bytes | None = None, durable: bool = True, ttl: float | None = None, timeout: float | None = None
    ) -> list[bool]:
        """Puts the blocks from the pool, and waits for the result: for each block, whether it is stored, now or already.
        `parent`: the block before the first; without it the first begins the prompt. Blocks stored by this call stay in the pool
        for later stages. To be called once."""

    @property
    def why(self) -> Error | None:
        """The cause for the first block of the put that is not stored."""

    def close(self) -> None:
        """Releases the room."""

@final
class Completion:
    """The result of one batch."""

    @property
    def id(self) -> int: ...
    @property
    def kind(self) -> Literal["put", "get", "exists", "lock", "delete"]: ...
    @property
    def ok(self) -> bool:
        """Whether every key succeeded."""

    @property
    def results(self) -> list[bool]:
        """One for each key, in the order of the request. A put: the page is stored, now or already. A get: the page is complete
        and verified in its buffer; buffers of failed keys may have been written to. Exists and lock: the page can be read now.
        Delete: the page was stored and is deleted."""

    @property
    def errors(self) -> dict[int, Error]:
        """The error of each failed key. In exists and delete, an absent page is a `Miss`."""

    @property
    def reasons(self) -> dict[str, tuple[Error, int]]:
        """The same by reason: one error of each, and the number of keys. `errors` makes an exception for each key, which is slow
        for thousands of absent keys."""

    @property
    def error(self) -> Error | None:
        """The first error."""

    @property
    def prefix(self) -> int:
        """The number of leading keys that succeeded."""

    @property
    def written(self) -> int:
        """Pages that a put wrote; pages that were already stored are not counted."""

@final
class Paged:
    """Blocks in the slots of a pool: part `p` of block `i` begins at byte `parts[p][1] + slots[i] * parts[p][2]` of the buffer
    `parts[p][0]`. A part is (buffer, offset, stride); there is one for each part of a block, in the order of the spec (for pages:
    one), and `None` for parts of layers that are not read."""

    def __new__(cls, parts: Sequence[tuple[Buffer, int, int] | None], slots: Sequence[int]) -> Self: ...

#: Where blocks lie: a buffer for each key, exactly as long as a block (a longer one is refused, too); one buffer with all
#: blocks one after the other; or `Paged`.
Places: TypeAlias = Sequence[Buffer] | Buffer | Paged

@final
class Pages:
    """Batches of blocks: submitted from any thread without waiting, completed later, each exactly once, with one result for each
    key in the order of the keys. The same calls also exist in a form that waits.

    - A refused batch (an exception) has no id and no effect.
    - After the completion of a batch no thread and no disk accesses its buffers.
    - An eventfd is readable exactly while completions can be drained. `drain` empties it; a program that reads it does so before
      draining.
    - A repeated key in one batch has the result of its first position; in a get it is `Invalid` (reason `Duplicate`) at the
      others, and their buffers are not written.
    - `timeout` (seconds): keys without a result by then get `Deadline`, soon after, even if the server has stopped; only a get
      straight into memory of mode adopted waits until the disk has finished.
    - `group` (default 0) and `rank` (default: this process's): one for all keys, or a sequence with one for each.
    """

    @property
    def namespace(self) -> bytes:
        """32 bytes: the name of the identity."""

    @property
    def under_way(self) -> int:
        """Submitted batches that were not drained."""

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
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> int:
        """Stores a page under each key. After the completion every get returns the first page that was put under the key.
        `parent`: declares the keys as consecutive blocks of one text, and is the key before them (`b""`: they begin the text).
        `ttl`: the time to live of these blocks in seconds (default: the handle's)."""

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
        """Looks up which pages can be read now."""

    def submit_lock(
        self,
        keys: Sequence[Key],
        *,
        hold: float = 60.0,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> int:
        """The same, and protects stored pages from eviction for `hold` seconds, or until `unlock`."""

    def unlock(self, what: int | Sequence[Key]) -> None:
        """Ends the locks of the batch with this id, or one lock on each key. It does not wait."""

    def submit_delete(
        self,
        keys: Sequence[Key],
        *,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Deletes blocks; after the completion they cannot return."""

    def cancel(self, id: int) -> bool:
        """Ends a batch early: it completes soon, once, with `Retry` (reason `Cancelled`) for unfinished keys. False if it had
        completed."""

    def drain(self, lane: Literal["store", "lookup", "load"] | None = None) -> list[Completion]:
        """Returns the waiting completions, of all lanes or of one. It does not wait."""

    def wait(self, timeout: float | None = None) -> list[Completion]:
        """Drains; without a completion it waits for the first. Returns an empty list after `timeout` seconds, or if no batch is
        under way."""

    def fileno(self) -> int:
        """The eventfd (`lanes=False`), for select, poll and asyncio. It belongs to this handle: do not close it."""

    def event_fd(self, lane: Literal["store", "lookup", "load"]) -> int:
        """The eventfd of a lane: three different ones with `lanes=True`, otherwise the same one."""

    def close(self, timeout: float | None = None) -> None:
        """Cancels batches under way, discards completions that were not drained, ends the locks. After its return no buffer of
        this handle is accessed. Raises `Deadline` if that takes longer than `timeout` (default: the client's): the module then
        keeps those buffers, and `close` may be called again. Later submissions raise `Retry` (reason `Closed`)."""

    # The same as calls that wait. They raise what concerns the whole call; what concerns single keys is in the answer.

    def put(
        self,
        keys: Sequence[Key],
        buffers: Places,
        *,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        parent: bytes | None = None,
        ttl: float | None = None,
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
        """Counts the absent blocks among these by cause: for a get, as `pages.missing([keys[at] for at in answer.errors])`. It is
        a look-up; stored blocks are not counted."""

    def delete(
        self,
        keys: Sequence[Key],
        *,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Completion: ...
    def delete_all(self) -> int:
        """Deletes every block of this identity, of all groups and ranks; returns the number of deleted blocks."""

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
        """The longest prefix of these consecutive blocks that can be restored now: up to the last block boundary at which every
        required part of every group and rank is stored. With `hold`, its blocks are protected from eviction for `hold` seconds.

        With `times` the result has a `plan`: the part of the prefix that loads faster than it computes at the present speed of
        the disks, with the reason. The prompt has `prompt_tokens` tokens (default: one more than the blocks), and `hbm_blocks`
        leading blocks are in device memory already; windows and states are at the boundaries `hbm_boundaries`, in blocks.
        `overlap`: the engine's computing during the load; `layers`: each layer starts when it is loaded, `none`: computing starts
        when all blocks are loaded, as in engines that load whole blocks."""

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
        """Reads blocks layer by layer: an iterator that returns each layer when it is usable. The destination is either
        `buffers`, or `layer_buffers`, one for each layer of the blocks (`[part][block]` inside; `None` for layers that are not
        read). `layers`: a consecutive range of the model's layers; default: all."""

    def pin(
        self, keys: Sequence[Key], *, hold: float, group: int = 0, rank: int | None = None, timeout: float | None = None
    ) -> Lease:
        """Protects the stored blocks from eviction for `hold` seconds."""

    def __enter__(self) -> Pages: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Match:
    """The result of a look-up."""

    @property
    def blocks(self) -> int:
        """Leading blocks that can be restored now."""

    @property
    def pending(self) -> int:
        """Leading blocks that can be restored once the puts under way have finished."""

    @property
    def missing(self) -> Missing:
        """The blocks behind the prefix by cause."""

    @property
    def lease(self) -> Lease | None: ...
    @property
    def plan(self) -> Plan | None:
        """Present if `times` was given. A lease holds all of `blocks`, even if the plan uses fewer."""

@final
class Missing:
    """Counts of blocks that cannot be restored, by cause; its text lists the causes with a count, and it is false without any. A
    store remembers a bounded number of removed blocks since it was opened: older ones count as never stored."""

    @property
    def evicted(self) -> int:
        """Stored, and evicted to make room or to keep a quota."""

    @property
    def expired(self) -> int:
        """Stored, and expired."""

    @property
    def deleted(self) -> int:
        """Stored, and deleted."""

    @property
    def out_of_service(self) -> int:
        """Damaged, or in a part of the store that failed."""

    @property
    def never_stored(self) -> int:
        """Never stored, as far as the store remembers."""

    @property
    def cut_off(self) -> int:
        """In a match: stored, but an earlier block of the prefix is absent."""

    def __bool__(self) -> bool: ...

@final
class Times:
    """The prefill times of an engine: from measurements (cached tokens, new tokens, milliseconds), from the data sheet of
    `devices` devices for a known model, or from both."""

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
    """The part of a prefix that is worth restoring. Times are milliseconds."""

    @property
    def blocks(self) -> int:
        """Blocks to restore; computing continues behind them. 0: a load would be slower than computing, or no block is stored."""

    @property
    def tokens(self) -> int: ...
    @property
    def recompute_tokens(self) -> int:
        """Tokens before that boundary that are computed again."""

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
        """Time to the first token without a restore."""

    @property
    def held_ms(self) -> float:
        """Time to the first token with only the blocks in device memory."""

    @property
    def benefit_ms(self) -> float:
        """The difference of `held_ms` and `first_token_ms`."""

    @property
    def reason(self) -> str: ...
    @property
    def actions(self) -> list[tuple[int, int, int, str, int]]:
        """Group, first block, the block behind the last, action (`use`, `disk`, `recompute`, `leave out`), bytes."""

    @property
    def disk_bytes_per_second(self) -> float:
        """The rate of the store's disks, as measured by its reads."""

    @property
    def disk_outstanding_bytes(self) -> int: ...
    @property
    def disk_reads_measured(self) -> int:
        """0: no measurement yet, a typical drive is assumed."""

@final
class Lease:
    """Blocks that are protected from eviction until its time is over, or `end`. Garbage collection does not end it."""

    @property
    def blocks(self) -> int:
        """Held keys. For a match that counted other nodes (`of_cluster`), the matched blocks: of these the lease holds those on
        the server itself."""

    def renew(self, hold: float) -> None: ...
    def end(self) -> bool:
        """False if the lease had already ended."""

@final
class Layer:
    """A layer that is usable now."""

    @property
    def layer(self) -> int:
        """Its index in the execution order of the model."""

    @property
    def blocks(self) -> int:
        """Leading blocks of the request that are complete and verified, in this and all earlier layers."""

@final
class Layers(Iterator[Layer]):
    """Layers of a read, in order. After the end of the iteration or of `close` no buffer is accessed. It stops early if no block
    is usable any more, and at the deadline; `errors` has the causes."""

    def __iter__(self) -> Layers: ...
    def __next__(self) -> Layer: ...
    @property
    def arrived(self) -> int:
        """Layers that are usable now: those already returned, and those that can be taken without waiting. It does not wait."""

    @property
    def usable_blocks(self) -> int: ...
    @property
    def usable_layers(self) -> int: ...
    @property
    def errors(self) -> dict[int, Error]: ...
    @property
    def reasons(self) -> dict[str, tuple[Error, int]]:
        """The same by reason: one error of each, and the number of blocks."""

    def wait(self, timeout: float) -> bool:
        """Waits for the next layer or the end of the read, for `timeout` seconds at most; returns whether there is one. It takes
        nothing."""

    def close(self) -> None: ...

@final
class Event:
    """A change of a block."""

    @property
    def what(self) -> Literal["stored", "evicted", "expired", "deleted", "damaged", "present", "complete", "gap"]: ...
    @property
    def namespace(self) -> bytes | None:
        """None: all namespaces, as in `complete` and `gap`."""

    @property
    def key(self) -> bytes | None:
        """None: every block of the namespace."""

    @property
    def keys(self) -> list[bytes]:
        """All keys of a run; otherwise `key`, or none."""

    @property
    def group(self) -> int: ...
    @property
    def coordinate(self) -> tuple[int, int, int] | None:
        """The heads: first, count, total. None: the whole state."""

    @property
    def sequence(self) -> tuple[int, int] | None:
        """For `Client.watch(after=...)`. None: `present`."""

@final
class Events(Iterator[Event]):
    """Events in their order."""

    def __iter__(self) -> Events: ...
    def __next__(self) -> Event: ...
    def take(self, timeout: float) -> list[Event]:
        """The waiting events, after a wait for the first of `timeout` seconds at most; a gap is an event. Raises when the stream
        has ended."""
