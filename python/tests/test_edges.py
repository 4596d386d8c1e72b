"""Engines of three tenants on three nodes of one cluster with a bucket behind them, each engine with its own connector on every node,
in one seeded run: blocks are stored, read and deleted; nodes are killed and come back, or stand still for a while; a tenant goes and
comes back as another one. After each step every engine loads everything on every node: what was stored since the last delete, or
nothing.

KVARTS_EDGES=N runs N seeds."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
from unittest import mock

import kvarts
import numpy

import doubles

doubles.install()

import torch  # noqa: E402

import test_lmcache  # noqa: E402
import test_sglang  # noqa: E402
import test_vllm  # noqa: E402
from served import PROGRAM, Server  # noqa: E402

SEEDS = int(os.environ.get("KVARTS_EDGES", "1"))
NODES, KEYS, STEPS = 3, 8, 12
#: Far more than anything takes here.
SOON = 30
#: For connectors: longer than a server waits for another node that is to hear of a delete.
TIMEOUT = 6.0
BYTES = 8192


class NotAcknowledged(AssertionError):
    """Nothing is promised of a delete."""


def insist(delete):
    """A delete that was not acknowledged promises nothing: it is asked for again, as an operator would."""
    deadline = time.monotonic() + SOON / 2
    while (why := delete()) is not None:
        if time.monotonic() > deadline:
            raise NotAcknowledged(why)
        time.sleep(0.1)


class Lmcache:
    """Objects of LMCache."""

    def __init__(self, place):
        self.adapter = test_lmcache.Adapter(**place)
        self.keys = test_lmcache.names(KEYS)

    def put(self, content):
        keys = [self.keys[n] for n in content]
        _, _, results = self.adapter.answer(self.adapter.plugin.submit_batch_set(keys, list(map(memoryview, content.values()))))
        return [n for n, good in zip(content, results) if good]

    def get(self):
        here = [n for n, good in enumerate(self.adapter.exists(self.keys)) if good]
        into = [bytearray(BYTES) for _ in here]
        keys, views = [self.keys[n] for n in here], list(map(memoryview, into))
        results = self.adapter.answer(self.adapter.plugin.submit_batch_get(keys, views))[2] if here else ()
        return {n: bytes(one) for n, one, good in zip(here, into, results) if good}

    def delete(self, some):
        def delete():
            is_done, why, _ = self.adapter.delete([self.keys[n] for n in some])
            return None if is_done else why

        insist(delete)
        return some

    def close(self):
        self.adapter.plugin.close()


class Vllm:
    """Chunks of vLLM's offloading. It deletes nothing itself: its operator does."""

    def __init__(self, place):
        server = type("At", (), {"socket": place.pop("server")})
        self.tier = test_vllm.Tier(server, chunks=KEYS, **place)
        self.keys = test_vllm.keys(KEYS)

    def put(self, content):
        for n, one in content.items():
            self.tier.memory[n] = numpy.frombuffer(one, dtype=numpy.int8)
        done = self.tier.store([self.keys[n] for n in content], list(content))
        return self.good(done, list(content))

    def good(self, done, some):
        if done.success:
            return some
        return [n for n in some if self.keys[n] in (done.successful_keys or ())]

    def get(self):
        here = [n for n, good in enumerate(self.tier.lookup(self.keys)) if good]
        self.tier.memory[:] = 0
        some = self.good(self.tier.load([self.keys[n] for n in here], here), here) if here else ()
        return {n: self.tier.memory[n].tobytes() for n in some}

    def delete(self, some):
        def delete():
            told = self.tier.tier._pages.delete([n.to_bytes(32, "big") for n in some], group=0)
            return next((error for error in told.errors.values() if not isinstance(error, kvarts.Miss)), None)

        insist(delete)
        return some

    def close(self):
        self.tier.tier.shutdown()


