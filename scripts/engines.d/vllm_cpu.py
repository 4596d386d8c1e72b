"""vLLM's tiers of offloading without a device: the same specification, with a worker that copies in the host's memory."""

import time

import numpy
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            self._worker = _Worker(self, kv_caches)
        return self._worker


class _Worker(OffloadingWorker):
    """Copies at once what vLLM's own worker copies on streams."""

    def __init__(self, spec, kv_caches):
        self._region = SharedOffloadRegion(
            engine_id=spec._engine_id,
            num_chunks=spec.num_chunks,
            rank=spec.config.parallel.rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self._per_chunk = spec.blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._device, self._host = [], []
        for cache in kv_caches.tensors:
            flat = cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
            self._device.append(flat)
            self._host.append(self._region.create_next_worker_view(cache.page_size_bytes * self._per_chunk))
        self._finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id, device, host, store):
        began, moved = time.monotonic(), 0
        blocks, chunks = iter(device.block_ids.tolist()), iter(numpy.asarray(host.chunk_ids).tolist())
        for group, (count, first) in enumerate(zip(device.group_sizes, device.block_indices)):
            chunk = None
            for at in range(first, first + count):
                inside = at % self._per_chunk
                if chunk is None or inside == 0:
                    chunk = next(chunks)
                block = next(blocks)
                for ref in self._groups[group]:
                    size = ref.page_size_bytes
                    page = self._device[ref.tensor_idx].shape[1]
                    there = self._host[ref.tensor_idx][chunk, inside * page : inside * page + size]
                    here = self._device[ref.tensor_idx][block, :size]
                    there.copy_(here) if store else here.copy_(there)
                    moved += size
        self._finished.append(TransferResult(job_id, True, moved, time.monotonic() - began))
        return True

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self._device.clear()
        self._host.clear()
        self._region.cleanup()
