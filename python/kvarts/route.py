"""`python -m kvarts.route`: a reference proxy before engines that speak OpenAI's HTTP interface, which sends each request to where its prefix is.

    $ python -m kvarts.route --engine http://10.0.0.1:8000,server=10.0.0.1:7440 --engine http://10.0.0.2:8000,server=10.0.0.2:7440

It passes on `/v1/completions`, `/v1/chat/completions` and `/v1/models`, answers as they come, byte for byte. It keeps nothing but what is under way. An engine
that fails before the first byte of its answer is left out for a while, and the request goes to another one; after that byte the client gets
the answer as it broke off. `/health` says whether there is an engine, `/status` what went where, and why, and `/metrics` the same for Prometheus.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
import urllib.parse
import uuid

import kvarts

from . import route_http as http
from . import route_metrics
from .route_choice import PAUSE, Chooser, Choice, Engine, Prompt, Server, Turn

_PATHS = {"/v1/completions": "POST", "/v1/chat/completions": "POST", "/v1/models": "GET", "/health": "GET", "/status": "GET", "/metrics": "GET"}
#: Answers of an engine that another one may give better.
_FAILED = (502, 503, 504)
#: The longest answer to a tokenisation or of a prefill, and the most tokens of a prompt.
_ANSWER_MAX, _TOKENS_MAX = 64 << 20, 1 << 22
#: Seconds for a tokenisation.
_TOKENIZE_TIMEOUT = 5.0
#: Seconds that requests under way have at a stop.
_STOP = 10.0


class Proxy:
    def __init__(self, settings):
        self.settings = settings
        servers = {}
        self.engines = []
        for number, (url, server, role) in enumerate(settings.engines):
            if server is not None:
                server = servers.setdefault(server, Server(server, settings.token, settings.ask_timeout))
            self.engines.append(Engine(number, url, server, role))
        self.chooser = Chooser(self.engines, list(servers.values()), settings)
        self.servers = list(servers.values())
        self.refused, self.broken, self.gone, self.prompts = {}, 0, 0, {"tokens": 0, "text": 0}
        self.retried, self.handed = 0, {"handed": 0, "alone": 0}
        self._open, self._room = set(), http.Room(settings.bodies_max)

    @property
    def connections(self):
        return len(self._open)

    # Connections.

    async def serve(self, reader, writer):
        """One connection: one request."""
        task = asyncio.current_task()
        self._open.add(task)
        try:
            if len(self._open) > self.settings.connections:
                raise http.Refused(503, "the proxy has reached its limit of connections", "overloaded_error")
            request = await http.read_head(reader)
            if request is not None:
                await self._with_body(request, reader, writer)
        except http.Refused as error:
            self.refused[error.status] = self.refused.get(error.status, 0) + 1
            await self._last(writer, http.refusal(error))
        except http.Gone:
            self.gone += 1
        except http.Lost:
            # The client has to see that the answer is not whole.
            self.broken += 1
            writer.transport.abort()
        except OSError:
            self.gone += 1
        finally:
            self._open.discard(task)
            writer.close()

    async def _with_body(self, request, reader, writer):
        length = http.length_of(request, self.settings.body_max)
        self._room.take(length)
        try:
            await http.read_body(request, length, reader, writer)
            await self._handled(request, reader, writer)
        finally:
            self._room.give_back(length)

    async def _last(self, writer, data):
        try:
            await http.send(writer, data)
        except http.Gone:
            self.gone += 1

    async def _handled(self, request, reader, writer):
        method = _PATHS.get(request.path)
        if method is None:
            raise http.Refused(404, f"{request.path[:200]} is not a path of this proxy")
        if request.method != method:
            raise http.Refused(405, f"{request.path} supports only {method}")
        if request.path == "/status":
            return await http.send(writer, http.answer(200, self.status()))
        if request.path == "/metrics":
            return await http.send(writer, http.answer(200, route_metrics.text(self)))
        if request.path == "/health":
            up = [engine for engine in self.engines if not engine.is_away()]
            return await http.send(writer, http.answer(200 if up else 503, {"engines": len(self.engines), "up": len(up)}))
        work = asyncio.ensure_future(self._passed_on(request, writer))
        gone = asyncio.ensure_future(http.until_gone(reader))
        try:
            # ends: the work has limits of its own, and a client that goes away ends it
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise http.Gone("the client closed the connection")
            # ends: it is done
            work.result()
        finally:
            gone.cancel()
            work.cancel()
            # ends: both are done or cancelled
            await asyncio.gather(work, gone, return_exceptions=True)

    # Requests.

    async def _passed_on(self, request, writer):
        fields = request.head.passed_on()
        if request.path == "/v1/models":
            engines = sorted(self.engines, key=Engine.load)
            return await self._answered(request, fields, b"", [Choice(engine, "models") for engine in engines], writer)
        body = http.parsed(request.body)
        if not any(name.lower() == "x-request-id" for name, _ in fields):
            fields.append(("X-Request-Id", str(uuid.uuid4())))
        prompt = await self._prompt(request.path, body)
        data = request.body
        prefills = [engine for engine in self.engines if engine.role == "prefill"]
        decoders = [engine for engine in self.engines if engine.role != "prefill"]
        if prefills and decoders:
            handed = await self._prefilled(request, fields, body, prompt, prefills)
            self.handed["handed" if handed else "alone"] += 1
            if handed is not None:
                data = json.dumps({**body, "kv_transfer_params": {**_terms_of(body), **handed}}).encode()
            choices = [Choice(engine, "decode" if handed else "decode-alone") for engine in sorted(decoders, key=Engine.load)]
        else:
            choices = await self._choices(prompt, self.engines)
        await self._answered(request, fields, data, choices, writer)

    async def _choices(self, prompt, engines):
        """The engine that was chosen, and behind it the others, for the case that it fails."""
        choice = await self.chooser.choose(prompt, engines)
        rest = sorted((engine for engine in engines if engine is not choice.engine), key=Engine.load)
        return [choice, *(Choice(engine, "again", choice.ms) for engine in rest)]

    async def _answered(self, request, fields, data, choices, writer):
        """The answer of the first of these that gives one, as it comes."""
        why = "there is no engine"
        for tried, choice in enumerate(choices):
            self.retried += tried > 0
            turn = Turn(choice.engine, choice.ms)
            try:
                answered = await self._begun(choice.engine, request, fields, data)
            except http.Lost as error:
                why = self._lost(choice.engine, error)
                continue
            else:
                self._count(choice.engine.answered, choice.reason)
                turn.begins()
                try:
                    await http.send(writer, answered.begin())
                    async for piece in answered.pieces(self.settings.stall):
                        await http.send(writer, piece)
                except http.Lost as error:
                    self._count(choice.engine.failures, error.kind)
                    raise
                finally:
                    answered.close()
                return
            finally:
                turn.ends()
        raise http.Refused(502, f"no engine answered: {why}"[:500], "server_error")

    async def _begun(self, engine, request, fields, data):
        answered = await http.ask(engine.url, request.method, request.path, fields, data, self.settings.first_byte, self.settings.tls)
        if answered.status in _FAILED:
            answered.close()
            raise http.Lost(f"the engine answered with status {answered.status}", str(answered.status))
        engine.away_until = 0.0
        return answered

    def _lost(self, engine, error):
        engine.away_until = time.monotonic() + PAUSE
        self._count(engine.failed, str(error)[:80])
        self._count(engine.failures, error.kind if isinstance(error, http.Lost) else "answer")
        return f"{engine.url}: {error}"

    @staticmethod
    def _count(counts, name):
        # Reasons that engines give are not trusted to be few.
        name = name if name in counts or len(counts) < 32 else "other"
        counts[name] = counts.get(name, 0) + 1

    async def _prefilled(self, request, fields, body, prompt, prefills):
        """What the engine that prefills hands over, or `None`: then the one that decodes computes all of it."""
        asked = {name: value for name, value in body.items() if name != "stream_options"}
        asked.update(max_tokens=1, stream=False, kv_transfer_params={**_terms_of(body), "do_remote_decode": True})
        if "max_completion_tokens" in body:
            asked["max_completion_tokens"] = 1
        data = json.dumps(asked).encode()
        for tried, choice in enumerate(await self._choices(prompt, prefills)):
            self.retried += tried > 0
            turn = Turn(choice.engine, choice.ms)
            try:
                answered = await self._begun(choice.engine, request, fields, data)
                try:
                    told = await answered.whole(_ANSWER_MAX, self.settings.first_byte)
                finally:
                    answered.close()
                if answered.status != 200:
                    # What is wrong with the request the one that decodes says.
                    self._count(choice.engine.failed, f"prefill answered {answered.status}")
                    self._count(choice.engine.failures, "prefill")
                    return None
                self._count(choice.engine.answered, f"prefill: {choice.reason}")
                handed = http.parsed(told).get("kv_transfer_params")
                return handed if isinstance(handed, dict) else None
            except (http.Lost, http.Refused) as error:
                self._lost(choice.engine, error)
            finally:
                turn.ends()
        return None

    # Prompts.

    async def _prompt(self, path, body):
        """A request's prompt in tokens, as an engine has them, or where none says them as text."""
        chat = path.endswith("chat/completions")
        given = body.get("messages" if chat else "prompt")
        if not chat and isinstance(given, list) and given and not all(isinstance(one, int) for one in given):
            # Several prompts in one request go where the first one does.
            given = given[0]
        text = given if isinstance(given, str) else json.dumps(given)
        model = body.get("model") if isinstance(body.get("model"), str) else ""
        tokens = _tokens(given)
        if tokens is None and given and self.settings.policy in ("cost", "owner"):
            tokens = await self._tokenised({"model": model, **({"messages": given} if chat else {"prompt": text})})
        self.prompts["text" if tokens is None else "tokens"] += 1
        return Prompt(text, tokens, model)

    async def _tokenised(self, asked):
        engines = [engine for engine in self.engines if engine.tokenises and not engine.is_away()]
        for engine in sorted(engines, key=Engine.load)[:1]:
            fields = [("Content-Type", "application/json"), ("Accept", "application/json")]
            try:
                answered = await http.ask(engine.url, "POST", "/tokenize", fields, json.dumps(asked).encode(), _TOKENIZE_TIMEOUT, self.settings.tls)
                try:
                    if answered.status in (404, 405, 501):
                        engine.tokenises = False
                    if answered.status != 200:
                        return None
                    return _tokens(http.parsed(await answered.whole(_ANSWER_MAX, _TOKENIZE_TIMEOUT)).get("tokens"))
                finally:
                    answered.close()
            except (http.Lost, http.Refused):
                return None
        return None

    def status(self):
        return {
            "policy": self.settings.policy,
            "engines": [engine.told() for engine in self.engines],
            "servers": [{"server": one.endpoint, "is_away": one.is_away(), "why": one.why} for one in self.servers],
            "prompts": self.prompts,
            "refused": self.refused,
            "broken": self.broken,
            "clients_gone": self.gone,
        }

    async def stop(self):
        """Requests under way have a while."""
        tasks = [task for task in self._open if task is not asyncio.current_task()]
        if tasks:
            # ends: after `_STOP` seconds
            await asyncio.wait(tasks, timeout=_STOP)
            for task in tasks:
                task.cancel()
            # ends: all of them are cancelled
            await asyncio.gather(*tasks, return_exceptions=True)
        self.chooser.close()


