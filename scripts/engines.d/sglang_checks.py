"""The checks of SGLang (scripts/engines)."""

import functools
import os
import signal
import subprocess
import time

from common import DEADLINE, PATIENCE, RUNNERS, Process, Server, environment, expect, full_of, model_of, prompts_of, python_of

PROMPTS = prompts_of(4, 1)
#: Tokens of a page.
PAGE = 16


class Engine(Process):
    """A process of SGLang's (scripts/engines.d/sglang_engine.py)."""

    def __init__(self, name, storage=None, linker=None, model="llama", **engine):
        python = python_of("sglang")
        settings = {"model": model_of(python, model), "storage": storage, "linker": linker, "engine": engine}
        # SGLang builds an extension for its digests of pages, with the `ninja` of its environment.
        path = os.pathsep.join([os.path.dirname(python), os.environ["PATH"]])
        super().__init__(name, python, "sglang_engine.py", settings, PATH=path)

    def generate(self, prompts=PROMPTS):
        """(tokens, prompt tokens that came from storage, seconds)"""
        found = self.ask(do="generate", prompts=prompts)
        return found["tokens"], found["stored"], found["seconds"]


@functools.cache
def right_of():
    """What comes out without a cache."""
    plain = Engine("sglang-plain")
    right, _, _ = plain.generate()
    plain.end()
    return right


class Sglang:
    """The storage of SGLang with its real pools of the host, and behind its engine on a processor (see sglang_cpu)."""

    PREFIX = ""
    CHECKS = ("pools", "restart", "away", "damage", "identity", "churn")
    FULL = full_of(PROMPTS, PAGE)

    def __init__(self):
        self.python = python_of("sglang")
        self.server = self.engine = None

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

    def storage(self, server=None, **more):
        return {"server": (server or self.server).socket, "timeout": DEADLINE, **more}

    @staticmethod
    def stored(server, pages):
        """Until the server has them: SGLang stores behind its answers."""
        deadline = time.monotonic() + PATIENCE
        while (there := server.metric("kvarts_engine_blocks_stored_total")) < pages:
            expect(time.monotonic() < deadline, f"{there:.0f} of {pages} pages stored")
            time.sleep(0.1)

    def served(self):
        """A server that has the pages of a process that was killed, and another process."""
        if self.server is None:
            self.server = Server("sglang", "sglang-engine")
            first = Engine("sglang-first", self.storage())
            found, stored, _ = first.generate()
            expect((found, stored) == (right_of(), 0), f"with an empty store: {stored} tokens of it, {found}")
            self.stored(self.server, self.FULL // PAGE)
            first.kill()
        if self.engine is None:
            self.engine = Engine("sglang-second", self.storage())

    def again(self):
        """The same prompts by an engine that has forgotten everything: prompt tokens from storage, and seconds."""
        self.engine.reset()
        found, stored, seconds = self.engine.generate()
        expect(found == right_of(), f"another output, with {stored} tokens from disk: {found} for {right_of()}")
        return stored, seconds

    def back(self):
        """As `again`, where the first call may be the one that finds the server back."""
        for _ in range(3):
            time.sleep(1.5)
            stored, seconds = self.again()
            if stored:
                break
        return stored, seconds

    def check_restart(self):
        """A second process after SIGKILL of the first one, and again after SIGKILL of the server: the same output, from disk."""
        self.served()
        stored, _ = self.again()
        expect(stored == self.FULL, f"{stored} of {self.FULL} tokens from disk")
        self.server.kill()
        self.server.start()
        stored, _ = self.back()
        expect(stored == self.FULL, f"{stored} of {self.FULL} tokens from disk after SIGKILL of the server")
        return f"{stored} of {self.FULL} prompt tokens of full pages from disk, and again after SIGKILL of the server, the same output"

    def check_away(self):
        """The server stops: the engine goes on without it, and takes it again when it is back."""
        self.served()
        _, seconds = self.again()
        self.server.process.send_signal(signal.SIGSTOP)
        try:
            stored, stopped = self.again()
            expect(stored == 0, "tokens from a server that stands still")
            _, meanwhile = self.again()
        finally:
            self.server.process.send_signal(signal.SIGCONT)
        stored, _ = self.back()
        expect(stored == self.FULL, f"{stored} of {self.FULL} tokens from disk when the server was back")
        return f"{seconds:.2f} s with the server, {stopped:.2f} s when it stopped, {meanwhile:.2f} s while away, then {stored} tokens from disk again"

    def check_damage(self):
        """A flipped bit on disk: that page is computed again, and the damage is counted."""
        self.served()
        self.server.stop()
        self.server.flip_a_bit()
        checked = self.server.fsck()
        expect(checked.returncode == 1, f"fsck: {checked.returncode}: {checked.stdout[-500:]}{checked.stderr[-500:]}")
        self.server.start()
        stored, _ = self.back()
        damaged = self.server.metric("kvarts_engine_chunks_damaged_total")
        expect(damaged > 0, "the damage is not in the metrics")
        expect(0 < stored < self.FULL, f"{stored} of {self.FULL} prompt tokens from disk")
        return f"fsck exit 1, {damaged:.0f} damaged in the server's metrics, {stored} of {self.FULL} prompt tokens from disk, the same output"

    def check_identity(self):
        """Another revision: nothing is shared, and each finds its own."""
        self.served()
        before = self.server.metric("kvarts_engine_blocks_stored_total")
        other = Engine("sglang-other", self.storage(revision="other"))
        found, stored, _ = other.generate()
        expect((found, stored) == (right_of(), 0), f"{stored} tokens from an engine of another revision")
        self.stored(self.server, before + self.FULL // PAGE)
        other.reset()
        found, stored, _ = other.generate()
        other.end()
        expect((found, stored) == (right_of(), self.FULL), f"{stored} of {self.FULL} tokens of its own from disk")
        return "another revision: nothing shared, each finds its own"

    def check_churn(self):
        """A budget of a few pages: churn, and no wrong output."""
        server = Server("sglang", "sglang-churn", "--budget", "4 MiB", "--segment", "1 MiB", "--shards", "1")
        try:
            engine, stored = Engine("sglang-churn", self.storage(server)), 0
            for _ in range(3):
                for seed in range(5, 13):
                    engine.generate(prompts_of(4, seed, tokens=600))
                    engine.reset()
                found, more, _ = engine.generate()
                expect(found == right_of(), "another output")
                time.sleep(1)  # stores go on behind the answers
                engine.reset()
                found, again, _ = engine.generate()
                expect(found == right_of(), "another output")
                stored += more + again
                engine.reset()
            evicted = server.metric("kvarts_engine_blocks_evicted_total")
            engine.end()
            expect(evicted > 0 and stored > 0, f"{evicted:.0f} blocks evicted, {stored} tokens from disk: this tried nothing")
        finally:
            server.stop()
        return f"{stored} prompt tokens from disk, {evicted:.0f} blocks evicted, the same output"

    def close(self):
        if self.engine is not None:
            self.engine.end()
        if self.server is not None:
            self.server.stop()
