"""Checks of what operators and requests ask of vLLM's connectors: switched on by name or by one variable, terms of requests, a slow disk, measured steps
(scripts/engines)."""

import contextlib
import json
import os
import shutil
import subprocess
import time
import tomllib

from common import BLOCK, DEADLINE, PATIENCE, PLACE, ROOT, Server, Skipped, environment, expect, full_of, model_of, prompts_of
from vllm_checks import PROMPTS, Engine, Layers, Vllm

#: Where reads of a group of processes are bounded.
_BLKIO = "/sys/fs/cgroup/blkio"


def installed():
    """A directory that Python takes for an installation of the module: with the entry points that python/pyproject.toml has."""
    with open(os.path.join(ROOT, "python", "pyproject.toml"), "rb") as text:
        points = tomllib.load(text)["project"]["entry-points"]
    place = os.path.join(PLACE, "installed")
    shutil.rmtree(place, ignore_errors=True)
    meta = os.path.join(place, "kvarts_points-0.dist-info")
    os.makedirs(meta)
    with open(os.path.join(meta, "METADATA"), "w", encoding="utf-8") as text:
        text.write("Metadata-Version: 2.1\nName: kvarts-points\nVersion: 0\n")
    with open(os.path.join(meta, "entry_points.txt"), "w", encoding="utf-8") as text:
        for group, named in points.items():
            text.write(f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in named.items()))
    return {"PYTHONPATH": os.pathsep.join([place, environment()["PYTHONPATH"]])}


