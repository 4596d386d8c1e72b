"""The checks of LMCache (scripts/engines)."""

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request

from common import BLOCK, DEADLINE, PATIENCE, PLACE, RUNNERS, Server, environment, expect, free_port, model_of, python_of
from vllm_checks import PROMPTS, Engine, right_of


class CacheServer:
    """LMCache's server, as its command line starts it, with Kvarts as its second level."""

    def __init__(self, python, server):
        self.port, page = free_port(), free_port()
        parameters = {"server": server.socket, "revision": "1", "dtype": "bf16"}
        adapter = {"type": "native_plugin", "module_path": "kvarts.lmcache", "class_name": "Kvarts", "adapter_params": parameters}
        command = ["nice", os.path.join(os.path.dirname(python), "lmcache"), "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--http-host", "127.0.0.1", "--http-port", str(page), "--disable-metrics", "--chunk-size", str(BLOCK)]
        command += ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven"]
        # Its memory is a file then, which Kvarts' disks write into.
        command += ["--no-l1-use-lazy", "--shm-name", f"kvarts-check-{self.port}"]
        command += ["--l2-adapter", json.dumps(adapter)]
        quiet = dict(environment(), LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1")
        with open(os.path.join(PLACE, "lmcache-server.log"), "wb") as log:
            self.process = subprocess.Popen(command, env=quiet, stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE
        while not self.answers(page):
            expect(self.process.poll() is None and time.monotonic() < deadline, f"LMCache's server did not start: see {PLACE}/lmcache-server.log")
            time.sleep(0.2)

    @staticmethod
    def answers(port):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthcheck", timeout=10):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def kill(self):
        self.process.kill()
        self.process.wait()


class Lmcache:
    """LMCache's own check of an adapter, and the same objects after a restart of everything."""

    PREFIX = ""
    CHECKS = ("basic", "restart", "engine")

    def __init__(self):
        self.python = python_of("lmcache")

    def versions(self):
        code = "import importlib.metadata as m, kvarts; print('lmcache', m.version('lmcache'), 'kvarts', kvarts.__version__)"
        done = subprocess.run([self.python, "-c", code], env=environment(), capture_output=True, text=True, check=True)
        return done.stdout.strip().splitlines()[-1]

    def check_basic(self):
        """python -m lmcache.v1.basic_check --mode test_l2_adapter"""
        server = Server("lmcache", "lmcache")
        try:
            adapter = {"type": "native_plugin", "module_path": "kvarts.lmcache", "class_name": "Kvarts"}
            adapter["adapter_params"] = {"server": server.socket, "revision": "1", "dtype": "float32"}
            command = ["nice", self.python, "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--num-keys", "20"]
            command += ["--obj-size", "65536", "--l2-adapter", json.dumps(adapter)]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
        finally:
            server.stop()
        rates = re.findall(r"^\| (LOOKUP \(absent\)|STORE|LOOKUP \(exist\)|LOAD) .*?\| +(\d+/\d+) \|", done.stdout, re.MULTILINE)
        expect(len(rates) == 4 and all(rate == "20/20" for _, rate in rates), done.stdout[-3000:] + done.stderr[-1000:])
        return ", ".join(f"{name.lower()} {rate}" for name, rate in rates)

    def adapter(self, server, what, revision="1"):
        command = ["nice", self.python, os.path.join(RUNNERS, "lmcache_run.py"), server.socket, what, revision]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        expect(done.returncode == 0 and lines, done.stdout[-1000:] + done.stderr[-3000:])
        return json.loads(lines[-1].removeprefix("RESULT "))

    def check_restart(self):
        """LMCache's adapter in other processes: after SIGKILL of the server, of another revision, and with a server that stands still."""
        server = Server("lmcache", "lmcache-restart")
        try:
            expect(self.adapter(server, "store")["stored"] == 16, "not all objects were stored")
            server.kill()
            server.start()
            again = self.adapter(server, "load")
            expect((again["found"], again["right"], again["wrong"]) == (16, 16, 0), f"after SIGKILL: {again}")
            other = self.adapter(server, "load", "2")
            expect((other["found"], other["right"], other["wrong"]) == (0, 0, 0), f"another revision: {other}")
            server.process.send_signal(signal.SIGSTOP)
            still = self.adapter(server, "load")
            server.process.send_signal(signal.SIGCONT)
            expect((still["found"], still["right"], still["wrong"]) == (0, 0, 0), f"results with a stopped server: {still}")
            expect(still["seconds"] < 2 * DEADLINE + 3, f"the calls to a stopped server took {still['seconds']:.1f} s")
        finally:
            server.stop()
        return f"after SIGKILL 16 of 16 right, another revision 0 found, server stopped: misses after {still['seconds']:.1f} s"

    def check_engine(self):
        """vLLM with LMCache's server, whose memory is empty when the second engine asks: what comes back, comes from Kvarts."""
        model = model_of(self.python, "llama")
        right = right_of(model, self.python)["prompts"]
        full = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS["prompts"])
        server = Server("lmcache", "lmcache-engine")
        try:
            for turn in ("first", "second"):
                cache = CacheServer(self.python, server)
                try:
                    connector = {"class": "LMCacheMPConnector", "lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": cache.port}
                    engine = Engine(f"lmcache-{turn}", model, connector, self.python)
                    found, _, _ = engine.generate(PROMPTS["prompts"])
                    expect(found == right, f"the output differs from the output without a cache, {turn} engine")
                    tokens = engine.cached("external_unspecified")
                    adopted = server.metric(r'kvarts_clients\{mode="adopted"\}')
                    if turn == "first":
                        self.wait_until_stored(server, full // BLOCK)
                    engine.end()
                finally:
                    cache.kill()
        finally:
            server.stop()
        expect(tokens == full, f"{tokens:.0f} of {full} prompt tokens came from LMCache")
        expect(adopted > 0, "the server does not write into LMCache's memory directly")
        return f"a second engine and a second cache server: {tokens:.0f} of {full} prompt tokens, the same output; memory adopted"

    def wait_until_stored(self, server, blocks):
        deadline = time.monotonic() + PATIENCE
        while (stored := server.metric("kvarts_engine_blocks_stored_total")) < blocks:
            expect(time.monotonic() < deadline, f"{stored:.0f} of {blocks} blocks stored")
            time.sleep(0.1)

    def close(self):
        pass
