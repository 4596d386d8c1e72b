"""KV-cache blocks on disk, shared between processes and kept across restarts.

Guarantees of all calls:

- A read has one of three results: exactly the bytes that one producer put under that key and identity, an error, or a miss. A
  read never returns other bytes, a mix of two producers' bytes, or another tenant's bytes.
- The module keeps the buffers of a batch until no disk and no thread accesses them any more, even if the caller drops the
  buffers, closes the handle, or exits. The caller must not use a buffer between the submission and the completion of its batch.
- The interpreter's lock is released during waits and digests. Requests do not each need a thread.
- Wrong arguments raise an exception that names the argument. No argument can crash the process, including addresses (`int`)
  outside registered memory.
- After `os.fork` a client belongs to the parent. In the child each call raises `Invalid` (reason `Forked`), and dropping the
  objects has no effect. Connect again in the child.
- At the exit of the interpreter, the module cancels all requests and waits at most two seconds for their end. It does not free
  memory that a disk still writes to after this time.

All methods may be called from any thread.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, final

from typing_extensions import Self

__version__: str

class Error(Exception):
    """The base of all errors. The subclass determines how the caller must react. `reason` names the cause in one word that does
    not change between versions (`NotHere`, `Quota`, `Digest`, ...). The text is for people."""

    reason: str
    kind: Literal["miss", "retry", "refused", "invalid", "deadline", "corrupt", "read_only", "bug"]

    def __init__(self, text: str = "", reason: str = "") -> None: ...

class Miss(Error):
    """The block is not stored: compute the block."""

class Retry(Error):
    """A temporary failure: retry. Calls also raise this error while the server cannot be reached; a later call reconnects
    automatically."""

class Refused(Error):
    """Not permitted: a quota or the budget is exhausted, or a right is missing."""

class Invalid(Error, ValueError):
    """The request is wrong and can never succeed: correct the request."""

class Deadline(Error, TimeoutError):
    """The timeout passed before the result was available."""

class Corrupt(Error):
    """The block is damaged on disk: compute the block. The damage has been logged and counted."""

class ReadOnly(Error):
    """The store refuses writes after a fault; reads continue."""

class Bug(Error):
    """A defect in Kvarts: report it."""

class _SupportsDLPack(Protocol):
    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

#: Anything with the buffer protocol (memoryview, numpy, mmap, bytearray), a DLPack tensor on the CPU (torch, bfloat16
#: included), or an address: an `int` inside memory of `Client.memory` or `Client.adopt`. A buffer must be contiguous. A buffer
#: of a get must be writable. A buffer may begin at any address.
Buffer: TypeAlias = Any | _SupportsDLPack | int

#: The key of a block: 32 bytes as `key` or `chain` return them. Any other value (`str`, or `bytes` of another length, up to 4096
#: bytes) is converted with `key`.
Key: TypeAlias = bytes | str

def key(*parts: bytes | str | int) -> bytes:
    """Computes the key of a block (32 bytes) from the engine's name of the block. Equal parts have equal keys on every machine, and
    different parts have different keys: `key("a", "b")` is not `key("ab")`. A single part of exactly 32 bytes is used unchanged.
    Leave out values that are arguments of `Client.pages` or of a batch: model, revision, dtype, group and rank."""

def chain(
    tokens: Sequence[int] | Buffer, block_tokens: int, *, parent: bytes | None = None, extra: bytes | None = None
) -> list[bytes]:
    """Computes the keys of all full blocks of a sequence of tokens. Each key identifies its block and all tokens before the block.
    `tokens` is a sequence of numbers below 2**32, or a buffer of uint32. `parent` is the key of the block before the first token.
    `extra` is further data on which the bytes of every block depend (an adapter, a salt, an image)."""

def kept_windows(every: int, window: int, first: int, last: int, block_tokens: int) -> list[tuple[int, int]]:
    """Selects the blocks to keep among the blocks `first` to `last` of a chain, and returns ranges of blocks. The function is for
    groups in which a prefix needs only its last `window` tokens. For each multiple of `every` tokens, it takes the first block
    boundary at or after this multiple, and keeps the window before this boundary. If `every` is 0, it keeps the window before
    every boundary."""

def window_interval(
    nbytes: int, block_tokens: int, tokens_per_second: int = 10_000, bytes_per_second: int = 2_000_000_000
) -> int:
    """Computes the value of `every` for `kept_windows`. With this value, writing the `nbytes` of one kept boundary takes as long as
    computing half of the tokens up to the next kept boundary. 0 means: keep every boundary."""

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
    """Connects to a server (`kvarts serve`) and returns a client.

    - `server`: the path of the server's socket, `HOST:PORT`, or `http(s)://HOST:PORT`. The default is `$KVARTS_SERVER`; without
      this variable it is `127.0.0.1:7440`. To share memory with a server on this host, use the path of its socket.
    - `token`: by default the content of the file that `$KVARTS_TOKEN_FILE` names.
    - `timeout`: the limit in seconds for connecting, and for every call without its own timeout.
    - `authority`, `certificate` and `private_key` (PEM): for TLS.
    - `threads`: the number of threads of this client that copy and digest, 1 to 1024.
    - `of_cluster`: look-ups without a hold, and matches without a plan, also find blocks on other nodes of the server's cluster.
      Loads fetch these blocks from the other nodes. A hold of a match covers only the blocks of the server itself.

    The client reconnects automatically after an outage of the server. Raises `Retry` (reason `Away`) if the server cannot be
    reached now."""

def open(
    dirs: str | PathLike[str] | Sequence[str | PathLike[str]],
    budget: int,
    *,
    executors: int | None = None,
) -> Client:
    """Opens a store inside this process, without a server. Only one process can have the directories of a store open. The call
    raises `Refused` (reason `Locked`) if another process has them open.

    `dirs`: one directory for each device. Absent directories are created. `budget`: the limit on the bytes on disk; the store
    never exceeds it. `close`, the end of `with`, and the exit of the interpreter close the store. If the process dies, no
    acknowledged block is lost."""

@final
class Client:
    """A store on a server (`connect`) or in this process (`open`). Both have the same interface."""

    @property
    def path(self) -> Literal["local", "grpc", "embedded"]:
        """The path of blocks: `local` (through memory shared with the server), `grpc` (over gRPC), or `embedded` (inside this
        process)."""

    @property
    def held_bytes(self) -> int:
        """Bytes of shared memory that cannot be used, because a connection ended while disks were writing to these bytes."""

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
        """Registers a model with the server or the store, and returns a handle on the blocks of its identity. All arguments from `model` to
        `extras` determine the bytes of blocks. Handles never share blocks if they differ in one of these arguments, in the page
        sizes or in `tp_size`. Use "none" for a feature that the engine does not have. `model`, `revision`, `dtype`, `engine`,
        `layout` and `layout_version` always need a value.

        Give either `page_bytes` or `spec`:

        - `page_bytes`: each block is one opaque page of this size. An engine with several groups (KV caches) gives a size for each
          group (`{0: 65536, 1: 4096}`).
        - `spec`: blocks have layers and parts. The value is the name of a shipped model, or the text of a spec (TOML).

        Other arguments:

        - `tp_rank` and `tp_size`: this process has part `tp_rank` of `tp_size` parts of the state. Ranks never share pages, unless
          a batch sets `rank`.
        - `windows`: the groups in which a prefix needs only the blocks of its last tokens, with the number of these tokens
          (`{1: 128}`). 0 means the last block alone. A prefix needs all blocks of the other groups.
        - `durable`: puts are acknowledged after a flush. Otherwise they are acknowledged after the write.
        - `ttl`: the time to live of blocks in seconds.
        - `lanes`: the handle has three eventfds (store, lookup, load) instead of one.
        - `timeout`: the timeout of batches without their own timeout. `None` selects the timeout of the client."""

    def memory(self, nbytes: int) -> Memory:
        """Allocates memory into which the server's disks write directly. This process verifies the bytes in place, without a copy
        on the host. If the client uses gRPC, the memory is ordinary memory. The memory is freed after its last user, including
        views, has released it."""

    def shared_pool(self, nbytes: int) -> Pool:
        """Allocates memory that the processes of one engine share: see `Pool`. The call requires the local path. The pool counts
        once against the tenant's limit of memory. It is freed when no process has it mapped any more."""

    def attach(self, name: str) -> Memory:
        """Maps the memory of a pool that another process of the same tenant has created on this server. `name`: the pool's
        `Pool.name`."""

    def adopt(self, buffer: Buffer, *, fd: int | None = None, offset: int = 0, nbytes: int | None = None) -> Memory:
        """Registers memory of an engine. Buffers and addresses in this memory can then be used as pages, and batches need not pin
        and check each of them.

        - `fd`: the in-memory file (`memfd_create`, or a file of `/dev/shm`) that `buffer` maps from `offset` on, in whole pages of
          4 KiB. The server's disks then write directly into the file, and this process verifies the bytes. If the file allows
          seals, the call seals the file against shrinking. The engine must not shorten the file before `Memory.close` has
          returned. Without `fd`, bytes are copied once by a client of a server, and not at all by a store in this process.
        - `nbytes`: required if `buffer` is an address. The caller then guarantees that the memory stays mapped until
          `Memory.close` has returned."""

    def watch(
        self, *, after: tuple[int, int] | None = None, namespace: bytes | None = None, snapshot: bool = False, runs: bool = False
    ) -> Events:
        """Returns an iterator over the events of all blocks of the caller's tenant. With `namespace`, it returns only the events of
        one model that this client has registered (`Pages.namespace`). The iterator waits for the next event. If events were
        missed, the iterator raises `Retry` (reason `EventGap`).

        - `after`: the iterator begins after this event (`Event.sequence`).
        - `snapshot`: without `after`, the iterator begins with the blocks that are stored now: a `present` event for each block,
          then a `complete` event. Missed events are then a `gap` event instead of an error, and a new snapshot follows it.
        - `runs`: one event may have several blocks of one column."""

    def stats(self) -> dict[str, Any]:
        """The state and the counters of the store."""

    def models(self) -> list[dict[str, Any]]:
        """The models of the caller's tenant that were registered since the server started, or that have blocks in the store. Each
        model has `namespace`, `model`, `revision`, `dtype`, `engine`, `layout`, `block_tokens`, `layers`, `registered` and
        `last_used_ms`. The call requires a server."""

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
        """Chooses the node for a request. The call requires a server.

        Each of `nodes` has the values that the caller has measured or chosen:

        - `node`: the number of the node.
        - `store` (16 bytes): the store of the node's server. This server returns the value as `here`.
        - `decodes`, `queue_ms`, `decoding`, `memory_tokens`, `device_tokens`, `memory_bytes_per_ms`.
        - Optional: `disk_tokens`, `disk_bytes_per_ms`, `disk_queue_ms`, `network_bytes_per_ms`, `network_queue_ms`. If a node has a
          `store`, the server supplies the values that are absent.

        `namespace` and `keys` identify the blocks of the prompt. The server looks these blocks up in the groups and ranks that the
        latest `match` of this model on the server required. Before the first match it looks them up in the model's first group.
        Without `namespace` and `keys` the server looks up no blocks. `owner`: the number of a node, and the number of leading
        tokens that this node has.

        The result has these keys:

        - `class`.
        - `candidates`, in the order of `cost_ms`. Each has `node`, `action`, `cached_tokens` and the terms of its cost.
        - `nodes`: for each node with a `store`, the number of its leading `blocks` (`None`: unknown), the assumed values, and
          `trouble`.
        - `here`, `owner`, `owner_has_lease`, `leased_by`, and `bucket_blocks` (`None`: unknown).
        - `unasked`: the number of blocks for which the directory did not answer in time."""

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
        """Opens a session for a conversation that begins with these blocks. The server protects the stored blocks of the session
        from eviction. The call requires a server and a token with the right to write.

        - `columns`: the groups and ranks whose blocks the session holds. The rank `None` is the rank of this process. By default
          the session holds every group of this rank; with `[]` it holds no blocks.
        - `shared_blocks`: the number of leading blocks that other sessions share, such as a system prompt. In a cluster the
          server's node claims the chain after these blocks.
        - `lease`: the number of seconds that the session lasts without a renewal, for example after the death of this process. More
          than ten minutes require the right to pin.

        The server computes the class and the advice for the next turn (`Session.told`) from these arguments:

        - `prompt_tokens`: the tokens of the prompt. 0 means the tokens of the blocks.
        - `engine_blocks`: the leading blocks in the engine's own memory. By default, the blocks that the session had before.
        - `times`."""

    def close(self, timeout: float | None = None) -> None:
        """Closes all handles (see `Pages.close`), and closes the connection or the store. Sessions end with their lease."""

    def __enter__(self) -> Client: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Session:
    """A conversation whose blocks a server holds. A session lasts until `close`, the end of `with`, or the end of its lease. No
    thread renews the lease automatically, so a stalled process does not hold blocks forever. After the session has ended or its
    server was restarted, calls raise `Refused` (reason `LeaseEnded`): open a new session. Calls of one session run one after
    another."""

    @property
    def id(self) -> int:
        """The number of the session. It stays the same if the session moves to another server."""

    @property
    def keys(self) -> list[bytes]:
        """The keys of all blocks of the session, in their order."""

    @property
    def told(self) -> dict[str, Any]:
        """The server's last reply:

        - `held`: the number of blocks of that call that are held in all columns.
        - `class`.
        - `owner` (16 bytes): in a cluster, the node that owns the session's chain and should compute its turns. Otherwise `None`.
        - `is_owner`: whether the owner is the node of this server.
        - `tail`: advice on keeping windows and states. It has `keep` ("nothing", "every_block", "every_blocks", "replay"),
          `every_blocks`, `tip` (whether to keep the windows and states at the end of the turn), `replay_tokens`, `replay_ms` and
          `write_ms`."""

    def fork(
        self,
        blocks: int | None = None,
        *,
        prompt_tokens: int = 0,
        engine_blocks: int | None = None,
        times: Times | None = None,
    ) -> Session:
        """Opens a session that continues from the first `blocks` blocks of this session, by default from all. The server holds the
        shared blocks once, until both sessions have ended."""

    def extend(
        self,
        keys: Sequence[Key],
        *,
        prompt_tokens: int = 0,
        engine_blocks: int | None = None,
        times: Times | None = None,
    ) -> dict[str, Any]:
        """Appends blocks, and renews the lease. Returns `told`. Call `extend` before the engine computes the blocks, and `hold`
        after the put of the blocks."""

    def hold(self, first: int = 0) -> dict[str, Any]:
        """Holds the stored blocks of the session from block `first` on, and renews the lease. Returns `told`. `first` should be 0.
        Each call with another value adds a lease on the server, which lasts until a later hold covers its blocks."""

    def renew(self) -> None:
        """Renews the lease: its full length begins again now."""

    def hand_over(self, to: Client) -> dict[str, Any]:
        """Moves the session to the server of the client `to`. Returns `told`. The session keeps its number, and this object
        continues on the new server. `to` must have registered the model (`Client.pages`). The old server releases the chain
        first, and the held blocks last. If the new server refuses the session, repeat the call before the lease at the old
        server ends."""

    def close(self) -> bool:
        """Ends the session. Returns false if the session had already ended."""

    def __enter__(self) -> Session: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Memory:
    """Registered memory: `memoryview(memory.view)`, `numpy.frombuffer(memory.view, ...)`, or addresses in it."""

    @property
    def mode(self) -> Literal["adopted", "copied", "embedded"]:
        """How bytes reach the memory. `adopted`: the server's disks write into the memory, and this process verifies the bytes.
        `copied`: this process copies the bytes once. `embedded`: the store in this process writes the bytes."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def view(self) -> memoryview:
        """A view of the bytes. The memory is not freed while a view exists."""

    def close(self, timeout: float | None = None) -> None:
        """Ends the registration. Returns when no batch uses the memory any more. Raises `Deadline` if this takes longer than
        `timeout`. Afterwards, buffers in this memory can be passed like buffers in any other memory."""

@final
class Pool:
    """Memory that the processes of one engine share, and the blocks that are staged in this memory. The scheduler creates the pool
    (`Client.shared_pool`); workers attach to its memory by its name (`Client.attach`)."""

    @property
    def name(self) -> str:
        """The name for `Client.attach`: 32 random hexadecimal digits. Clients of other tenants cannot use the name."""

    @property
    def memory(self) -> Memory:
        """The whole memory of the pool, mapped into this process."""

    @property
    def counts(self) -> dict[str, int]:
        """The state and the counters of the pool:

        - `bytes`, `free_bytes`.
        - Numbers of blocks: `hits` (found in the pool), `shared` (already being read for another stage), `read` (requested from
          the server), `came` (arrived), `no_room` (not read for lack of room), `kept` (saved in the pool and stored),
          `withdrawn` (deleted, expired or evicted on the server), `evicted` (removed from the pool to make room).
        - `silent`: the number of stages that ended because no block arrived."""

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
        """Reads consecutive blocks of a chain into the pool, the same blocks in every column, and holds them there. A column is
        (handle, group, rank); the rank `None` is the rank of the handle. `first_block`: the index of the first block in the
        chain. `silence`: see `Stage`. The call does not wait."""

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
        """Reserves room in the pool for blocks that an engine saves there and then puts. Raises `Retry` if the pool has no room. With
        `wait=False`, it also raises `Retry` if another thread uses the pool at this moment. That thread may wait for a
        connection."""

@final
class Stage:
    """The blocks of one request in a pool. A stage reads the blocks and holds them. It ends when all blocks are present, when the
    next block cannot be read, or when no block arrives for `silence` seconds. Staged blocks stay in place until `close`, even
    if a disk, a network or a server fails."""

    @property
    def staged(self) -> int:
        """Leading blocks that are present in every column, including all that have arrived so far."""

    @property
    def is_over(self) -> bool:
        """Whether the stage has ended."""

    @property
    def why(self) -> Error | None:
        """The cause if the stage ended before the last block arrived; otherwise `None`."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the stage, at most `timeout` seconds. Returns `staged`."""

    def stretches(self, column: int = 0) -> list[tuple[int, int, int, int]]:
        """The positions of the staged blocks of a column, in the order of the keys. Each is (offset of an extent in the pool, blocks
        of the extent, index of the first staged block in the extent, number of staged blocks). An extent has the form
        `[part][block]`, with the parts of all layers in the order of `Pages.parts`."""

    def places(self, part: int, column: int = 0) -> list[tuple[int, int]]:
        """The positions of one part of the staged blocks, in the order of the keys. Each is (offset in the pool, bytes)."""

    def close(self) -> None:
        """Releases the blocks of the stage, and stops reads that no other stage needs."""

