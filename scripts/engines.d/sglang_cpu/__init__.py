"""SGLang's hierarchical cache on a processor. Its pools of the host are registered with CUDA and copied by CUDA's kernels; this
replaces these two, for models with one kind of attention, and nothing else. SGLang imports it in the processes that need it, as a
package of models that it has been named (SGLANG_EXTERNAL_MODEL_PACKAGE)."""

from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

_begin = MHATokenToKVPoolHost.__init__


def _begin_unregistered(self, *arguments, **named):
    _begin(self, *arguments, **(named | {"pin_memory": False}))


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


MHATokenToKVPoolHost.__init__ = _begin_unregistered
MHATokenToKVPoolHost.load_to_device_per_layer = _load
MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up
