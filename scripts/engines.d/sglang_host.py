"""A pool of SGLang's host, and storages of its pages, as in processes of their own."""

from types import SimpleNamespace

import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

# No engine has said yet what it runs with.
runs_with = SimpleNamespace(model_path="test/model", revision="1", dtype="bfloat16", quantization=None, kv_cache_dtype="auto")
runtime_context.get_model = lambda: runs_with

PAGE, PAGES, LAYERS = 16, 32, 4
device = MHATokenToKVPool(PAGE * PAGES, PAGE, torch.bfloat16, 2, 32, LAYERS, "cpu", False)
keys = [f"{n:064x}" for n in range(PAGES)]
where = torch.arange(PAGE * PAGES)


def storage(backend, extra, layout):
    """A storage of this backend, and its pool."""
    settings = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False)
    config = HiCacheStorageConfig(
        **settings, enable_storage_metrics=False, is_page_first_layout=True, model_name="test/model", extra_config=extra
    )
    pool = MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=PAGE * PAGES,
        start_layer=0,
        end_layer=LAYERS,
    )
    made = StorageBackendFactory.create_backend(backend, config, pool)
    made.register_mem_pool_host(pool)
    return made, pool


def filled(pool):
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, dtype=torch.float32).to(pool.kv_buffer.dtype))
