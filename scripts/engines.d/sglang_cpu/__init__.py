"""SGLang on a processor. Its pools of the host are registered with CUDA and copied by CUDA's kernels, for models with one kind of attention,
and its processes open NCCL beside gloo, which they talk over; this replaces the first two, leaves out the third, and does nothing else. SGLang
finds it as a plugin of its own (`sglang_stub/sglang_cpu.dist-info`), in each of its processes. Where KVARTS_TOLD names a file it has the linker write
there how it calls pages."""

import json
import os


def _pairs(pool, layer):
    """The keys and the values of a layer: of the model's pool, and of that of the host."""
    return (pool.device_k_buffers[layer], pool.k_data_refs[layer]), (pool.device_v_buffers[layer], pool.v_data_refs[layer])


def _load(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
    for model, host in _pairs(self, layer_id):
        model[device_indices] = host[host_indices]


def _back_up(self, device_pool, host_indices, device_indices, io_backend):
    for layer in range(self.layer_num):
        for model, host in _pairs(self, layer):
            host[host_indices] = model[device_indices]


def _named(method, **named):
    """The method, with these arguments whatever it is called with."""

    def called(*arguments, **others):
        return method(*arguments, **{**others, **named})

    return called


def _telling(naming):
    def told(self, draft):
        found = naming(self, draft)
        with open(os.environ["KVARTS_TOLD"], "w", encoding="utf-8") as file:
            json.dump(found, file)
        return found

    return told


def install():
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    MHATokenToKVPoolHost.__init__ = _named(MHATokenToKVPoolHost.__init__, pin_memory=False)
    MHATokenToKVPoolHost.load_to_device_per_layer = _load
    MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up
    GroupCoordinator.__init__ = _named(GroupCoordinator.__init__, use_pynccl=False)
    if "KVARTS_TOLD" in os.environ:
        from kvarts.sglang_pools import Pools

        Pools.naming = _telling(Pools.naming)
    if "KVARTS_TRANSFER" in os.environ:
        from sglang_cpu import transfer

        transfer.install()