class Pool(test_sglang.Pool):
    """Pages of as many bytes as all other blocks have here."""

    def __init__(self):
        super().__init__(pages=KEYS)
        width = BYTES // (2 * test_sglang.PAGE * test_sglang.LAYERS * test_sglang.HEADS * 2)
        self.kv_buffer = torch.zeros(2, KEYS * test_sglang.PAGE, test_sglang.LAYERS, test_sglang.HEADS, width, dtype=self.dtype)

    def get_dummy_flat_data_page(self):
        return self.get_data_page(0)

    def set_from_flat_data_page(self, index, data_page):
        part = self.kv_buffer[:, index : index + test_sglang.PAGE]
        part[...] = data_page.reshape(part.shape)

    def bytes(self, n):
        return numpy.asarray(self.get_data_page(n * test_sglang.PAGE).view(torch.uint8)).tobytes()

    def fill(self, n, content):
        page = self.get_dummy_flat_data_page()
        numpy.asarray(page.view(torch.uint8))[:] = numpy.frombuffer(content[: self.size()], dtype=numpy.uint8)
        self.set_from_flat_data_page(n * test_sglang.PAGE, page)

    def size(self):
        return self.get_data_page(0).numel() * 2


class Sglang:
    """Pages of SGLang. What it deletes is everything."""

    def __init__(self, place):
        self.pool, self.keys = Pool(), test_sglang.keys(KEYS)
        self.storage = test_sglang.storage(self.pool, **place)

    def put(self, content):
        for n, one in content.items():
            self.pool.fill(n, one)
        results = self.storage.batch_set_v1([self.keys[n] for n in content], test_sglang.indices(*content))
        return [n for n, good in zip(content, results) if good]

    def get(self):
        for n in range(KEYS):
            self.pool.fill(n, bytes(BYTES))
        results = self.storage.batch_get_v1(self.keys, test_sglang.indices(*range(KEYS)))
        return {n: self.pool.bytes(n) for n, good in enumerate(results) if good}

    def delete(self, some):
        def delete():
            self.storage.clear()
            return "the server is away" if self.storage._link.away else None

        insist(delete)
        return range(KEYS)

    def close(self):
        self.storage.close()


class Refused(Exception):
    """A command of the operator failed."""


class Node(Server):
    """A node of the cluster; where it has tokens, with one of the operator."""

    token_file = None

    def answers(self):
        return self.agrees("stat")

    def agrees(self, *command):
        """Whether a command of the operator ends well."""
        try:
            self.say(*command)
            return True
        except Refused:
            return False

    def say(self, *command):
        """What a command of the operator says."""
        arguments = [PROGRAM, *command, "--server", self.socket, "--json"]
        if self.token_file is not None:
            arguments += ["--token-file", self.token_file]
        done = subprocess.run(arguments, capture_output=True, timeout=SOON)
        if done.returncode:
            raise Refused(f"{' '.join(command)}: {done.stdout.decode()}{done.stderr.decode()}{self.log()}")
        return json.loads(done.stdout)


class Tenant:
    """Who has a name now, and what its engines know."""

    def __init__(self, name, engine):
        self.name, self.engine = name, engine
        self.generation = 0
        self.is_here = True
        self.forget()

    def forget(self):
        """All of it was deleted, or is another one's."""
        self.epochs = [0] * KEYS
        self.stored = [set() for _ in range(KEYS)]

    def content(self, n, size=BYTES):
        """Other bytes after each delete: what comes back is seen."""
        name = f"{self.name} {self.generation} {n} {self.epochs[n]}".encode()
        return hashlib.shake_256(name).digest(size)


