"""What it costs to tell routers, in processor time a block: `python events_cost.py [BLOCKS]`, with the module and `$KVARTS_PROGRAM` as for the tests.

Two parts: what the scheduler's thread does for a block that is stored and goes again, up to vLLM's event, and what following a server's events costs, from
its connection to the ledger, by a process that does nothing else."""

import multiprocessing
import os
import sys
import time

import doubles

doubles.install()

import torch  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

import kvarts  # noqa: E402
from kvarts import events, vllm_events  # noqa: E402
from served import IDENTITY, Server  # noqa: E402
from test_vllm_events import TOKENS, Asked  # noqa: E402

PAGE, SOME = 4096, 1000


class Plan:
    """Blocks of one group."""

    block_tokens = hash_tokens = TOKENS
    main = 0, TOKENS, FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=1, dtype=torch.bfloat16)

    @staticmethod
    def keys(request, first, last):
        return request.block_hashes[first:last]


def told(blocks):
    """Seconds for blocks that are stored, told of, gone and told of as gone."""
    announcer = vllm_events.Announcer.__new__(vllm_events.Announcer)
    announcer._plan, announcer._ledger = Plan, events.Ledger(1)
    announcer._group, announcer._block_tokens, announcer._spec = Plan.main
    requests = [Asked(f"r{n}", SOME, seed=n) for n in range(blocks // SOME)]
    began = time.process_time()
    for request in requests:
        announcer.saved(announcer.offered(request, 0, SOME), SOME)
        announcer.take()
        announcer._ledger.happened(False, 0, request.block_hashes)
        announcer.take()
    return time.process_time() - began


def follow(socket, blocks, ready, seconds):
    """Follows a server until that many events have come."""
    seen = 0

    class Counting(events.Ledger):
        def happened(self, is_stored, column, keys):
            nonlocal seen
            super().happened(is_stored, column, keys)
            seen += len(keys)

        def lost(self):
            # From here on no event is missed.
            ready.set()

    def connect():
        client = kvarts.connect(socket)
        return client, client.pages(PAGE, **IDENTITY)

    began = time.process_time()
    follower = events.Follower(Counting(1), connect, [(0, 0)])
    while seen < blocks:
        time.sleep(0.05)
    seconds.value = time.process_time() - began
    follower.close()


def followed(blocks):
    """Seconds of a process for this number of events of a server, half of them of stores, half of deletes."""
    server = Server()
    try:
        context = multiprocessing.get_context("spawn")
        ready, seconds = context.Event(), context.Value("d", 0.0)
        other = context.Process(target=follow, args=(server.socket, blocks, ready, seconds))
        other.start()
        ready.wait(60)
        client = kvarts.connect(server.socket)
        pages = client.pages(PAGE, **IDENTITY)
        page, left = bytes(PAGE), blocks // 2
        while left > 0:
            names = [kvarts.key("page", left, n) for n in range(min(left, SOME))]
            # A server that has much to do takes some of them.
            left -= sum(pages.put(names, [page] * len(names)).results)
            pages.delete(names)
        other.join(120)
        client.close()
        return seconds.value if other.exitcode == 0 else float("nan")
    finally:
        server.stop()


def main():
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    one, other = told(blocks) / blocks, followed(blocks) / blocks
    print(f"{os.cpu_count()} processors, {blocks} blocks")
    print(f"told of as stored and as gone: {one * 1e6:.2f} us a block, {one * 1e5:.1%} of a processor at 100,000 a second")
    print(f"followed: {other * 1e6:.2f} us an event, {other * 1e5:.1%} of a processor at 100,000 a second")


if __name__ == "__main__":
    main()
