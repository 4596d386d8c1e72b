"""The checks of SGLang (scripts/engines)."""

import collections
import concurrent.futures
import functools
import json
import os
import shutil
import signal
import subprocess
import time

from common import DEADLINE, PATIENCE, PLACE, RUNNERS, Course, Process, Server, compare, environment, expect, full_of, model_of, prompts_of, python_of

PROMPTS = prompts_of(4, 1)
#: Tokens of a page.
PAGE = 16


class Engine(Process):
    """A process of SGLang's (scripts/engines.d/sglang_engine.py)."""

    def __init__(self, name, storage=None, linker=None, model="llama", role=None, variables=None, **engine):
        python = python_of("sglang")
        settings = {"model": model_of(python, model), "storage": storage, "linker": linker, "role": role, "engine": engine}
        told = os.path.join(PLACE, f"{name}.told")
        # SGLang builds an extension for its digests of pages, with the `ninja` of its environment.
        path = os.pathsep.join([os.path.dirname(python), os.environ["PATH"]])
        super().__init__(name, python, "sglang_engine.py", settings, PATH=path, KVARTS_TOLD=told, **(variables or {}))

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


class Decode(Sglang):
    """A prefill engine and a decode engine that offloads into the same server. Only the transfer between the two is replaced (sglang_cpu/transfer.py)."""

    PREFIX = "decode-"
    CHECKS = ("offload", "away", "killed")
    #: Tokens that a decode engine gathers before it offloads them.
    STRIDE = 2 * PAGE
    #: Tokens of an answer. With those of the prompt behind its last full page they are three strides, and the last one ends with the answer.
    LONG = 3 * STRIDE + 1 - 200 % PAGE
    #: What the user says next.
    NEXT = prompts_of(1, 3, tokens=30)[0]

    def __init__(self):
        super().__init__()
        self.place = os.path.join(PLACE, "servers", "sglang-decode-transfer")
        self.room = 0
        self.prefill = self.decode = None

    def pair(self):
        """Both engines, which start at the same time."""
        if self.prefill is not None:
            return
        self.server = Server("sglang", "sglang-decode")
        shutil.rmtree(self.place, ignore_errors=True)
        os.makedirs(self.place)
        # One of them would find what the other has half written.
        model_of(self.python, "llama")
        with concurrent.futures.ThreadPoolExecutor(2) as both:
            self.prefill, self.decode = both.map(self.started, ("prefill", "decode"))

    def started(self, role):
        variables = {"KVARTS_ROLE": role, "KVARTS_TRANSFER": self.place, "SGLANG_HICACHE_DECODE_OFFLOAD_STRIDE": str(self.STRIDE)}
        storage = {"server": self.server.socket, "timeout": DEADLINE}
        return Engine(f"sglang-decode-{role}", storage, role=role, variables=variables)

    def prefilled(self, prompt, salt=None):
        """(the first token, prompt tokens from storage) of the prefill engine, which has forgotten what it had in memory."""
        deadline = time.monotonic() + PATIENCE
        while not self.prefill.ask(do="reset")["reset"]:
            expect(time.monotonic() < deadline, "the prefill engine is never idle")
            time.sleep(0.1)
        self.room += 1
        found = self.prefill.ask(do="hand", prompt=prompt, room=self.room, rid=f"prefill-{self.room}", tokens=1, salt=salt)
        return found["tokens"][0], found["cached"].get("storage", 0)

    def decoded(self, first, prompt, tokens, salt=None):
        """The tokens of the decode engine, which has just got the prompt."""
        return self.decode.ask(do="hand", prompt=prompt, room=self.room, rid=f"decode-{self.room}-{first}", tokens=tokens, salt=salt)["tokens"]

    def answered(self, prompt, tokens, salt=None):
        """(prompt tokens from storage, the answer) of both engines."""
        first, stored = self.prefilled(prompt, salt)
        # Prefill stores behind its answer.
        self.settled("prefill")
        found = self.decoded(first, prompt, tokens, salt)
        self.settled("decode")
        expect(found[0] == first and len(found) == tokens, f"an answer of {len(found)} tokens that begins with {found[0]}, not {first}")
        return stored, found

    def told(self, role):
        try:
            with open(os.path.join(self.place, f"told.{role}"), encoding="utf-8") as file:
                return [json.loads(line) for line in file]
        except FileNotFoundError:
            return []

    def settled(self, role):
        """Until an engine has told nothing new for longer than a call of the storage takes."""
        before, since, deadline = -1, time.monotonic(), time.monotonic() + PATIENCE
        while time.monotonic() < since + 2 * DEADLINE:
            expect(time.monotonic() < deadline, f"the {role} engine does not stop storing")
            if (now := len(self.told(role))) != before:
                before, since = now, time.monotonic()
            time.sleep(0.1)

    def file(self, name):
        with open(os.path.join(self.place, name), "rb") as file:
            return file.read()

    def offloads(self, room=None):
        """What a decode engine has offloaded of a request, by default the last one."""
        return [one for one in self.told("decode") if one["do"] == "offload" and one["rid"].startswith(f"decode-{room or self.room}-")]

    def keys(self, role, since, *calls):
        """What SGLang has passed to the storage: each key once, in order."""
        return list(dict.fromkeys(key for one in self.told(role)[since:] if one["do"] in calls for key in one["keys"]))

    def failures(self):
        """Lines of the engines' logs about exceptions."""
        found = []
        for engine in (self.prefill, self.decode):
            with open(engine.log, encoding="utf-8", errors="replace") as log:
                found += [line.strip() for line in log if "Traceback" in line or "Exception" in line]
        return found

    def check_offload(self):
        """The next turn of a conversation is loaded: the pages of the prompt, which the prefill engine stored, and those that the decode engine offloaded."""
        self.pair()
        prompt, full = PROMPTS[0], len(PROMPTS[0]) // PAGE * PAGE
        stored, answer = self.answered(prompt, self.LONG)
        expect(stored == 0, f"{stored} tokens from an empty store")
        parts, room = self.offloads(), self.room
        expect([one["begin"] for one in parts] == [full + at * self.STRIDE for at in range(3)], f"other parts: {parts}")
        expect([one["finished"] for one in parts] == [False, False, True], "the end of the answer was not offloaded")
        offloaded = self.keys("decode", 0, "batch_set_v1")
        total = full + 3 * self.STRIDE
        expect(len(offloaded) == (total - full) // PAGE, f"{len(offloaded)} pages offloaded")
        since = len(self.told("prefill"))
        turn = [*prompt, *answer, *self.NEXT]
        first, stored = self.prefilled(turn)
        expect(stored == total, f"{stored} of {total} tokens of the next turn from disk")
        # The keys that the prefill engine's tree has for the same tokens.
        asked = self.keys("prefill", since, "batch_exists", "batch_exists_v2")
        expect(asked[full // PAGE : total // PAGE] == offloaded, f"other keys: {asked} do not continue with {offloaded}")
        # The bytes in the prefill engine's pool on the device, of which it has sent all pages.
        sent = self.file(f"sent.{self.room}")
        page = len(self.file(f"sent.{room}")) // -(-len(prompt) // PAGE)
        before = self.file(f"sent.{room}")[: full // PAGE * page]
        [name] = [name for name in os.listdir(self.place) if name.startswith(f"offloaded.decode-{room}-")]
        behind = self.file(name)
        expect(len(behind) == len(offloaded) * page and len(set(behind)) > 100, "the decode engine has told no bytes")
        expect(sent[: len(before)] == before, "pages of the prompt have other bytes")
        expect(sent[len(before) : len(before) + len(behind)] == behind, "pages that were decoded have other bytes")
        # In another namespace nothing is found, and the same token comes out of the computation.
        computed, stored = self.prefilled(turn, salt="other")
        expect(stored == 0, f"{stored} tokens from another namespace")
        expect(computed == first, f"the first token is {first} from the store, but {computed} without it")
        said = self.salted()
        expect(not (bad := self.failures()), f"exceptions in the logs: {bad[:5]}")
        return f"{total} of {total} tokens from disk, {total - full} of them offloaded in {len(parts)} parts; keys and bytes equal, the same first token; {said}"

    def salted(self):
        """An answer in a namespace, which ends within a stride: its pages are found there and nowhere else."""
        prompt, full = PROMPTS[1], len(PROMPTS[1]) // PAGE * PAGE
        _, answer = self.answered(prompt, self.LONG - 10, salt="one")
        turn, total = [*prompt, *answer, *self.NEXT], full + 2 * self.STRIDE
        found = {salt: self.prefilled(turn, salt)[1] for salt in (None, "two", "one")}
        expect(found == {None: 0, "two": 0, "one": total}, f"tokens by namespace: {found}")
        return f"with a salt {total} tokens, and none with another"

    def check_away(self):
        """The server stops while the decode engine offloads, and is killed: both engines go on, and offload again when it is back."""
        self.pair()
        prompt, full = PROMPTS[2], len(PROMPTS[2]) // PAGE * PAGE
        first, _ = self.prefilled(prompt)
        self.settled("prefill")
        since, began = len(self.told("decode")), time.monotonic()
        self.server.process.send_signal(signal.SIGSTOP)
        try:
            answer = self.decoded(first, prompt, self.LONG)
            seconds = time.monotonic() - began
            self.settled("decode")
            lost = [one for one in self.told("decode")[since:] if one["do"] == "batch_set_v1"]
            expect(len(lost) == 3 and not any(one["good"] for one in lost), f"stores while the server was stopped: {lost}")
            longest = max(one["seconds"] for one in lost)
            expect(longest < 2 * DEADLINE, f"a store while the server was stopped took {longest:.1f} s")
            turn = [*prompt, *answer, *self.NEXT]
            began = time.monotonic()
            without, stored = self.prefilled(turn)
            turned = time.monotonic() - began
            expect(stored == 0, "a stopped server served tokens")
        finally:
            self.server.process.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        again, stored = self.prefilled(turn)
        expect(again == without, f"the first token is {again}, but {without} without the server")
        expect(stored >= full, f"{stored} tokens from disk when the server was back")
        self.server.kill()
        gone = self.decoded(*self.another(PROMPTS[3]), self.LONG)
        expect(len(gone) == self.LONG, "an answer without the server is incomplete")
        self.settled("decode")
        self.server.start()
        time.sleep(1.5)
        for _ in range(3):
            _, answer = self.answered(PROMPTS[3], self.LONG)
            _, back = self.prefilled([*PROMPTS[3], *answer, *self.NEXT])
            if back == full + 3 * self.STRIDE:
                break
        expect(back == full + 3 * self.STRIDE, f"{back} tokens from disk after the server was killed")
        expect(not (bad := self.failures()), f"exceptions in the logs: {bad[:5]}")
        return (
            f"stopped: an answer of {self.LONG} tokens in {seconds:.1f} s, {len(lost)} parts not stored (at most {longest:.1f} s for one), the next turn in {turned:.1f} s and the same token; "
            f"killed and back: {back} tokens from disk"
        )

    def another(self, prompt):
        first, _ = self.prefilled(prompt)
        return first, prompt

    def check_killed(self):
        """SIGKILL of the decode engine in the middle of an answer: what it had offloaded is loaded."""
        self.pair()
        prompt = prompts_of(1, 9)[0]
        first, _ = self.prefilled(prompt)
        self.settled("prefill")
        since = len(self.told("decode"))
        self.decode.send(do="hand", prompt=prompt, room=self.room, rid=f"decode-{self.room}-{first}", tokens=700, salt=None)
        deadline = time.monotonic() + PATIENCE
        while sum(one["good"] for one in self.told("decode")[since:] if one["do"] == "batch_set_v1") < 6:
            expect(time.monotonic() < deadline, "the decode engine stored nothing in time")
            time.sleep(0.02)
        self.decode.kill()
        parts = self.offloads()
        expect(not any(one["finished"] for one in parts), "the decode engine was killed too late")
        stored = sum(one["good"] for one in self.told("decode")[since:] if one["do"] == "batch_set_v1") * PAGE
        tokens = [token for one in parts for token in one["tokens"]]
        full = len(prompt) // PAGE * PAGE
        _, found = self.prefilled([*prompt[:full], *tokens, *self.NEXT])
        expect(full + stored <= found <= full + len(tokens), f"{found} tokens from disk, {stored} were stored behind the prompt's {full}")
        return f"{found} tokens from disk, {found - full} of them offloaded by the killed engine, which had copied {len(tokens)}"

    def close(self):
        for engine in (self.prefill, self.decode):
            if engine is not None and engine.process.poll() is None:
                engine.end()
        if self.server is not None:
            self.server.stop()


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