@final
class Draft:
    """Room in a pool for blocks that an engine saves. Workers write the blocks there (`kvarts.gpu`). After the last write, `put`
    stores the blocks. Keep the draft as long as a device may write to its room. If a save of this process has the draft as its
    argument `draft`, this save keeps the room."""

    def stretches(self) -> list[tuple[int, int, int, int]]:
        """The positions of the blocks in the order of the keys, in the form of `Stage.stretches`."""

    def put(
        self, *, parent: bytes | None = None, durable: bool = True, ttl: float | None = None, timeout: float | None = None
    ) -> list[bool]:
        """Puts the blocks from the pool and waits. Returns for each block whether this put or an earlier put stored it. `parent`: the
        key of the block before the first block; without `parent` the first block begins the prompt. Blocks that this call stores
        stay in the pool for later stages. A draft can be put only once."""

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
        """One value for each key, in the order of the request. True means:

        - put: this put or an earlier put stored the page.
        - get: the page is complete and verified in its buffer. The buffers of failed keys may have been overwritten.
        - exists and lock: the page can be read now.
        - delete: the page was stored and is deleted."""

    @property
    def errors(self) -> dict[int, Error]:
        """The error of each failed key, by the position of the key. In exists and delete, an absent page is a `Miss`."""

    @property
    def reasons(self) -> dict[str, tuple[Error, int]]:
        """The errors by reason: one error for each reason, and the number of keys with this reason. `errors` makes an exception for
        each key, which is slow for thousands of absent keys."""

    @property
    def error(self) -> Error | None:
        """The first error."""

    @property
    def prefix(self) -> int:
        """The number of leading keys that succeeded."""

    @property
    def written(self) -> int:
        """The number of pages that a put wrote, without the pages that were already stored."""