class World:
    """Three nodes, and what was done to them."""

    def __init__(self, seed, stack):
        self.random, self.story = random.Random(seed), []
        self.place = tempfile.mkdtemp(prefix="kvarts-edges-")
        stack.callback(shutil.rmtree, self.place, True)
        self.tenants = [Tenant("red", Lmcache), Tenant("green", Vllm), Tenant("blue", Sglang)]
        self.engines = {}
        stack.callback(self.close_all)
        self.config = self.path("kvarts.toml")
        self.operator = self.token()
        self.nodes = []
        for _ in range(NODES):
            self.nodes.append(Node())
            stack.callback(self.nodes[-1].stop)
        self.down, self.still = None, None
        self.elsewhere = 0
        host = f"127.{200 + os.getpid() % 50}.{os.getpid() // 250 % 250}"
        self.addresses = [f"{host}.{1 + n}:{7500 + seed % 1000}" for n in range(NODES)]
        with open(self.path("members.toml"), "w") as file:
            file.write("epoch = 1\n")
            for node, address in zip(self.nodes, self.addresses):
                file.write(f'[[node]]\nid = "{node.say("stat")["store"]}"\naddress = "{address}"\n')
        with open(self.path("secret"), "wb") as file:
            file.write(bytes([7]) * 32)
        self.write()
        for node in self.nodes:
            node.kill()
            node.arguments, node.token_file = ("--config", self.config), self.operator[0]
            os.unlink(node.socket)
        for node in self.nodes:
            node.start()
        self.until_reached()
        self.connect()

    def path(self, name):
        return os.path.join(self.place, name)

    def token(self):
        """The file of a new token, and its hash."""
        made = json.loads(subprocess.run([PROGRAM, "config", "token", "--json"], check=True, capture_output=True).stdout)
        path = self.path(f"token-{len(os.listdir(self.place))}")
        with open(path, "w") as file:
            file.write(made["token"])
        return path, made["hash"]

    def write(self):
        """The configuration of all nodes."""
        os.makedirs(self.path("bucket"), exist_ok=True)
        lines = ["[cluster]", f"members = '{self.path('members.toml')}'", f"secret = '{self.path('secret')}'"]
        lines += ["[cold]", f"bucket = 'file://{self.path('bucket')}'", "uses = 0", "age = 0", "refresh = 1", "memory = '128 MiB'"]
        tenants = [("operator", "operator", self.operator)]
        for tenant in self.tenants:
            if tenant.is_here:
                tenant.token = self.token()
                tenants.append((tenant.name, f"{tenant.name}-{tenant.generation}", tenant.token))
        for name, salt, (_, hash) in tenants:
            lines += ["[[tenants]]", f"name = '{name}'", f"salt = '{salt}'", "[[tokens]]", f"tenant = '{name}'"]
            lines += [f"hash = '{hash}'", "rights = ['read', 'write', 'pin', 'delete', 'admin']"]
        with open(self.config, "w") as file:
            file.write("\n".join(lines) + "\n")

    def until(self, what, done):
        deadline = time.monotonic() + SOON
        while not done():
            assert time.monotonic() < deadline, f"not in time: {what}"
            time.sleep(0.02)

    def until_reached(self):
        self.until("all nodes reach each other", lambda: all(node.agrees("cluster", "status") for node in self.nodes))

    def connect(self, nodes=range(NODES)):
        """Engines of all tenants that are here."""
        for tenant in self.tenants:
            for n in nodes:
                if tenant.is_here and (tenant, n) not in self.engines:
                    place = dict(server=self.nodes[n].socket, token_file=tenant.token[0], timeout=TIMEOUT, pause=0.1, durable=True)
                    self.engines[tenant, n] = tenant.engine(place)

    def close(self, which):
        for of in [of for of in self.engines if which(*of)]:
            self.engines.pop(of).close()

    def close_all(self):
        self.close(lambda tenant, node: True)

    def well(self):
        """Nodes that answer."""
        return [n for n in range(NODES) if n not in (self.down, self.still)]

    # Steps.

    def put(self):
        tenant, n = self.random.choice([one for one in self.tenants if one.is_here]), self.random.choice(self.well())
        first = self.random.randrange(KEYS)
        some = range(first, min(KEYS, first + 1 + self.random.randrange(4)))
        self.story.append(f"{tenant.name} {tenant.generation} stores {some} on node {n}")
        for at in self.engines[tenant, n].put({at: tenant.content(at) for at in some}):
            tenant.stored[at].add(n)

    def delete(self):
        tenant, n = self.random.choice([one for one in self.tenants if one.is_here]), self.random.choice(self.well())
        some = sorted(self.random.sample(range(KEYS), self.random.randrange(1, 5)))
        self.story.append(f"{tenant.name} {tenant.generation} deletes {some}, or everything, on node {n}")
        try:
            deleted = self.engines[tenant, n].delete(some)
        except NotAcknowledged:
            # A node that stands still may hold what a delete needs: the lock of the bucket's directory.
            if self.still is None:
                raise
            self.go_on()
            deleted = self.engines[tenant, n].delete(some)
        for at in deleted:
            tenant.epochs[at] += 1
            tenant.stored[at].clear()

    def kill(self):
        if self.still is not None:
            return self.go_on()
        if self.down is not None:
            n, self.down = self.down, None
            self.story.append(f"node {n} comes back")
            self.nodes[n].start()
            self.until_reached()
            return self.connect([n])
        self.down = self.random.randrange(NODES)
        self.story.append(f"node {self.down} is killed")
        self.nodes[self.down].kill()
        self.close(lambda tenant, node: node == self.down)
        os.unlink(self.nodes[self.down].socket)

    def hang(self):
        if self.down is not None or self.still is not None:
            return self.kill()
        self.still = self.random.randrange(NODES)
        self.story.append(f"node {self.still} stands still")
        self.nodes[self.still].signal(signal.SIGSTOP)

    def go_on(self):
        n, self.still = self.still, None
        self.story.append(f"node {n} goes on")
        self.nodes[n].signal(signal.SIGCONT)
        self.until_reached()

    def swap(self):
        """A tenant goes, or comes back as another one."""
        while self.down is not None or self.still is not None:
            self.kill()
        gone = [one for one in self.tenants if not one.is_here]
        tenant = gone[0] if gone else self.random.choice(self.tenants)
        tenant.is_here = not tenant.is_here
        if tenant.is_here:
            tenant.generation += 1
            tenant.forget()
        self.story.append(f"{tenant.name} {'comes back as another one' if tenant.is_here else 'goes'}")
        self.write()
        for node in self.nodes:
            node.say("reload")
        # All tokens are new ones.
        if not tenant.is_here:
            for n in range(NODES):
                left = self.engines[tenant, n].get()
                assert left == {}, f"who has gone reads on: node {n}, {sorted(left)}"
        self.close_all()
        self.connect()

    def look(self):
        """Every engine loads everything on every node."""
        for (tenant, n), engine in self.engines.items():
            if n not in self.well():
                continue
            stored = {at for at in range(KEYS) if n in tenant.stored[at]}
            deadline = time.monotonic() + SOON
            while lost := stored - self.found(tenant, n, engine):
                # A connector leaves a server alone that did not answer, and waits for a node that stands still as long as it may.
                if self.still is not None:
                    break
                assert time.monotonic() < deadline, f"it is lost: {tenant.name}, blocks {lost}, node {n}"

    def found(self, tenant, n, engine):
        """What an engine finds on a node now, all of it right."""
        found = engine.get()
        for at, one in found.items():
            right = tenant.content(at)[: len(one)]
            assert one == right, f"wrong bytes: {tenant.name}, block {at}, node {n}"
            assert tenant.stored[at], f"it comes back: {tenant.name}, block {at}, node {n}"
            self.elsewhere += n not in tenant.stored[at]
        return set(found)

    def go(self):
        steps = [self.put] * 5 + [self.delete] * 3 + [self.kill] * 2 + [self.hang, self.swap]
        # Each once at least, in any order.
        each = [self.put, self.delete, self.kill, self.hang, self.swap]
        order = each + self.random.choices(steps, k=STEPS - len(each))
        self.random.shuffle(order)
        for step in [self.put, self.put, *order]:
            step()
            self.look()