def _tokens(given):
    """Tokens, if that is what they are."""
    if not isinstance(given, list) or not given or len(given) > _TOKENS_MAX:
        return None
    return given if all(type(one) is int and 0 <= one < 1 << 32 for one in given) else None


def _terms_of(body):
    """What a request itself says of its blocks, which holds on both engines."""
    terms = body.get("kv_transfer_params")
    return terms if isinstance(terms, dict) else {}


def _engine(text):
    url, *rest = text.split(",")
    place = urllib.parse.urlsplit(url)
    if place.scheme not in ("http", "https") or not place.hostname:
        raise argparse.ArgumentTypeError(f"{url!r} is not an http:// or https:// address")
    server, role = None, "both"
    for one in rest:
        name, _, value = one.partition("=")
        if name == "server" and value:
            server = value
        elif name == "role" and value in ("prefill", "decode", "both"):
            role = value
        else:
            raise argparse.ArgumentTypeError(f"{one!r}: write server=HOST:PORT, server=SOCKET, or role=prefill, decode or both")
    return url, server, role


def _times(text):
    """A file of samples, or MODEL@DEVICE or MODEL@DEVICExN of the planner's tables."""
    try:
        if "@" in text:
            model, _, device = text.partition("@")
            device, _, count = device.partition("x")
            return kvarts.Times(model=model, device=device, devices=int(count or 1))
        with open(text) as file:
            samples = [json.loads(line) for line in file if line.strip()]
        return kvarts.Times(samples=[(one["cached"], one["new"], one["ms"]) for one in samples])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _namespace(text):
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 32:
        raise argparse.ArgumentTypeError("a namespace has 64 hexadecimal digits")
    return found