@final
class Paged:
    """Blocks in the slots of an engine's buffers. Part `p` of block `i` begins at byte `parts[p][1] + slots[i] * parts[p][2]` of the
    buffer `parts[p][0]`. `parts` has an element (buffer, offset, stride) for each part of a block, in the order of the spec. For
    opaque pages it has one element. The element is `None` for parts of layers that are not read."""

    def __new__(cls, parts: Sequence[tuple[Buffer, int, int] | None], slots: Sequence[int]) -> Self: ...

#: The positions of blocks: a buffer for each key, with exactly the length of a block (longer buffers are refused); or one buffer
#: with all blocks one after the other; or `Paged`.
Places: TypeAlias = Sequence[Buffer] | Buffer | Paged

@final
class Pages:
    """A handle on the blocks of one identity. Any thread submits batches of keys without waiting. Each batch completes later, exactly
    once, with one result for each key in the order of the keys. The same operations also exist as calls that wait.

    - A refused batch (an exception) has no id and no effect.
    - After the completion of a batch no thread and no disk accesses its buffers.
    - An eventfd is readable exactly while completions can be drained. `drain` resets the eventfd; a program that reads the eventfd
      must do so before it drains.
    - A repeated key in one batch has the result of its first position. In a get, the other positions fail with `Invalid` (reason
      `Duplicate`), and their buffers are not written.
    - `timeout` (seconds): keys without a result at this time fail with `Deadline` soon afterwards, even if the server has stopped.
      One exception: a get directly into memory of the mode `adopted` completes only after the disk has finished.
    - `group` (default: 0) and `rank` (default: the rank of this process): one value for all keys, or a sequence with one value for
      each key.
    """

    @property
    def namespace(self) -> bytes:
        """The name of the identity, 32 bytes."""

    @property
    def under_way(self) -> int:
        """The number of submitted batches that have not been drained."""

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
        """Stores a page under each key. After the completion, every get returns the first page that was put under the key. `parent`
        declares that the keys are consecutive blocks of one prompt. Its value is the key of the block before them; `b""` means
        that they begin the prompt. `ttl`: the time to live of these blocks in seconds (default: the `ttl` of the handle)."""

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
        """Looks up pages as `submit_exists` does, and protects the stored pages from eviction for `hold` seconds, or until
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
        """Deletes blocks. After the completion the deleted blocks can never be read again."""

    def cancel(self, id: int) -> bool:
        """Ends a batch early. The batch soon completes, with `Retry` (reason `Cancelled`) for its unfinished keys. Returns false if
        the batch had already completed."""

    def drain(self, lane: Literal["store", "lookup", "load"] | None = None) -> list[Completion]:
        """Returns the pending completions of all lanes, or of the given lane. The call does not wait."""

    def wait(self, timeout: float | None = None) -> list[Completion]:
        """Returns the pending completions. If there is none, the call waits for the first completion. Returns an empty list after
        `timeout` seconds, or if no batch is in progress."""

    def fileno(self) -> int:
        """The eventfd of a handle with `lanes=False`, for select, poll and asyncio. The handle owns the eventfd: do not close it."""

    def event_fd(self, lane: Literal["store", "lookup", "load"]) -> int:
        """The eventfd of a lane. With `lanes=True` each lane has its own eventfd. Otherwise all lanes have the same eventfd."""

    def close(self, timeout: float | None = None) -> None:
        """Cancels the batches in progress, discards completions that were not drained, and ends the locks. After the call has
        returned, no buffer of this handle is accessed. Raises `Deadline` if this takes longer than `timeout` (default: the
        timeout of the client). The module then keeps the buffers, and `close` may be called again. Later submissions raise
        `Retry` (reason `Closed`)."""

    # The same operations as calls that wait. They raise errors of the whole call. Errors of single keys are in the result.

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
        """Counts the absent blocks among these keys by cause. The call looks the keys up, and does not count stored blocks. After a
        get, pass the keys that failed: `pages.missing([keys[at] for at in answer.errors])`."""

    def delete(
        self,
        keys: Sequence[Key],
        *,
        group: int | Sequence[int] | None = None,
        rank: int | Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Completion: ...
    def delete_all(self) -> int:
        """Deletes every block of this identity, in all groups and ranks. Returns the number of deleted blocks."""

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
        """Finds the longest prefix of these consecutive blocks that can be restored now. The prefix ends at the last block boundary at
        which every required part of every group and rank is stored. With `hold`, the blocks of the prefix are protected from
        eviction for `hold` seconds.

        With `times` the result has a `plan`, with a reason. The plan selects the part of the prefix that the disks, at their
        present speed, load faster than the engine computes it. Arguments of the plan:

        - `prompt_tokens`: the number of tokens of the prompt. By default, one more than the blocks have.
        - `hbm_blocks`: the number of leading blocks that are already in device memory.
        - `hbm_boundaries`: the boundaries, in blocks, at which device memory has windows and states.
        - `overlap`: with `layers`, the engine computes each layer as soon as the layer is loaded. With `none`, the engine starts
          when all blocks are loaded."""

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
        """Reads blocks layer by layer. Returns an iterator that yields each layer as soon as the layer is usable. The destination is
        either `buffers` or `layer_buffers`. `layer_buffers` has one buffer for each layer, in the form `[part][block]`, and `None`
        for layers that are not read. `layers`: a consecutive range of the model's layers (default: all)."""

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
        """Leading blocks that can be restored after the puts in progress have ended."""

    @property
    def missing(self) -> Missing:
        """Counts the blocks after the prefix that cannot be restored, by cause."""

    @property
    def lease(self) -> Lease | None: ...
    @property
    def plan(self) -> Plan | None:
        """The plan if `times` was given; otherwise `None`. The lease holds all blocks of the prefix, even if the plan uses fewer
        blocks."""

