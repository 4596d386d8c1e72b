"""Kvarts as the second level of LMCache (multi-process mode), as a `native_plugin` adapter.

    --l2-adapter '{"type": "native_plugin", "module_path": "kvarts.lmcache", "class_name": "Kvarts", "adapter_params":
        {"server": "/run/kvarts/kvarts.sock", "revision": "0e9e39f", "dtype": "bf16"}}'

Guarantees:

- A load returns the bytes that the same model, revision, dtype and version of LMCache stored under that key, or it is a miss.
  LMCache's keys name the model, but neither its revision nor the type of its cache. The settings `revision` and `dtype` are
  therefore required.
- No call waits. A batch ends within `timeout` seconds plus one second for every 64 MiB, or at most half a second later. This also
  holds if the server has stopped. While the server cannot be reached, look-ups and loads are misses, and stores are dropped. The
  connector restores the connection without a restart.

If LMCache's memory is an in-memory file (`lmcache server --shm-name NAME`), the server's disks write directly into this file.
Otherwise loads and stores are copied.

An object is one page. All pages of a handle have the same size, so each size of objects has its own handle. A look-up does not
name the size of the object. Separate pages (`_Sizes`) therefore record the sizes of a model's objects.
"""

import itertools
import os
import select
import threading
import time

import kvarts

from .link import Link, allowed, contract, logger, token_of, whole_number
from .lmcache_compat import probe, version
from .shared import Pools

#: The limit of different sizes of objects in one group of a model.
_SIZES = 16
_RECORD = 4096
#: Seconds after which the sizes are read again, because another process may have stored objects of a new size.
_FRESH = 5.0
#: `chunk_tokens`, by default: LMCache's own default of `chunk_size`.
_CHUNK_TOKENS = 256
#: Seconds after which the engine's times are sent again, because a restarted store does not know them.
_TOLD = 60.0
#: The key of a block that is never stored.
_NONE = kvarts.key("kvarts", "none")


class _Unready(Exception):
    """A handle or a list of sizes is missing. The link's thread must get it."""


class _Task:
    """A batch of LMCache. It may need several batches of Kvarts."""

    def __init__(self, future, kind, keys, buffers):
        self.future = future
        self.kind = kind
        self.keys = keys
        self.buffers = buffers
        self.results = [False] * len(keys)
        self.errors = []  # one for each reason
        self.open = 0

    def answer(self):
        """The result in LMCache's form: (future, ok, error, result for each key)."""
        if self.kind == "exists":
            return self.future, True, "", self.results
        # An absent object is no error of a delete.
        bad = next((error for error in self.errors if self.kind != "delete" or not isinstance(error, kvarts.Miss)), None)
        ok = all(self.results) if self.kind != "delete" else bad is None
        return self.future, ok, "" if bad is None else str(bad), self.results


class _Sizes:
    """The sizes of the objects in a model's group, as records that all processes share: record n has the n-th size."""

    def __init__(self, pages, group):
        self._pages = pages
        self._keys = [kvarts.key("sizes", group, n) for n in range(_SIZES)]
        self.known = []
        self.read_at = 0.0

    def read(self):
        memory = bytearray(_SIZES * _RECORD)
        done = self._pages.get(self._keys, memory)
        if done.error is not None and not isinstance(done.error, (kvarts.Miss, kvarts.Corrupt)):
            raise done.error
        self.known = [int(bytes(memory[n * _RECORD : n * _RECORD + 20])) for n, here in enumerate(done.results) if here]
        self.read_at = time.monotonic()
        return done.results

    def add(self, size):
        """Writes a size into the first free record, or into the next one if another process has written that record meanwhile."""
        for _ in range(_SIZES):
            free = [n for n, here in enumerate(self.read()) if not here]
            if size in self.known:
                return
            if not free:
                break
            done = self._pages.put([self._keys[free[0]]], [b"%020d" % size + bytes(_RECORD - 20)])
            if not done.ok:
                raise done.error
        raise kvarts.Refused(f"the objects in one group of a model have more than {_SIZES} different sizes: objects of a further size cannot be stored")