def course(seed):
    """The blocks that were found on a node which had not stored them."""
    with contextlib.ExitStack() as stack:
        doubles.of_sglang()
        stack.enter_context(mock.patch("sglang.srt.runtime_context.get_model", lambda: doubles.SGLANG))
        world = World(seed, stack)
        try:
            world.go()
        except BaseException as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"seed {seed}:\n  " + "\n  ".join(world.story))
            raise
        return world.elsewhere


class Edges(unittest.TestCase):
    def test_whatever_is_deleted_hung_killed_or_reloaded_engines_get_what_they_stored_or_nothing(self):
        elsewhere = 0
        for seed in range(4, 4 + SEEDS):
            with self.subTest(seed=seed):
                elsewhere += course(seed)
        self.assertGreater(elsewhere, 10, "nothing came from other nodes")

    def test_a_delete_that_does_nothing_is_seen(self):
        nothing = {engine: mock.patch.object(engine, "delete", lambda self, some: some) for engine in (Lmcache, Vllm, Sglang)}
        with contextlib.ExitStack() as stack:
            for patch in nothing.values():
                stack.enter_context(patch)
            with self.assertRaisesRegex(AssertionError, "wrong bytes"):
                for seed in range(1, 4):
                    course(seed)


if __name__ == "__main__":
    unittest.main()
