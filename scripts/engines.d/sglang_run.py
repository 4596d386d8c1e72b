"""SGLang's storage on a real pool of the host, for each of its layouts: `sglang_run.py SOCKET`. Run by scripts/engines."""

import sys

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE, PAGES, LAYERS = 16, 32, 4
extra = {"backend_name": "kvarts", "module_path": "kvarts.sglang", "class_name": "Kvarts", "interface_v1": 1}
extra.update(server=sys.argv[1], revision="1", timeout=30)
settings = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False)
config = HiCacheStorageConfig(
    **settings, enable_storage_metrics=False, is_page_first_layout=True, model_name="test/model", extra_config=extra
)
device = MHATokenToKVPool(PAGE * PAGES, PAGE, torch.bfloat16, 2, 32, LAYERS, "cpu", False)
keys = [f"{n:064x}" for n in range(PAGES)]
where = torch.arange(PAGE * PAGES)


def storage(layout):
    """A storage, as in a process of its own, and its pool."""
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
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    return made, pool


for layout in ("layer_first", "page_first", "page_first_direct"):
    first, pool = storage(layout)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, dtype=torch.float32).to(pool.kv_buffer.dtype))
    assert first.batch_exists(keys) == 0, "pages of another layout were found"
    assert first.batch_set_v1(keys, where) == [True] * PAGES, "not stored"
    second, other = storage(layout)
    other.kv_buffer.zero_()
    assert second.batch_exists([*keys, "f" * 64]) == PAGES, "not found"
    assert second.batch_get_v1(keys, where) == [True] * PAGES, "not loaded"
    for page in range(PAGES):
        one, two = pool.get_data_page(page * PAGE), other.get_data_page(page * PAGE)
        assert torch.equal(one, two), f"page {page} has other bytes"
    for one in (first, second):
        one.close()
    print(f"{layout}: {PAGES} pages equal", flush=True)
