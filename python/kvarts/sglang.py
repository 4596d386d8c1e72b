"""Kvarts as the third level of SGLang's hierarchical cache (`HiCacheStorage`, interface v1).

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "kvarts", "module_path": "kvarts.sglang", "class_name": "Kvarts", "interface_v1": 1,
        "server": "/run/kvarts/kvarts.sock"}'

What holds:

- A page comes back with the bytes that were stored under its hash by the same model, revision, type, layout, page size and rank,
  or it is a miss. `revision` must be named where the model's name does not say it.
- Each call of SGLang's controller threads returns within about `timeout` seconds, also if the server has stopped; while it is
  away, everything is a miss. It comes back by itself. No exception leaves this class: SGLang's threads would end.

A page of any layout is one block. It is copied once, between the pool of the host and memory that the server's disks write to.
Pools beside the one of the KV cache (v2: sliding windows, recurrent states) are not stored: SGLang says so at its start.
"""

import importlib.metadata
import threading

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

import kvarts

from .link import Link, logger, revision_of, token_of

#: Bytes of memory shared with the server, for reads and for writes each; at least one page.
_SHARED = 32 << 20


class _Staging:
    """Memory between the pool and the server, for one direction: one call at a time."""

    def __init__(self, client, page_bytes, dtype):
        self.lock = threading.Lock()
        self.pages = max(1, _SHARED // page_bytes)
        self.memory = client.memory(self.pages * page_bytes)
        whole = torch.frombuffer(memoryview(self.memory.view)[: self.pages * page_bytes], dtype=torch.uint8)
        self.views = [whole[n * page_bytes : (n + 1) * page_bytes].view(dtype) for n in range(self.pages)]
        self.addresses = [self.memory.address + n * page_bytes for n in range(self.pages)]


class Kvarts(HiCacheStorage):
    """`server`, `token_file`: as for `kvarts.connect`. `revision`, `identity`: what decides bytes beside SGLang's own settings;
    `dtype` must be named, too, where the cache has elements of eight bits. `timeout`: seconds for each call. `pause`: seconds for
    which a server that did not answer is left alone. `durable`: stores are acknowledged after a flush."""

    def __init__(self, storage_config, kwargs=None):
        extra = dict(storage_config.extra_config or {})
        self._config = storage_config
        self._timeout = float(extra.get("timeout", 2.0))
        self._durable = bool(extra.get("durable", False))
        self._identity = {str(name): str(value) for name, value in extra.get("identity", {}).items()}
        self._named_dtype = extra.get("dtype")
        self._model = storage_config.model_name or "none"
        self._revision = revision_of(self._model, extra.get("revision"))
        server, token_file = extra.get("server"), extra.get("token_file")
        pause = float(extra.get("pause", 1.0))
        self._link = Link(lambda: kvarts.connect(server, token_of(token_file), timeout=self._timeout), pause)
        self._pages = None
        self._pool = None
        self._opening = threading.Lock()

    def register_mem_pool_host(self, mem_pool_host):
        super().register_mem_pool_host(mem_pool_host)
        # Types of eight bits are kept as bytes: which one it is, the pool does not say.
        if not self._named_dtype and not mem_pool_host.dtype.is_floating_point:
            raise ValueError("dtype: name the type of the KV cache")
        sample = mem_pool_host.get_dummy_flat_data_page()
        self._pool = mem_pool_host
        self._dtype = sample.dtype
        self._page_bytes = sample.numel() * sample.element_size()

    # What SGLang calls.

    def batch_exists(self, keys, extra_info=None):
        done = self._call("exists", self._names(keys))
        return 0 if done is None else done.prefix

    def exists(self, key):
        return self.batch_exists([key]) == 1

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        return self._moved("get", keys, host_indices)

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        if not self._config.is_storage_writer:
            return [True] * len(keys)
        return self._moved("put", keys, host_indices)

    # The older interface: pages as tensors.

    def get(self, key, target_location=None, target_sizes=None):
        into = target_location if target_location is not None else self._pool.get_dummy_flat_data_page()
        done = self._call("get", self._names([key]), [into])
        return into if done is not None and done.ok else None

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        places = target_locations if target_locations is not None else [None] * len(keys)
        return [self.get(key, place) for key, place in zip(keys, places)]

    def set(self, key, value=None, target_location=None, target_sizes=None):
        value = value if value is not None else target_location
        done = self._call("put", self._names([key]), [value.contiguous()])
        return done is not None and done.ok

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        values = values if values is not None else target_locations
        return all([self.set(key, value) for key, value in zip(keys, values)])

    def clear(self):
        if self._usable():
            try:
                self._pages.delete_all()
            except kvarts.Error as error:
                self._link.failed(error)

    def close(self):
        self._link.close()

    # How it works.

    @staticmethod
    def _names(keys):
        """SGLang's keys are digests in hexadecimal digits: 32 bytes are taken as they are."""
        return [bytes.fromhex(key) if len(key) == 64 and key.isalnum() else kvarts.key("sglang", key) for key in keys]

    def _opened(self, client):
        config, pool = self._config, self._pool
        # Ranks of a model with latent attention have the same bytes.
        ranks = (1, 0) if config.is_mla_model else (config.tp_size, config.tp_rank)
        parts = ("pp_size", "pp_rank", "attn_cp_size", "attn_cp_rank", "dcp_size", "dcp_rank")
        pages = client.pages(
            self._page_bytes,
            model=self._model,
            revision=self._revision,
            dtype=f"{self._named_dtype or ''}/{pool.dtype}".replace("torch.", ""),
            engine="sglang",
            layout=f"{type(pool).__name__}-{pool.layout}",
            layout_version=importlib.metadata.version("sglang"),
            block_tokens=pool.page_size,
            tp_size=ranks[0],
            tp_rank=ranks[1],
            durable=self._durable,
            timeout=self._timeout,
            extras={
                **self._identity,
                **{part: str(getattr(config, part)) for part in parts},
                "format": str(getattr(pool, "storage_format_tag", None)),
                "layers": f"{getattr(pool, 'start_layer', None)}-{getattr(pool, 'end_layer', None)}",
            },
        )
        self._staging = {kind: _Staging(client, self._page_bytes, self._dtype) for kind in ("get", "put")}
        self._pages = pages

    def _usable(self):
        """Whether there is a store now. The first calls wait for it, as long as any call may."""
        if self._pool is None or self._link.away:
            return False
        if self._pages is None:
            with self._opening:
                if self._pages is None and not self._link.away:
                    ready = threading.Event()

                    def opened(client):
                        self._opened(client)
                        ready.set()

                    def not_opened(error):
                        logger.warning("kvarts: no store: %s", error)
                        ready.set()

                    self._link.do(opened, not_opened)
                    ready.wait(self._timeout)
        return self._pages is not None

    def _call(self, kind, names, *places):
        """The answer to a batch, or `None`: whatever happened, SGLang goes on."""
        try:
            if not self._usable():
                return None
            pages = self._pages
            if kind == "exists":
                return _Found(pages.exists(names, timeout=self._timeout))
            done = getattr(pages, kind)(names, *places, timeout=self._timeout)
            for error in done.errors.values():
                self._link.failed(error)
            if any(done.results):
                self._link.answered()
            return done
        except kvarts.Error as error:
            self._link.failed(error)
            logger.debug("kvarts: %s of %d pages: %s", kind, len(names), error)
        except Exception:
            logger.exception("kvarts: %s of %d pages failed", kind, len(names))
        return None

    def _moved(self, kind, keys, host_indices):
        """Reads or writes pages of the pool, as many at a time as the staging memory holds. After a failure of a whole batch the
        rest is not tried: SGLang takes a prefix."""
        results = [False] * len(keys)
        if not self._usable():
            return results
        first = host_indices[:: self._pool.page_size].tolist()
        staging, names = self._staging[kind], self._names(keys)
        with staging.lock:
            for begin in range(0, len(keys), staging.pages):
                part = range(begin, min(begin + staging.pages, len(keys)))
                if kind == "put":
                    for n in part:
                        staging.views[n - begin].copy_(self._pool.get_data_page(first[n], flat=True))
                done = self._call(kind, [names[n] for n in part], staging.addresses[: len(part)])
                if done is None:
                    break
                for n, good in zip(part, done.results):
                    if good and kind == "get":
                        self._pool.set_from_flat_data_page(first[n], staging.views[n - begin])
                    results[n] = good
        return results


class _Found:
    """What a look-up found, with the one answer that is used."""

    def __init__(self, results):
        self.prefix = results.index(False) if False in results else len(results)