@final
class Missing:
    """Counts of blocks that cannot be restored, by cause. `str` lists the causes whose count is not 0. The object is false if all
    counts are 0. A store records the causes of a limited number of removed blocks, beginning with its start. All other absent
    blocks count as never stored."""

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
        """Blocks that were never stored, and blocks that were removed so long ago that the store has no record of the cause."""

    @property
    def cut_off(self) -> int:
        """In a match: blocks that are stored, but come after an absent block of the prefix."""

    def __bool__(self) -> bool: ...

@final
class Times:
    """The prefill times of an engine. They come from measurements (cached tokens, new tokens, milliseconds), from the data sheet of
    a device for a known model, or from both. `devices` is the number of devices."""

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
    """The part of a prefix that is worth restoring. Times are in milliseconds."""

    @property
    def blocks(self) -> int:
        """The number of blocks to restore; the engine computes the rest. 0 means that a load would be slower than computing, or that
        no block is stored."""

    @property
    def tokens(self) -> int: ...
    @property
    def recompute_tokens(self) -> int:
        """The number of tokens that the engine computes again although they lie before the end of the restored blocks."""

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
        """Each action is (group, first block, last block + 1, action, bytes). The action is `use`, `disk`, `recompute` or `leave
        out`."""

    @property
    def disk_bytes_per_second(self) -> float:
        """The read rate of the store's disks, measured from the store's reads."""

    @property
    def disk_outstanding_bytes(self) -> int: ...
    @property
    def disk_reads_measured(self) -> int:
        """The number of measured reads. If it is 0, the plan assumes the speed of a typical drive."""

