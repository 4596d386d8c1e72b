"""The tier for vLLM without an engine: made by vLLM's own factory, driven as its manager does; by doubles where vLLM is absent."""

import os
import shutil
import signal
import threading
import time
import unittest
from types import SimpleNamespace
from unittest import mock

import numpy

import doubles

doubles.install()

from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, ScheduleEndContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: E402

import kvarts  # noqa: E402
import kvarts.vllm  # noqa: E402
from served import Server  # noqa: E402

CHUNK = 8192
SOON = 30


def keys(count, first=0, group=0):
    return [make_offload_key(n.to_bytes(32, "big"), group) for n in range(first, first + count)]


def specification(model="test/model", dtype="bfloat16", tokens=16, tp=1, groups=1, events=False):
    parallel = dict(rank=0, world_size=tp, tp_size=tp, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0)
    parallel.update(data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False)
    config = OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(tokens, (f"layer{n}",), n) for n in range(groups)),
        worker_kv_bytes_per_block=CHUNK,
        enable_kv_cache_events=events,
        extra_config={},
        engine_id="test",
        model=OffloadingModelConfig(model, dtype),
        cache=OffloadingCacheConfig(tokens, 1),
        parallel=OffloadingParallelConfig(**parallel),
        kv_cache_layout="LBHNC",
    )
    return SimpleNamespace(config=config, kv_events_config=SimpleNamespace(enable_kv_cache_events=events), blocks_per_chunk=1)


class Tier:
    """One tier with the host memory of a tiny engine."""

    def __init__(self, server, chunks=16, spec=None, **kwargs):
        self.memory = numpy.zeros((chunks, CHUNK), dtype=numpy.int8)
        parameters = {"timeout": SOON, "pause": 0.1, "identity": {"revision": "1"}, **kwargs}
        config = {"type": "KvartsTier", "module_path": "kvarts.vllm", "server": server.socket, **parameters}
        self.tier = SecondaryTierFactory.create_secondary_tier(config, memoryview(self.memory), spec or specification())
        self.jobs = 0

    def fill(self, chunk, value):
        self.memory[chunk] = value

    def transfer(self, submit, names, chunks, is_promotion):
        self.jobs += 1
        submit(TransferJob(self.jobs, names, numpy.array(chunks, dtype=numpy.int32), is_promotion, ReqContext("request")))
        deadline = time.monotonic() + SOON
        while True:
            for result in self.tier.get_finished_jobs():
                assert result.job_id == self.jobs
                return result
            assert time.monotonic() < deadline, "no answer"
            time.sleep(0.001)

    def store(self, names, chunks):
        return self.transfer(self.tier.submit_store, names, chunks, False)

    def load(self, names, chunks):
        return self.transfer(self.tier.submit_load, names, chunks, True)

    def lookup(self, names, request="request"):
        """As the scheduler: a step after the other until nothing is to be asked again."""
        context, steps = ReqContext(request), 0
        self.tier.on_new_request(context)
        deadline = time.monotonic() + SOON
        while True:
            found = [self.tier.lookup(name, context) for name in names]
            if LookupResult.RETRY not in found:
                self.tier.on_request_finished(context)
                return [one is LookupResult.HIT for one in found]
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            list(self.tier.get_finished_jobs())
            steps += 1
            assert time.monotonic() < deadline, "no answer"
            time.sleep(0.001)


