"""One stage on the machine, in a process of its own: `stage.py NAME SETTINGS`. It tells what it finds on standard output, one JSON
document a line, as soon as it is known, and ends with 0 if everything was done."""

import glob
import importlib
import json
import mmap
import os
import random
import select
import shutil
import sys
import threading
import time

from common import Process, Server, compare, free_port

HERE = os.path.dirname(os.path.abspath(__file__))
#: Tokens of an output that is compared.
TOKENS = 16
#: Tokens behind the last full block: they are computed whatever was restored.
TAIL = 5
#: A prompt that fills no block: it makes the engine take its steps.
STEP = [7, 11, 13, 17, 19]
#: Seconds that something may take which goes on by itself: pages being copied, a server that comes back.
PATIENCE = 120
#: Seconds without progress after which a store is taken for ended.
STALL = 5

MODULES = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.v1.kv_offload.tiering.spec",
    "kvarts",
    "kvarts.vllm",
    "kvarts.vllm_layers",
)
DEVICE_MODULES = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
)


def kind_of(place):
    """The kind of file system that a directory is on."""
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        found = [line.split()[1:3] for line in mounts]
    place = os.path.realpath(place) + os.sep
    return max((mount for mount in found if place.startswith(mount[0].rstrip(os.sep) + os.sep)), key=lambda mount: len(mount[0]))[1]


