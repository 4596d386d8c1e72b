"""What requests say of chunks to vLLM's Kvarts tier, over a real server, and how long the engine computes, by its steps and by what the operator says."""

import json
import subprocess
import time
import unittest
from types import SimpleNamespace
from unittest import mock

import numpy

import doubles

doubles.install()

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector  # noqa: E402
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402

import kvarts  # noqa: E402
import kvarts.vllm  # noqa: E402
from kvarts import vllm_terms  # noqa: E402
from served import PROGRAM, Server  # noqa: E402
from test_vllm import SOON, Tier, keys, specification  # noqa: E402

FAILED, PINNED, UNPINNED = kvarts.vllm._BLOCKS, kvarts.vllm._PINNED, kvarts.vllm._UNPINNED
TIMES = {"samples": [(0, 1000, 100.0), (0, 10_000, 1000.0)]}


class Terms(unittest.TestCase):
    def setUp(self):
        self.server = Server()
        self.addCleanup(self.server.stop)
        self.tier = Tier(self.server, spec=specification(groups=2))
        self.addCleanup(self.tier.tier.shutdown)
        self.counts = {}

    def request(self, name, **params):
        context = ReqContext(name, params or None)
        self.tier.tier.on_new_request(context)
        return context

    def stored(self, context, names, chunks=None):
        """The answer to a store of a request."""
        tier = self.tier
        tier.transfer(lambda job: tier.tier.submit_store(TransferJob(*list(vars(job).values())[:4], context)), names, chunks or range(len(names)), False)

    def counted(self, *names):
        for name, count in getattr(self.tier.tier.get_stats(), "data", {}).items():
            self.counts[name] = self.counts.get(name, 0) + count
        return [self.counts.get(name, 0) for name in names]

    def until(self, what, is_so):
        deadline = time.monotonic() + SOON
        while not is_so():
            self.assertLess(time.monotonic(), deadline, f"{what}: {self.counts}")
            time.sleep(0.002)

    def pins(self):
        command = [PROGRAM, "pin", "--list", "--json", "--server", self.server.socket]
        return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=SOON).stdout)

    def test_what_is_not_to_be_stored_is_not_and_what_was_stored_is_found(self):
        names = keys(4)
        self.stored(self.request("a"), names[:2])
        private = self.request("b", skip_save=True)
        self.stored(private, names[2:])
        self.assertEqual(self.tier.lookup(names), [True, True, False, False])
        self.tier.tier.on_request_finished(private)
        # Without what it said the same request stores.
        self.stored(ReqContext("b"), names[2:])
        self.assertEqual(self.tier.lookup(names), [True] * 4)

    def test_chunks_live_as_long_as_their_request_says(self):
        self.stored(self.request("a", ttl=0.4), keys(2))
        self.stored(self.request("b", ttl=3600), keys(2, 5))
        self.stored(self.request("c"), keys(2, 9))
        self.until("the time is over", lambda: self.tier.lookup(keys(2)) == [False] * 2)
        self.assertEqual(self.tier.lookup(keys(2, 5) + keys(2, 9)), [True] * 4)

    def test_a_request_s_chunks_are_held_when_it_is_over_and_they_are_stored(self):
        names = [*keys(3), *keys(3, group=1)]
        first = self.request("a")
        self.stored(first, keys(1))
        self.tier.tier.on_request_finished(first)
        context = self.request("b", pin=600)
        for key in names:
            context.set_offload_key_position(key, 16)
        self.assertEqual([self.tier.tier.lookup(key, context).name for key in names[:1]], ["RETRY"])
        # vLLM says that it is over while its last store is under way; one of its chunks is stored by nobody.
        tier = self.tier.tier
        job = TransferJob(70, names[1:5], numpy.arange(4, dtype=numpy.int32), False, context)
        with mock.patch.object(tier, "_hold", wraps=tier._hold) as hold:
            tier._requests._hold = hold
            tier.submit_store(job)
            tier.on_request_finished(context)
            self.assertEqual((hold.call_count, self.pins()["pins"] if "pins" in self.pins() else []), (0, []))
            self.until("it is stored", lambda: any(done.job_id == 70 for done in tier.get_finished_jobs()))
        self.until("they are held", lambda: self.counted(PINNED, (UNPINNED, "NotHere"))[1] == 1)
        self.assertEqual(self.counted((PINNED,), (UNPINNED, "NotHere"), (FAILED, "away")), [5, 1, 0])
        self.assertEqual(len(self.pins()["pins"]), 2)
        # Asked for again, it is held once.
        again = self.request("c", pin=600)
        for key in names:
            again.set_offload_key_position(key, 16)
        tier.on_request_finished(again)
        self.until("they are held", lambda: self.counted((PINNED,))[0] == 10)
        self.assertEqual(len(self.pins()["pins"]), 2)

    def test_what_cannot_be_held_is_counted_by_why(self):
        self.stored(self.request("a"), keys(1))
        self.server.kill()
        context = self.request("b", pin=600)
        context.set_offload_key_position(keys(1)[0], 16)
        self.tier.tier.on_request_finished(context)

        def counted():
            self.counted()
            return sum(count for name, count in self.counts.items() if name[0] == UNPINNED) == 1

        self.until("it is counted", counted)
        self.assertEqual(self.tier.tier._requests._known, {})

    def test_a_session_is_told_to_have_no_effect_and_nothing_is_kept_of_requests_that_say_nothing(self):
        vllm_terms._told.clear()
        with self.assertLogs("kvarts", "WARNING") as said:
            self.request("a", session="s")
            self.request("b", session="t")
            self.request("c", priority=3)
        self.assertEqual(len(said.output), 2)
        self.assertIn("no effect", said.output[0])
        self.assertIn("priority", said.output[1])
        self.request("d", max_load_tokens=4)
        self.assertEqual(self.tier.tier._requests._known, {})


