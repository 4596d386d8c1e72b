"""The checks of SGLang (scripts/engines)."""

import collections
import functools
import os
import signal
import subprocess
import time

from common import DEADLINE, PATIENCE, PLACE, RUNNERS, Course, Process, Server, compare, environment, expect, full_of, model_of, prompts_of, python_of

PROMPTS = prompts_of(4, 1)
#: Tokens of a page.
PAGE = 16


class Engine(Process):
    """A process of SGLang's (scripts/engines.d/sglang_engine.py)."""

    def __init__(self, name, storage=None, linker=None, model="llama", **engine):
        python = python_of("sglang")
        settings = {"model": model_of(python, model), "storage": storage, "linker": linker, "engine": engine}
        told = os.path.join(PLACE, f"{name}.told")
        # SGLang builds an extension for its digests of pages, with the `ninja` of its environment.
        path = os.pathsep.join([os.path.dirname(python), os.environ["PATH"]])
        super().__init__(name, python, "sglang_engine.py", settings, PATH=path, KVARTS_TOLD=told)

    def generate(self, prompts=PROMPTS):
        """(tokens, prompt tokens that came from storage, seconds)"""
        found = self.ask(do="generate", prompts=prompts)
        return found["tokens"], found["stored"], found["seconds"]


@functools.cache
def right_of(**engine):
    """What comes out without a cache."""
    plain = Engine("sglang-plain", **engine)
    right, _, _ = plain.generate()
    plain.end()
    return right


