"""What the checks of all engines have in common: a real server, tiny models, prompts."""

import contextlib
import glob
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request

RUNNERS = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(RUNNERS))
PLACE = os.path.abspath(os.environ.get("KVARTS_ENGINES") or os.path.join(ROOT, "target", "engines"))
#: Seconds that an engine may take to start or to answer on a loaded machine.
PATIENCE = 600
#: Tokens of a block; the processor's attention takes multiples of 32.
BLOCK = 32
#: Of nodes, for each other.
PORT = 7450
#: Seconds that a request may wait for Kvarts.
DEADLINE = 2.0


#: The folder of an engine's environment, where it is not called as the engine.
FOLDERS = {}


class Skipped(Exception):
    """A check cannot run, because a program or a package is missing."""


def python_of(engine):
    python = os.path.join(PLACE, FOLDERS.get(engine, engine), "bin", "python")
    if not os.path.exists(python):
        raise Skipped(f"there is no environment of {engine}: run scripts/engines setup {engine}")
    return python


def environment():
    paths = [os.environ["KVARTS_MODULE"]] if "KVARTS_MODULE" in os.environ else []
    return dict(os.environ, PYTHONPATH=os.pathsep.join([*map(os.path.abspath, paths), RUNNERS]), HF_HUB_OFFLINE="1")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A `kvarts serve` in a directory that outlives it."""

    def __init__(self, engine, name, *arguments):
        self.program = self.program_of(engine)
        self.place = os.path.join(PLACE, "servers", name)
        shutil.rmtree(self.place, ignore_errors=True)
        os.makedirs(self.place)
        self.directory = os.path.join(self.place, "d")
        self.socket = os.path.join(self.place, "s")
        self.port = free_port()
        self.arguments = arguments or ("--budget", "1 GiB")
        self.start()

    @staticmethod
    def program_of(engine):
        program = os.environ.get("KVARTS_PROGRAM") or os.path.join(PLACE, FOLDERS.get(engine, engine), "bin", "kvarts")
        if not os.path.exists(program):
            raise Skipped("there is no program kvarts: run scripts/wheel and scripts/engines setup again, or set KVARTS_PROGRAM")
        return os.path.abspath(program)

    def start(self):
        command = [self.program, "serve", "--dir", self.directory, "--listen-socket", self.socket, "--listen-grpc", "none"]
        command += ["--listen-metrics", f"127.0.0.1:{self.port}", *self.arguments]
        with open(os.path.join(self.place, "log"), "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while True:
            try:
                self.metric("kvarts_engine_chunks_damaged_total")
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"kvarts serve did not start: see {self.place}/log") from None
                time.sleep(0.1)

    def metric(self, name):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as page:
            text = page.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait(60)

    def flip_a_bit(self):
        """Flips one bit in the middle of the first run of pages that look like tensors."""
        for file in sorted(glob.glob(os.path.join(self.directory, "shard-*", "segment-*"))):
            with open(file, "r+b") as segment:
                run, at = [], 0
                while page := segment.read(4096):
                    if len(set(page)) > 100:
                        run.append(at)
                    elif len(run) >= 4:
                        break
                    else:
                        run = []
                    at += 4096
                if len(run) >= 4:
                    middle = run[len(run) // 2] + 2048
                    segment.seek(middle)
                    byte = segment.read(1)[0]
                    segment.seek(middle)
                    segment.write(bytes([byte ^ 1]))
                    segment.flush()
                    os.fsync(segment.fileno())
                    return
        raise RuntimeError("the check found no page on disk that looks like tensors, so it could flip no bit")

    def fsck(self):
        return subprocess.run([self.program, "fsck", self.directory], capture_output=True, text=True, check=False)


def cluster_of(nodes, first=210, wires=None):
    """Makes servers the nodes of one cluster that reach each other. `wires`: makes of the host under which a node is known, the one at which it
    listens and its ports the way from the one to the other; without it they are the same."""
    members, listen = "epoch = 1\n", {}
    for number, node in enumerate(nodes):
        command = [node.program, "stat", "--server", node.socket, "--json"]
        node.store = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["store"]
        # Addresses of this process alone: no connection takes their ports.
        high, low = divmod(os.getpid() & 0xFFFF, 256)
        known, own = (f"127.{octet + number}.{high}.{low}" for octet in (first, first + len(nodes)))
        members += f'[[node]]\nid = "{node.store}"\naddress = "{known}:{PORT}"\n'
        if wires is not None:
            node.wire = wires(known, own, (PORT, PORT + 1))
            listen[node] = ("--cluster-listen", f"{own}:{PORT}", "--cluster-lane-port", str(PORT + 1))
    for node in nodes:
        file = os.path.join(node.place, "members.toml")
        with open(file, "w", encoding="utf-8") as text:
            text.write(members)
        node.stop()
        node.arguments += ("--cluster", file, *listen.get(node, ()))
        node.start()
    reached(nodes)
    return nodes


def reached(nodes):
    """Waits until all nodes reach each other."""
    deadline = time.monotonic() + 60
    while any(node.metric(r'kvarts_cluster_nodes\{state="reachable"\}') < len(nodes) - 1 for node in nodes):
        expect(time.monotonic() < deadline, "the nodes did not reach each other in time")
        time.sleep(0.05)


#: Runs a program that the engine's own processes do not run when they start.
_RUN = "import sys; f = sys.argv[1]; del sys.argv[0]; exec(compile(open(f).read(), f, 'exec'), {'__name__': '__main__', '__file__': f})"


class Process:
    """A process of an engine's that takes commands, one JSON document a line, and answers each with one."""

    def __init__(self, name, python, runner, settings, **variables):
        self.log = os.path.join(PLACE, f"{name}.log")
        command = ["nice", python, "-c", _RUN, os.path.join(RUNNERS, runner), json.dumps(settings)]
        there = {**environment(), **variables}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env=there, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1, start_new_session=True
            )
        self.answer()

    def failed(self, how):
        with open(self.log, encoding="utf-8", errors="replace") as log:
            return RuntimeError(f"the engine {how}: {self.log}\n{log.read()[-3000:]}")

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise self.failed("ended")
        return json.loads(line)

    def send(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, **command):
        self.send(**command)
        return self.answer()

    def reset(self, host=True):
        """The engine forgets what it has in memory, and with `host` what its connector has in the host's."""
        self.ask(do="reset", host=host)

    def kill(self):
        # With the processes of its own that it has. There may be none any more.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self):
        self.send(do="end")
        self.process.stdin.close()
        if self.process.wait(PATIENCE) != 0:
            raise self.failed("ended with an error")


