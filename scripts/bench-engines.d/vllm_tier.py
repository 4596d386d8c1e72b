"""A secondary tier of vLLM's, made by vLLM's factory and driven as its manager does."""

import time
from types import SimpleNamespace

import numpy
import pages
from contestant import Contestant
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

#: Seconds between two looks at what is finished; an engine looks once a step, which is longer.
_LOOK = 0.0002


def specification():
    parallel = dict(rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0)
    parallel.update(data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False)
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer0",), 0),),
        worker_kv_bytes_per_block=pages.PAGE,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig("bench/model", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(**parallel),
        kv_cache_layout="LBHNC",
    )
    return SimpleNamespace(config=config, kv_events_config=SimpleNamespace(enable_kv_cache_events=False), blocks_per_chunk=1)


class Tier(Contestant):
    """`tier`: what the engine's configuration says of it."""

    def __init__(self, place, count, settings):
        self._file, memory = pages.engines_file(count)
        self.slots = pages.Slots(memory)
        rows = numpy.frombuffer(memory, dtype=numpy.int8).reshape(count, pages.PAGE)
        tier = {name: place if value == "PLACE" else value for name, value in settings["tier"].items()}
        if "socket" in settings:
            tier["server"] = settings["socket"]
        self._tier = SecondaryTierFactory.create_secondary_tier(tier, memoryview(rows), specification())
        self._jobs = {}
        self._names = 0

    def begin(self, kind, numbers, slots):
        self._names += 1
        keys = [make_offload_key(n.to_bytes(32, "big"), 0) for n in numbers]
        self._jobs[self._names] = keys
        job = TransferJob(self._names, keys, numpy.array(slots, dtype=numpy.int32), kind == "get", ReqContext("bench"))
        (self._tier.submit_load if job.is_promotion else self._tier.submit_store)(job)
        return self._names

    def finished(self):
        while not (jobs := list(self._tier.get_finished_jobs())):
            time.sleep(_LOOK)
        answers = []
        for job in jobs:
            keys = self._jobs.pop(job.job_id)
            good = set(keys if job.success else job.successful_keys or ())
            answers.append((job.job_id, [key in good for key in keys]))
        return answers

    def close(self):
        self._tier.shutdown()
