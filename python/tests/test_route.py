"""The proxy `python -m kvarts.route`, before engines that are doubles, and Kvarts servers that are real."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import kvarts
from served import PROGRAM, Server

BLOCK, PAGE, MODEL = 16, 4096, "test/route"
SOON = 30


class Double:
    """An engine that speaks OpenAI's interface and streams. Its tokens are the numbers of the prompt's words."""

    def __init__(self, name, tokenises=True, tls=None):
        self.name, self.tokenises, self.tls = name, tokenises, tls
        self.asked, self.gone, self.hangs, self.dies, self.breaks, self.fails = [], 0, False, False, False, 0
        self.params = None

    async def start(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=self.tls)
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def serve(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ", 2)[1]
            length = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0)
            body = json.loads(await reader.readexactly(length)) if length else {}
            await self.answer(path, body, head, reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            self.gone += 1
        finally:
            writer.close()

    async def answer(self, path, body, head, reader, writer):
        if path == "/tokenize":
            words = body["prompt"] if "prompt" in body else " ".join(one["content"] for one in body["messages"])
            told = {"tokens": [int(word) for word in words.split()]} if self.tokenises else {}
            return self.short(writer, told, 200 if self.tokenises else 404)
        self.asked.append((path, body, head))
        if self.dies:
            return writer.transport.abort()
        if self.fails:
            return self.short(writer, {"error": "busy"}, self.fails)
        if self.hangs:
            if not await reader.read(1):
                self.gone += 1
            return None
        if path == "/v1/models":
            return self.short(writer, {"data": [{"id": MODEL}]})
        if body.get("stream"):
            return await self.stream(writer)
        told = {"engine": self.name, "choices": [{"text": "it"}]}
        if "kv_transfer_params" in body:
            told["kv_transfer_params"] = {"remote_engine_id": self.name, "remote_block_ids": [1, 2]} if self.params is None else self.params
        return self.short(writer, told)

    async def stream(self, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in self.pieces():
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            if self.breaks:
                return writer.transport.abort()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def pieces(self):
        return [b"data: %d %s\n\n" % (n, bytes([65 + n % 26]) * (n * 97 % 5000)) for n in range(60)] + [b"data: [DONE]\n\n"]

    @staticmethod
    def short(writer, told, status=200):
        body = json.dumps(told).encode()
        writer.write(b"HTTP/1.1 %d Told\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))


class Engines:
    """Doubles, on a loop of their own."""

    def __init__(self, *doubles):
        self.loop = asyncio.new_event_loop()
        # It tells of each connection on which TLS ends early.
        self.loop.set_debug(False)
        import threading

        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.doubles = [self.run(double.start()) for double in doubles]

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SOON)

    async def _end(self):
        for double in self.doubles:
            double.server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def close(self):
        self.run(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(SOON)
        self.loop.close()


class Proxied(unittest.TestCase):
    #: Of the proxy's clients, where it speaks TLS.
    tls = None

    def engines(self, *doubles):
        engines = Engines(*doubles)
        self.addCleanup(engines.close)
        return engines.doubles

    def proxy(self, engines, *arguments, beside=(), roles=()):
        """Starts a proxy; `beside`: the servers of the engines."""
        command = [sys.executable, "-m", "kvarts.route", "--listen", "127.0.0.1:0", "--json", "--keys", "chain", *arguments]
        for n, engine in enumerate(engines):
            named = f",server={beside[n]}" if n < len(beside) else ""
            command += ["--engine", engine.url + named + (f",role={roles[n]}" if roles else "")]
        log = tempfile.TemporaryFile()
        self.addCleanup(log.close)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)

        def stop():
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(SOON), 0)
            process.stdout.close()
            log.seek(0)
            self.assertEqual(log.read().decode(), "")

        line = process.stdout.readline()
        self.addCleanup(stop)
        log.seek(0)
        self.assertTrue(line, log.read())
        self.scheme, _, self.address = json.loads(line)["listen"].partition("://")

    def ask(self, path, body=None, method=None):
        """Status and body."""
        connecting = http.client.HTTPConnection if self.scheme == "http" else lambda *of, **kw: http.client.HTTPSConnection(*of, context=self.tls, **kw)
        with contextlib.closing(connecting(self.address, timeout=SOON)) as connection:
            data = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
            connection.request(method or ("GET" if body is None else "POST"), path, data)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def complete(self, tokens, **more):
        prompt = tokens if isinstance(tokens, str) else " ".join(map(str, tokens))
        status, told = self.ask("/v1/completions", {"model": MODEL, "prompt": prompt, **more})
        self.assertEqual(status, 200, told)
        return json.loads(told)["engine"]

    def status(self):
        return json.loads(self.ask("/status")[1])

    def metrics(self):
        """Name with labels -> value, without the names' beginning."""
        status, told = self.ask("/metrics")
        self.assertEqual(status, 200)
        lines = [line for line in told.decode().splitlines() if not line.startswith("#")]
        return {name.removeprefix("kvarts_route_"): float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def raw(self, data, shut=False):
        """What a client gets that sends these bytes."""
        host, port = self.address.split(":")
        with socket.create_connection((host, int(port)), timeout=SOON) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(data)
                if shut:
                    connection.shutdown(socket.SHUT_WR)
            found = b""
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(65536):
                    found += piece
            return found

    def until(self, what, done):
        deadline = time.monotonic() + SOON
        while not done():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.02)


