"""The checks of LMCache (scripts/engines)."""

import json
import os
import re
import signal
import subprocess

from common import DEADLINE, PATIENCE, RUNNERS, Server, environment, expect, python_of


class Lmcache:
    """LMCache's own check of an adapter, and the same objects after a restart of everything."""

    PREFIX = ""
    CHECKS = ("basic", "restart")

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
            expect(self.adapter(server, "store")["stored"] == 16, "not stored")
            server.kill()
            server.start()
            again = self.adapter(server, "load")
            expect((again["found"], again["right"], again["wrong"]) == (16, 16, 0), f"after SIGKILL: {again}")
            other = self.adapter(server, "load", "2")
            expect((other["found"], other["right"], other["wrong"]) == (0, 0, 0), f"another revision: {other}")
            server.process.send_signal(signal.SIGSTOP)
            still = self.adapter(server, "load")
            server.process.send_signal(signal.SIGCONT)
            expect((still["found"], still["right"], still["wrong"]) == (0, 0, 0), f"a server that stands still: {still}")
            expect(still["seconds"] < 2 * DEADLINE + 3, f"it took {still['seconds']:.1f} s")
        finally:
            server.stop()
        return f"after SIGKILL 16 of 16 right, another revision 0 found, server stopped: misses after {still['seconds']:.1f} s"

    def close(self):
        pass
