"""SGLang's linker on its real pools of a device, in memory of a processor, for each kind of model: `sglang_linker_run.py SOCKET`. Run by scripts/engines."""

import sys
import time
from types import SimpleNamespace

import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.hybrid_cache import linker_pool_assembler
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

# No engine has said yet what it runs with.
runs_with = SimpleNamespace(model_path="test/model", revision="1", dtype="bfloat16", quantization=None, kv_cache_dtype="auto")
runtime_context.get_model = lambda: runs_with
linker_pool_assembler.get_memory = lambda: SimpleNamespace(enable_unified_memory=False)
alone = SimpleNamespace(attn_dcp_size=1)
linker_pool_assembler.get_parallel = memory_pool.get_parallel = runtime_context.get_parallel = lambda: alone

from kvarts.sglang_linker import KvartsLinker  # noqa: E402

PAGE, PAGES, LAYERS, WINDOW = 16, 32, 4, 3 * 16
BF16 = torch.bfloat16
FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
extra = {"server": sys.argv[1], "timeout": 60, "wait": 60, "pool_bytes": 64 << 20}
keys = [f"{n:064x}" for n in range(PAGES)]


def dense(layers=LAYERS):
    return MHATokenToKVPool(PAGE * PAGES, PAGE, BF16, 2, 32, layers, "cpu", False)


def windowed():
    return SWAKVPool(PAGE * PAGES, PAGE * PAGES, PAGE, BF16, 2, 32, [0, 2], [1, 3], "cpu")


def latent():
    return MLATokenToKVPool(PAGE * PAGES, PAGE, BF16, 64, 16, LAYERS, "cpu", False)


def indexed():
    return DSATokenToKVPool(PAGE * PAGES, 64, 64, BF16, 16, LAYERS, "cpu", 128, False, 80)


def states(cache):
    """The states of layers without attention, beside it: what SGLang keeps them in, with nothing around it."""
    parts = dict(conv=[torch.zeros(2, PAGES, 24, 3, dtype=BF16)], temporal=torch.zeros(2, PAGES, 2, 16, 8))
    pool = SimpleNamespace(mamba_cache=SimpleNamespace(**parts), num_mamba_layers=2)
    off = SimpleNamespace(enabled=False)
    named = dict(mamba_pool=pool, mamba_map={0: 0, 2: 1}, mamba_ckpt_pool=None, short_conv_pool=off, ngram_pool=off)
    return cache, SimpleNamespace(**named, register_layer_transfer_counter=lambda counter: None)


def linear(full):
    latents = dict(use_mla=True, kv_lora_rank=64, qk_rope_head_dim=16)
    named = dict(size=PAGE * PAGES, dtype=BF16, page_size=PAGE, head_num=2, head_dim=32, full_attention_layer_ids=[1, 3], device="cpu", mamba_pool=None)
    cache = HybridLinearKVPool(**named, full_kv_pool=full, **(latents if full is None else {}))
    return states(cache)


def with_windows_and_states():
    cache = SWAKVPool(PAGE * PAGES, PAGE * PAGES, PAGE, BF16, 2, 32, [1], [3], "cpu")
    return states(cache)


def linker(made):
    """A linker, as in a process of its own."""
    cache, states_of = made if isinstance(made, tuple) else (made, None)
    named = dict(page_size=cache.page_size, swa_retain_window=WINDOW, req_to_token_pool=states_of)
    alone = dict(mtp_draft_device_pools=(), sidecar_draft_device_pools=(), tp_cache_group=None, attn_tp_cache_group=None)
    allocator = SimpleNamespace(get_kvcache=lambda: cache)
    params = SimpleNamespace(token_to_kv_pool_allocator=allocator, **named, **alone)
    return KvartsLinker(None, params, components=components, extra_config=extra, forward_stream=None)


def fill(one, value):
    for entry in one.pools.values():
        for buffer in entry.kv_buffer:
            buffer.copy_(value(buffer.shape).to(buffer.dtype) if buffer.dtype.is_floating_point else value(buffer.shape) * 16)