def _listen(text):
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise argparse.ArgumentTypeError("write HOST:PORT")
    return host.strip("[]"), int(port)


def arguments():
    parser = argparse.ArgumentParser(
        prog="python -m kvarts.route",
        description="A reference proxy before engines that speak OpenAI's HTTP interface: it sends each request to the engine whose store has its prefix.",
    )
    of = parser.add_argument
    of("--engine", dest="engines", action="append", type=_engine, required=True, metavar="URL[,server=S][,role=R]",
       help="an engine; S: the Kvarts server beside it, as HOST:PORT or the path of its socket; R: prefill, decode or both [both]. "
            "With engines of the role prefill, each request is sent to one of them first, and then to one that decodes")
    of("--policy", choices=["cost", "owner", "round-robin", "random"], default="cost",
       help="cost: the least time to the first token, as the Kvarts server counts it from stores, queues and paths; owner: beside the store that "
            "owns the prefix or has most of it; random and round do not look at prefixes [cost]")
    of("--listen", type=_listen, default=("127.0.0.1", 8080), metavar="HOST:PORT", help="the address to listen on; port 0 selects a free port [127.0.0.1:8080]")
    of("--certificate", metavar="FILE", help="the listener speaks TLS: its certificate and those between it and the authority (PEM)")
    of("--key", metavar="FILE", help="the certificate's key (PEM)")
    of("--engine-ca", metavar="FILE", help="the authority of the engines' certificates (PEM); else those that this machine trusts")
    of("--keys", choices=["chain", "vllm", "sglang"], default="vllm",
       help="how the blocks' names follow from tokens: as vLLM's connectors make them (hash sha256, PYTHONHASHSEED not set), as SGLang's do, or "
            "by kvarts.chain. Blocks of prompts with adapters, salts or images have other names, and are not found [vllm]")
    of("--namespace", type=_namespace, metavar="HEX", help="the model's name in stores; else the one of the request's model that was used last")
    of("--times", type=_times, metavar="FILE|MODEL@DEVICE[xN]",
       help="the compute times of the engines: samples as for `kvarts plan calibrate`, or a data sheet, as llama-3.1-8b@h100x2; else 10,000 tokens a second")
    of("--token-file", metavar="FILE", help="the token for the Kvarts servers")
    of("--ask-timeout", type=float, default=0.5, metavar="SECONDS", help="the limit of each call to a Kvarts server [0.5]")
    of("--first-byte", type=float, default=600.0, metavar="SECONDS", help="the limit until an engine begins to answer [600]")
    of("--stall", type=float, default=120.0, metavar="SECONDS", help="the limit between two pieces of an answer [120]")
    of("--body-max", type=int, default=32 << 20, metavar="BYTES", help="the longest body of a request [33554432]")
    of("--bodies-max", type=int, default=1 << 30, metavar="BYTES", help="the limit of all bodies in memory together [1073741824]")
    of("--connections", type=int, default=1024, metavar="N", help="the limit of connections of clients [1024]")
    of("--seed", type=int, help="the seed of the policy random")
    of("--json", action="store_true", help="print the address as JSON")
    return parser


