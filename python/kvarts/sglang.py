"""Kvarts as the third level of SGLang's hierarchical cache (`HiCacheStorage`, interfaces v1 and v2).

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "kvarts", "module_path": "kvarts.sglang", "class_name": "Kvarts", "interface_v1": 1,
        "server": "/run/kvarts/kvarts.sock"}'

Guarantees:

- A read of a page returns the bytes that an engine with the same identity stored under the hash of the page, or it is a miss. The
  identity consists of model, revision, types, quantisation, overrides, layout, page size, rank and pool. SGLang's settings identify
  the model (`settings`); the name under which SGLang serves the model does not. Set `revision` if the model's path does not
  determine the revision.
- The connector refuses to start with a version of SGLang whose settings the connector cannot read. It also refuses versions whose
  page hashes do not depend on adapters and salts.
- Each call of SGLang's controller threads returns within about `timeout` seconds, even if the server has stopped. While the server
  cannot be reached, every page is a miss. The connector restores the connection without a restart. No exception leaves this class,
  because an exception would end SGLang's threads.
- A page that a look-up has found on this node is protected from eviction until it is read, but for at most `hold` seconds.

A page of any pool and layout is one block. A page is copied once, between the host's pool and memory into which the server's disks
write. Hybrid models have several pools (sliding windows, recurrent states, indexers), and each pool has its own blocks. A prefix is
restored up to the last page at which every pool has the pages that SGLang requires.
"""

import threading
import time

import torch

import kvarts

from .link import Link, brief, contract, logger, revision_of, seconds, token_of
from .sglang_compat import ALIKE, HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult, Shard, probe, version
from .sglang_holds import Holds
from .sglang_identity import expect_namespaces, names_of, settings

#: Bytes of memory shared with the server for each pool and direction; at least one page.
_SHARED = 32 << 20
#: Seconds for which found pages are held, by default. SGLang queues the read that follows a look-up.
_HOLD = 10.0
#: Seconds by which an answer may arrive after its deadline.
_LATE = 0.6