@contextlib.contextmanager
def slow(process, directory, bytes_per_second):
    """This process reads no faster from the device of this directory."""
    device = os.stat(directory).st_dev
    group = os.path.join(_BLKIO, f"kvarts-check-{os.getpid()}")
    try:
        os.mkdir(group)
        with open(os.path.join(group, "blkio.throttle.read_bps_device"), "w") as file:
            file.write(f"{os.major(device)}:{os.minor(device)} {bytes_per_second}\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            os.rmdir(group)
        raise Skipped(f"the rate of reads from the disk cannot be limited on this machine: {error}") from None

    def move(to):
        for task in os.listdir(f"/proc/{process.pid}/task"):
            with open(os.path.join(to, "tasks"), "w") as file:
                file.write(task)

    try:
        move(group)
        yield
    finally:
        move(_BLKIO)
        os.rmdir(group)


class Operator(Layers):
    PREFIX = "operator-"
    CHECKS = ("names", "variable", "terms", "slow_disk")

    def found_again(self, engine, server):
        """The prompts, stored and found again."""
        found, _, _ = engine.generate(PROMPTS["prompts"])
        expect(found == self.right["prompts"], "the output with an empty cache differs from the output without a cache")
        self.wait_until_saved(engine, self.full() // BLOCK)
        engine.reset()
        found, disk, _ = engine.generate(PROMPTS["prompts"])
        expect(found == self.right["prompts"], "the output differs from the output without a cache")
        expect(disk == self.full(), f"{disk:.0f} of {self.full()} prompt tokens came from disk")
        return f"{disk:.0f} of {self.full()} prompt tokens from disk, the same output"

    def switched(self, name, connector, **variables):
        server = Server("vllm", f"vllm-{name}")
        try:
            given = {one: value.format(socket=server.socket) for one, value in variables.items()}
            engine = Engine(f"vllm-{name}", self.model, connector and self.kvarts(server, **connector), variables={**installed(), **given})
            told = self.found_again(engine, server)
            engine.end()
            return told
        finally:
            server.stop()

    def check_names(self):
        """The connector by its name, without a module's path: vLLM's factory knows it by the plugin."""
        return self.switched("names", {"by_name": True})

    def check_variable(self):
        """One variable of the environment, and no configuration."""
        value = json.dumps({"server": "SOCKET", "pool_bytes": 64 << 20, "plans": False}).replace("{", "{{").replace("}", "}}").replace("SOCKET", "{socket}")
        return self.switched("variable", None, KVARTS_VLLM=value)

    def check_terms(self):
        """What requests say of their blocks reaches the store."""
        server = Server("vllm", "vllm-terms")
        try:
            engine = Engine("vllm-terms", self.model, self.kvarts(server))

            def asked(prompts, **terms):
                before = engine.from_disk()
                found = engine.ask(do="generate", prompts=prompts, tokens=8, transfer=[terms] * len(prompts))["tokens"]
                expect(found == [self.right["more"][PROMPTS["more"].index(prompt)] for prompt in prompts], f"the output with {terms} differs from the output without a cache")
                return engine.from_disk() - before

            skipped, short, pinned, wrong = ([prompt] for prompt in PROMPTS["more"][:4])
            full = full_of(short, BLOCK)
            asked(skipped, skip_save=True)
            asked(short, ttl=4)
            asked(pinned, pin=300)
            asked(wrong, ttl="soon", pin=-1, priority=3)
            self.wait_until_saved(engine, 3 * full // BLOCK)
            deadline = time.monotonic() + PATIENCE
            while engine.counters().get("vllm:kvarts_pinned_blocks", 0) < full // BLOCK or server.metric("kvarts_engine_blocks_expired_total") < full // BLOCK:
                expect(time.monotonic() < deadline, f"blocks were not pinned, or did not expire: {engine.counters()}")
                engine.generate([[1, 2, 3]], tokens=2)
            command = [server.program, "pin", "--list", "--server", server.socket, "--json"]
            pins = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["pins"]
            held = [pin["blocks"] for pin in pins if pin["ends_in_ms"] > 100_000]
            expect(held == [full // BLOCK], f"{pins}")
            engine.reset()
            disk = [asked(prompts, skip_save=True) for prompts in (skipped, short, pinned, wrong)]
            expect(disk == [0, 0, full, full], f"prompt tokens from disk, by request: {disk}")
            counts = {name.removeprefix(self.FAILED): count for name, count in engine.counters().items() if name.startswith(self.FAILED)}
            expect(counts.get("expired", 0) >= full // BLOCK and counts.get("never_stored", 0) >= full // BLOCK, f"{counts}")
            with open(engine.log, encoding="utf-8", errors="replace") as log:
                told = [line for line in log if "kv_transfer_params" in line]
            expect([name for name in ("ttl", "pin", "priority") if not any(f": {name}:" in line for line in told)] == [], f"the log does not name all invalid values: {told}")
            engine.end()
        finally:
            server.stop()
        return f"{full} tokens of a prompt: not stored with `skip_save`, expired with `ttl`, held as {held[0]} blocks with `pin`; three invalid values logged, the same output"

    #: Bytes a second of a disk that is slower than computing; and how often the same is asked of it.
    SLOW, TURNS = 2 << 20, 5

    def check_slow_disk(self):
        """A disk that takes longer to load a prefix than the engine to compute it: what is asked then takes hardly longer than without a cache."""
        model = model_of(self.python, "wide")
        [prompt] = prompts_of(1, 21, tokens=800)
        lengths = [64 + 30 * at for at in range(17)]
        others = [prompts_of(1, 100 + at, tokens=length)[0] for at, length in enumerate(lengths)]
        server = Server("vllm", "vllm-slow")
        try:
            # Apart: it goes on with what is left to save when no request runs.
            engine = Engine("vllm-slow", model, self.kvarts(server, plans=True, pool_bytes=512 << 20), apart=True)

            def asked():
                deadline = time.monotonic() + PATIENCE
                while not engine.ask(do="reset", host=True)["reset"]:
                    expect(time.monotonic() < deadline, "the engine keeps blocks of ended requests")
                    time.sleep(0.2)
                [tokens], disk, seconds = engine.generate([prompt], tokens=1)
                return tokens, disk, seconds

            for other in others:
                # The engine's own steps tell how long it computes.
                engine.generate([other], tokens=1)
            saved = self.settled(engine)
            right, _, computed = asked()
            full = full_of([prompt], BLOCK)
            self.wait_until_saved(engine, saved + full // BLOCK)
            found, disk, fast = asked()
            expect(found == right, "the output differs from the output without a cache")
            turns = []
            with slow(server.process, server.directory, self.SLOW):
                for _ in range(self.TURNS):
                    found, loaded, seconds = asked()
                    expect(found == right, "the output differs from the output without a cache")
                    turns.append((loaded, seconds))
            counts = self.failures_of(engine)
            engine.end()
            blind = self.blind(model, prompt, server, right)
        finally:
            server.stop()
        told = ", ".join(f"{seconds:.1f} s ({loaded:.0f} tokens)" for loaded, seconds in turns)
        note = f"computed in {computed:.1f} s; from a disk of 2 MiB/s, in turns: {told}; without plans {blind:.1f} s; with the whole disk {fast:.1f} s ({disk:.0f} of {full} tokens); {counts}"
        expect(disk == full, f"a part of the prefix is not stored: {note}")
        # A look-up, a stage that is cut short when it has cost as much as computing would have, and then computing.
        most = DEADLINE + 2 * computed + 1
        expect(all(seconds < most for _, seconds in turns), f"a turn took longer than computing the prompt twice: {note}")
        expect(sorted(turns, key=lambda turn: turn[1])[self.TURNS // 2][1] < 1.5 * computed + 1, f"most turns took longer than computing: {note}")
        expect(blind > most, f"the disk was not slow enough to test anything: {note}")
        return note

    @staticmethod
    def settled(engine):
        """Until nothing is on its way to the store; how many blocks were saved by then."""
        saved, before, deadline = 0, None, time.monotonic() + PATIENCE
        while saved != before:
            expect(time.monotonic() < deadline, f"{saved:.0f} blocks saved, and the saves did not end in time")
            before = saved
            time.sleep(2)
            # vLLM shows counts of a step with the next one.
            engine.generate([[1, 2, 3]], tokens=2)
            saved = engine.counters().get("vllm:kvarts_saved_blocks", 0)
        return saved

    def failures_of(self, engine):
        return {name.removeprefix(self.FAILED): int(count) for name, count in engine.counters().items() if name.startswith(self.FAILED)}

    def blind(self, model, prompt, server, right):
        """Seconds of the same without plans."""
        engine = Engine("vllm-blind", model, self.kvarts(server, plans=False, pool_bytes=512 << 20, timeout=10.0))
        engine.generate([[1, 2, 3]], tokens=2)
        with slow(server.process, server.directory, self.SLOW):
            [tokens], _, seconds = engine.generate([prompt], tokens=1)
        expect(tokens == right, "the output differs from the output without a cache")
        engine.end()
        return seconds


class Tier(Vllm):
    """The same of vLLM's own tiers."""

    PREFIX = "tier-"
    CHECKS = ("terms",)
    PINNED = "vllm:kv_offload_kvarts_pinned_blocks"

    def check_terms(self):
        """What requests say of their blocks reaches the store through vLLM's tiers, and so does how long its steps take."""
        server = Server("vllm", "vllm-tier-terms")
        try:
            engine = Engine("vllm-tier-terms", self.model, self.kvarts(server))

            def asked(prompts, **terms):
                before = engine.from_disk()
                found = engine.ask(do="generate", prompts=prompts, tokens=8, transfer=[terms] * len(prompts))["tokens"]
                expect(found == [self.right["more"][PROMPTS["more"].index(prompt)] for prompt in prompts], f"the output with {terms} differs from the output without a cache")
                return engine.from_disk() - before

            def until(what, is_so):
                deadline = time.monotonic() + PATIENCE
                while not is_so():
                    expect(time.monotonic() < deadline, f"{what}: {engine.counters()}")
                    engine.generate([[1, 2, 3]], tokens=2)

            skipped, short, pinned, plain = ([prompt] for prompt in PROMPTS["more"][:4])
            full = full_of(short, BLOCK)
            asked(skipped, skip_save=True)
            asked(short, ttl=4)
            asked(pinned, pin=300)
            asked(plain, session="s")
            until("held", lambda: engine.counters().get(self.PINNED, 0) >= full // BLOCK)
            until("expired", lambda: server.metric("kvarts_engine_blocks_expired_total") >= full // BLOCK)
            command = [server.program, "pin", "--list", "--server", server.socket, "--json"]
            pins = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["pins"]
            held = [pin["blocks"] for pin in pins if pin["ends_in_ms"] > 100_000]
            expect(held == [full // BLOCK], f"{pins}")
            engine.reset()
            disk = [asked(prompts, skip_save=True) for prompts in (skipped, short, pinned, plain)]
            expect(disk == [0, 0, full, full], f"prompt tokens from disk, by request: {disk}")
            with open(engine.log, encoding="utf-8", errors="replace") as log:
                expect(any("session: the field has no effect" in line for line in log), "the log does not say that sessions have no effect")
            measured = self.measured(engine)
            engine.end()
        finally:
            server.stop()
        return f"{full} tokens of a prompt: not stored with `skip_save`, expired with `ttl`, held as {held[0]} blocks with `pin`; {measured}; the same output"

    @staticmethod
    def measured(engine):
        """Prompts of several lengths tell how long the engine computes one of a thousand tokens."""
        for at in range(17):
            engine.generate(prompts_of(1, 100 + at, tokens=100 + 45 * at), tokens=1)
        ms = engine.ask(do="measured")["ms"]
        expect(ms is not None and 0 < ms < 60_000, f"the measured time of 1,000 tokens is not plausible: {ms} ms")
        return f"{ms:.0f} ms for 1,000 tokens by the measured steps"
