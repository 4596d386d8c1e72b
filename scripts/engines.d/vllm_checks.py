"""The checks of vLLM (scripts/engines)."""

import collections
import functools
import glob
import os
import signal
import subprocess
import time

from common import BLOCK, DEADLINE, PATIENCE, Course, Process, Server, Skipped, cluster_of, compare, environment, expect, full_of, model_of, prompts_of, python_of


class Engine(Process):
    """A process of vLLM (scripts/engines.d/vllm_run.py)."""

    def __init__(self, name, model, connector=None, python=None, apart=False, variables=None, **engine):
        """`apart`: its scheduler and worker have a process of their own, and step also without a request; `variables`: of its environment."""
        settings = {"model": model, "connector": connector, "engine": {"block_size": BLOCK, **engine}}
        variables = {**({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if apart else {}), **(variables or {})}
        super().__init__(name, python or python_of("vllm"), "vllm_run.py", settings, **variables)

    def generate(self, prompts, tokens=8):
        """(tokens, prompt tokens that came from disk, seconds)"""
        before = self.from_disk()
        found = self.ask(do="generate", prompts=prompts, tokens=tokens)
        return found["tokens"], self.from_disk() - before, found["seconds"]

    def counters(self):
        return self.ask(do="counters")

    def from_disk(self):
        return self.cached("disk")

    def cached(self, source):
        return self.counters().get(f"vllm:prompt_tokens_cached_by_source {source}", 0)

    def kill(self):
        super().kill()
        for left in glob.glob(f"/dev/shm/vllm_offload_check-{self.process.pid}*"):
            os.unlink(left)


PROMPTS = {"prompts": prompts_of(4, 1), "more": prompts_of(24, 2), "churned": prompts_of(12, 3)}


@functools.cache
def right_of(model, python=None):
    """What comes out without a cache."""
    plain = Engine("vllm-plain", model, python=python)
    right = {name: plain.generate(prompts)[0] for name, prompts in PROMPTS.items()}
    plain.end()
    return right


class Vllm:
    """The checks of vLLM's offloading with Kvarts as its tier. They share servers and engines, because an engine takes long to
    start."""

    PREFIX = ""
    CHECKS = ("restart", "killed", "away", "damage", "identity", "hybrid", "churn", "cluster")
    CONNECTOR = "Kvarts"
    FAILED = "vllm:kv_offload_kvarts_failed_blocks "
    #: How disks reach the engine's memory.
    MODE = "adopted"

    def __init__(self):
        self.python = python_of("vllm")
        self.model = model_of(self.python, "llama")
        self.server = self.engine = None
        self.right = right_of(self.model)

    def kvarts(self, server=None, **settings):
        return {"class": self.CONNECTOR, "server": (server or self.server).socket, "timeout": DEADLINE, **settings}

    def versions(self):
        code = "import vllm.version, torch, kvarts, sys; print('vllm', vllm.version.__version__, 'torch', torch.__version__, "
        code += "'kvarts', kvarts.__version__, 'python', sys.version.split()[0])"
        done = subprocess.run([self.python, "-c", code], env=environment(), capture_output=True, text=True, check=True)
        return done.stdout.strip().splitlines()[-1]

    def served(self):
        """A server that has `prompts`, and an engine that has stored them and then died in the middle of storing `more`."""
        if self.server is None:
            self.server = Server("vllm", "vllm" + self.CONNECTOR)
            first = Engine("vllm-first", self.model, self.kvarts())
            found, disk, _ = first.generate(PROMPTS["prompts"])
            expect(found == self.right["prompts"], "the output with an empty cache differs from the output without a cache")
            expect(disk == 0, "an empty store served tokens")
            first.send(do="generate", prompts=PROMPTS["more"], tokens=8)
            self.wait_for_growth()
            first.kill()
        if self.engine is None:
            self.engine = Engine("vllm-second", self.model, self.kvarts())

    def wait_for_growth(self):
        """Until the server has taken something more."""
        name = "kvarts_engine_blocks_stored_total"
        before, deadline = self.server.metric(name), time.monotonic() + 20
        while self.server.metric(name) == before and time.monotonic() < deadline:
            time.sleep(0.001)

    def again(self, which="prompts"):
        """The same prompts by an engine that has forgotten everything."""
        self.engine.reset()
        found, disk, seconds = self.engine.generate(PROMPTS[which])
        expect(found == self.right[which], f"the output differs from the output without a cache ({disk:.0f} prompt tokens came from disk)")
        return disk, seconds

    @staticmethod
    def full(which="prompts"):
        return full_of(PROMPTS[which], BLOCK)

    def check_restart(self):
        """A second process with the same prompts: tokens from Kvarts, by the engine's own metrics, and the same output."""
        self.served()
        disk, _ = self.again()
        expect(disk == self.full(), f"{disk:.0f} of {self.full()} prompt tokens came from disk")
        expect(self.server.metric(rf'kvarts_clients\{{mode="{self.MODE}"\}}') > 0, f"no client's memory is {self.MODE}")
        return f"{disk:.0f} of {self.full()} prompt tokens from disk, memory {self.MODE}, the same output"

    def check_killed(self):
        """After SIGKILL of the server, and of the engine in the middle of a store."""
        self.served()
        parts, _ = self.again("more")
        self.server.kill()
        self.server.start()
        time.sleep(1.5)
        disk, _ = self.again()
        if disk == 0:  # the first request after the server came back may be the one that finds that out
            time.sleep(1.5)
            disk, _ = self.again()
        expect(disk == self.full(), f"{disk:.0f} of {self.full()} prompt tokens came from disk after SIGKILL of the server")
        return f"engine killed while storing: {parts:.0f} of {self.full('more')} prompt tokens had reached the disk; server killed: all {disk:.0f}"

    def check_away(self):
        """The server stops: no request waits longer than the deadline, and it comes back by itself."""
        self.served()
        self.again()
        self.engine.reset()
        _, seconds = self.again()
        self.server.process.send_signal(signal.SIGSTOP)
        try:
            disk, stopped = self.again()
            expect(disk == 0, "a stopped server served tokens")
            _, meanwhile = self.again()
        finally:
            self.server.process.send_signal(signal.SIGCONT)
        time.sleep(2.5)
        back, _ = self.again()
        if back == 0:
            time.sleep(1.5)
            back, _ = self.again()
        expect(back == self.full(), f"{back:.0f} of {self.full()} prompt tokens came from disk when the server was back")
        # The time of computing is the time of the second run with the server away.
        expect(stopped - seconds < DEADLINE + 1 + meanwhile, f"a request took {stopped:.1f} s, {seconds:.1f} s with the server")
        return f"{seconds:.2f} s with the server, {stopped:.2f} s when it stopped, {meanwhile:.2f} s while away, then {back:.0f} tokens from disk again"

    def check_damage(self):
        """A flipped bit on disk: that block is recomputed, and the damage is counted."""
        self.served()
        self.server.stop()
        self.server.flip_a_bit()
        checked = self.server.fsck()
        expect(checked.returncode == 1, f"fsck: {checked.returncode}: {checked.stdout[-500:]}{checked.stderr[-500:]}")
        self.server.start()
        time.sleep(1.5)
        before = self.failures()
        both = self.full() + self.full("more")
        self.again()
        disk, damaged = 0, 0
        for which in ("prompts", "more"):
            disk += self.again(which)[0]
        damaged = self.server.metric("kvarts_engine_chunks_damaged_total")
        expect(damaged > 0, "the damage is not in the metrics")
        failed = {reason: count - before.get(reason, 0) for reason, count in self.failures().items() if count > before.get(reason, 0)}
        expect(set(failed) - {"away", "DeadlinePassed"}, f"the damage is not in vLLM's metrics: {failed}")
        return f"fsck exit 1, {damaged:.0f} damaged in the server's metrics, failed blocks in vLLM's {failed}, {disk:.0f} of at most {both} prompt tokens from disk, the same output"

    def failures(self):
        """Blocks that failed, by reason, as vLLM counts them."""
        return {name.removeprefix(self.FAILED): count for name, count in self.engine.counters().items() if name.startswith(self.FAILED)}

    def check_identity(self):
        """Another revision, another type, another size of blocks: nothing is shared."""
        self.served()
        others = {"revision": ({"revision": "other"}, {}), "dtype": ({}, {"dtype": "float32"}), "block size": ({}, {"block_size": 2 * BLOCK})}
        for name, (settings, engine) in others.items():
            other = Engine("vllm-other", self.model, self.kvarts(**settings), **engine)
            found, disk, _ = other.generate(PROMPTS["prompts"])
            expect(disk == 0, f"{disk:.0f} tokens from an engine of another {name}")
            other.reset()
            again, disk, _ = other.generate(PROMPTS["prompts"])
            expect(again == found, f"{name}: the output with the cache differs from the output without a cache")
            expect(disk > 0, f"{name}: the engine found none of its own blocks on disk")
            other.end()
        return "revision, dtype (bfloat16, float32) and block size (32, 64): nothing shared, each finds its own"

    def check_hybrid(self):
        """Layers with a sliding window beside layers without: a prefix is restored right."""
        model = model_of(self.python, "gemma3")
        plain = Engine("vllm-hybrid-plain", model)
        right, _, _ = plain.generate(PROMPTS["prompts"])
        plain.end()
        server = Server("vllm", "vllm-hybrid")
        try:
            engine = Engine("vllm-hybrid", model, self.kvarts(server))
            found, _, _ = engine.generate(PROMPTS["prompts"])
            expect(found == right, "the output with an empty cache differs from the output without a cache")
            engine.reset()
            found, disk, _ = engine.generate(PROMPTS["prompts"])
            expect(found == right, "the output differs from the output without a cache")
            expect(disk > 0, "no prompt token came from disk")
            engine.end()
        finally:
            server.stop()
        return f"{disk:.0f} of {self.full()} prompt tokens from disk, the same output"

    def check_churn(self):
        """A budget of a few blocks: churn, and no wrong output."""
        server = Server("vllm", "vllm-churn", "--budget", "4 MiB", "--segment", "1 MiB", "--shards", "1")
        try:
            engine = Engine("vllm-churn", self.model, self.kvarts(server))
            disk = 0
            for turn, which in enumerate(("churned", "churned", "more", "prompts", "churned", "prompts")):
                found, more, _ = engine.generate(PROMPTS[which])
                expect(found == self.right[which], f"the output differs from the output without a cache, turn {turn}")
                disk += more
                engine.reset()
            evicted = server.metric("kvarts_engine_blocks_evicted_total")
            engine.end()
            expect(evicted > 0 and disk > 0, f"{evicted:.0f} blocks evicted, {disk:.0f} tokens from disk: the check had no effect")
        finally:
            server.stop()
        return f"{disk:.0f} prompt tokens from disk, {evicted:.0f} blocks evicted, the same output"

    def check_cluster(self):
        """An engine beside one node stores, an engine beside another node finds that: the bytes come from the first node."""
        nodes = cluster_of([Server("vllm", f"vllm-cluster-{self.CONNECTOR}-{number}") for number in range(2)])
        try:
            first = Engine("vllm-node-first", self.model, self.kvarts(nodes[0]))
            found, disk, _ = first.generate(PROMPTS["prompts"])
            expect(found == self.right["prompts"] and disk == 0, "with empty disks, the output differs, or tokens came from disk")
            self.wait_until_known(nodes, first)
            first.end()
            second = Engine("vllm-node-second", self.model, self.kvarts(nodes[1]))
            found, disk, seconds = second.generate(PROMPTS["prompts"])
            expect(found == self.right["prompts"], f"the output differs from the output without a cache ({disk:.0f} prompt tokens came from the node)")
            expect(disk == self.full(), f"{disk:.0f} of {self.full()} prompt tokens came from the other node")
            second.end()
            served = nodes[0].metric("kvarts_cluster_served_bytes_total")
            expect(served > 0, "the node with the blocks served no bytes")
        finally:
            for node in nodes:
                node.stop()
        return f"{disk:.0f} of {self.full()} prompt tokens from the other node ({served / 2**20:.1f} MiB, {seconds:.2f} s), the same output"

    def wait_until_known(self, nodes, engine):
        """Until the first node has all full blocks, and the directory, of which each node has a part, knows all that it has."""
        wanted, stored, deadline = self.full() // BLOCK, 0, time.monotonic() + PATIENCE
        while (stored := nodes[0].metric("kvarts_engine_blocks_stored_total")) < wanted:
            expect(time.monotonic() < deadline, f"{stored:.0f} of {wanted} blocks stored")
            # What a step has left to store goes on with the next one.
            engine.generate([[1, 2, 3]], tokens=2)
        while sum(node.metric("kvarts_cluster_directory_entries") for node in nodes) < nodes[0].metric("kvarts_engine_blocks_stored_total"):
            expect(time.monotonic() < deadline, "the directory did not receive the first node's blocks in time")
            time.sleep(0.05)

    def close(self):
        if self.engine is not None:
            self.engine.end()
        if self.server is not None:
            self.server.stop()


class Layers(Course, Vllm):
    """The same with the layerwise connector, and what that one is for."""

    PREFIX = "layers-"
    CHECKS = (
        "restart", "killed", "away", "damage", "identity", "hybrid", "churn", "cluster", "layered", "pool", "ranks", "heads", "heads_hybrid", "stages", "states",
        "handover", "course", "course_ranks", "course_hybrid",
    )  # fmt: skip
    CONNECTOR = "KvartsLayers"
    FAILED = "vllm:kvarts_unstaged_blocks "

    def check_damage(self):
        """A flipped bit on disk: that block is recomputed, and the damage is counted. By an engine whose pool is empty."""
        self.served()
        self.engine.end()
        self.engine = None
        return super().check_damage()

    def check_layered(self):
        """A prefix is landed under the computation: each layer waits for its own."""
        model = model_of(self.python, "wide")
        prompts = prompts_of(3, 4, tokens=1000)
        plain = Engine("vllm-wide-plain", model)
        right, _, computed = plain.generate(prompts)
        plain.end()
        server = Server("vllm", "vllm-wide")
        try:
            engine = Engine("vllm-wide", model, self.kvarts(server, timeout=PATIENCE, pool_bytes=512 << 20))
            found, _, _ = engine.generate(prompts, tokens=16)
            expect([tokens[:8] for tokens in found] == right, "the output with an empty cache differs from the output without a cache")
            self.wait_until_saved(engine, sum(len(prompt) // BLOCK for prompt in prompts))
            engine.reset()
            before = engine.counters()
            found, disk, seconds = engine.generate(prompts)
            expect(found == right, "the output differs from the output without a cache")
            full = full_of(prompts, BLOCK)
            expect(disk == full, f"{disk:.0f} of {full} prompt tokens came from disk")
            after = engine.counters()
            layers, own = (after[name] - before.get(name, 0) for name in ("vllm:kvarts_layers", "vllm:kvarts_overlapped_layers"))
            engine.end()
        finally:
            server.stop()
        expect(own == layers > 0, f"{own:.0f} of {layers:.0f} layers were waited for only by their own computation")
        note = f"{own:.0f} of {layers:.0f} layers were waited for only by their own computation"
        return f"{disk:.0f} of {full} prompt tokens from disk, {note}; {computed:.1f} s without a cache, {seconds:.1f} s with it"

    def check_pool(self):
        """What was saved is in the pool: the next request of that prefix reads nothing from the disk."""
        server = Server("vllm", "vllm-pool")
        try:
            engine = Engine("vllm-pool", self.model, self.kvarts(server))
            found, _, _ = engine.generate(PROMPTS["prompts"])
            expect(found == self.right["prompts"], "the output with an empty cache differs from the output without a cache")
            self.wait_until_saved(engine, self.full() // BLOCK)
            engine.reset(host=False)
            found, disk, seconds = engine.generate(PROMPTS["prompts"])
            expect(found == self.right["prompts"], "the output differs from the output without a cache")
            expect(disk == self.full(), f"{disk:.0f} of {self.full()} prompt tokens came from the pool")
            read = engine.counters().get("vllm:kvarts_staged_blocks read", 0)
            expect(read == 0, f"{read:.0f} blocks were read from disk")
            engine.reset()
            found, again, _ = engine.generate(PROMPTS["prompts"])
            expect(found == self.right["prompts"] and again == self.full(), f"{again:.0f} of {self.full()} prompt tokens came from disk")
            read = engine.counters().get("vllm:kvarts_staged_blocks read", 0)
            expect(read == self.full() // BLOCK, f"{read:.0f} blocks were read when the pool was empty")
            engine.end()
        finally:
            server.stop()
        return f"{disk:.0f} of {self.full()} prompt tokens from the pool, nothing was read, {seconds:.2f} s, the same output"

    def several(self, name, kind="llama", blocks=0, **engine):
        """An engine stores this number of blocks, and another one finds them."""
        model = model_of(self.python, kind)
        try:
            plain = Engine(f"vllm-{name}-plain", model, **engine)
            right, _, _ = plain.generate(PROMPTS["prompts"])
            plain.end()
        except RuntimeError as error:
            raise Skipped(f"vLLM without a connector cannot run {engine} here: {str(error).splitlines()[0]}") from None
        server = Server("vllm", f"vllm-{name}")
        try:
            for turn in ("first", "second"):
                one = Engine(f"vllm-{name}-{turn}", model, self.kvarts(server), **engine)
                found, disk, _ = one.generate(PROMPTS["prompts"])
                expect(found == right, f"the output differs from the output without a cache, {turn} engine ({disk:.0f} prompt tokens came from disk)")
                if turn == "first":
                    self.wait_until_saved(one, blocks or self.full() // BLOCK)
                one.end()
        finally:
            server.stop()
        expect(disk == self.full(), f"{disk:.0f} of {self.full()} prompt tokens came from disk")
        return f"{disk:.0f} of {self.full()} prompt tokens from disk, the same output"

    def check_handover(self):
        """One engine prefills, another one beside another node decodes; then each of them and each server is lost in between."""
        nodes = cluster_of([Server("vllm", f"vllm-handover-{number}") for number in range(2)])
        prompts, right = PROMPTS["more"][:20], self.right["more"][:20]
        made, told = [], []
        try:

            def started(role, node):
                made.append(Engine(f"vllm-{role}", self.model, self.kvarts(node, role=role), apart=True))
                # A pool is there with the first steps.
                made[-1].generate(prompts_of(1, 5))
                return made[-1]

            prefill, decode = started("kv_producer", nodes[0]), started("kv_consumer", nodes[1])

            def handed(first, loses=None, least=0):
                """Four prompts, from one engine to the other; something is lost after the first has answered."""
                some = slice(first, first + 4)
                answer = prefill.ask(do="generate", prompts=prompts[some], tokens=1, transfer=[{"do_remote_decode": True}] * 4)
                expect(answer["tokens"] == [tokens[:1] for tokens in right[some]], "the first token of the prefill engine differs from the output without a cache")
                if loses is not None:
                    loses()
                before = decode.from_disk()
                found = decode.ask(do="generate", prompts=prompts[some], tokens=8, transfer=answer["transfer"])
                disk, full = decode.from_disk() - before, full_of(prompts[some], BLOCK)
                expect(found["tokens"] == right[some], f"the output differs from the output without a cache ({disk:.0f} prompt tokens were handed over)")
                offered = [one["kvarts"]["tokens"] for one in answer["transfer"]]
                expect(disk >= least * full, f"{disk:.0f} of {full} prompt tokens were handed over; offered {offered}, {decode.counters()}")
                told.append(f"{disk:.0f} of {full} in {found['seconds']:.1f} s")
                return answer["transfer"]

            params = handed(0, least=1)
            expect([one["kvarts"]["tail_tokens"] for one in params] == [len(prompt) % BLOCK for prompt in prompts[:4]], f"the hand-over does not have the rest of the prompts: {params}")
            handed(4, prefill.kill)
            made.remove(prefill)
            prefill = started("kv_producer", nodes[0])
            handed(8, nodes[0].kill)
            nodes[0].start()
            handed(12, nodes[1].kill)
            nodes[1].start()
            time.sleep(3)
            handed(16, least=1)
            for one in (prefill, decode):
                one.end()
                made.remove(one)
        finally:
            for one in made:
                one.kill()
            for node in nodes:
                node.stop()
        acts = ("calm", "prefill engine killed", "its server killed", "the decoder's server killed", "afterwards")
        return "the same output; prompt tokens handed over: " + "; ".join(f"{act}: {one}" for act, one in zip(acts, told))

    def check_ranks(self):
        """Two workers with tensor parallelism."""
        return self.several("ranks", tensor_parallel_size=2, distributed_executor_backend="mp")

    def check_heads(self):
        """One worker reads what two with tensor parallelism have stored, and two what one has: each a part of the other's heads."""
        return self.heads("llama")

    def check_heads_hybrid(self):
        """The same of a model with windows beside full attention."""
        return self.heads("gemma3")

    def heads(self, kind):
        model, ways = model_of(self.python, kind), ({}, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"})
        found = []
        for writes, reads in (ways[::-1], ways):
            plain = Engine(f"vllm-heads-{kind}-plain", model, **reads)
            right, _, _ = plain.generate(PROMPTS["prompts"])
            plain.end()
            found.append(self.crossed(kind, writes, reads, right))
        return ", ".join(found) + ", the same output"

    def crossed(self, kind, writes, reads, right):
        """An engine reads what another one has stored that has another number of workers."""
        server, model = Server("vllm", f"vllm-heads-{kind}"), model_of(self.python, kind)
        try:
            for turn, engine in (("first", writes), ("second", reads)):
                one = Engine(f"vllm-heads-{kind}-{turn}", model, self.kvarts(server, head_ranges=2, windows="full"), **engine)
                found, disk, _ = one.generate(PROMPTS["prompts"])
                if turn == "first":
                    # With a window for each block.
                    self.wait_until_saved(one, self.full() // BLOCK * (1 if kind == "llama" else 2))
                one.end()
        finally:
            server.stop()
        workers = [engine.get("tensor_parallel_size", 1) for engine in (writes, reads)]
        expect(found == right, f"the output differs from the output without a cache, {workers} workers ({disk:.0f} prompt tokens came from disk)")
        expect(disk == self.full(), f"{disk:.0f} of {self.full()} prompt tokens came from disk, {workers} workers")
        return f"{disk:.0f} of {self.full()} prompt tokens from disk with {workers[0]} and {workers[1]} workers"

    #: vLLM's layers with states say other things in other batches here, also without a connector: one request runs at a time, and there is no
    #: course of them.
    STATES = {"enable_prefix_caching": True, "mamba_cache_mode": "align", "max_num_seqs": 1}

    def check_states(self):
        """Recurrent states beside attention."""
        return self.several("states", "lfm2", blocks=self.full() // BLOCK + len(PROMPTS["prompts"]), **self.STATES)

    def check_stages(self):
        """Two workers with pipeline parallelism."""
        return self.several("stages", pipeline_parallel_size=2, distributed_executor_backend="mp")

    #: Seeds of a course, and steps between two things that happen to the server.
    SEEDS, STEPS = (1, 2), 24

    def course(self, kind, seeds=SEEDS, turns=Course.TURNS, tokens=48, **engine):
        """Courses of requests over a server to which something happens; afterwards what they say and what is stored is that of a run without
        faults."""
        model = self.model if kind == "llama" else model_of(self.python, kind)
        shared = prompts_of(2, 7)
        texts = [begin[: 64 + 32 * at] + prompts_of(1, 11 + at, tokens=40 + 30 * at)[0] for at in range(4) for begin in shared]
        given = {"block_size": BLOCK, "max_num_batched_tokens": 96, **engine}
        said, tried, stored = [], collections.Counter(), {}
        for name in ("calm", *seeds):
            server = Server("vllm", f"vllm-course-{name}")
            try:
                settings = {"model": model, "texts": texts, "tokens": tokens}
                small = {} if name == "calm" else {"num_gpu_blocks_override": 28}
                connector = {"server": server.socket, "timeout": DEADLINE, "pool_bytes": 16 << 20, "windows": "full"}
                one = Process(f"vllm-course-{name}", self.python, "vllm_course.py", {**settings, "connector": connector, "engine": {**given, **small}})
                if name == "calm":
                    right = one.ask(do="right")["right"]
                else:
                    self.trouble(one, server, name, right, said, tried, turns)
                self.all_of(one, server, right)
                answer = one.ask(do="blocks")
                # Of windows what could not be kept is not there.
                found = {block: content for block, content in answer["blocks"].items() if int(block.split()[2]) in answer["full"]}
                if name == "calm":
                    stored = found
                else:
                    expect(found.keys() >= stored.keys(), f"seed {name}: {len(stored.keys() - found.keys())} of {len(stored)} blocks are not stored")
                    self.compare(stored, found)
                    tried.update({what: count for what, count in one.ask(do="counters").items()})
                one.end()
            finally:
                server.stop()
        for what in ("given up running", "given up waiting", *(("preempted", "forgotten") if turns == Course.TURNS else ())):
            expect(tried[what], f"no request was {what}: {tried}")
        expect(tried["given up staging"] + tried["given up staged"], f"no request was given up while it was staged: {tried}")
        note = ", ".join(f"{what} {count:.0f}" for what, count in sorted(tried.items()) if not what.startswith("vllm"))
        landed = tried["vllm:kvarts_promised_blocks"]
        expect(landed > 0, f"no block was promised: {tried}")
        outputs = f"{len(said)} outputs as without a cache, {said.count('rounding')} of them but for rounding"
        return f"{outputs}, {landed:.0f} blocks promised and landed, {len(stored)} blocks stored as in a run without faults; {note}"

    def trouble(self, one, server, seed, right, said, tried, turns):
        steps = lambda turn: dict(do="steps", seed=1000 * seed + turn, count=self.STEPS)  # noqa: E731
        for turn, answer in self.troubled(server, seed, tried, steps, one, turns):
            self.judge(answer["ended"], right, said, f"seed {seed}, turn {turn}")
        answer = one.ask(do="settle")
        self.judge(answer["ended"], right, said, f"seed {seed}, at the end")
        tried.update(answer["seen"])

    def all_of(self, one, server, right):
        """Every text once more, until all of it is stored."""
        time.sleep(1.5)
        for _ in range(3):
            found = one.ask(do="right")["right"]
            expect(all(compare(a, b) != "different" for a, b in zip(right, found)), "after the faults, the output differs from the output without a cache")
            one.ask(do="settle")
            time.sleep(0.3)

    def check_course(self):
        """Seeded courses: admitted, staged, promised, landed, saved, preempted and given up in each; the server killed and stopped."""
        return self.course("llama")

    def check_course_ranks(self):
        """The same of an engine with two workers, and less of it: two workers on two processors take turns."""
        return self.course("llama", self.SEEDS[:1], 6, 16, tensor_parallel_size=2, distributed_executor_backend="mp")

    def check_course_hybrid(self):
        """The same of a model with windows beside full attention."""
        return self.course("gemma3")
    def wait_until_saved(self, engine, blocks):
        deadline = time.monotonic() + PATIENCE
        while (saved := engine.counters().get("vllm:kvarts_saved_blocks", 0)) < blocks:
            expect(time.monotonic() < deadline, f"{saved:.0f} of {blocks} blocks saved")
            # vLLM shows counts of a step with the next one.
            engine.generate([[1, 2, 3]], tokens=2)