class Recorded:
    """A handle whose look-ups with times are remembered."""

    def __init__(self, pages):
        self._pages, self.told = pages, []

    def __getattr__(self, name):
        return getattr(self._pages, name)

    def match(self, keys, times=None, **more):
        self.told.append(times)
        return self._pages.match(keys, times=times, **more)


class Measured(unittest.TestCase):
    def tier(self, **kwargs):
        server = Server()
        self.addCleanup(server.stop)
        tier = Tier(server, **kwargs)
        self.addCleanup(tier.tier.shutdown)
        tier.tier._pages = Recorded(tier.tier._pages)
        return tier.tier

    def stepped(self, tier):
        """A step, after which what the link was given is done."""
        tier.on_schedule_end(ScheduleEndContext((), ()))
        done = []
        tier._link.then(lambda: done.append(True))
        deadline = time.monotonic() + SOON
        while not done:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.001)
        return len(tier._pages.told)

    def test_times_that_the_operator_gives_are_told_to_the_store_once_and_after_a_while_again(self):
        tier = self.tier(times=TIMES)
        self.assertEqual([self.stepped(tier) for _ in range(3)], [1, 1, 1])
        self.assertAlmostEqual(tier._pages.told[0].prefill_ms(0, 1000), 100.0)
        told, until = tier._told
        self.assertGreater(until, time.monotonic())
        tier._told = told, 0.0
        self.assertEqual([self.stepped(tier) for _ in range(2)], [2, 2])
        # Without times nothing is told.
        self.assertEqual(self.stepped(self.tier()), 0)

    def test_a_chunk_is_as_many_tokens_as_vllm_says(self):
        config = specification(tokens=32).config
        config.cache.blocks_per_chunk = 4
        self.assertEqual(self.tier()._naming(config, {"revision": "1"})["block_tokens"], 128)

    def test_the_connector_measures_the_steps_of_its_engine(self):
        tier, clock = self.tier(), SimpleNamespace(now=0.0)
        manager = SimpleNamespace(secondary_tiers=[tier])
        made = lambda role: kvarts.vllm.Kvarts(None, role, None)  # noqa: E731
        with mock.patch.object(OffloadingConnector, "manager", manager), mock.patch("kvarts.vllm._complete"):
            connector, worker = made(KVConnectorRole.SCHEDULER), made(KVConnectorRole.WORKER)
        self.assertEqual((worker._watch, connector._watch._steps), (None, tier.steps))
        # The end of each step is told, also where nothing was moved.
        self.assertIsNotNone(worker.build_connector_worker_meta())
        with mock.patch("kvarts.steps.time", SimpleNamespace(monotonic=lambda: clock.now)):
            for n in range(20):
                request = SimpleNamespace(request_id=str(n), num_prompt_tokens=64 << n % 4, num_computed_tokens=0)
                connector.update_state_after_alloc(request, None, 0)
                for counts in ({}, {request.request_id: request.num_prompt_tokens}):
                    connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens=counts))
                    clock.now += sum(counts.values()) / 1000
                    connector.update_connector_output(None)
                connector.request_finished_all_groups(request, ())
        self.assertEqual((connector._watch._requests, connector.asked[:3]), ({}, [("let in", "0"), ("step", 0), ("ran",)]))
        self.assertAlmostEqual(tier.steps.times.prefill_ms(0, 512), 512.0, places=3)
        self.stepped(tier)
        self.assertIs(tier._pages.told[-1], tier.steps.times)


if __name__ == "__main__":
    unittest.main()
