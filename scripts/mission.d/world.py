"""The parts of a mission, as processes: nodes of one cluster with a bucket behind them, engines of vLLM on the processor, the proxy before them."""

import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request

from common import BLOCK, PATIENCE, PLACE, Server, cluster_of, environment, expect, free_port
from wire import Wire

#: One that prefills finds what others have computed and stores what it computes; one that decodes stores nothing.
_ROLES = {"prefill": "kv_both", "decode": "kv_consumer"}
#: Tokens of an engine's own cache: less than what the conversations have, so that the store counts.
CACHE_BLOCKS = 96
#: Engines of each kind.
PREFILL = DECODE = 2


def page(url, timeout=10):
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read().decode()


def sums(text, pattern):
    """The sum of the values of all metrics whose name and labels match."""
    return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))


class Part:
    """A process that can be killed and started again, and logs to a file."""

    def __init__(self, name, command, **variables):
        self.name, self._command, self._variables = name, command, variables
        self.log = os.path.join(PLACE, "mission", f"{name}.log")
        os.makedirs(os.path.dirname(self.log), exist_ok=True)
        self.process = None
        self.start()

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self._command, env={**environment(), **self._variables}, stdout=log, stderr=log, start_new_session=True)

    def kill(self):
        # With the processes of its own that it has. There may be none any more.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def ready(self, url):
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return page(url)
            except (OSError, urllib.error.URLError):
                expect(self.process.poll() is None, f"{self.name} ended too early: see {self.log}")
                expect(time.monotonic() < deadline, f"{self.name} does not answer: see {self.log}")
                time.sleep(0.2)


def _blocks_for(model):
    """Groups of a model with windows share the blocks."""
    with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
        return CACHE_BLOCKS * (2 if json.load(file).get("sliding_window") else 1)


class Engine(Part):
    """`vllm serve`, without a tokenizer: prompts and answers are tokens."""

    def __init__(self, name, python, model, node=None, role="both"):
        self.port, self.node, self.role, self._lost = free_port(), node, role, collections.Counter()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(self.port), "--host", "127.0.0.1"]
        command += ["--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "2048", "--block-size", str(BLOCK), "--seed", "0"]
        command += ["--dtype", "float32", "--max-num-seqs", "4", "--num-gpu-blocks-override", str(_blocks_for(model))]
        if node is None:
            command += ["--no-enable-prefix-caching"]
        else:
            extra = {"server": node.socket, "timeout": 2.0, "pool_bytes": 64 << 20, "plans": False}
            told = {"kv_connector": "KvartsLayers", "kv_connector_module_path": "kvarts.vllm_layers", "kv_role": _ROLES[role], "kv_connector_extra_config": extra}
            command += ["--kv-transfer-config", json.dumps(told)]
        # Threads that wait for each other without sleeping would take the processors of the other engines.
        alone = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        super().__init__(name, command, VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING", **alone)

    def up(self):
        self.ready(f"{self.url}/health")
        return self

    def kill(self):
        # What is under way now is counted by neither process.
        with contextlib.suppress(OSError):
            self._lost = self.counted()
        super().kill()

    def counted(self):
        """Prompt tokens of its requests, and those of them that came from where, by all its processes."""
        return self._lost + self._counts()

    def _counts(self):
        text = page(f"{self.url}/metrics")
        source = lambda name: sums(text, rf'vllm:prompt_tokens_cached_by_source_total{{[^}}]*source="{name}"[^}}]*}}')  # noqa: E731
        staged = lambda name: sums(text, rf'vllm:kvarts_staged_blocks_total{{[^}}]*source="{name}"[^}}]*}}')  # noqa: E731
        found = {
            "prompt": sums(text, r"vllm:prompt_tokens_total(?:{[^}]*})?"),
            "computed": sums(text, r'vllm:prompt_tokens_by_source_total{[^}]*source="local_compute"[^}]*}'),
            "device": source("device"),
            "store": source("disk"),
            "pool_blocks": staged("pool"),
            "read_blocks": staged("read"),
            "handed": sums(text, r"vllm:kvarts_handed_blocks_total(?:{[^}]*})?") * BLOCK,
        }
        for what in ("unstaged_blocks", "unhanded_blocks", "dropped_blocks", "session_turns"):
            for why, count in re.findall(rf'^vllm:kvarts_{what}_total{{[^}}]*(?:reason|outcome)="([^"]*)"[^}}]*}} (\S+)$', text, re.MULTILINE):
                found[f"{what}_{why}"] = float(count)
        return collections.Counter(found)


class Proxy(Part):
    def __init__(self, python, policy, engines, seed):
        self.port = free_port()
        command = [python, "-m", "kvarts.route", "--listen", f"127.0.0.1:{self.port}", "--policy", policy, "--seed", str(seed)]
        for engine in engines:
            command += ["--engine", f"{engine.url},server={engine.node.socket},role={engine.role}"]
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(f"proxy-{policy}", command)
        self.ready(f"{self.url}/health")

    def again(self):
        self.start()
        self.ready(f"{self.url}/health")


class Node(Server):
    """A server whose counts outlast its processes."""

    def __init__(self, *arguments):
        self._lost, self.wire = collections.Counter(), None
        super().__init__(*arguments)

    def counted(self):
        return self._lost + _node_counts(page(f"http://127.0.0.1:{self.port}/metrics"))

    def kill(self):
        self._lost = self.counted()
        super().kill()

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self._lost = self.counted()
        super().stop()


def _node_counts(text):
    given = lambda name: sums(text, rf"kvarts_{name}(?:{{[^}}]*}})?")  # noqa: E731
    return collections.Counter(
        {
            "stored_blocks": given("engine_blocks_stored_total") - given("cold_restored_blocks_total"),
            "restored_blocks": given("cold_restored_blocks_total"),
            "kept_from_storing": sums(text, r'kvarts_cluster_put_blocks_total{how="(?:kept|owned)"}'),
            "evicted_blocks": given("engine_blocks_evicted_total"),
            "damaged": given("engine_chunks_damaged_total"),
            "own_bytes": sums(text, r'kvarts_cluster_path_bytes_total{path="own"}'),
            "peer_bytes": given("cluster_served_bytes_total"),
            "bucket_bytes": given("cold_given_bytes_total") + given("cold_restored_bytes_total"),
        }
    )


def nodes_of(name, count, budget, apart=False):
    """Servers that are one cluster over wires that can be cut, with one bucket behind them; or, `apart`, servers that know nothing of each other."""
    small = ("--budget", budget, "--segment", "1 MiB", "--shards", "1")
    if apart:
        return [Node("vllm", f"{name}-{n}", *small) for n in range(count)]
    bucket = os.path.join(PLACE, "servers", f"{name}-bucket")
    shutil.rmtree(bucket, ignore_errors=True)
    os.makedirs(bucket)
    cold = ("--cold-bucket", f"file://{bucket}", "--cold-age", "0", "--cold-uses", "0", "--cold-offer", "on", "--cold-memory", "128 MiB")
    nodes = [Node("vllm", f"{name}-{n}", *small, *cold) for n in range(count)]
    return cluster_of(nodes, first=220, wires=Wire)