class Sglang:
    """The storage of SGLang with its real pools of the host, and behind its engine on a processor (see sglang_cpu)."""

    PREFIX = ""
    CHECKS = ("pools", "restart", "away", "damage", "identity", "churn")
    FULL = full_of(PROMPTS, PAGE)
    RUN = "sglang_run.py"

    def __init__(self):
        self.python = python_of("sglang")
        self.server = self.engine = None

    def versions(self):
        code = "import importlib.metadata as m, kvarts; print('sglang', m.version('sglang'), 'kvarts', kvarts.__version__)"
        done = subprocess.run([self.python, "-c", code], env=environment(), capture_output=True, text=True, check=True)
        return done.stdout.strip().splitlines()[-1]

    def check_pools(self):
        """Pages of each layout or kind come back in another pool."""
        server = Server("sglang", "sglang")
        try:
            command = ["nice", self.python, os.path.join(RUNNERS, self.RUN), server.socket]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
        finally:
            server.stop()
        expect(done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:])
        return ", ".join(line for line in done.stdout.splitlines() if line.endswith("equal"))

    def begun(self, name, server=None, **more):
        """An engine with this storage."""
        return Engine(f"sglang-{self.PREFIX}{name}", {"server": (server or self.server).socket, "timeout": DEADLINE, **more})

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
            self.server = Server("sglang", f"sglang-{self.PREFIX}engine")
            first = self.begun("first")
            found, stored, _ = first.generate()
            expect((found, stored) == (right_of(), 0), f"with an empty store, {stored} tokens came from the store, and the output is {found}")
            self.stored(self.server, self.FULL // PAGE)
            first.kill()
        if self.engine is None:
            self.engine = self.begun("second")

    def again(self):
        """The same prompts by an engine that has forgotten everything: prompt tokens from storage, and seconds."""
        self.engine.reset()
        found, stored, seconds = self.engine.generate()
        expect(found == right_of(), f"with {stored} tokens from disk, the output is {found}, and not {right_of()}")
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
            expect(stored == 0, "a stopped server served tokens")
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
        other = self.begun("other", revision="other")
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
        server = Server("sglang", f"sglang-{self.PREFIX}churn", "--budget", "4 MiB", "--segment", "1 MiB", "--shards", "1")
        try:
            engine, stored = self.begun("churn", server), 0
            for _ in range(3):
                for seed in range(5, 13):
                    engine.generate(prompts_of(4, seed, tokens=600))
                    engine.reset()
                found, more, _ = engine.generate()
                expect(found == right_of(), "the output differs from the output without a cache")
                time.sleep(1)  # stores go on behind the answers
                engine.reset()
                found, again, _ = engine.generate()
                expect(found == right_of(), "the output differs from the output without a cache")
                stored += more + again
                engine.reset()
            evicted = server.metric("kvarts_engine_blocks_evicted_total")
            engine.end()
            expect(evicted > 0 and stored > 0, f"{evicted:.0f} blocks evicted, {stored} tokens from disk: the check had no effect")
        finally:
            server.stop()
        return f"{stored} prompt tokens from disk, {evicted:.0f} blocks evicted, the same output"

    def close(self):
        if self.engine is not None:
            self.engine.end()
        if self.server is not None:
            self.server.stop()


class Mooncake(Sglang):
    """SGLang's own storage of Mooncake, with Kvarts in Mooncake's place."""

    PREFIX = "mooncake-"
    CHECKS = ("pools",)
    RUN = "sglang_mooncake_run.py"


class Linker(Course, Sglang):
    """The same with the linker, which lands layer by layer."""

    PREFIX = "linker-"
    CHECKS = ("pools", "restart", "away", "damage", "identity", "churn", "ranks", "course", "course_ranks")
    RUN = "sglang_linker_run.py"
    #: Two processes that share two processors look up slowly.
    WAIT = 5.0

    def begun(self, name, server=None, engine=None, **more):
        given = {"server": (server or self.server).socket, "timeout": DEADLINE, "pool_bytes": 64 << 20, "wait": self.WAIT, **more}
        return Engine(f"sglang-{self.PREFIX}{name}", linker=given, **(engine or {}))

    def check_ranks(self):
        """Two processes with tensor parallelism."""
        right, server = right_of(tp_size=2), Server("sglang", "sglang-linker-ranks")
        try:
            for turn in ("first", "second"):
                one = self.begun(f"ranks-{turn}", server, {"tp_size": 2})
                found, stored, _ = one.generate()
                expect(found == right, f"the output of the {turn} engine differs, with {stored} tokens from disk")
                self.stored(server, 2 * self.FULL // PAGE)
                one.end()
        finally:
            server.stop()
        expect(stored == self.FULL, f"{stored} of {self.FULL} prompt tokens from disk")
        return f"{stored} of {self.FULL} prompt tokens from disk, the same output"

    def course(self, seeds, **engine):
        """Courses of requests over a server to which something happens; afterwards what they say and what is stored is that of a run without
        faults."""
        shared = prompts_of(2, 7)
        texts = [begin[: 64 + 32 * at] + prompts_of(1, 11 + at, tokens=40 + 30 * at)[0] for at in range(4) for begin in shared]
        said, tried, stored, asked = [], collections.Counter(), {}, {"prompts": texts, "tokens": 24}
        for name in ("calm", *seeds):
            server = Server("sglang", f"sglang-course-{name}")
            try:
                # Less than all of what is asked for at once.
                small = {} if name == "calm" else {"max_total_tokens": 1024}
                one = self.begun(f"course-{name}", server, {"context_length": 512, "chunked_prefill_size": 96, **engine, **small}, wait=0.3)
                if name == "calm":
                    right = one.ask(do="right", **asked)["right"]
                else:
                    for turn, answer in self.troubled(server, name, tried, lambda turn, name=name, one=one: dict(do="course", seed=100 * name + turn, count=20, **asked), one):
                        self.judge(answer["ended"], right, said, f"seed {name}, turn {turn}")
                        tried.update(answer["seen"])
                        if turn.endswith(("3", "7")):
                            one.reset()
                            tried["forgotten"] += 1
                time.sleep(1.5)
                for _ in range(2):
                    one.reset()
                    found = one.ask(do="right", **asked)["right"]
                    expect(all(compare(a, b) != "different" for a, b in zip(right, found)), "after the faults, the output differs from the output without a cache")
                    time.sleep(1)
                found = one.ask(do="blocks", prompts=texts)["blocks"]
                if name == "calm":
                    stored = found
                    expect(len(stored) >= sum(len(text) // PAGE for text in texts), f"a run without faults stored only {len(stored)} pages")
                else:
                    expect(found.keys() >= stored.keys(), f"seed {name}: {len(stored.keys() - found.keys())} of {len(stored)} pages are not stored")
                    self.compare(stored, found)
                with open(one.log, encoding="utf-8", errors="replace") as log:
                    tried["retracted"] += log.read().count("etract")
                one.end()
            finally:
                server.stop()
        for what in ("given up", "forgotten", "tokens restored"):
            expect(tried[what], f"no request was {what}: {tried}")
        expect(not tried["loads failed"], f"promised loads failed: {tried}")
        note = ", ".join(f"{what} {count:.0f}" for what, count in sorted(tried.items()))
        outputs = f"{len(said)} outputs as without a cache, {said.count('rounding')} of them but for rounding"
        return f"{outputs}; {len(stored)} pages stored as in a run without faults; {note}"

    def check_course(self):
        """Seeded courses: requests that share beginnings, many at once in a cache too small for them, given up at any time; the server killed and
        stopped."""
        return self.course((1, 2))

    def check_course_ranks(self):
        """The same of an engine with two processes."""
        return self.course((1,), tp_size=2)