@final
class Lease:
    """Protects blocks from eviction until the lease expires, or until `end`. Garbage collection of this object does not end the
    lease."""

    @property
    def blocks(self) -> int:
        """The number of held keys. If the match also counted blocks of other nodes (`of_cluster`), it is the number of matched blocks;
        the lease then holds only the blocks that are on the server itself."""

    def renew(self, hold: float) -> None: ...
    def end(self) -> bool:
        """Ends the lease. Returns false if the lease had already ended."""

@final
class Layer:
    """A layer that is usable now."""

    @property
    def layer(self) -> int:
        """The index of the layer in the execution order of the model."""

    @property
    def blocks(self) -> int:
        """The number of leading blocks of the request that are complete and verified in this layer and all earlier layers."""

@final
class Layers(Iterator[Layer]):
    """The layers of a read, in order. After the end of the iteration or after `close`, no buffer is accessed. The iteration stops
    early if no block is usable any more, or at the deadline. `errors` has the causes."""

    def __iter__(self) -> Layers: ...
    def __next__(self) -> Layer: ...
    @property
    def arrived(self) -> int:
        """The number of layers that are usable now, including the layers that the iterator has already returned. The call does not
        wait."""

    @property
    def usable_blocks(self) -> int: ...
    @property
    def usable_layers(self) -> int: ...
    @property
    def errors(self) -> dict[int, Error]: ...
    @property
    def reasons(self) -> dict[str, tuple[Error, int]]:
        """The errors by reason: one error for each reason, and the number of blocks with this reason."""

    def wait(self, timeout: float) -> bool:
        """Waits for the next layer or the end of the read, at most `timeout` seconds. Returns whether a layer is ready. The iterator
        returns this layer next."""

    def close(self) -> None: ...

