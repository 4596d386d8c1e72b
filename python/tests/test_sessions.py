"""Sessions of three tenants on a real server: what they hold, what ends them, and that nothing of them is left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import kvarts
from kvarts.aio import AsyncSession
from served import IDENTITY, PAGE, PROGRAM, Server, keys, pattern

#: Far more than anything takes here.
SOON = 30
#: A lease of a client that is killed: a test waits for its end.
SHORT = 1.0
TENANTS = ("red", "blue", "green")
#: Blocks that `red` may hold.
HELD_MAX = 8

KILLED = """
import sys, time, kvarts
sys.path.insert(0, sys.argv[1])
from served import IDENTITY, PAGE, keys
client = kvarts.connect(sys.argv[2])
session = client.session(client.pages(PAGE, **IDENTITY), keys(2), lease=float(sys.argv[3]))
fork = session.fork(1)
print(session.id, session.told["held"], flush=True)
time.sleep(600)
"""


class Tenants(Server):
    """A server for tenants with tokens, which are found in `tokens`."""

    def __init__(self):
        folder = tempfile.TemporaryDirectory(prefix="kvarts-")
        self.folder, self.tokens = folder, {}
        lines = []
        for tenant in TENANTS:
            made = subprocess.run([PROGRAM, "config", "token", "--json"], check=True, capture_output=True)
            made = json.loads(made.stdout)
            self.tokens[tenant] = os.path.join(folder.name, tenant)
            with open(self.tokens[tenant], "w") as file:
                file.write(made["token"])
            lines += ["[[tenants]]", f"name = '{tenant}'", f"pin = '{HELD_MAX * PAGE}'", "[[tokens]]", f"tenant = '{tenant}'"]
            lines += [f"hash = '{made['hash']}'", "rights = ['read', 'write', 'pin', 'delete']"]
        config = os.path.join(folder.name, "config.toml")
        with open(config, "w") as file:
            file.write("\n".join(lines) + "\n")
        super().__init__("--config", config)

    def token(self, tenant):
        with open(self.tokens[tenant]) as file:
            return file.read()

    def answers(self):
        try:
            kvarts.connect(self.socket, self.token("red"), timeout=10).close()
            return True
        except kvarts.Error:
            return False

    def listed(self, tenant):
        command = [PROGRAM, "session", "list", "--json", "--server", self.socket, "--token-file", self.tokens[tenant]]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["sessions"]

    def stop(self):
        super().stop()
        self.folder.cleanup()


class Sessions(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Tenants()
        cls.addClassCleanup(cls.server.stop)

    def client(self, tenant="red", server=None):
        server = server or self.server
        client = kvarts.connect(server.socket, server.token(tenant))
        self.addCleanup(client.close, 5)
        return client

    def stored(self, client, count=10):
        pages = client.pages(PAGE, **IDENTITY)
        pages.put(keys(count), [pattern(n) for n in range(count)])
        return pages

    def until(self, what, done):
        deadline = time.monotonic() + SOON
        while not done():
            self.assertLess(time.monotonic(), deadline, f"not in time: {what}")
            time.sleep(0.05)

    def is_free(self, pages):
        """Whether all that a tenant may hold can be held, so that nothing else is."""
        try:
            lease = pages.match(keys(HELD_MAX), hold=60).lease
        except kvarts.Refused as error:
            self.assertEqual(error.reason, "PinCap")
            return False
        self.assertEqual(lease.blocks, HELD_MAX)
        lease.end()
        return True

    def test_a_session_holds_its_blocks_and_forks_count_them_once(self):
        client = self.client()
        pages = self.stored(client)
        with client.session(pages, keys(2), lease=60) as session:
            self.assertEqual((session.told["held"], session.told["owner"], session.told["is_owner"]), (2, None, False))
            self.assertEqual(session.extend(keys(1, 2))["held"], 1)
            self.assertEqual((session.keys, session.hold()["held"]), (keys(3), 3))
            forks = [session.fork() for _ in range(10)]
            self.assertEqual({fork.told["class"] for fork in forks}, {"forked_rollout"})
            short = session.fork(2)
            self.assertEqual(short.keys, keys(2))
            self.assertEqual(short.extend(keys(1, 4))["held"], 1)
            with self.assertRaises(kvarts.Refused) as refused:
                short.extend(keys(5, 5))
            self.assertEqual((refused.exception.reason, len(short.keys)), ("PinCap", 3))
            self.assertEqual(len(self.server.listed("red")), 12)
            session.renew()
        # What forks stand on outlives the parent.
        self.assertFalse(self.is_free(pages))
        self.assertTrue(all(fork.close() for fork in [*forks, short]))
        self.assertFalse(short.close())
        self.assertEqual(self.server.listed("red"), [])
        self.assertTrue(self.is_free(pages))
        with self.assertRaises(kvarts.Refused) as ended:
            session.extend(keys(1, 2))
        self.assertEqual(ended.exception.reason, "LeaseEnded")

    def test_a_client_that_is_killed_costs_its_lease_and_nothing_after(self):
        pages = self.stored(self.client())
        environment = {**os.environ, "KVARTS_TOKEN_FILE": self.server.tokens["red"]}
        command = [sys.executable, "-c", KILLED, os.path.dirname(__file__), self.server.socket, str(SHORT)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        with process:
            number, held = process.stdout.readline().split()
            process.send_signal(signal.SIGKILL)
        self.assertEqual(held, b"2")
        self.until("its sessions are over", lambda: not self.server.listed("red"))
        self.assertTrue(self.is_free(pages))
        again = self.client().session(pages, keys(1))
        self.assertNotEqual(again.id, int(number))
        again.close()

    def test_tenants_see_their_own_sessions_and_hold_their_own_blocks(self):
        opened = []
        for tenant in TENANTS:
            client = self.client(tenant)
            opened.append((tenant, client.session(self.stored(client), keys(HELD_MAX))))
        for tenant, session in opened:
            self.assertEqual([one["session"] for one in self.server.listed(tenant)], [session.id])
            self.assertEqual(session.told["held"], HELD_MAX)
        # A model of one tenant is none of another one's.
        red, blue = self.client("red"), self.client("blue")
        other = blue.pages(PAGE, **{**IDENTITY, "revision": "of blue"})
        with self.assertRaises(kvarts.Invalid) as unknown:
            red.session(other, keys(1))
        self.assertEqual(unknown.exception.reason, "UnknownNamespace")
        for tenant, session in opened:
            self.assertTrue(session.close())
            self.assertEqual(self.server.listed(tenant), [])

    def test_what_is_wrong_is_told(self):
        client = self.client()
        pages = self.stored(client)
        for argument, wrong in [
            ("lease", dict(lease=-1.0)),
            ("lease_ms", dict(lease=0.0)),
            ("group", dict(columns=[(9, None)])),
            ("keys", dict(shared_blocks=2)),
        ]:
            with self.assertRaisesRegex(kvarts.Invalid, argument):
                client.session(pages, keys(2), **wrong)
        with tempfile.TemporaryDirectory() as place, kvarts.open(place, 256 << 20) as here:
            with self.assertRaisesRegex(kvarts.Invalid, "connect to a server"):
                here.session(here.pages(PAGE, **IDENTITY), keys(1))
        # Without columns nothing is held.
        with client.session(pages, keys(2), columns=[]) as session:
            self.assertEqual(session.told["held"], 0)
            self.assertTrue(self.is_free(pages))
        # Of a client that was closed it is as dead as that: its lease ends it.
        closed = self.client()
        session = closed.session(pages, keys(1), lease=SHORT)
        closed.close()
        with self.assertRaises(kvarts.Error):
            session.renew()
        self.until("its session is over", lambda: not self.server.listed("red"))

    def test_a_turn_has_its_class_and_an_advice(self):
        client = self.client("green")
        pages = client.pages(PAGE, **{**IDENTITY, "block_tokens": 16})
        times = kvarts.Times([(0, 1, 0.1), (0, 100_000, 10_000.0)])
        with client.session(pages, keys(20), prompt_tokens=16 * 20 + 5000, times=times) as session:
            self.assertEqual((session.told["class"], session.told["held"]), ("new_long_prefix", 0))
            # Pages have no windows.
            self.assertEqual((session.told["tail"]["keep"], session.told["tail"]["tip"]), ("nothing", False))
            pages.put(keys(1), [pattern(0)])
            self.assertEqual(session.hold(0)["held"], 1)
            told = session.extend(keys(1, 20), prompt_tokens=16 * 21)
            self.assertEqual((told["class"], told), ("continuation", session.told))

    def test_a_session_goes_on_at_another_server_under_its_number(self):
        other = Tenants()
        self.addCleanup(other.stop)
        here, there = self.client("blue"), self.client("blue", other)
        session = here.session(self.stored(here), keys(2))
        number = session.id
        # The other server knows no such model: nothing is lost, and it is handed over again.
        with self.assertRaises(kvarts.Invalid) as unknown:
            session.hand_over(there)
        self.assertEqual(unknown.exception.reason, "UnknownNamespace")
        self.assertTrue(self.server.listed("blue")[0]["is_handed_over"])
        with self.assertRaises(kvarts.Refused):
            session.extend(keys(1, 2))
        self.stored(there)
        self.assertEqual(session.hand_over(there)["held"], 2)
        self.assertEqual((session.id, self.server.listed("blue")), (number, []))
        self.assertEqual([one["session"] for one in other.listed("blue")], [number])
        self.assertEqual(session.extend(keys(1, 2))["held"], 1)
        here.close()
        self.assertTrue(session.close())
        self.assertEqual(other.listed("blue"), [])

    def test_sessions_as_coroutines(self):
        client = self.client("blue")
        pages = self.stored(client)

        async def run():
            async with await AsyncSession.open(client, pages, keys(2), lease=60.0) as session:
                self.assertEqual((await session.extend(keys(1, 2)))["held"], 1)
                self.assertEqual((await session.hold())["held"], 3)
                await session.renew()
                fork = await session.fork(1)
                self.assertEqual((fork.session.keys, session.session.keys), (keys(1), keys(3)))
                self.assertTrue(await fork.close())
            self.assertEqual(self.server.listed("blue"), [])

        asyncio.run(run())


if __name__ == "__main__":
    unittest.main()