#: Nats by which two log-probabilities may differ if all that differs is the order in which they were rounded.
ROUNDING = 0.15


def compare(reference, found):
    """`equal`: the same tokens with the same log-probabilities. `rounding`: not more apart than another order of the same sums
    brings; behind the first token that differs nothing is compared. `different`: anything else."""
    if reference["tokens"] == found["tokens"] and reference["likely"] == found["likely"]:
        return "equal"
    pairs = zip(reference["tokens"][0], found["tokens"][0], reference["likely"][0], found["likely"][0])
    for ours, theirs, expected, likely in pairs:
        if str(theirs) not in expected or str(ours) not in likely:
            return "different"
        if max(abs(expected[token] - likely[token]) for token in expected.keys() & likely.keys()) > ROUNDING:
            return "different"
        if ours != theirs:
            return "rounding"
    return "rounding"


class Course:
    """Requests over a server to which something happens."""

    #: How often something does.
    TURNS = 12

    def troubled(self, server, seed, tried, command, engine, turns=TURNS):
        """(which turn, and what happened in it; the engine's answer to `command(turn)`) for each."""
        chance = random.Random(seed)
        for turn in range(turns):
            what = chance.choice(("nothing", "nothing", "killed", "stopped", "slow"))
            if what == "killed":
                server.kill()
            elif what == "stopped":
                server.process.send_signal(signal.SIGSTOP)
            engine.send(**command(turn))
            if what == "slow":
                # In the middle of what the engine does.
                time.sleep(chance.random() / 4)
                server.process.send_signal(signal.SIGSTOP)
                time.sleep(chance.random() / 2)
                server.process.send_signal(signal.SIGCONT)
            answer = engine.answer()
            if what == "killed":
                server.start()
            elif what == "stopped":
                server.process.send_signal(signal.SIGCONT)
            tried.update({f"server {what}": 1})
            yield f"({what}) {turn}", answer

    @staticmethod
    def judge(ended, right, said, where):
        for text, found in ended:
            said.append(compare(right[text], found))
            expect(said[-1] != "different", f"{where}: the output of text {text} is {found['tokens']}, but {right[text]['tokens']} without a cache")

    @staticmethod
    def compare(stored, found):
        """Bytes are those of a run without faults, but for the last bits of what was computed in another batch."""
        for name, (digest, *numbers) in stored.items():
            other, *others = found[name]
            if digest != other:
                far = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(numbers, others))
                expect(far < 0.1, f"block {name} differs from that of a run without faults: {far}")


def full_of(prompts, block):
    """Prompt tokens of full blocks; of each prompt at least one token is computed."""
    return sum((len(prompt) - 1) // block * block for prompt in prompts)


def model_of(python, kind, seed=1):
    place = os.path.join(PLACE, "models", f"{kind}-{seed}")
    if not os.path.exists(os.path.join(place, "config.json")):
        subprocess.run([python, os.path.join(RUNNERS, "tiny.py"), kind, place, str(seed)], check=True, capture_output=True)
    return place


def prompts_of(count, seed, tokens=200):
    """Prompts of which no two have a beginning in common."""
    return [[(seed * 7919 + n * 104729 + at * (at + 31 * n + 7)) % 500 + 5 for at in range(tokens)] for n in range(count)]


def expect(good, text):
    if not good:
        raise AssertionError(text)
