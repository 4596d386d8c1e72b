"""SGLang's own storage of Mooncake on a real pool of the host, over Kvarts in Mooncake's place: `sglang_mooncake_run.py SOCKET`. Run by scripts/engines."""

import sys
import tempfile
from types import SimpleNamespace

from kvarts import mooncake

place = tempfile.TemporaryDirectory()
mooncake.write(place.name)
sys.path.insert(0, place.name)

import torch  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402

# No engine has said yet what it runs with.
runs_with = SimpleNamespace(model_path="test/model", revision="1", dtype="bfloat16", quantization=None, kv_cache_dtype="auto")
runtime_context.get_model = lambda: runs_with

PAGE, PAGES, LAYERS = 16, 32, 4
extra = {"master_server_address": f"kvarts:{sys.argv[1]}"}
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
    made = StorageBackendFactory.create_backend("mooncake", config, pool)
    assert type(made.store).__module__ == "kvarts.mooncake", "another store"
    made.register_mem_pool_host(pool)
    return made, pool


for layout in ("page_first", "page_first_direct"):
    first, pool = storage(layout)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, dtype=torch.float32).to(pool.kv_buffer.dtype))
    first.clear()
    assert first.batch_exists(keys) == 0, "pages that are not there were found"
    assert first.batch_set_v1(keys[:20], where[: 20 * PAGE]) == [True] * 20, "not stored"
    second, other = storage(layout)
    other.kv_buffer.zero_()
    assert second.batch_exists(keys) == 20, "not found"
    assert second.batch_get_v1(keys, where) == [True] * 20 + [False] * 12, "not loaded"
    for page in range(20):
        assert torch.equal(pool.get_data_page(page * PAGE), other.get_data_page(page * PAGE)), f"page {page} has other bytes"
    for one in (first, second):
        one.store.close()
    print(f"{layout}: 20 pages equal", flush=True)
