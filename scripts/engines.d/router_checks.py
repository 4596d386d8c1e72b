"""The check of what routers in front of vLLM are told (scripts/engines)."""

import json
import os
import subprocess
import time

from common import PATIENCE, Process, Server, expect, free_port, model_of, python_of
from vllm_checks import PROMPTS, Engine, Vllm, right_of

#: Numbers by which vLLM calls blocks in events: the last 64 bits of their hashes.
_LAST = 16
_DAMAGED = "kvarts_engine_chunks_damaged_total"


class Routers(Vllm):
    """vLLM with its KV events on, a router that decodes them with vLLM's own classes, and a server to which something happens."""

    PREFIX = "layers-"
    CHECKS = ("events",)
    CONNECTOR = "KvartsLayers"

    def __init__(self):
        self.python = python_of("vllm")
        self.model = model_of(self.python, "llama")
        self.server = self.engine = self.router = self.watching = None

    def check_events(self):
        """What the router knows is what the server has: after stores, evictions, damage, and a server that is killed and comes back."""
        right = right_of(self.model)
        self.server = Server("vllm", "vllm-events", "--budget", "4 MiB", "--segment", "1 MiB", "--shards", "1")
        self.watch()
        ports = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "replay": f"tcp://127.0.0.1:{free_port()}"}
        # A publisher binds where it has a star.
        events = {"endpoint": ports["endpoint"].replace("127.0.0.1", "*"), "replay_endpoint": ports["replay"].replace("127.0.0.1", "*")}
        told = {"enable_kv_cache_events": True, "publisher": "zmq", **events}
        self.router = Process("vllm-router", self.python, "vllm_router.py", ports)
        # Its scheduler steps also without a request: what is stored is told when it is.
        self.engine = Engine("vllm-events", self.model, self.kvarts(), apart=True, kv_events_config=told)
        # A pool is there with the first steps.
        self.engine.generate([[1, 2, 3]], tokens=2)
        said = []
        for which in ("prompts", "more", "churned"):
            found, _, _ = self.engine.generate(PROMPTS[which])
            expect(found == right[which], f"the output differs from the output without a cache: {which}")
            said.append(self.until_equal(which))
        expect(said[-1]["removed"] > 0, "nothing was evicted: the check had no effect")
        self.server.kill()
        self.watching.wait(PATIENCE)
        self.watching = None
        self.server.start()
        said.append(self.until_equal("server killed"))
        self.server.stop()
        self.server.flip_a_bit()
        self.server.start()
        subprocess.run([self.server.program, "scrub", "--server", self.server.socket], check=False, capture_output=True)
        expect(self.server.metric(_DAMAGED) > 0, "the server did not find the damage")
        said.append(self.until_equal("damaged"))
        replayed = self.router.ask(do="replay")
        expect(not replayed["wrong"] and replayed["stored"] == said[-1]["stored"], f"after a replay, the router has blocks that the server lacks: {replayed['wrong']}")
        counts = ", ".join(f"{len(one['stored'])} blocks" for one in said)
        return f"the router had the same blocks as the server each time: {counts}; {said[-1]['removed']} removals; a replay gives the same blocks"

    def until_equal(self, when):
        """Until the router knows what the server has, and no more."""
        deadline = time.monotonic() + PATIENCE / 10
        while True:
            is_right, view = self.compared()
            expect(not view["wrong"], f"{when}: {view['wrong'][:3]}")
            if is_right:
                expect(view["stored"], f"{when}: the router has no blocks")
                return view
            expect(time.monotonic() < deadline, f"{when}: the router has {len(view['stored'])} blocks, and the server {self.there}")
            # An engine that is idle tells nothing.
            self.engine.generate([[1, 2, 3]], tokens=2)
            time.sleep(0.1)

    def compared(self):
        """What the router knows, beside the events of the server, or beside what it has found when it was started again."""
        view = self.router.ask(do="view")
        if self.watching is None:
            command = [self.server.program, "stat", "--server", self.server.socket, "--json"]
            stat = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            self.there = sum(shard["blocks"] for shard in stat["recovery"]) - self.server.metric(_DAMAGED)
            return len(view["stored"]) == self.there and set(view["stored"]) <= self.before, view
        with open(self.events, encoding="utf-8") as lines:
            names = set()
            for event in (json.loads(line) for line in lines if line.endswith("\n")):
                change = names.add if event["event"] == "stored" else names.discard
                change(int(event["key"][-_LAST:], 16))
        self.there, self.before = len(names), names
        return set(view["stored"]) == names, view

    def watch(self):
        """Writes the server's events to a file, until the server ends."""
        self.events = os.path.join(self.server.place, "events")
        with open(self.events, "wb") as file:
            self.watching = subprocess.Popen([self.server.program, "watch", "--json", "--server", self.server.socket], stdout=file)

    def close(self):
        if self.watching is not None:
            self.watching.kill()
            self.watching.wait()
        if self.router is not None:
            self.router.kill()
        super().close()