class Passing(Proxied):
    def test_round_robin_alternates_and_random_takes_all(self):
        engines = self.engines(Double("a"), Double("b"))
        self.proxy(engines, "--policy", "round-robin")
        self.assertEqual([self.complete([1, 2]) for _ in range(6)], ["a", "b"] * 3)
        self.assertEqual([one["answered"] for one in self.status()["engines"]], [{"round-robin": 3}] * 2)
        self.proxy(engines, "--policy", "random", "--seed", "7")
        self.assertEqual({self.complete([1, 2]) for _ in range(20)}, {"a", "b"})

    def test_a_stream_comes_through_byte_for_byte_and_models_and_health_answer(self):
        (engine,) = self.engines(Double("a"))
        self.proxy([engine], "--policy", "round-robin")
        status, told = self.ask("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "1 2"}], "stream": True})
        self.assertEqual((status, told), (200, b"".join(engine.pieces())))
        body = json.dumps({"model": MODEL, "prompt": "1", "stream": True}).encode()
        found = self.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        head, _, framed = found.partition(b"\r\n\r\n")
        self.assertIn(b"Content-Type: text/event-stream", head)
        self.assertEqual(framed, b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in engine.pieces()) + b"0\r\n\r\n")
        self.assertEqual(engine.asked[-1][1], json.loads(body))
        self.assertEqual(json.loads(self.ask("/v1/models")[1]), {"data": [{"id": MODEL}]})
        self.assertEqual(self.ask("/health")[0], 200)

    def test_an_engine_that_fails_before_its_first_byte_is_left_out_and_one_that_breaks_off_is_seen(self):
        a, b = self.engines(Double("a"), Double("b"))
        self.proxy([a, b], "--policy", "round-robin")
        for a.dies, a.fails in [(True, 0), (False, 503)]:
            self.assertEqual({self.complete([1]) for _ in range(4)}, {"b"})
        first = self.status()["engines"][0]
        self.assertTrue(first["is_away"] and sum(first["failed"].values()) >= 1, first)
        self.assertEqual((first["waiting"], first["decoding"]), (0, 0))
        # What is wrong with all of them is said, in the shape of OpenAI's errors.
        b.fails = 503
        status, told = self.ask("/v1/completions", {"prompt": "1"})
        error = json.loads(told)["error"]
        self.assertEqual((status, error["type"], error["code"]), (502, "server_error", 502))
        # An answer that began is not begun again.
        a.dies, a.fails, b.fails, a.breaks, b.breaks = False, 0, 0, True, True
        with self.assertRaises((http.client.IncompleteRead, ConnectionError)):
            self.ask("/v1/completions", {"prompt": "1", "stream": True})

    def test_hostile_requests_cost_an_error_or_their_connection_and_nothing_else(self):
        (engine,) = self.engines(Double("a"))
        self.proxy([engine], "--policy", "round-robin", "--body-max", "100000")
        post = b"POST /v1/completions HTTP/1.1\r\n"
        for sent, status in [
            (b"\x16\x03\x01\x02garbage\r\n\r\n", 400),
            (b"GET /status HTTP/2\r\n\r\n", 400),
            (b"GET /status HTTP/1.1\r\nno colon\r\n\r\n", 400),
            (b"GET /status HTTP/1.1\r\na : b\r\n\r\n", 400),
            (b"GET /status HTTP/1.1\r\nX: " + b"y" * 200_000 + b"\r\n\r\n", 431),
            (b"GET /status HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n", 431),
            (post + b"\r\n", 411),
            (post + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
            (post + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
            (post + b"Content-Length: -1\r\n\r\n", 400),
            (post + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
            (post + b"Content-Length: 100001\r\n\r\n", 413),
            (post + b"Content-Length: 4\r\n\r\n{no}", 400),
            (post + b"Content-Length: 2\r\n\r\n[]", 400),
            (post + b"Content-Length: 90000\r\n\r\n" + b"[" * 90_000, 400),
            (b"DELETE /v1/completions HTTP/1.1\r\n\r\n", 405),
            (b"GET /etc/passwd HTTP/1.1\r\n\r\n", 404),
        ]:
            with self.subTest(sent[:60]):
                found = self.raw(sent)
                self.assertTrue(found.startswith(b"HTTP/1.1 %d " % status) or not found and status == 431, found[:100])
                if found:
                    self.assertEqual(json.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"], status)
        self.assertEqual(self.raw(b"", shut=True), b"")
        self.assertTrue(self.raw(b"GET /sta", shut=True).startswith(b"HTTP/1.1 400 "))
        self.assertTrue(self.raw(post + b"Content-Length: 9\r\n\r\n{", shut=True).startswith(b"HTTP/1.1 400 "))
        self.assertEqual(engine.asked, [])
        self.assertEqual(self.complete([1]), "a")

    def test_a_client_that_goes_away_ends_its_request_at_the_engine(self):
        (engine,) = self.engines(Double("a"))
        self.proxy([engine], "--policy", "round-robin")
        engine.hangs = True
        body = b'{"prompt": "1"}'
        with socket.create_connection(self.address.split(":"), timeout=SOON) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            self.until("the engine is asked", lambda: engine.asked)
            self.assertEqual(self.status()["engines"][0]["waiting"], 1)
        self.until("the engine is let go", lambda: engine.gone == 1)
        self.until("nothing is under way", lambda: self.status()["engines"][0]["waiting"] == 0)
        self.assertEqual(self.status()["clients_gone"], 1)

    def test_an_engine_that_says_nothing_is_left_after_its_time(self):
        a, b = self.engines(Double("a"), Double("b"))
        self.proxy([a, b], "--policy", "round-robin", "--first-byte", "0.5")
        a.hangs = True
        self.assertEqual([self.complete([1]) for _ in range(2)], ["b", "b"])

    def test_what_prefills_hands_over_to_what_decodes(self):
        prefill, decode = self.engines(Double("p"), Double("d"))
        self.proxy([prefill, decode], "--policy", "owner", roles=["prefill", "decode"])
        asked = {"max_tokens": 50, "stream_options": {"include_usage": True}}
        self.assertEqual(self.complete([1, 2, 3], **asked), "d")
        (_, first, head), (_, second, other) = prefill.asked[0], decode.asked[0]
        self.assertEqual((first["max_tokens"], first["stream"], first["kv_transfer_params"]), (1, False, {"do_remote_decode": True}))
        self.assertNotIn("stream_options", first)
        self.assertEqual(second["kv_transfer_params"], {"remote_engine_id": "p", "remote_block_ids": [1, 2]})
        self.assertEqual((second["max_tokens"], second["prompt"]), (50, "1 2 3"))
        name = [line for line in head.split("\r\n") if line.startswith("X-Request-Id")]
        self.assertTrue(name and name[0] in other, "both are one request")
        # What the request itself says of its blocks, both are told.
        self.complete([1, 2], kv_transfer_params={"session": "s", "ttl": 9})
        self.assertEqual(prefill.asked[-1][1]["kv_transfer_params"], {"session": "s", "ttl": 9, "do_remote_decode": True})
        self.assertEqual(decode.asked[-1][1]["kv_transfer_params"], {"session": "s", "ttl": 9, "remote_engine_id": "p", "remote_block_ids": [1, 2]})
        # Without a prefill the other one computes all of it.
        prefill.dies = True
        self.assertEqual(self.complete([1, 2, 3], **asked), "d")
        self.assertNotIn("kv_transfer_params", decode.asked[-1][1])
        self.assertEqual(self.status()["engines"][1]["answered"], {"decode": 2, "decode-alone": 1})

    def test_without_a_tokeniser_an_owner_follows_from_the_text_and_stays_when_it_grows(self):
        engines = self.engines(*(Double(name, tokenises=False) for name in "abcd"))
        self.proxy(engines, "--policy", "owner")
        told = {}
        for session in range(12):
            text = f"session {session} " * 200
            told[session] = self.complete(text)
            for turn in range(3):
                self.assertEqual(self.complete(text + "more " * 100 * turn), told[session])
        self.assertGreater(len(set(told.values())), 1)
        self.assertEqual(self.status()["prompts"], {"tokens": 0, "text": 48})


class Beside(Proxied):
    """Engines beside the nodes of a cluster, or beside servers that know nothing of each other."""

    def servers(self, count, in_cluster):
        place = tempfile.TemporaryDirectory(prefix="kvarts-route-")
        self.addCleanup(place.cleanup)
        servers = []
        for _ in range(count):
            servers.append(Server())
            self.addCleanup(servers[-1].stop)
        if in_cluster:
            self.join(servers, place.name)
        return servers

    def say(self, server, *command):
        done = subprocess.run([PROGRAM, *command, "--server", server.socket, "--json"], capture_output=True, timeout=SOON)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def join(self, servers, place):
        host = f"127.{150 + os.getpid() % 50}.{os.getpid() // 250 % 250}"
        members = os.path.join(place, "members.toml")
        with open(members, "w") as file:
            file.write("epoch = 1\n")
            for n, server in enumerate(servers):
                file.write(f'[[node]]\nid = "{self.say(server, "stat")["store"]}"\naddress = "{host}.{n + 1}:7400"\n')
        secret = os.path.join(place, "secret")
        with open(secret, "wb") as file:
            file.write(bytes([7]) * 32)
        for server in servers:
            server.process.terminate()
            server.process.wait(SOON)
            server.arguments = ("--cluster", members, "--cluster-secret", secret)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(server.socket)
        for server in servers:
            server.start()
        reached = lambda one: (told := self.say(one, "cluster", "status")) and all(node["is_reachable"] for node in told["nodes"])  # noqa: E731
        self.until("all nodes reach each other", lambda: all(reached(one) for one in servers))

    def store(self, server, tokens):
        """What an engine beside this server would have stored of a prompt."""
        with kvarts.connect(server.socket) as client:
            pages = client.pages(PAGE, model=MODEL, revision="1", dtype="bf16", engine="test", layout="pages", block_tokens=BLOCK)
            keys = kvarts.chain(tokens, BLOCK)
            self.assertTrue(pages.put(keys, [bytes(PAGE)] * len(keys)).ok)
            pages.close()

    def test_prefixes_of_several_ranks_and_windows_go_where_all_of_them_is(self):
        servers = self.servers(2, True)
        engines = self.engines(Double("a"), Double("b"))
        identity = dict(model=MODEL, revision="1", dtype="bf16", engine="test", layout="ranks", block_tokens=BLOCK)
        tokens = [list(range(n * 1000, n * 1000 + 8 * BLOCK + 3)) for n in range(4)]
        for n, server in enumerate(servers):
            with kvarts.connect(server.socket) as client:
                pages = client.pages({0: PAGE, 1: PAGE}, tp_size=2, windows={1: 2 * BLOCK}, **identity)
                for at, prompt in enumerate(tokens):
                    keys = kvarts.chain(prompt, BLOCK)
                    # Of each the other server has one rank alone.
                    for rank in (0, 1) if at % 2 == n else (0,):
                        self.assertTrue(pages.put(keys, [bytes(PAGE)] * 8, rank=rank).ok)
                        self.assertTrue(pages.put(keys[6:], [bytes(PAGE)] * 2, group=1, rank=rank).ok)
                    # As engines ask before they load.
                    self.assertEqual(pages.match(keys).blocks, 8 if at % 2 == n else 0)
                pages.close()
        self.proxy(engines, "--policy", "owner", "--ask-timeout", "5", beside=[server.socket for server in servers])
        where = lambda prompt: self.complete([*prompt, 5, 6, 7])  # noqa: E731
        for n, prompt in enumerate(tokens):
            self.until(f"prompt {n} goes where it is", lambda: where(prompt) == "ab"[n % 2])
        self.assertEqual([where(prompt) for prompt in tokens], list("abab"))
        found = self.metrics()
        self.assertEqual({name.rpartition("reason=")[2] for name in found if name.startswith("requests_total")}, {'"most-of-it"}'})

    def test_a_prompt_of_more_parts_than_a_route_may_look_at_is_looked_at_as_far(self):
        [server] = self.servers(1, False)
        identity = dict(model=MODEL, revision="1", dtype="bf16", engine="test", layout="many", block_tokens=BLOCK)
        keys = [kvarts.key("many", n) for n in range(17_000)]
        times = kvarts.Times(samples=[(0, 100, 10.0), (0, 10_000, 1000.0)])
        with kvarts.connect(server.socket) as client:
            # 64 parts of each block: 16,384 blocks are as many as a route looks at.
            pages = client.pages(PAGE, tp_size=64, **identity)
            for rank in range(64):
                self.assertTrue(pages.put(keys[:2], [bytes(PAGE)] * 2, rank=rank).ok)
            here = client.route([], times=times, prompt_tokens=1)["here"]
            asked = dict(times=times, prompt_tokens=17_000 * BLOCK + 1, namespace=pages.namespace, keys=keys)
            # Before an engine has looked for any, and behind that.
            for _ in range(2):
                [node] = client.route([{"node": 1, "store": here}], **asked)["nodes"]
                self.assertEqual(node["blocks"], 2)
                self.assertEqual(pages.match(keys[:3]).blocks, 2)
            pages.close()

    def prefixes_go_where_they_are(self, in_cluster, policy):
        servers = self.servers(2, in_cluster)
        engines = self.engines(Double("a"), Double("b"))
        prompts = {n: list(range(n * 1000, n * 1000 + 8 * BLOCK + 3)) for n in range(6)}
        for n, tokens in prompts.items():
            self.store(servers[n % 2], tokens)
        self.proxy(engines, "--policy", policy, "--ask-timeout", "2", beside=[server.socket for server in servers])
        where = lambda tokens: self.complete(list(tokens) + [5, 6, 7])  # noqa: E731
        for n, tokens in prompts.items():
            self.until(f"prompt {n} goes where it is", lambda: where(tokens) == "ab"[n % 2])
        self.assertEqual([where(tokens) for tokens in prompts.values()], list("ababab"))
        told = self.status()
        self.assertEqual([one["why"] for one in told["servers"]], [None, None])
        # A server that stands still costs its timeout once; then requests go on without it.
        for server in servers:
            server.signal(signal.SIGSTOP)
        start = time.monotonic()
        for _ in range(4):
            self.complete(prompts[0])
        self.assertLess(time.monotonic() - start, 25)
        self.assertTrue(any(one["is_away"] for one in self.status()["servers"]))

    def test_by_cost_a_prompt_goes_to_the_engine_beside_the_node_that_has_it(self):
        self.prefixes_go_where_they_are(True, "cost")

    def test_by_owner_a_prompt_goes_to_the_engine_beside_the_node_that_has_it(self):
        self.prefixes_go_where_they_are(True, "owner")

    def test_servers_that_know_nothing_of_each_other_are_asked_each(self):
        self.prefixes_go_where_they_are(False, "cost")

    def test_a_busy_owner_is_passed_over_by_cost(self):
        servers = self.servers(2, True)
        a, b = self.engines(Double("a"), Double("b"))
        tokens = list(range(8 * BLOCK + 3))
        self.store(servers[0], tokens)
        self.proxy([a, b], "--policy", "cost", "--ask-timeout", "5", beside=[server.socket for server in servers])
        self.until("the directory knows it", lambda: self.complete(tokens) == "a")
        a.hangs, asked = True, len(a.asked)
        body = json.dumps({"model": MODEL, "prompt": " ".join(map(str, [*tokens, *range(9000, 9900)]))}).encode()
        with socket.create_connection(self.address.split(":"), timeout=SOON) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            self.until("the engine is busy", lambda: len(a.asked) > asked)
            self.assertEqual(self.complete(tokens), "b")


class Command(unittest.TestCase):
    def say(self, *arguments):
        done = subprocess.run([sys.executable, "-m", "kvarts.route", *arguments], capture_output=True, timeout=SOON, text=True)
        return done.returncode, done.stdout + done.stderr

    def test_wrong_arguments_are_named(self):
        for arguments, told in [
            ((), "--engine"),
            (("--engine", "ftp://x"), "not an http"),
            (("--engine", "http://x,role=judge"), "role=prefill, role=decode or role=both"),
            (("--engine", "http://x", "--policy", "guess"), "invalid choice"),
            (("--engine", "http://x", "--times", "llama-3.1-8b@abacus"), "no device is named"),
            (("--engine", "http://x", "--namespace", "12"), "64 hexadecimal digits"),
        ]:
            code, said = self.say(*arguments)
            self.assertEqual(code, 2)
            self.assertIn(told, said)
        code, said = self.say("--help")
        self.assertEqual(code, 0)
        self.assertIn("whose store", said)

    def test_keys_are_those_of_engines(self):
        from kvarts.route_choice import keys_of

        tokens = list(range(40))
        self.assertEqual(keys_of("chain", tokens, 16), kvarts.chain(tokens, 16))
        import hashlib

        block = lambda first: b"".join(n.to_bytes(4, "little") for n in range(first, first + 16))  # noqa: E731
        one = hashlib.sha256(block(0)).digest()
        self.assertEqual(keys_of("sglang", tokens, 16), [one, hashlib.sha256(one + block(16)).digest()])
        found = keys_of("vllm", tokens, 16)
        self.assertEqual(([len(key) for key in found], keys_of("vllm", tokens[:20], 16)), ([32, 32], found[:1]))


if __name__ == "__main__":
    unittest.main()