def _of_files(option, made, *files):
    try:
        return made(*files)
    except OSError as error:
        # Which file it is, a library of TLS does not say.
        raise OSError(f"{option}: {', '.join(filter(None, files))}: {error}") from None


def _settings(given):
    parser = arguments()
    settings = parser.parse_args(given)
    secure = any(url.startswith("https:") for url, *_ in settings.engines)
    if (settings.certificate is None) != (settings.key is None):
        parser.error("--certificate and --key belong together")
    if settings.engine_ca and not secure:
        parser.error("--engine-ca: no engine has an https:// address")
    settings.listener_tls = settings.tls = None
    if settings.certificate:
        settings.listener_tls = _of_files("--certificate, --key", http.listener_tls, settings.certificate, settings.key)
    if secure:
        settings.tls = _of_files("--engine-ca", http.engine_tls, settings.engine_ca)
    settings.token = None
    if settings.token_file:
        with open(settings.token_file) as file:
            settings.token = file.read().strip()
    if settings.times is None:
        settings.times = kvarts.Times(samples=[(0, 100, 10.0), (0, 10_000, 1000.0)])
    return settings


async def _run(settings):
    proxy = Proxy(settings)
    tls = settings.listener_tls
    more = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": http.HEAD_TIMEOUT}
    # ends: it binds a socket, and waits for nothing else
    server = await asyncio.start_server(proxy.serve, *settings.listen, limit=http.HEAD_MAX, **more)
    host, port = server.sockets[0].getsockname()[:2]
    told = {"listen": f"{'http' if tls is None else 'https'}://{host}:{port}", "policy": settings.policy, "engines": len(settings.engines)}
    print(json.dumps(told) if settings.json else f"serving {told['listen']} by {settings.policy} to {told['engines']} engines", flush=True)
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    # ends: a signal says that it is over
    await over.wait()
    server.close()
    await proxy.stop()


def main(given=None):
    try:
        settings = _settings(given)
    except OSError as error:
        print(f"kvarts.route: {error}", file=sys.stderr)
        return 1
    try:
        asyncio.run(_run(settings))
    except OSError as error:
        print(f"kvarts.route: {settings.listen[0]}:{settings.listen[1]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