@final
class Event:
    """A change of a block."""

    @property
    def what(self) -> Literal["stored", "evicted", "expired", "deleted", "damaged", "present", "complete", "gap"]: ...
    @property
    def namespace(self) -> bytes | None:
        """The namespace of the block. `None` means all namespaces, as in `complete` and `gap` events."""

    @property
    def key(self) -> bytes | None:
        """The key of the block. `None` means every block of the namespace."""

    @property
    def keys(self) -> list[bytes]:
        """All keys of an event with several blocks. For other events, `key` alone, or an empty list if `key` is `None`."""

    @property
    def group(self) -> int: ...
    @property
    def coordinate(self) -> tuple[int, int, int] | None:
        """The heads that the block has: (first, count, total). `None` means that the block has the whole state."""

    @property
    def sequence(self) -> tuple[int, int] | None:
        """The position of the event, for `Client.watch(after=...)`. `None` for `present` events."""

@final
class Events(Iterator[Event]):
    """An iterator over events, in the order in which they happened."""

    def __iter__(self) -> Events: ...
    def __next__(self) -> Event: ...
    def take(self, timeout: float) -> list[Event]:
        """Returns the pending events. If there is none, the call waits for the first event, at most `timeout` seconds. A gap is an
        event. Raises an error after the stream has ended."""