def indices(pages, size):
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def transfers(name, first, last, size, shift, trailing):
    """What SGLang transfers of these pages: their places are pages of the same number, further on by `shift`."""
    places = lambda begin: indices([n + shift for n in range(begin, last)], size)  # noqa: E731
    found = [PoolTransfer(PoolName.KV, device_indices=places(first), keys=keys[first:last])]
    if SWA in components:
        begin = max(first, last - WINDOW // size) if trailing else first
        found.append(PoolTransfer(PoolName.SWA, device_indices=places(begin), keys=keys[begin:last]))
    if MAMBA in components:
        found.append(PoolTransfer(PoolName.MAMBA, device_indices=torch.tensor([last - 1 + shift]), keys=[keys[last - 1]]))
    return found


KINDS = {
    "heads": (dense, {FULL}),
    "latents": (latent, {FULL}),
    "latents and indexer": (indexed, {FULL}),
    "windows": (windowed, {FULL, SWA}),
    "states": (lambda: linear(dense(2)), {FULL, MAMBA}),
    "latents and states": (lambda: linear(None), {FULL, MAMBA}),
    "windows and states": (with_windows_and_states, {FULL, SWA, MAMBA}),
}
for name, (make, components) in KINDS.items():
    first, second = linker(make()), linker(make())
    size = first._pools.block_tokens
    count = 16 * PAGES // size // 2
    fill(first, torch.randn)
    fill(second, torch.zeros)
    deadline = time.monotonic() + 60
    while first._desk.name is None or second._desk.name is None:
        assert time.monotonic() < deadline, "no pool"
        time.sleep(0.01)
    # Two nodes of a tree: windows and states are there at their ends.
    middle = count // 2
    for begin, end in ((1, middle), (middle, count)):
        assert first.offload(transfers(name, begin, end, size, 0, trailing=False)), "not taken"
    while first.num_completed_offloads() < 2:
        assert time.monotonic() < deadline, "not stored"
        time.sleep(0.01)
    assert [first.pop_completed_offload() for _ in range(2)] == [True, True], "not stored"
    # Asked for with a page behind that no store has.
    asked = transfers(name, 1, count + 1, size, 0, trailing=True)
    found = second.lookup("r", asked)
    last = count - 1
    expected = [last] if SWA in components or MAMBA in components else list(range(1, last + 1))
    assert found == expected, f"{name}: {found} and not {expected}"
    # Some of it the device has had since.
    assert second.lookup("r", transfers(name, 2, count + 1, size, 0, trailing=True))[-1] == last - 1
    shift = 1 if count + 1 < PAGES * PAGE // size else 0
    loads = transfers(name, 2, count, size, shift, trailing=True)
    assert second.load("r", loads), "not loaded"
    index = second.start_layer_wise_loading()
    second.layer_done_counter.set_consumer(index)
    for layer in range(second.layer_done_counter.num_layers):
        second.layer_done_counter.wait_until(layer)
    assert second.finish_layer_wise_loading(index), "not landed"
    pages = 0
    for entry, other in zip(first.pools.values(), second.pools.values()):
        load = next(one for one in loads if one.name == entry.indices_from_pool)
        here = entry.prepare_locations(entry.translate_indices(load.device_indices - shift * (1 if load.name == PoolName.MAMBA else size)))
        there = other.prepare_locations(other.translate_indices(load.device_indices))
        span = first._pools._pools[entry.name].span
        for one, two in zip(entry.kv_buffer, other.kv_buffer):
            for at, to in zip(here, there):
                assert one[at : at + span].count_nonzero() > 0, "no page was compared"
                assert torch.equal(one[at : at + span], two[to : to + span]), f"{name}: {entry.name}: the bytes differ"
                pages += 1
    before = second._pools._pools[PoolName.KV].span * (1 + shift)
    untouched = not any(buffer[before : before + 1].count_nonzero() for buffer in second.pools[PoolName.KV].kv_buffer)
    assert untouched, "the load has overwritten a page outside the request"
    for one in (first, second):
        one.close()
    print(f"{name}: {pages} parts equal", flush=True)
