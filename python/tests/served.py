"""A real `kvarts serve` for the tests, and what they have in common."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

import kvarts

PROGRAM = os.environ.get("KVARTS_PROGRAM", "kvarts")
PAGE = 64 << 10
IDENTITY = dict(model="test/model", revision="0123abc", dtype="bf16", engine="test", layout="pages")


class Server:
    """A server in a directory of its own, which outlives it."""

    def __init__(self, *arguments):
        self.place = tempfile.mkdtemp(prefix="kvarts-")
        self.socket = os.path.join(self.place, "s")
        self.arguments = arguments
        self.process = None
        self.start()

    def start(self):
        command = [PROGRAM, "serve", "--dir", os.path.join(self.place, "d"), "--listen-socket", self.socket]
        command += [] if "--budget" in self.arguments else ["--budget", "1 GiB"]
        command += ["--listen-grpc", "none", "--listen-metrics", "none", *self.arguments]
        with open(os.path.join(self.place, "log"), "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not os.path.exists(self.socket) or not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self.log())
            time.sleep(0.05)

    def answers(self):
        try:
            kvarts.connect(self.socket, timeout=10).close()
            return True
        except kvarts.Error:
            return False

    def log(self):
        with open(os.path.join(self.place, "log")) as file:
            return file.read()

    def signal(self, number):
        self.process.send_signal(number)
        # A process stops thread by thread, after the call has returned.
        while number == signal.SIGSTOP and not self.stands_still():
            time.sleep(0.01)

    def stands_still(self):
        tasks = f"/proc/{self.process.pid}/task"
        states = []
        for task in os.listdir(tasks):
            with open(f"{tasks}/{task}/stat") as file:
                states.append(file.read().rpartition(")")[2].split()[0])
        return set(states) == {"T"}

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self.place, ignore_errors=True)


class Served(unittest.TestCase):
    """Tests of one server."""

    arguments = ()

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*cls.arguments)

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def connect(self, **kwargs):
        client = kvarts.connect(self.server.socket, **kwargs)
        self.addCleanup(client.close)
        return client

    def pages(self, client=None, page=PAGE, **kwargs):
        client = client or self.connect()
        kwargs = {**IDENTITY, "revision": self.id(), **kwargs}
        return client.pages(page, **kwargs)


def keys(count, first=0):
    return [kvarts.key("page", n) for n in range(first, first + count)]


def pattern(n, size=PAGE):
    """Bytes of which no part is found in another page."""
    return b"".join((n * 1_000_003 + at).to_bytes(8, "little") for at in range(size // 8)) + bytes(size % 8)
