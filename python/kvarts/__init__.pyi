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
    """A temporary failure: retry. Also raised while the server cannot be reached; a later call reconnects by itself."""

class Refused(Error):
    """Not permitted: a quota or the budget is exhausted, or a right is missing."""

class Invalid(Error, ValueError):
    """The request cannot succeed as it is: correct it."""

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
#: included), or an address: an `int` inside memory of `Client.memory` or `Client.adopt`. A buffer must be contiguous, and
#: writable for a get. It may begin at any address.
Buffer: TypeAlias = Any | _SupportsDLPack | int

#: 32 bytes as `key` or `chain` return them. Any other value (`str`, or `bytes` of another length, up to 4096) is converted
#: with `key`.
Key: TypeAlias = bytes | str

def key(*parts: bytes | str | int) -> bytes:
    """The key of a block, 32 bytes, computed from the engine's name of the block. Equal parts give equal keys on every machine, and
    different parts give different keys: `key("a", "b")` is not `key("ab")`. A single part of exactly 32 bytes is used unchanged.
    Leave out values that have their own parameter: model, revision, dtype, group and rank."""

def chain(
    tokens: Sequence[int] | Buffer, block_tokens: int, *, parent: bytes | None = None, extra: bytes | None = None
) -> list[bytes]:
    """The keys of all full blocks of a text. Each key identifies its block and all tokens before the block. `tokens` is a sequence
    of numbers below 2**32, or a buffer of uint32. `parent` is the key of the preceding block; `extra` is further data that
    determines every block (an adapter, a salt, an image)."""

def kept_windows(every: int, window: int, first: int, last: int, block_tokens: int) -> list[tuple[int, int]]:
    """Selects blocks to keep out of `first` to `last` of a chain, as ranges. It is for a group whose prefixes need only the last
    `window` tokens. It keeps the windows of the prefixes that end at the first block boundary at or behind each multiple of
    `every` tokens; 0: at every boundary."""

