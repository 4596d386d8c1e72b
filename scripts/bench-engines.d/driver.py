"""What the measurements need of a contestant: its process, its server, its files, and what all of that costs."""

import ctypes
import json
import os
import shutil
import subprocess
import time

import pages
from common import PLACE, Server

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20


class Missing(Exception):
    """A package or a program is missing."""


def processor_seconds(pid):
    """What a process has used, its ended threads included; nanoseconds exact."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def tree(pid):
    """A process and all below it."""
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        todo += children.get(one, [])
    return found


def machine_seconds():
    """What all processors of the machine have done, the kernel's own threads included; hundredths of a second exact."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def sync(place):
    """Writes the file system's pages out: how long that took."""
    began = time.monotonic()
    fd = os.open(place, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(fd)
    finally:
        os.close(fd)
    return time.monotonic() - began


def files_of(place):
    for folder, _, names in os.walk(place):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                yield path


def drop_caches(place):
    """Forgets what the kernel holds of these files, and of all others where that is allowed; False where it is not."""
    for path in files_of(place):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    try:
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("1")
    except OSError:
        return False
    return True


def on_disk(place):
    return sum(os.stat(path).st_blocks * 512 for path in files_of(place))


class Worker:
    """A process of one contestant. It takes one command at a time."""

    def __init__(self, entry, python, place, count, socket=None, log=None, start=True):
        self.entry, self.log = entry, log
        settings = dict(entry.settings, **({"socket": socket} if socket else {}))
        arguments = [entry.module, entry.cls, place, str(count), json.dumps(settings)]
        environment = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONPATH=os.pathsep.join([HERE, os.environ.get("KVARTS_MODULE", "")]))
        environment.update(VLLM_LOGGING_LEVEL="WARNING", LMCACHE_LOG_LEVEL="WARNING", PYTHONDONTWRITEBYTECODE="1")
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [python, os.path.join(HERE, "worker.py"), *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                bufsize=1,
            )

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            with open(self.log, errors="replace") as log:
                raise RuntimeError(f"{self.entry.name} ended: {self.log}\n{log.read()[-1500:]}")
        return json.loads(line)

    def send(self, do, **command):
        self.process.stdin.write(json.dumps({"do": do, **command}) + "\n")

    def ask(self, do, **command):
        self.send(do, **command)
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def end(self):
        self.ask("end")
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


class Store:
    """A contestant with its place and, if it has one, its server: what outlives its processes."""

    def __init__(self, entry, place, mib):
        self.entry = entry
        self.python = os.path.join(PLACE, entry.engine, "bin", "python")
        if not os.path.exists(self.python):
            raise Missing(f"there is no environment of {entry.engine}: run scripts/bench-engines setup {entry.engine}")
        for needed in sorted({entry.needs, "kvarts"} if entry.ours else {entry.needs}):
            look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({needed!r}) is None)"
            if subprocess.run([self.python, "-c", look], env=self._environment(), check=False).returncode != 0:
                raise Missing(f"the package {needed} is missing: run scripts/bench-engines setup {entry.engine}")
        name = entry.name.replace(" ", "-")
        self.server = self.socket = None
        if entry.server:
            self.server = Server("kvarts", f"bench-{name}", "--budget", f"{2 * mib + 4096} MiB")
            self.place, self.socket = self.server.directory, self.server.socket
        else:
            self.place = os.path.join(place, name)
            shutil.rmtree(self.place, ignore_errors=True)
            os.makedirs(self.place)
        self.log = os.path.join(place, f"{name}.log")

    @staticmethod
    def _environment():
        return dict(os.environ, PYTHONPATH=os.environ.get("KVARTS_MODULE", ""))

    def worker(self, count, log=None):
        return Worker(self.entry, self.python, self.place, count, self.socket, self.log)

    def cost(self, worker):
        """Seconds of processors that its processes have used so far, and bytes that they have had from devices."""
        pids = tree(worker.process.pid)
        if self.server is not None:
            pids += tree(self.server.process.pid)
        read = 0
        for pid in pids:
            try:
                with open(f"/proc/{pid}/io") as file:
                    read += next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
            except OSError:
                pass
        return sum(map(processor_seconds, pids)), read

    def crash(self, worker):
        """SIGKILL to everything, and the server again."""
        if self.server is not None:
            self.server.process.kill()
        worker.kill()
        if self.server is not None:
            self.server.process.wait()
            self.server.start()

    def flip(self, n):
        """Flips a bit in the middle of page `n` on disk. The server must not run. False if the page is nowhere."""
        needle, _ = pages.needle(n)
        for path in files_of(self.place):
            with open(path, "r+b") as file:
                at, tail = 0, b""
                while part := file.read(4 * MIB):
                    found = (tail + part).find(needle)
                    if found >= 0:
                        where = at - len(tail) + found + 100
                        file.seek(where)
                        byte = file.read(1)[0]
                        file.seek(where)
                        file.write(bytes([byte ^ 1]))
                        file.flush()
                        os.fsync(file.fileno())
                        return True
                    at, tail = at + len(part), part[-len(needle) :]
        return False

    def remove(self):
        if self.server is not None:
            self.server.stop()
            shutil.rmtree(self.server.place, ignore_errors=True)
        else:
            shutil.rmtree(self.place, ignore_errors=True)