class VllmTier(unittest.TestCase):
    def setUp(self):
        self.server = Server()
        self.addCleanup(self.server.stop)

    def tier(self, **kwargs):
        tier = Tier(self.server, **kwargs)
        self.addCleanup(tier.tier.shutdown)
        return tier

    def told(self, tier, wanted):
        """Until routers know of these chunks and of no others."""
        deadline = time.monotonic() + SOON
        while True:
            for event in tier.tier.take_events():
                self.assertIs(event.medium, Medium.STORAGE)
                self.assertTrue(event.removal_expected)
                for key in event.keys:
                    self.assertEqual(key in self.routers, event.removed, "told twice, or gone and never told")
                    (self.routers.discard if event.removed else self.routers.add)(key)
            if self.routers == set(wanted) and not tier.tier.has_pending_work():
                return
            self.assertLess(time.monotonic(), deadline, f"{len(self.routers)} chunks are known, {len(wanted)} are there")
            list(tier.tier.get_finished_jobs())
            time.sleep(0.002)

    def test_routers_are_told_of_chunks_that_are_stored_found_and_gone(self):
        self.routers = set()
        tier = self.tier(spec=specification(groups=2, events=True))
        names = [*keys(3), *keys(2, 1, group=1)]
        self.assertTrue(tier.store(names, range(5)).success)
        self.told(tier, names)
        # Of one key the chunks of both groups are told apart.
        pages = tier.tier._pages
        pages.delete([names[1][:-4]], group=0)
        self.told(tier, [name for name in names if name != names[1]])
        self.assertTrue(tier.store([names[1]], [7]).success)
        self.told(tier, names)
        # Another engine finds what it has not stored, and is told when it goes.
        self.routers, first = set(), self.routers
        other = self.tier(spec=specification(groups=2, events=True))
        self.assertEqual(other.lookup([names[0], *keys(1, 9)]), [True, False])
        self.told(other, [names[0]])
        pages.delete_all()
        self.told(other, [])
        self.routers = first
        self.told(tier, [])

    def test_routers_are_told_of_what_a_start_of_the_server_has_lost(self):
        self.routers = set()
        tier = self.tier(spec=specification(events=True))
        self.assertTrue(tier.store(keys(2), range(2)).success)
        self.told(tier, keys(2))
        self.server.kill()
        shutil.rmtree(os.path.join(self.server.place, "d"))
        self.server.start()
        self.told(tier, [])

    def test_without_events_in_vllm_nothing_is_followed(self):
        tier = self.tier()
        self.assertTrue(tier.store(keys(1), [0]).success)
        self.assertEqual((list(tier.tier.take_events()), tier.tier.has_pending_work()), ([], False))
        self.assertFalse([one for one in threading.enumerate() if one.name == "kvarts-events"])

    def test_blocks_come_back_in_a_second_engine_and_groups_are_kept_apart(self):
        first = self.tier(spec=specification(groups=2))
        for chunk in range(4):
            first.fill(chunk, chunk + 1)
        names = keys(2) + keys(2, group=1)
        self.assertEqual(first.lookup(names), [False] * 4)
        self.assertTrue(first.store(names, [0, 1, 2, 3]).success)
        second = self.tier(spec=specification(groups=2))
        self.assertEqual(second.lookup(names + keys(1, 9)), [True] * 4 + [False])
        self.assertTrue(second.load(names, [7, 6, 5, 4]).success)
        self.assertEqual([int(second.memory[chunk, -1]) for chunk in (7, 6, 5, 4)], [1, 2, 3, 4])

    def test_a_promotion_that_failed_in_part_says_which_keys_are_good(self):
        tier = self.tier()
        tier.fill(0, 5)
        names = keys(3)
        tier.store(names[1:2], [0])
        result = tier.load(names, [1, 2, 3])
        self.assertFalse(result.success)
        self.assertEqual(list(result.successful_keys), names[1:2])
        self.assertEqual(int(tier.memory[2, 0]), 5)
        result = tier.load(names[2:], [1])
        self.assertEqual((result.success, result.successful_keys), (False, None))

    def test_a_key_whose_load_failed_is_a_miss_for_the_request_that_asked(self):
        tier = self.tier()
        [name] = keys(1)
        tier.store([name], [0])
        context = ReqContext("one")
        while tier.tier.lookup(name, context) is LookupResult.RETRY:
            tier.tier.on_schedule_end(ScheduleEndContext((), ()))
            list(tier.tier.get_finished_jobs())
        self.assertIs(tier.tier.lookup(name, context), LookupResult.HIT)
        self.server.kill()
        self.assertFalse(tier.load([name], [1]).success)
        self.assertIs(tier.tier.lookup(name, context), LookupResult.MISS)
        tier.tier.on_request_finished(context)
        self.assertEqual((tier.tier._lookups.found, tier.tier._lookups._askers), ({}, {}))

    def test_absent_keys_cost_no_exception_each(self):
        tier, names = self.tier(), keys(8192)
        self.assertTrue(tier.store(names[:1], [0]).success)
        made = mock.Mock(side_effect=kvarts.errors._make)
        with mock.patch("kvarts.errors._make", made):
            self.assertEqual(tier.lookup(names), [True] + [False] * 8191)
        self.assertLess(made.call_count, 10)

    def test_engines_of_another_identity_share_nothing(self):
        names = keys(2)
        self.assertTrue(self.tier().store(names, [0, 1]).success)
        self.assertEqual(self.tier().lookup(names), [True] * 2)
        others = [
            {"identity": {"revision": "2"}},
            {"spec": specification(dtype="fp8")},
            {"spec": specification(tokens=32)},
            {"spec": specification(tp=2)},
            {"spec": specification(model="another")},
            {"identity": {"revision": "1", "quantisation": "awq"}},
        ]
        for kwargs in others:
            with self.subTest(kwargs):
                self.assertEqual(self.tier(**kwargs).lookup(names), [False] * 2)

    def test_a_server_that_stands_still_is_a_miss_and_comes_back(self):
        tier = self.tier(timeout=1.0)
        names = keys(2)
        while not tier.store(names, [0, 1]).success:
            pass
        self.server.signal(signal.SIGSTOP)
        try:
            self.assertEqual(tier.lookup(names, "stopped"), [False] * 2)
            self.assertFalse(tier.load(names, [2, 3]).success)
            self.assertFalse(tier.store(keys(2, 8), [2, 3]).success)
        finally:
            self.server.signal(signal.SIGCONT)
        deadline = time.monotonic() + SOON
        while tier.lookup(names) != [True] * 2:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_it_starts_without_a_server_and_ends_with_loads_under_way(self):
        self.server.kill()
        tier = self.tier(timeout=1.0)
        self.assertEqual(tier.lookup(keys(2)), [False] * 2)
        self.server.start()
        deadline = time.monotonic() + SOON
        while not tier.store(keys(2), [0, 1]).success:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        for n in range(20):
            tier.tier.submit_load(TransferJob(100 + n, keys(2), numpy.array([2, 3]), True, ReqContext("end")))
        tier.tier.drain_jobs()
        self.assertEqual(len(list(tier.tier.get_finished_jobs())), 20)

    def test_a_detector_of_stores_that_take_too_long_is_handed_to_vllm(self):
        detector = {"backpressure_cls": "EMABackpressureDetector"}
        extra = {"server": "s", "backpressure": detector, "cpu_bytes_to_use": 1}
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
        with mock.patch("kvarts.vllm.identity_of", return_value={}):
            kvarts.vllm._complete(config)
        [tier] = extra["secondary_tiers"]
        # vLLM makes the detector out of it, asks it before each store and tells it after each.
        self.assertEqual((tier["backpressure"], tier["server"], "cpu_bytes_to_use" in tier), (detector, "s", False))

    def test_a_model_without_a_revision_is_refused(self):
        with self.assertRaisesRegex(ValueError, "revision"):
            Tier(self.server, identity={})


if __name__ == "__main__":
    unittest.main()