def window_interval(
    nbytes: int, block_tokens: int, tokens_per_second: int = 10_000, bytes_per_second: int = 2_000_000_000
) -> int:
    """The value of `every` for `kept_windows` at which writing the `nbytes` of one boundary takes as long as computing half of the
    tokens up to the next boundary. 0: keep every boundary."""

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

    `server`: the path of its socket, `HOST:PORT`, or `http(s)://HOST:PORT`; default: `$KVARTS_SERVER`, or else `127.0.0.1:7440`.
    To share memory with a server on this host, use its socket. `token`: default: the content of the file that
    `$KVARTS_TOKEN_FILE` names. `timeout`: the limit for connecting and for every call without its own timeout. TLS: `authority`,
    `certificate` and `private_key` are PEM. `threads`: threads of this client that copy and digest, 1 to 1024. `of_cluster`:
    look-ups without a hold, and matches without a plan, also find blocks of other nodes of the server's cluster, and loads fetch
    them from there. A hold of a match covers only the blocks of the server itself.

    The client reconnects by itself after an outage of the server. Raises `Retry` (reason `Away`) if the server cannot be reached
    now."""

def open(
    dirs: str | PathLike[str] | Sequence[str | PathLike[str]],
    budget: int,
    *,
    executors: int | None = None,
) -> Client:
    """Opens a store inside this process, without a server. Only one process can have its directories open: the call raises
    `Refused` (reason `Locked`) if another process has them open.

    `dirs`: one directory for each device, created if absent. `budget`: bytes on disk, never exceeded. The store is closed by
    `close`, by `with`, and at the exit of the interpreter; a process that dies loses no acknowledged block."""

@final
class Client:
    """A store of a server (`connect`) or in this process (`open`). The interface is the same."""

    @property
    def path(self) -> Literal["local", "grpc", "embedded"]:
        """How blocks travel: through memory shared with the server, over gRPC, or inside this process."""

    @property
    def held_bytes(self) -> int:
        """Bytes of shared memory that cannot be used, because a connection ended while disks were writing to them."""

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
        in any of them, in the page sizes or in `tp_size`, never share blocks. Use "none" for a feature that the engine does not
        have; model, revision, dtype, engine, layout and the layout's version are always required.

        `page_bytes`: one size, or one for each group (`{0: 65536, 1: 4096}`) of an engine with several groups of KV caches. Each
        block is then one opaque page. Or `spec`: the name of a shipped model or the text of a spec (TOML), whose blocks have
        layers and parts. `tp_rank` of `tp_size`: this process's part of the state; ranks never share pages, unless a batch sets
        `rank`. `windows`: groups of which a prefix needs only the blocks of its last tokens, with the number of tokens
        (`{1: 128}`; 0: the last block alone). A prefix needs all blocks of the other groups.

        `durable`: puts are acknowledged after a flush, otherwise after the write. `ttl`: the time to live of blocks in seconds.
        `lanes`: three eventfds (store, lookup, load) instead of one. `timeout`: of batches without one of their own; `None` is
        the client's. The call registers the model with the server."""

    def memory(self, nbytes: int) -> Memory:
        """Allocates memory into which the server's disks write directly. This process verifies the bytes in place, without a copy
        on the host. Over gRPC it is ordinary memory. The memory is freed with its last user, including views."""

    def shared_pool(self, nbytes: int) -> Pool:
        """Allocates memory that the processes of one engine share: see `Pool`. Only over the local path. The pool counts once
        against the tenant's limit of memory, and is freed with the last process that has it mapped."""

    def attach(self, name: str) -> Memory:
        """Maps the memory of a pool that another process of the same tenant has made on this server."""

    def adopt(self, buffer: Buffer, *, fd: int | None = None, offset: int = 0, nbytes: int | None = None) -> Memory:
        """Registers an engine's memory once. Buffers or addresses in it can then be used as pages without pinning and checking each
        of them.

        `fd`: the file in memory (`memfd_create`, or a file of `/dev/shm`) that `buffer` maps from `offset` on, in whole pages of
        4 KiB. The server's disks then write into the file directly, and this process verifies the bytes. The call seals the file
        against shrinking if the file allows seals; in any case the engine must not shorten it before `Memory.close` has returned.
        Without `fd`, bytes are copied once (embedded: not at all). `nbytes` is required if `buffer` is an address: the caller
        then guarantees that the memory stays mapped until `Memory.close` has returned."""

    def watch(
        self, *, after: tuple[int, int] | None = None, namespace: bytes | None = None, snapshot: bool = False, runs: bool = False
    ) -> Events:
        """Events of the blocks of the caller's tenant, or of one model that this client has registered (`Pages.namespace`). The
        iterator waits for the next event. It skips no event: it raises `Retry` (reason `EventGap`) if events were missed.

        `after`: start behind this event. `snapshot`: without `after`, begin with the present blocks: `present` for each block,
        then `complete`. With `snapshot`, a gap is an event, and the present blocks follow it again. `runs`: an event may have
        several blocks of one column."""

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

        Each of `nodes` has the values that the caller knows: `node` (its number), `store` (16 bytes: the store of the server on
        that node, which that server returns as `here`), `decodes`, `queue_ms`, `decoding`, `memory_tokens`, `device_tokens`,
        `memory_bytes_per_ms`; and optionally `disk_tokens`, `disk_bytes_per_ms`, `disk_queue_ms`, `network_bytes_per_ms`,
        `network_queue_ms`: the server fills in absent ones for nodes with a `store`. `namespace` and `keys` name the blocks of
        the prompt. The server looks them up in the groups and ranks that the latest `match` of this model on the server required
        (before the first match: in the model's first group). Without `namespace` and `keys` the server looks up no blocks.
        `owner`: a node's number, and the number of leading tokens that the node has.

        The result: `class`; `candidates` in the order of `cost_ms`, each with `node`, `action`, `cached_tokens` and the terms of
        its cost; `nodes`: for each node with a `store` its leading `blocks` (`None`: unknown), assumed values and the `trouble`;
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
        """Opens a session: a conversation that begins with these blocks. The server protects the stored ones from eviction. Only
        with a server; the token must have the right to write.

        `columns`: groups and ranks (`None`: this process's) whose blocks are held; by default every group, of this rank; `[]`
        holds no blocks. `shared_blocks`: the number of leading blocks that other sessions share, such as a system prompt; in a
        cluster the server's node claims the chain behind them. `lease`: seconds that the session lasts without a renewal, and
        therefore after the death of this process; more than ten minutes require the right to pin.

        The server computes the class and the advice of the next turn (`Session.told`) from `prompt_tokens` (0: those of the
        blocks), `engine_blocks` (leading blocks in the engine's own memory; by default the blocks that the session had before)
        and `times`."""

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
        """The number of the session. A server that takes the session over keeps the number."""

    @property
    def keys(self) -> list[bytes]:
        """The keys of all blocks of the session, in their order."""

    @property
    def told(self) -> dict[str, Any]:
        """The server's last reply: `held` (blocks of that call that are held in all columns), `class`, `tail`, `owner` (16 bytes:
        in a cluster the node that owns the session's chain and should compute its turns; else `None`) and `is_owner` (whether
        the owner is this server's node). `tail` is advice on keeping windows and states: `keep` ("nothing", "every_block",
        "every_blocks", "replay"), `every_blocks`, `tip` (whether to keep those at the turn's end), `replay_tokens`,
        `replay_ms`, `write_ms`."""

    def fork(
        self,
        blocks: int | None = None,
        *,
        prompt_tokens: int = 0,
        engine_blocks: int | None = None,
        times: Times | None = None,
    ) -> Session:
        """Opens a session that continues from the first `blocks` blocks of this one, by default from all. The server holds shared
        blocks once, as long as either session lasts."""

    def extend(
        self,
        keys: Sequence[Key],
        *,
        prompt_tokens: int = 0,
        engine_blocks: int | None = None,
        times: Times | None = None,
    ) -> dict[str, Any]:
        """Appends blocks and renews the lease; returns `told`. Call `extend` before the blocks are computed, and `hold` after the
        put of the blocks."""

    def hold(self, first: int = 0) -> dict[str, Any]:
        """Holds the stored blocks of the session from block `first` on, and renews the lease; returns `told`. `first` should be the
        beginning of the session: each call with another value adds a lease on the server, until a later hold covers it."""

    def renew(self) -> None:
        """Renews the lease for its full length, from now on."""

    def hand_over(self, to: Client) -> dict[str, Any]:
        """Moves the session to the server of the client `to`; returns `told`. The session keeps its number, and this object
        continues with it. `to` must have registered the model (`Client.pages`). The old server releases the chain first, and the
        held blocks last. If the new server refuses the session, repeat the call before the lease at the old server ends."""

    def close(self) -> bool:
        """Ends the session; returns false if it had ended already."""

    def __enter__(self) -> Session: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Memory:
    """Registered memory: `memoryview(memory.view)`, `numpy.frombuffer(memory.view, ...)`, or addresses in it."""

    @property
    def mode(self) -> Literal["adopted", "copied", "embedded"]:
        """How bytes reach the memory. `adopted`: disks write into it, and this process verifies the bytes. `copied`: this process
        copies them once. `embedded`: the store in this process writes them."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def view(self) -> memoryview:
        """The bytes. The memory is not freed while a view exists."""

    def close(self, timeout: float | None = None) -> None:
        """Ends the registration. Returns when no batch uses the memory any more; raises `Deadline` if that takes longer than
        `timeout`. Afterwards its pages can be passed as buffers like any other memory."""

@final
class Pool:
    """Memory that the processes of one engine share, and the blocks that are staged in it. The scheduler makes it; workers attach
    to its memory by its name (`Client.attach`)."""

    @property
    def name(self) -> str:
        """The name for `Client.attach`: 32 random hexadecimal digits. It is not valid for other tenants."""

    @property
    def memory(self) -> Memory:
        """The whole memory, as mapped in this process."""

    @property
    def counts(self) -> dict[str, int]:
        """The state and the counters of the pool. `bytes`, `free_bytes`; numbers of blocks: `hits` (found in the pool), `shared`
        (already being read for another stage), `read` (requested from the server), `came` (arrived), `no_room` (not read for
        lack of room), `kept` (saved in the pool and stored), `withdrawn` (deleted, expired or evicted on the server),
        `evicted` (removed from the pool to make room); `silent`: stages that ended because no block arrived."""

    def clear(self) -> None:
        """Discards every block that no stage holds. The next stage reads such a block again."""

    def stage(
        self,
        columns: Sequence[tuple[Pages, int, int | None]],
        keys: Sequence[bytes | str],
        *,
        first_block: int = 0,
        silence: float = 10.0,
    ) -> Stage:
        """Holds and reads consecutive blocks of a chain, the same blocks in every column. A column is (handle, group, rank); `None`
        is the handle's own rank. `first_block`: the index of the first block in the chain. The call does not wait."""

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
        """Reserves room for blocks that an engine saves into the pool and then puts from there. Raises `Retry` if the pool has no
        room. With `wait=False` it also raises `Retry` if another thread uses the pool at this moment: that thread may wait for a
        connection."""

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
        """The cause, if the stage ended before the last block arrived."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the stage or for `timeout`; returns `staged`."""

    def stretches(self, column: int = 0) -> list[tuple[int, int, int, int]]:
        """The positions of the staged blocks of a column, in their order: (offset of an extent in the pool, blocks of the extent,
        index of the first staged block in the extent, number of staged blocks). An extent has the form `[part][block]`, with
        the parts of all layers in the order of the shape."""

    def places(self, part: int, column: int = 0) -> list[tuple[int, int]]:
        """The positions of one part of the staged blocks, in their order: (offset in the pool, bytes)."""

    def close(self) -> None:
        """Releases the blocks of the stage, and stops reads that no other stage needs."""

@final
class Draft:
    """Room in a pool for blocks that an engine saves. Workers write the blocks there (`kvarts.gpu`); `put` stores them after the
    last write. Keep the draft as long as a device may write there. A save of this process that was given the draft keeps the
    room by itself."""

    def stretches(self) -> list[tuple[int, int, int, int]]:
        """The positions of the blocks in the order of the keys, in the form of `Stage.stretches`."""

    def put(
        self, *, parent: bytes | None = None, durable: bool = True, ttl: float | None = None, timeout: float | None = None
    ) -> list[bool]:
        """Puts the blocks from the pool and waits. Returns for each block whether it is stored, now or before. `parent`: the key of
        the block before the first one; without it the first block begins the prompt. Blocks stored by this call stay in the pool
        for later stages. Call it once."""

    @property
    def why(self) -> Error | None:
        """The error of the first block that the put did not store."""

    def close(self) -> None:
        """Releases the room in the pool."""

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
        """One for each key, in the order of the request. Put: the page is stored, now or before. Get: the page is complete and
        verified in its buffer; buffers of failed keys may have been overwritten. Exists and lock: the page can be read now.
        Delete: the page was stored and is deleted."""

    @property
    def errors(self) -> dict[int, Error]:
        """The error of each failed key. In exists and delete, an absent page is a `Miss`."""

    @property
    def reasons(self) -> dict[str, tuple[Error, int]]:
        """The errors by reason: one error of each reason, and the number of its keys. `errors` makes an exception for each key,
        which is slow for thousands of absent keys."""

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

#: The positions of blocks: a buffer for each key, exactly as long as a block (a longer one is refused); one buffer with all
#: blocks one after the other; or `Paged`.
Places: TypeAlias = Sequence[Buffer] | Buffer | Paged

@final
class Pages:
    """Batches of blocks: submitted from any thread without waiting, completed later, each exactly once, with one result for each
    key in the order of the keys. The same calls also exist in a form that waits.

    - A refused batch (an exception) has no id and no effect.
    - After the completion of a batch no thread and no disk accesses its buffers.
    - An eventfd is readable exactly while completions can be drained. `drain` resets the eventfd; a program that reads the eventfd
      must do so before it drains.
    - A repeated key in one batch has the result of its first position. In a get, the other positions fail with `Invalid` (reason
      `Duplicate`), and their buffers are not written.
    - `timeout` (seconds): keys without a result by then fail with `Deadline`, soon after, even if the server has stopped; only a
      get straight into memory of mode adopted waits until the disk has finished.
    - `group` (default 0) and `rank` (default: this process's): one for all keys, or a sequence with one for each.
    """

    @property
    def namespace(self) -> bytes:
        """The name of the identity, 32 bytes."""

    @property
    def under_way(self) -> int:
        """The number of submitted batches that were not drained yet."""

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
        """Looks up pages as `submit_exists` does, and protects the stored ones from eviction for `hold` seconds, or until
        `unlock`."""

    def unlock(self, what: int | Sequence[Key]) -> None:
        """Ends the locks of the batch with this id, or one lock on each of these keys. The call does not wait."""

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
        """Ends a batch early: it completes soon, once, with `Retry` (reason `Cancelled`) for unfinished keys. Returns false if the
        batch had completed already."""

    def drain(self, lane: Literal["store", "lookup", "load"] | None = None) -> list[Completion]:
        """Returns the pending completions, of all lanes or of one. The call does not wait."""

    def wait(self, timeout: float | None = None) -> list[Completion]:
        """Returns the pending completions; waits for the first one if there is none. Returns an empty list after `timeout` seconds,
        or if no batch is under way."""

    def fileno(self) -> int:
        """The eventfd (`lanes=False`), for select, poll and asyncio. The handle owns the eventfd: do not close it."""

    def event_fd(self, lane: Literal["store", "lookup", "load"]) -> int:
        """The eventfd of a lane. With `lanes=True` each lane has its own eventfd, otherwise all lanes have the same one."""

    def close(self, timeout: float | None = None) -> None:
        """Cancels batches under way, discards completions that were not drained, and ends the locks. After its return no buffer of
        this handle is accessed. Raises `Deadline` if that takes longer than `timeout` (default: the client's): the module then
        keeps those buffers, and `close` may be called again. Later submissions raise `Retry` (reason `Closed`)."""

    # The same operations as calls that wait. They raise errors of the whole call; errors of single keys are in the result.

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
        """Counts the absent blocks among these keys by cause. After a get: `pages.missing([keys[at] for at in answer.errors])`. The
        call is a look-up; stored blocks are not counted."""

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
        """Finds the longest prefix of these consecutive blocks that can be restored now: up to the last block boundary at which
        every required part of every group and rank is stored. With `hold`, its blocks are protected from eviction for `hold`
        seconds.

        With `times` the result has a `plan`: the part of the prefix that the disks, at their present speed, load faster than the
        engine computes it, with the reason. `prompt_tokens`: tokens of the prompt (default: one more than the blocks have).
        `hbm_blocks`: leading blocks that are in device memory already. `hbm_boundaries`: the boundaries, in blocks, at which
        device memory has windows and states. `overlap`: `layers`: the engine computes each layer as soon as it is loaded; `none`:
        the engine starts when all blocks are loaded, as engines do that load whole blocks."""

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
        """Reads blocks layer by layer. Returns an iterator that yields each layer when the layer is usable. The destination is
        either `buffers`, or `layer_buffers`: a buffer for each layer of the blocks (in the form `[part][block]`; `None` for layers
        that are not read). `layers`: a consecutive range of the model's layers; default: all."""

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
        """The plan, if `times` was given. The lease holds all of `blocks`, even if the plan uses fewer."""

@final
class Missing:
    """Counts of blocks that cannot be restored, by cause. `str` lists the causes whose count is not 0; the object is false if all
    counts are 0. A store remembers a bounded number of removed blocks since it was opened: older ones count as never stored."""

    @property
    def evicted(self) -> int:
        """Blocks that were evicted to make room or to keep a quota."""

    @property
    def expired(self) -> int:
        """Blocks whose time to live has passed."""

    @property
    def deleted(self) -> int:
        """Blocks that were deleted."""

    @property
    def out_of_service(self) -> int:
        """Blocks that are damaged, or lie in a part of the store that failed."""

    @property
    def never_stored(self) -> int:
        """Blocks that were never stored, as far as the store remembers."""

    @property
    def cut_off(self) -> int:
        """In a match: blocks that are stored, but behind an absent block of the prefix."""

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
        """Blocks to restore; the engine computes the rest. 0: a load would be slower than computing, or no block is stored."""

    @property
    def tokens(self) -> int: ...
    @property
    def recompute_tokens(self) -> int:
        """Tokens before the end of the restored blocks that the engine computes again."""

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
        """The time that the restore saves: `held_ms` minus `first_token_ms`."""

    @property
    def reason(self) -> str: ...
    @property
    def actions(self) -> list[tuple[int, int, int, str, int]]:
        """Group, first block, the block behind the last, action (`use`, `disk`, `recompute`, `leave out`), bytes."""

    @property
    def disk_bytes_per_second(self) -> float:
        """The rate of the store's disks, as measured on the store's reads."""

    @property
    def disk_outstanding_bytes(self) -> int: ...
    @property
    def disk_reads_measured(self) -> int:
        """The number of measured reads. 0: no measurement yet, the plan assumes a typical drive."""

@final
class Lease:
    """Protects blocks from eviction until its time is over, or until `end`. Garbage collection of this object does not end it."""

    @property
    def blocks(self) -> int:
        """The number of held keys. For a match that counted other nodes (`of_cluster`), the number of matched blocks; the lease holds
        those that are on the server itself."""

    def renew(self, hold: float) -> None: ...
    def end(self) -> bool:
        """Ends the lease; returns false if the lease had ended already."""

@final
class Layer:
    """A layer that is usable now."""

    @property
    def layer(self) -> int:
        """The index of the layer in the execution order of the model."""

    @property
    def blocks(self) -> int:
        """Leading blocks of the request that are complete and verified, in this and all earlier layers."""

@final
class Layers(Iterator[Layer]):
    """Layers of a read, in order. After the end of the iteration or of `close` no buffer is accessed. The iteration stops early if
    no block is usable any more, and at the deadline; `errors` has the causes."""

    def __iter__(self) -> Layers: ...
    def __next__(self) -> Layer: ...
    @property
    def arrived(self) -> int:
        """The number of layers that are usable now: those already returned, and those that the iterator returns without waiting. The
        call does not wait."""

    @property
    def usable_blocks(self) -> int: ...
    @property
    def usable_layers(self) -> int: ...
    @property
    def errors(self) -> dict[int, Error]: ...
    @property
    def reasons(self) -> dict[str, tuple[Error, int]]:
        """The errors by reason: one error of each reason, and the number of its blocks."""

    def wait(self, timeout: float) -> bool:
        """Waits for the next layer or the end of the read, for `timeout` seconds at most; returns whether a layer is ready. The
        iterator still returns this layer."""

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
        """All keys of a run; otherwise `key` alone, or no keys."""

    @property
    def group(self) -> int: ...
    @property
    def coordinate(self) -> tuple[int, int, int] | None:
        """The heads of the block: first, count, total. None: the whole state."""

    @property
    def sequence(self) -> tuple[int, int] | None:
        """The position of the event, for `Client.watch(after=...)`. None for `present` events."""

@final
class Events(Iterator[Event]):
    """Events in their order."""

    def __iter__(self) -> Events: ...
    def __next__(self) -> Event: ...
    def take(self, timeout: float) -> list[Event]:
        """Returns the pending events; waits for the first one for `timeout` seconds at most. A gap is an event. Raises an error when
        the stream has ended."""