def written(file):
    """Where whole MiB of a file have been written: what was only set aside is read without the disk."""
    size, fd, found, at = 1 << 20, os.open(file, os.O_RDONLY), [], 0
    try:
        while True:
            at = os.lseek(fd, at, os.SEEK_DATA)
            end = os.lseek(fd, at, os.SEEK_HOLE)
            found += range(-(-at // size) * size, end - size + 1, size)
            at = end
    except OSError:  # no data behind this
        return found
    finally:
        os.close(fd)


class Store(Server):
    """A `kvarts serve` in a directory that outlives it and may be there already."""

    def __init__(self, settings, name, directory, budget):
        self.program = settings["program"]
        self.place = os.path.join(settings["place"], "servers", name)
        os.makedirs(self.place, exist_ok=True)
        self.directory = directory
        self.socket = os.path.join(self.place, "s")
        self.port = free_port()
        self.arguments = ("--budget", str(budget), *settings["serve"])
        self.start()

    def stored(self):
        return self.metric("kvarts_engine_blocks_stored_total")

    def moved(self, direction):
        return self.metric(rf'kvarts_device_bytes_total\{{executor="\d+",direction="{direction}"\}}')


class Engine(Process):
    """The engine, and what it was asked."""

    def __init__(self, settings, name, connector=None):
        asked = {"model": settings["model"], "engine": settings["engine"], "connector": connector}
        self.facts = {}
        super().__init__(
            os.path.join(settings["place"], "logs", name), sys.executable, os.path.join(HERE, "engine.py"), asked, **settings["variables"]
        )

    def answer(self):
        found = super().answer()
        if "ready" in found:
            self.facts = found
        return found

    def generate(self, prompt, tokens=TOKENS, likely=True):
        """The answer, and prompt tokens by where they came from."""
        before = self.ask(do="counters")
        found = self.ask(do="generate", prompts=[prompt], tokens=tokens, likely=likely)
        after = self.ask(do="counters")
        return found, {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}

    def first_token(self, prompt):
        """Seconds, and where prompt tokens came from."""
        found, source = self.generate(prompt, tokens=1, likely=False)
        return found["seconds"], source

    def forget(self, host):
        """The engine forgets what the device has, and with `host` what its host tier has. Pages that are being copied cannot be
        forgotten, so it goes on stepping until they are not."""
        deadline = time.monotonic() + PATIENCE
        while not self.ask(do="reset", connector=False)["reset"]:
            if time.monotonic() > deadline:
                raise RuntimeError("the engine did not drop its cached prefixes in time")
            self.step()
        if host:
            self.ask(do="reset", connector=True)
            self.step()

    def is_busy(self):
        """Whether what was sent is not answered yet."""
        return not select.select([self.process.stdout], [], [], 0)[0]

    def step(self):
        self.ask(do="generate", prompts=[STEP], tokens=1, likely=False)


class Stage:
    def __init__(self, settings, told):
        self.settings = settings
        self.told = told
        self.lengths = settings["lengths"]
        self.known = {tuple(key) for key in settings["known"]}
        self.block = settings["engine"]["block_size"]
        self.file = os.path.join(settings["place"], "references.json")
        self.engine = self.server = None

    def tell(self, what, **fact):
        print(json.dumps({"what": what, **fact}), file=self.told, flush=True)

    def is_known(self, what, source=None, length=None, fault=None):
        return (what, source, length, fault) in self.known

    def prompt(self, length, seed=0):
        numbers = random.Random(length * 1000 + seed)
        return [numbers.randrange(5, self.settings["vocabulary"] - 5) for _ in range(length + TAIL)]

    def references(self):
        with open(self.file, encoding="utf-8") as file:
            return json.load(file)

    def end(self):
        if self.engine is not None:
            self.engine.kill()
        if self.server is not None:
            self.server.kill()
        for left in glob.glob("/dev/shm/vllm_offload_pack-*"):
            os.unlink(left)

    def times(self, source, length, prepare, expected):
        """Seconds to the first token, each time after `prepare`; `expected` says where all of the prefix must come from."""
        if self.is_known("first token", source, length):
            return
        seconds, wrong = [], []
        for _ in range(self.settings["repeats"]):
            prepare()
            took, came = self.engine.first_token(self.prompt(length))
            seconds.append(round(took, 5))
            if came != ({expected: length} if expected else {}):
                wrong.append(came)
        self.tell("first token", source=source, length=length, seconds=seconds, otherwise=wrong)

    def output(self, source, length, kind, expected):
        """The output now beside the reference of that kind; exactly equal where the device is known to compute the same bits twice."""
        found, came = self.engine.generate(self.prompt(length))
        references = self.references()
        verdict = compare(references[kind][str(length)], found)
        same_shapes = references["exact"] and kind == "device"
        good = verdict == "equal" if same_shapes else verdict != "different"
        complete = came == ({expected: length} if expected else {})
        of = f"the output of the engine alone that had the prefix {'in device memory' if kind == 'device' else 'to compute'}"
        told = f"{verdict}, prompt tokens from {came or 'nowhere'}"
        self.tell("output", source=source, length=length, of=of, verdict=told, holds=good and complete)
        return found

    # What the machine is.

    def machine(self):
        import torch

        facts = {"python": sys.version.split()[0], "torch": torch.__version__, "processors": os.cpu_count()}
        facts["memory_gib"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
        for name in ("disk", "memory"):
            os.makedirs(self.settings[name], exist_ok=True)
            facts[name + "_free_gib"] = shutil.disk_usage(self.settings[name]).free >> 30
            facts[name + "_on"] = kind_of(self.settings[name])
        facts["shm_free_gib"] = shutil.disk_usage("/dev/shm").free >> 30
        if torch.cuda.is_available():
            facts["device"], facts["cuda"] = torch.cuda.get_device_name(), torch.version.cuda
            facts["link_bytes_per_second"] = round(self.link(torch))
        self.tell("machine", **facts)
        if self.settings["tiny"]:
            self.tell("tiny", why="little is moved: no rate says anything")
        self.imports()

    def link(self, torch):
        size = 1 << 28
        host, device = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8, device="cuda")
        best = 0
        for _ in range(8):
            torch.cuda.synchronize()
            began = time.perf_counter()
            device.copy_(host, non_blocking=True)
            torch.cuda.synchronize()
            best = max(best, size / (time.perf_counter() - began))
        return best

    def imports(self):
        bad = {}
        wanted = (*DEVICE_MODULES, *MODULES) if self.settings["device"] == "cuda" else MODULES
        for name in wanted:
            try:
                importlib.import_module(name)
            except BaseException as error:
                bad[name] = f"{type(error).__name__}: {error}"[:300]
        self.tell("imports", good=len(wanted) - len(bad), bad=bad)
        if bad:
            raise RuntimeError(f"these modules cannot be imported: {json.dumps(bad)}")

    # The engine without anything behind it.

    def plain(self):
        self.engine = Engine(self.settings, "plain")
        self.tell("engine", source="plain", **self.engine.facts)
        references = {"computed": {}, "device": {}, "exact": True}
        for length in self.lengths:
            prompt = self.prompt(length)
            references["computed"][length], _ = self.engine.generate(prompt)
            references["device"][length], _ = self.engine.generate(prompt)
            again, came = self.engine.generate(prompt)
            references["exact"] &= compare(references["device"][length], again) == "equal" and came == {"device": length}
        with open(self.file, "w", encoding="utf-8") as file:
            json.dump(references, file)
        self.tell("repeatable", equal_twice=references["exact"])
        for length in self.lengths:
            self.output("device", length, "device", "device")
            self.tell_agreement(references, length)
        self.times_of_computing()
        self.spoilt()

    def tell_agreement(self, references, length):
        """A prefix out of memory is continued by other shapes of the same sums."""
        verdict = compare(references["computed"][length], references["device"][length])
        of = "the output with everything computed, but for rounding"
        self.tell("output", source="device, computed", length=length, of=of, verdict=verdict, holds=verdict != "different")

    def times_of_computing(self):
        for length in self.lengths:
            self.times("computed", length, lambda: self.engine.forget(False), None)
            self.times("device", length, lambda: None, "device")

    def spoilt(self):
        """Whether an output can tell one wrong page: else the comparisons here prove nothing."""
        length = self.lengths[0]
        self.engine.forget(False)
        self.engine.ask(do="empty")
        self.engine.first_token(self.prompt(length))
        spoilt = self.engine.ask(do="spoil")
        found, _ = self.engine.generate(self.prompt(length))
        verdict = compare(self.references()["device"][str(length)], found)
        self.tell(
            "fault",
            fault="one page of the device's memory made zeros",
            expected="another output, so that comparing shows it",
            found=f"page {spoilt['spoilt']} of {spoilt['pages']}: {verdict}",
            holds=verdict != "equal",
        )

    # Kvarts.

    def kvarts(self, source, directory, budget, connector=None, near="host"):
        """`near`: how the engine calls what the connector has in the host's memory."""
        if not os.path.exists(directory):
            self.known = {key for key in self.known if key[0] != "stored"}
        elif not any(key[0] == "stored" for key in self.known):
            shutil.rmtree(directory)
        self.server = Store(self.settings, source, directory, budget)
        connector = connector or {"class": "Kvarts", "module": "kvarts.vllm", **self.settings["tier"]}
        self.engine = Engine(self.settings, source, {"server": self.server.socket, "timeout": PATIENCE, **connector})
        modes = {mode: self.server.metric(rf'kvarts_clients\{{mode="{mode}"\}}') for mode in ("adopted", "direct", "copied")}
        self.tell("engine", source=source, modes=modes, **self.engine.facts)
        for length in self.lengths:
            self.store(source, length)
            self.engine.forget(True)
            self.output(f"kvarts {source}", length, "device", "disk")
            self.engine.forget(False)
            self.output(f"kvarts host, {source}", length, "device", near)

    def store(self, source, length):
        """Has a prompt computed and waits until all of it is stored."""
        if self.is_known("stored", source, length):
            return
        before, began = self.server.stored(), time.monotonic()
        self.output(f"stored in {source}", length, "computed", None)
        wanted = length // self.block
        self.grown(before, wanted)
        blocks = self.server.stored() - before
        self.tell(
            "stored",
            source=source,
            length=length,
            blocks=blocks,
            of=wanted,
            bytes=length * self.settings["token_bytes"],
            seconds=round(time.monotonic() - began, 3),
        )

    def grown(self, before, wanted):
        """Until that many blocks more are stored, or none comes any more. The engine stores behind its steps."""
        last, since = before, time.monotonic()
        while (now := self.server.stored()) - before < wanted and time.monotonic() - since < STALL:
            if now > last:
                last, since = now, time.monotonic()
            self.engine.step()

    def until(self, reached, meanwhile):
        deadline = time.monotonic() + PATIENCE
        while not reached() and time.monotonic() < deadline:
            meanwhile()

    def layers(self):
        """The layerwise connector, with its pool and the disk behind it."""
        connector = {"class": "KvartsLayers", "module": "kvarts.vllm_layers", "pool_bytes": self.settings["pool_bytes"], "plans": False}
        self.kvarts("layers", self.settings["disk"] + "-layers", self.settings["disk_budget"], connector, near="disk")
        for length in self.lengths:
            self.times("layers disk", length, lambda: self.engine.forget(True), "disk")
            self.times("layers pool", length, lambda: self.engine.forget(False), "disk")

    def disk(self):
        self.kvarts("disk", self.settings["disk"], self.settings["disk_budget"])
        self.disk_rate()
        for length in self.lengths:
            self.times("kvarts disk", length, lambda: self.engine.forget(True), "disk")
            self.times("kvarts host", length, lambda: self.engine.forget(False), "host")
        for fault in (self.flipped, self.killed_loading, self.killed_storing):
            if not self.is_known("fault", fault=fault.__doc__):
                fault()

    def disk_rate(self):
        """What the disk gives for the same files, read past the page cache by several threads."""
        files = sorted(glob.glob(os.path.join(self.settings["disk"], "shard-*", "segment-*")))
        parts = [(file, at) for file in files for at in written(file)]
        read, lock, deadline, errors = [0], threading.Lock(), time.monotonic() + 4, []

        def work(mine):
            buffer = mmap.mmap(-1, 1 << 20)
            opened = {}
            try:
                for file, at in mine:
                    if time.monotonic() > deadline:
                        break
                    if file not in opened:
                        opened[file] = os.open(file, os.O_RDONLY | os.O_DIRECT)
                    count = os.preadv(opened[file], [buffer], at)
                    with lock:
                        read[0] += count
            except OSError as error:
                errors.append(str(error))
            for fd in opened.values():
                os.close(fd)

        began = time.monotonic()
        threads = [threading.Thread(target=work, args=(parts[n::16],)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.tell("disk rate", bytes=read[0], bytes_per_second=round(read[0] / (time.monotonic() - began)), errors=errors[:1])

    def own(self):
        connector = {"class": "OffloadingConnector", **self.settings["own"]}
        self.engine = Engine(self.settings, "own", connector)
        self.tell("engine", source="own", **self.engine.facts)
        for length in self.lengths:
            self.engine.first_token(self.prompt(length))
            self.until_in_host(length)
            self.output("vllm host", length, "device", "host")
            self.times("vllm host", length, lambda: self.engine.forget(False), "host")

    def until_in_host(self, length):
        """The engine copies to host memory behind its steps."""
        for _ in range(10):
            self.engine.forget(False)
            _, came = self.engine.first_token(self.prompt(length))
            if came == {"host": length}:
                break
        self.engine.forget(False)

    def memory(self):
        directory = os.path.join(self.settings["memory"], "kvarts-engine-pack")
        try:
            self.kvarts("memory", directory, self.settings["memory_budget"])
            for length in self.lengths:
                self.times("kvarts memory", length, lambda: self.engine.forget(True), "disk")
        finally:
            self.end()
            self.engine = self.server = None
            shutil.rmtree(directory, ignore_errors=True)

    # What goes wrong.

    def fault(self, what, expected, verdicts, found, more=True):
        good = "different" not in verdicts and more
        self.tell("fault", fault=what, expected=expected, found=f"{', '.join(verdicts)}; {found}", holds=good)

    def again(self, length, seed=0):
        self.engine.forget(True)
        found, came = self.engine.generate(self.prompt(length, seed))
        return found, int(came.get("disk", 0))

    def until_back(self):
        """Until the engine finds its server again."""
        self.until(lambda: self.again(self.lengths[0])[1] > 0, lambda: None)

    def flipped(self):
        """a bit on disk flipped"""
        self.server.stop()
        self.server.flip_a_bit()
        self.server.start()
        self.until_back()
        verdicts, tokens, references = [], [], self.references()
        for length in self.lengths:
            found, came = self.again(length)
            verdicts.append(compare(references["device"][str(length)], found))
            tokens.append(came)
        damaged = self.server.metric("kvarts_engine_chunks_damaged_total")
        told = f"{tokens} of {self.lengths} tokens from disk, {damaged:.0f} damaged by the server's count"
        self.fault(self.flipped.__doc__, "found, computed again, the same output but for rounding", verdicts, told, damaged > 0)

    def killed_loading(self):
        """the server killed while the engine loads"""
        length = self.lengths[-1]
        self.engine.forget(True)
        before = self.engine.ask(do="counters")
        read = self.server.moved("read")
        self.engine.send(do="generate", prompts=[self.prompt(length)], tokens=TOKENS, likely=True)
        enough = length * self.settings["token_bytes"] // 8
        self.until(lambda: self.server.moved("read") - read >= enough or not self.engine.is_busy(), lambda: None)
        self.server.kill()
        found = self.engine.answer()
        came = self.engine.ask(do="counters").get("disk", 0) - before.get("disk", 0)
        self.server.start()
        self.until_back()
        back, tokens = self.again(length)
        reference = self.references()["device"][str(length)]
        verdicts = [compare(reference, found), compare(reference, back)]
        told = f"{came:.0f} of {length} tokens from disk before it was killed, {tokens} when it was back"
        self.fault(self.killed_loading.__doc__, "no failed request, the same output but for rounding, and from disk again", verdicts, told, tokens > 0)

    def killed_storing(self):
        """the server killed while it stores"""
        length = self.lengths[-2]
        before = self.server.stored()
        self.engine.forget(True)
        self.engine.send(do="generate", prompts=[self.prompt(length, 1)], tokens=TOKENS, likely=True)
        self.until(lambda: self.server.stored() > before or not self.engine.is_busy(), lambda: None)
        self.server.kill()
        first = self.engine.answer()
        self.server.start()
        self.until_back()
        found, tokens = self.again(length, 1)
        told = f"{tokens} of {length} tokens had been stored"
        self.fault(self.killed_storing.__doc__, "the same output but for rounding, with what had been stored", [compare(first, found)], told)


def main():
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    stage = Stage(settings, told)
    try:
        getattr(stage, name)()
    finally:
        stage.end()


if __name__ == "__main__":
    main()