class Kvarts:
    """A native connector of LMCache.

    - `server`, `token_file`: as for `kvarts.connect`.
    - `revision`: the model's revision, or `{model: revision}`.
    - `dtype`: the type of the KV cache.
    - `identity`: other settings that determine the bytes (`{"quantisation": "fp8-v2"}`).
    - `timeout`: seconds for each batch, in addition to the time for its bytes.
    - `pause`: after the server did not answer, the connector sends no requests for this number of seconds.
    - `durable`: stores are acknowledged after a flush.
    - `times`: arguments of `kvarts.Times`. The store computes the value of objects from these times, because LMCache does not report
      the engine's steps to a plug-in.
    - `chunk_tokens`: LMCache's `chunk_size`; with N tensor-parallel ranks that each store a part of a chunk, `chunk_size` / N."""

    def __init__(
        self,
        server=None,
        revision=None,
        dtype=None,
        token_file=None,
        identity=None,
        timeout=2.0,
        pause=1.0,
        durable=False,
        times=None,
        chunk_tokens=_CHUNK_TOKENS,
    ):
        if not isinstance(revision, dict) and not revision:
            raise ValueError("revision: the setting is missing: set the model's revision, or one for each model")
        if not dtype:
            raise ValueError("dtype: the setting is missing: set the type of the KV cache's elements")
        self._revision = revision
        self._dtype = str(dtype)
        self._identity = {str(name): str(value) for name, value in (identity or {}).items()}
        self._timeout = float(timeout)
        self._durable = bool(durable)
        self._times = kvarts.Times(**times) if times else None
        self._told = {}  # (model, size of objects) -> when the times are sent to the store again
        self._chunk_tokens = whole_number({"chunk_tokens": chunk_tokens}, "chunk_tokens", 1)
        self._version = version()
        probe(__name__)
        self._link = Link(lambda: kvarts.connect(server, token_of(token_file), timeout=self._timeout, of_cluster=True), pause)
        self._lock = threading.Lock()
        self._futures = itertools.count(1)
        self._pools = Pools()
        self._handles = {}  # (model, size of objects) -> pages
        self._sizes = {}  # (model, group) -> _Sizes
        self._parts = {}  # (handle, batch) -> (task, positions)
        self._done = []  # results that LMCache has not taken yet
        self._closed = False
        # One descriptor, which is readable while a handle or `_own` is readable.
        self._own = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._own, select.EPOLLIN)

    # What LMCache calls.

    def event_fd(self):
        return self._poll.fileno()

    def submit_batch_set(self, keys, memoryviews):
        return self._submit("put", keys, memoryviews)

    def submit_batch_get(self, keys, memoryviews):
        return self._submit("get", keys, memoryviews)

    def submit_batch_exists(self, keys):
        return self._submit("exists", keys, None)

    def submit_batch_delete(self, keys):
        return self._submit("delete", keys, None)

    def drain_completions(self):
        with self._lock:
            for pages in list(self._handles.values()):
                for done in pages.drain():
                    self._part_done(pages, done)
            answers, self._done = self._done, []
            if answers:
                os.eventfd_read(self._own)
        return answers

    def close(self):
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._link.close()  # closes the handles, too: after it, nothing accesses LMCache's memory
        self._pools.close()
        self._poll.close()
        os.close(self._own)

    # How it works.

    def _submit(self, kind, keys, buffers):
        task = _Task(next(self._futures), kind, list(keys), None if buffers is None else list(buffers))
        if buffers is not None and len(task.buffers) != len(task.keys):
            raise ValueError(f"memoryviews: {len(task.buffers)} views were given for {len(task.keys)} keys")
        if self._closed or (self._link.puts_away if kind == "put" else self._link.away):
            self._answer(task, kvarts.Retry("the server cannot be reached; Kvarts retries after a pause"))
            return task.future
        try:
            self._begin(task, None)
        except _Unready:
            self._link.do(lambda client: self._begin(task, client), lambda error: self._answer(task, error))
        return task.future

    def _begin(self, task, client):
        """Splits a batch by handles and submits the parts. Without a client it raises `_Unready` if a handle is missing."""
        places = {}
        for at, key in enumerate(task.keys):
            model, _, group = key.split("@")[:3]
            if task.buffers is not None:
                sizes = [memoryview(task.buffers[at]).nbytes]
            else:
                sizes = self._known_sizes(model, group, client)
            for size in sizes:
                places.setdefault((model, group, size), []).append(at)
        parts = [(self._handle(*place, client, task.kind == "put"), positions) for place, positions in places.items()]
        if client is not None:
            self._pools.prepare(client, task.buffers)
        elif not self._pools.is_ready(task.buffers):
            raise _Unready
        with self._lock:
            task.open = 1
            for pages, positions in parts:
                self._begin_part(task, pages, positions)
            self._end_part(task)

    def _begin_part(self, task, pages, positions):
        keys = [kvarts.key("lmcache", task.keys[at]) for at in positions]
        submit = getattr(pages, "submit_" + task.kind)
        try:
            if task.buffers is None:
                batch = submit(keys, timeout=self._timeout)
            else:
                timeout = allowed(self._timeout, len(keys) * pages.block_bytes())
                batch = submit(keys, [task.buffers[at] for at in positions], timeout=timeout)
        except kvarts.Error as error:
            (self._link.put_failed if task.kind == "put" else self._link.failed)(error)
            task.errors.append(error)
            return
        task.open += 1
        self._parts[pages, batch] = task, positions

    def _part_done(self, pages, done):
        task, positions = self._parts.pop((pages, done.id))
        results, reasons = done.results, done.reasons
        self._link.learn(True in results, reasons, put=task.kind == "put")
        for at, good in zip(positions, results):
            task.results[at] = task.results[at] or good
        task.errors.extend(error for error, _ in reasons.values())
        self._end_part(task)

    def _end_part(self, task):
        task.open -= 1
        if task.open == 0:
            self._done.append(task.answer())
            os.eventfd_write(self._own, 1)

    def _answer(self, task, error):
        """Ends a batch that could not begin."""
        if not isinstance(error, (kvarts.Retry, kvarts.Deadline)):  # the link logs those
            logger.warning("kvarts: the %s of %d objects could not begin: %s", task.kind, len(task.keys), error)
        task.errors = [error]
        with self._lock:
            if not self._closed:
                self._done.append(task.answer())
                os.eventfd_write(self._own, 1)

    def _handle(self, model, group, size, client, writes):
        pages = self._handles.get((model, size))
        sizes = self._sizes.get((model, group))
        noted = not writes or (sizes is not None and size in sizes.known)
        if pages is not None and noted:
            return pages
        if client is None:
            raise _Unready
        if not noted:
            self._read_sizes(model, group, client).add(size)
        if pages is None:
            pages = client.pages(
                size, layout="lmcache-object", block_tokens=self._chunk_tokens, durable=self._durable, **self._identity_of(model)
            )
            self._tell_times(model, size, pages)
            with self._lock:
                self._handles[model, size] = pages
                self._poll.register(pages.fileno(), select.EPOLLIN)
        return pages

    def _known_sizes(self, model, group, client):
        sizes = self._sizes.get((model, group))
        if sizes is None or time.monotonic() - sizes.read_at > _FRESH:
            if client is None:
                raise _Unready
            sizes = self._read_sizes(model, group, client)
        for size in sizes.known:
            if (model, size) not in self._handles and client is None:
                raise _Unready
        return sizes.known

    def _read_sizes(self, model, group, client):
        sizes = self._sizes.get((model, group))
        if sizes is None:
            sizes = _Sizes(client.pages(_RECORD, layout="lmcache-sizes", **self._identity_of(model)), group)
        sizes.read()
        self._sizes[model, group] = sizes
        for size in sizes.known:
            if (pages := self._handles.get((model, size))) is not None:
                self._tell_times(model, size, pages)
        return sizes

    def _tell_times(self, model, size, pages):
        """Sends the engine's times for an object to the store, if they are configured. Runs in the link's thread."""
        if self._times is not None and time.monotonic() >= self._told.get((model, size), 0.0):
            pages.match([_NONE], times=self._times)
            self._told[model, size] = time.monotonic() + _TOLD

    def _identity_of(self, model):
        revision = self._revision.get(model) if isinstance(self._revision, dict) else self._revision
        if not revision:
            raise kvarts.Invalid(f"revision: the setting has no revision for the model {model!r}: add the revision")
        return dict(
            model=model,
            revision=str(revision),
            dtype=self._dtype,
            engine="lmcache",
            layout_version=contract("lmcache", self._version, {}),
            extras=self._identity,
        )