class _Staging:
    """Memory between a pool and the server, for one direction and one call at a time. `handle`: a handle that no other code drains."""

    def __init__(self, client, handle, page_bytes, dtype):
        self.lock = threading.Lock()
        self.handle = handle
        self.pages = max(1, _SHARED // page_bytes)
        self.memory = client.memory(self.pages * page_bytes)
        whole = torch.frombuffer(memoryview(self.memory.view)[: self.pages * page_bytes], dtype=torch.uint8)
        self.views = [whole[n * page_bytes : (n + 1) * page_bytes].view(dtype) for n in range(self.pages)]
        self.addresses = [self.memory.address + n * page_bytes for n in range(self.pages)]
        #: The batch that still occupies this memory, because a stalled server may still write to it or read from it.
        self.held_by = None


class _Pool:
    """A pool of the host, with the handle on its pages."""

    def __init__(self, name, host, replicated, dtype):
        self.name = name
        self.host = host
        self.page_size = getattr(host, "page_size", 1) or 1
        sample = host.get_dummy_flat_data_page()
        # The pool stores types of eight bits as plain bytes, so it does not show which type it is.
        if not dtype and not host.dtype.is_floating_point:
            raise ValueError(f"dtype: the setting is missing: set the type of the cache, because pool {name} stores its elements as plain bytes")
        self.dtype = sample.dtype
        self.page_bytes = sample.numel() * sample.element_size()
        self.named = dict(
            page_bytes=self.page_bytes,
            dtype=f"{dtype or ''}/{host.dtype}".replace("torch.", ""),
            layout=f"{type(host).__name__}-{host.layout}",
            block_tokens=self.page_size,
        )
        self.extras = {
            "format": str(getattr(host, "storage_format_tag", None)),
            "layers": f"{getattr(host, 'start_layer', None)}-{getattr(host, 'end_layer', None)}",
        }
        if name != PoolName.KV:
            self.extras["pool"] = str(name)
        if hasattr(host, "temporal_dtype"):  # recurrent states have parts of several types
            self.extras["states"] = f"{host.temporal_dtype} {host.temporal_state_shape} {host.conv_state_shapes}"
        self.replicated = replicated
        self.pages = self.staging = self.holds = None

    def open(self, client, hold, **named):
        extras = {**named.pop("extras"), **brief(self.extras)}
        handles = {kind: client.pages(**named, **self.named, extras=extras) for kind in ("get", "put")}
        if hold:
            self.holds = Holds(client.pages(**named, **self.named, extras=extras), hold)
        self.staging = {kind: _Staging(client, handle, self.page_bytes, self.dtype) for kind, handle in handles.items()}
        self.pages = handles["get"]


class Kvarts(HiCacheStorage):
    """The storage backend. Its settings:

    - `server`, `token_file`: as for `kvarts.connect`.
    - `revision`: the revision of the model. `identity`: other settings that determine the bytes and are no settings of SGLang.
    - `dtype`: the type of the cache. Required if a cache has elements of eight bits.
    - `draft`: the revision of the draft model. Required if there is a draft model.
    - `timeout`: the limit of each call in seconds.
    - `hold`: found pages that are not read are protected from eviction for this number of seconds. 0 protects no pages.
    - `pause`: after the server did not answer, the connector sends no requests for this number of seconds.
    - `durable`: stores are acknowledged after a flush."""

    def __init__(self, storage_config, kwargs=None):
        extra = dict(storage_config.extra_config or {})
        self._config = storage_config
        self._timeout = float(extra.get("timeout", 2.0))
        self._durable = bool(extra.get("durable", False))
        self._identity = {str(name): str(value) for name, value in extra.get("identity", {}).items()}
        self._dtype = extra.get("dtype")
        self._draft = extra.get("draft")
        self._hold = seconds(extra, "hold", _HOLD)
        probe(__name__)
        expect_namespaces()
        self._shard = Shard(storage_config)
        self._model, revision, self._settings = settings()
        self._revision = revision_of(self._model, extra.get("revision") or revision)
        server, token_file = extra.get("server"), extra.get("token_file")
        pause = float(extra.get("pause", 1.0))
        self._link = Link(lambda: kvarts.connect(server, token_of(token_file), timeout=self._timeout, of_cluster=True), pause)
        self._pools = {}
        self._opening = threading.Lock()

    def register_mem_pool_host(self, mem_pool_host):
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = PoolName(host_pool_name)
        if name != PoolName.KV or name not in self._pools:
            self._register(name, host_pool)

    def _register(self, name, host):
        if str(name).startswith("draft") and not self._draft:
            raise ValueError(f"draft: the setting is missing: set the revision of the draft model of pool {name}")
        # All ranks of a model with latent attention have the same bytes, except for recurrent states.
        replicated = self._config.is_mla_model and name != PoolName.MAMBA
        pool = _Pool(name, host, replicated, self._dtype)
        if str(name).startswith("draft"):
            pool.extras["draft"] = str(self._draft)
        self._pools[name] = pool

    # What SGLang calls: the pool of the KV cache.

    def batch_exists(self, keys, extra_info=None):
        return _leading(self._there(PoolName.KV, keys))

    def exists(self, key):
        return self.batch_exists([key]) == 1

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        return self._moved("get", PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        if not self._shard.writes:
            return [True] * len(keys)
        return self._moved("put", PoolName.KV, keys, host_indices, _prefix_of(extra_info))

    # All pools of a hybrid model.

    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None):
        """Finds the prefix at whose end every pool has the required pages: all pages (`ALL_PAGES`), or the last ones (`TRAILING_PAGES`)."""
        pages = _leading(self._there(PoolName.KV, keys))
        hits = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            there = self._there(transfer.name, keys[:pages])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                good = set(range(1, _leading(there) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                wanted = max(1, len(transfer.keys or ()))
                good = {n for n in restorable if all(there[max(0, n - wanted) : n])}
            else:
                # This class stores nothing in this form of pages, so it does not limit the other pools.
                continue
            if good:
                hits[transfer.name] = max(good)
            restorable = [n for n in restorable if n in good]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(self, transfers, extra_info=None):
        return {one.name: self._moved("get", one.name, one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(self, transfers, extra_info=None):
        prefix = _prefix_of(extra_info)
        return {one.name: self._moved("put", one.name, one.keys or [], one.host_indices, prefix) for one in transfers}

    # The older interface: pages as tensors.

    def get(self, key, target_location=None, target_sizes=None):
        into = target_location if target_location is not None else self.mem_pool_host.get_dummy_flat_data_page()
        done = self._call(self._pools.get(PoolName.KV), "get", names_of([key]), [into])
        return into if done is not None and done.ok else None

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        places = target_locations if target_locations is not None else [None] * len(keys)
        return [self.get(key, place) for key, place in zip(keys, places)]

    def set(self, key, value=None, target_location=None, target_sizes=None):
        value = value if value is not None else target_location
        done = self._call(self._pools.get(PoolName.KV), "put", names_of([key]), [value.contiguous()])
        return done is not None and done.ok

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        values = values if values is not None else target_locations
        return all([self.set(key, value) for key, value in zip(keys, values)])

    def clear(self):
        for pool in self._pools.values():
            if self._usable(pool):
                try:
                    pool.pages.delete_all()
                except kvarts.Error as error:
                    self._link.failed(error)

    def close(self):
        self._link.close()

    # How it works.

    def _open(self, pool, client):
        config = self._config
        pool.open(
            client,
            self._hold,
            model=self._model,
            revision=self._revision,
            engine="sglang",
            layout_version=contract("sglang", version(), ALIKE, pool.named, pool.extras),
            tp_size=1 if pool.replicated else config.tp_size,
            tp_rank=0 if pool.replicated else config.tp_rank,
            durable=self._durable,
            timeout=self._timeout,
            extras=brief({**self._settings, **self._identity, **self._shard.parts}),
        )

    def _usable(self, pool, writes=False):
        """Whether the pool has a handle on the store. The first calls wait for it, up to `timeout` seconds."""
        if pool is None or self._link.away or (writes and self._link.puts_away):
            return False
        if pool.pages is None:
            with self._opening:
                if pool.pages is None and not self._link.away:
                    ready = threading.Event()

                    def opened(client):
                        self._open(pool, client)
                        ready.set()

                    def not_opened(error):
                        logger.warning("kvarts: the store of pool %s could not be opened; its pages are misses until a retry succeeds: %s", pool.name, error)
                        ready.set()

                    self._link.do(opened, not_opened)
                    # ends: the connection's timeout, which is its argument
                    ready.wait(self._timeout)
        return pool.pages is not None

    def _call(self, pool, kind, names, *places, **more):
        """The result of a batch; `None` after any error, so that SGLang continues."""
        try:
            if not self._usable(pool, kind == "put"):
                return None
            if kind == "exists":
                return pool.pages.exists(names, timeout=self._timeout)
            done = getattr(pool.pages, kind)(names, *places, timeout=self._timeout, **more)
            self._learn(done, kind == "put")
            return done
        except kvarts.Error as error:
            (self._link.put_failed if kind == "put" else self._link.failed)(error)
            logger.debug("kvarts: the %s of %d pages failed: %s", kind, len(names), error)
        except Exception:
            logger.exception("kvarts: the %s of %d pages failed because of a defect in Kvarts; report it", kind, len(names))
        return None

    def _learn(self, done, put=False):
        self._link.learn(True in done.results, done.reasons, put)

    def _there(self, name, keys):
        """Which pages can be read now."""
        pool, names = self._pools.get(name), names_of(keys)
        found = self._call(pool, "exists", names) if keys else None
        if found and any(found) and pool.holds is not None and not self._held(pool, [one for one, here in zip(names, found) if here]):
            # Some pages have been removed meanwhile, or are on another node.
            found = self._call(pool, "exists", names)
        return [False] * len(keys) if found is None else found

    def _held(self, pool, names):
        try:
            return pool.holds.hold(names, self._timeout)
        except kvarts.Error as error:
            self._link.failed(error)
            logger.debug("kvarts: %d pages could not be protected from eviction: %s", len(names), error)
            return False

    def _moved(self, kind, name, keys, host_indices, prefix=None):
        """Reads or writes pages of a pool, in batches of the size of the staging memory. After the failure of a whole batch it does not try the
        rest, because SGLang uses only a prefix. `prefix`: the page before the first one, as `Pages.put` takes it (`parent`)."""
        results = [False] * len(keys)
        pool = self._pools.get(name)
        if not self._usable(pool, kind == "put"):
            return results
        if host_indices is None or host_indices.numel() != len(keys) * pool.page_size:
            logger.error("kvarts: pool %s: the number of indices from SGLang does not match %d pages of %d indices each; report it", name, len(keys), pool.page_size)
            return results
        first = host_indices[:: pool.page_size].tolist()
        staging, names = pool.staging[kind], names_of(keys)
        with staging.lock:
            for begin in range(0, len(keys), staging.pages):
                # Also a batch that ended in time may have shown that the server does not answer.
                if begin and not self._usable(pool, kind == "put"):
                    break
                part = range(begin, min(begin + staging.pages, len(keys)))
                if kind == "get":
                    done = self._read(staging, [names[n] for n in part])
                else:
                    parent = names[begin - 1] if begin and prefix is not None else prefix

                    def fill(begin=begin, part=part):
                        for n in part:
                            staging.views[n - begin].copy_(pool.host.get_data_page(first[n], flat=True))

                    done = self._written(staging, [names[n] for n in part], fill, parent)
                if done is None:
                    break
                for n, good in zip(part, done.results):
                    if good and kind == "get":
                        pool.host.set_from_flat_data_page(first[n], staging.views[n - begin])
                    results[n] = good
        if kind == "get" and pool.holds is not None:
            pool.holds.let_go(names)
        return results

    def _read(self, staging, names):
        return self._batch("get", staging, names)

    def _written(self, staging, names, fill, parent):
        return self._batch("put", staging, names, fill, parent=parent)

    def _batch(self, kind, staging, names, fill=None, **more):
        """As `_call`, but it does not wait for a stalled server that may still write to the staging memory or read from it. The memory stays unused until
        that batch has ended. `fill`: fills the memory."""
        failed = self._link.put_failed if kind == "put" else self._link.failed
        try:
            deadline = time.monotonic() + self._timeout + _LATE
            if staging.held_by is not None and self._answer(kind, staging, 0.0) is None:
                return None
            if fill is not None:
                fill()
            submit = getattr(staging.handle, "submit_" + kind)
            staging.held_by = submit(names, staging.addresses[: len(names)], timeout=self._timeout, **more)
            done = self._answer(kind, staging, max(0.0, deadline - time.monotonic()))
            if done is None:
                failed(kvarts.Deadline(f"the server did not answer a {kind} of {len(names)} pages within {self._timeout:g} seconds"))
            return done
        except kvarts.Error as error:
            failed(error)
            logger.debug("kvarts: the %s of %d pages failed: %s", kind, len(names), error)
        except Exception:
            logger.exception("kvarts: the %s of %d pages failed because of a defect in Kvarts; report it", kind, len(names))
        return None

    def _answer(self, kind, staging, seconds):
        """The result of the batch that occupies this memory, or `None` if it has not ended within `seconds`."""
        # ends: `seconds`, what is left of the caller's time
        for done in staging.handle.wait(seconds):
            if done.id == staging.held_by:
                staging.held_by = None
                self._learn(done, kind == "put")
                return done
        return None


def _prefix_of(extra_info):
    """The page before the first one, if SGLang passes it (`hicache_storage_pass_prefix_keys`)."""
    keys = getattr(extra_info, "prefix_keys", None)
    if keys is None:
        return None
    return names_of(keys[-1:])[0] if keys else b""


def _leading(results):
    """The number of leading true results."""
    return results.index(False) if False in results else len(results)
