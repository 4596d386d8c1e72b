"""SGLang's storages below its hierarchical cache: files, and NIXL's POSIX plugin, with pages in a pool as SGLang gives them."""

import os

import pages
import torch
from contestant import Waiting
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig


def configuration(extra):
    """One rank of a model whose pages are one piece each."""
    sizes = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=True)
    return HiCacheStorageConfig(
        **sizes, enable_storage_metrics=False, is_page_first_layout=True, model_name="bench/model", extra_config=extra
    )


def names(numbers):
    return [f"{n:064x}" for n in numbers]


class File(Waiting):
    """Tensors that lie in the pool itself; SGLang copies each once more."""

    def __init__(self, place, count, settings):
        super().__init__(place, count, settings)
        whole = torch.frombuffer(self.slots.buffer, dtype=torch.uint8)
        self._tensors = [whole[slot * pages.PAGE : (slot + 1) * pages.PAGE] for slot in range(count)]
        self._storage = HiCacheFile(configuration({"file_storage_path": place}))

    def put(self, numbers, slots):
        return [self._storage.set(name, self._tensors[slot]) for name, slot in zip(names(numbers), slots)]

    def get(self, numbers, slots):
        return [self._storage.get(name, self._tensors[slot]) is not None for name, slot in zip(names(numbers), slots)]


class _Pool:
    """What NIXL's storage asks of a pool: one piece of memory, a page after the other."""

    layout, page_size = "page_first", 1

    def __init__(self, buffer):
        self.kv_buffer = torch.frombuffer(buffer, dtype=torch.uint8)

    def is_stride_page_aligned(self, alignment):
        return pages.PAGE % alignment == 0 and self.kv_buffer.data_ptr() % alignment == 0

    def get_page_buffer_meta(self, indices):
        return [self.kv_buffer.data_ptr() + n * pages.PAGE for n in indices.tolist()], [pages.PAGE] * len(indices)


class Nixl(Waiting):
    def __init__(self, place, count, settings):
        super().__init__(place, count, settings)
        from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

        os.environ["SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"] = place
        extra = {"plugin": {"posix": {"active": True}}, "use_direct_io": settings["direct"], "l3_cleaner_enabled": False}
        self._storage = HiCacheNixl(configuration(extra), place)
        self._storage.register_mem_pool_host(_Pool(self.slots.buffer))

    def put(self, numbers, slots):
        return self._storage.batch_set_v1(names(numbers), torch.tensor(slots))

    def get(self, numbers, slots):
        return self._storage.batch_get_v1(names(numbers), torch.tensor(slots))
