"""SGLang's storage on a real pool of the host, for each of its layouts: `sglang_run.py SOCKET`. Run by scripts/engines."""

import sys

import sglang_host
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang_host import LAYERS, PAGE, PAGES, keys, where

extra = {"backend_name": "kvarts", "module_path": "kvarts.sglang", "class_name": "Kvarts", "interface_v1": 1}
extra.update(server=sys.argv[1], revision="1", timeout=30)


def storage(layout):
    return sglang_host.storage("dynamic", extra, layout)


for layout in ("layer_first", "page_first", "page_first_direct"):
    first, pool = storage(layout)
    sglang_host.filled(pool)
    assert first.batch_exists(keys) == 0, "pages of another layout were found"
    assert first.batch_set_v1(keys, where) == [True] * PAGES, "not stored"
    second, other = storage(layout)
    other.kv_buffer.zero_()
    assert second.batch_exists([*keys, "f" * 64]) == PAGES, "not found"
    assert second.batch_get_v1(keys, where) == [True] * PAGES, "not loaded"
    for page in range(PAGES):
        one, two = pool.get_data_page(page * PAGE), other.get_data_page(page * PAGE)
        assert torch.equal(one, two), f"page {page} has wrong bytes"
    for one in (first, second):
        one.close()
    print(f"{layout}: {PAGES} pages equal", flush=True)


# A hybrid model: full attention, a sliding window, recurrent states.


def states():
    parts = dict(conv=[torch.zeros(LAYERS, PAGES, 24, 3, dtype=torch.bfloat16)], temporal=torch.zeros(LAYERS, PAGES, 2, 16, 8))
    return MambaPoolHost(MambaStateBufferInfo(**parts), 2.0, 0, device_capacity=PAGES, pin_memory=False, layout="page_first")


def hybrid():
    made, pool = storage("page_first")
    pools = {PoolName.KV: pool, PoolName.SWA: storage("page_first")[1], PoolName.MAMBA: states()}
    for name, host in pools.items():
        made.register_mem_host_pool_v2(host, name)
    made.on_host_pools_registered()
    return made, pools


def fill(host, value):
    for buffer in host.kv_buffer if isinstance(host.kv_buffer, list) else [host.kv_buffer]:
        buffer.copy_(value(buffer.shape).to(buffer.dtype))


first, pools = hybrid()
for host in pools.values():
    fill(host, torch.randn)
# Windows and states are there at some boundaries only.
windows = PoolTransfer(PoolName.SWA, host_indices=where[: 4 * PAGE], keys=keys[12:16], hit_policy=PoolHitPolicy.TRAILING_PAGES)
ends = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([3, 4]), keys=[keys[7], keys[15]], hit_policy=PoolHitPolicy.TRAILING_PAGES)
assert first.batch_set_v1(keys, where) == [True] * PAGES, "not stored"
assert first.batch_set_v2([windows, ends]) == {"swa": [True] * 4, "mamba": [True] * 2}, "not stored"
second, others = hybrid()
for host in others.values():
    fill(host, torch.zeros)
one = PoolTransfer(PoolName.MAMBA, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
found = second.batch_exists_v2(keys, [windows, one])
assert (found.kv_hit_pages, found.restorable_prefix_pages) == (16, [16]), f"another prefix: {found}"
assert second.batch_exists_v2(keys, [one]).restorable_prefix_pages == [8, 16], "other boundaries"
windows = PoolTransfer(PoolName.SWA, host_indices=where[8 * PAGE : 12 * PAGE], keys=keys[12:16])
ends = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([9]), keys=[keys[15]])
assert second.batch_get_v2([windows, ends]) == {"swa": [True] * 4, "mamba": [True]}, "not loaded"
for name, here, there in [(PoolName.SWA, n * PAGE, (8 + n) * PAGE) for n in range(4)] + [(PoolName.MAMBA, 4, 9)]:
    assert torch.equal(pools[name].get_data_page(here), others[name].get_data_page(there)), f"{name}: the bytes differ"
for made in (first, second):
    made.close()
print("hybrid: windows and states equal", flush=True)
