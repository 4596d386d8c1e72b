"""The checks of SGLang (scripts/engines)."""

import os
import subprocess

from common import PATIENCE, RUNNERS, Server, environment, expect, python_of


class Sglang:
    """The storage of SGLang with its real pools of the host; no engine runs."""

    PREFIX = ""
    CHECKS = ("pools",)

    def __init__(self):
        self.python = python_of("sglang")

    def versions(self):
        code = "import importlib.metadata as m, kvarts; print('sglang', m.version('sglang'), 'kvarts', kvarts.__version__)"
        done = subprocess.run([self.python, "-c", code], env=environment(), capture_output=True, text=True, check=True)
        return done.stdout.strip().splitlines()[-1]

    def check_pools(self):
        """Pages of each layout come back in another pool."""
        server = Server("sglang", "sglang")
        try:
            command = ["nice", self.python, os.path.join(RUNNERS, "sglang_run.py"), server.socket]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
        finally:
            server.stop()
        expect(done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:])
        return ", ".join(line for line in done.stdout.splitlines() if line.endswith("equal"))

    def close(self):
        pass
