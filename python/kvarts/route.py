"""`python -m kvarts.route`: a reference proxy for engines with OpenAI's HTTP interface. It sends each request to the engine whose store has the prefix.

    $ python -m kvarts.route --engine http://10.0.0.1:8000,server=10.0.0.1:7440 --engine http://10.0.0.2:8000,server=10.0.0.2:7440

The proxy forwards `/v1/completions`, `/v1/chat/completions` and `/v1/models`, and streams answers byte for byte. It keeps only the state of requests
in progress. If an engine fails before the first byte of its answer, the proxy excludes the engine for a while and sends the request to another engine.
If the engine fails later, the client receives the incomplete answer. `/health` reports whether an engine is available. `/status` reports the numbers of
requests by engine and reason. `/metrics` reports the same numbers for Prometheus.
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
#: Statuses after which the proxy tries another engine.
_FAILED = (502, 503, 504)
#: The limit of bytes of a tokenisation's or a prefill's answer, and the limit of tokens of a prompt.
_ANSWER_MAX, _TOKENS_MAX = 64 << 20, 1 << 22
#: Seconds for a tokenisation.
_TOKENIZE_TIMEOUT = 5.0
#: Seconds that requests under way may still take when the proxy stops.
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
        """Serves one connection, with one request."""
        task = asyncio.current_task()
        self._open.add(task)
        try:
            if len(self._open) > self.settings.connections:
                raise http.Refused(503, f"the proxy has reached its limit of {self.settings.connections} connections (--connections): retry later", "overloaded_error")
            request = await http.read_head(reader)
            if request is not None:
                await self._with_body(request, reader, writer)
        except http.Refused as error:
            self.refused[error.status] = self.refused.get(error.status, 0) + 1
            await self._last(writer, http.refusal(error))
        except http.Gone:
            self.gone += 1
        except http.Lost:
            # The client must see that the answer is incomplete.
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
            raise http.Refused(404, f"{request.path[:200]} is not a path of this proxy; its paths are {', '.join(_PATHS)}")
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
        """The chosen engine, followed by the other engines in case that it fails."""
        choice = await self.chooser.choose(prompt, engines)
        rest = sorted((engine for engine in engines if engine is not choice.engine), key=Engine.load)
        return [choice, *(Choice(engine, "again", choice.ms) for engine in rest)]

    async def _answered(self, request, fields, data, choices, writer):
        """Streams the answer of the first engine that answers."""
        why = "no engine is configured for this request"
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
        # The number of different reasons is limited, because they come from engines.
        name = name if name in counts or len(counts) < 32 else "other"
        counts[name] = counts.get(name, 0) + 1

    async def _prefilled(self, request, fields, body, prompt, prefills):
        """Has an engine prefill the prompt. Returns the parameters for the decoding engine, or `None`: that engine then computes the whole prompt."""
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
                    # The decoding engine reports the error of the request.
                    self._count(choice.engine.failed, f"the prefill engine answered with status {answered.status}")
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
        """A request's prompt: as the engines' tokens, or as text if no engine tokenises it."""
        chat = path.endswith("chat/completions")
        given = body.get("messages" if chat else "prompt")
        if not chat and isinstance(given, list) and given and not all(isinstance(one, int) for one in given):
            # The first of several prompts decides.
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
        """Waits up to `_STOP` seconds for requests under way, then cancels them."""
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
    """`given` if it is a list of tokens, else `None`."""
    if not isinstance(given, list) or not given or len(given) > _TOKENS_MAX:
        return None
    return given if all(type(one) is int and 0 <= one < 1 << 32 for one in given) else None


def _terms_of(body):
    """A request's own `kv_transfer_params`, which apply to both engines."""
    terms = body.get("kv_transfer_params")
    return terms if isinstance(terms, dict) else {}


def _engine(text):
    url, *rest = text.split(",")
    place = urllib.parse.urlsplit(url)
    if place.scheme not in ("http", "https") or not place.hostname:
        raise argparse.ArgumentTypeError(f"{url!r} is not an http:// or https:// address, such as http://10.0.0.1:8000")
    server, role = None, "both"
    for one in rest:
        name, _, value = one.partition("=")
        if name == "server" and value:
            server = value
        elif name == "role" and value in ("prefill", "decode", "both"):
            role = value
        else:
            raise argparse.ArgumentTypeError(f"{one!r} is not valid: write server=HOST:PORT, server=SOCKET, role=prefill, role=decode or role=both")
    return url, server, role


def _times(text):
    """A file of samples, or MODEL@DEVICE or MODEL@DEVICExN from the planner's tables."""
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
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not a namespace: write 64 hexadecimal digits")
    return found


def _listen(text):
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not valid: write HOST:PORT, such as 127.0.0.1:8080")
    return host.strip("[]"), int(port)


def arguments():
    parser = argparse.ArgumentParser(
        prog="python -m kvarts.route",
        description="A reference proxy for engines with OpenAI's HTTP interface: it sends each request to the engine whose store has the prefix.",
    )
    of = parser.add_argument
    of("--engine", dest="engines", action="append", type=_engine, required=True, metavar="URL[,server=S][,role=R]",
       help="the address of an engine; repeat the option for each engine. S is the Kvarts server of this engine: HOST:PORT, or the path of its socket. R is "
            "prefill, decode or both [both]. If an engine has the role prefill, each request goes first to such an engine, and then to an engine that decodes")
    of("--policy", choices=["cost", "owner", "round-robin", "random"], default="cost",
       help="how the proxy chooses an engine. cost: the engine with the shortest time to the first token, which a Kvarts server estimates from stores, queues "
            "and paths. owner: an engine whose store owns the prefix, or has most of its blocks. random, round-robin: without regard to prefixes [cost]")
    of("--listen", type=_listen, default=("127.0.0.1", 8080), metavar="HOST:PORT", help="the address to listen on; port 0 selects a free port [127.0.0.1:8080]")
    of("--certificate", metavar="FILE", help="serve TLS with this certificate. The file (PEM) has the certificate first, then the intermediate certificates. Requires --key")
    of("--key", metavar="FILE", help="the private key of --certificate (PEM)")
    of("--engine-ca", metavar="FILE", help="the authority that issued the engines' certificates (PEM) [the authorities that this machine trusts]")
    of("--keys", choices=["chain", "vllm", "sglang"], default="vllm",
       help="how block keys are computed from tokens. vllm: as in vLLM's connectors (hash sha256, PYTHONHASHSEED not set). sglang: as in SGLang's "
            "connectors. chain: with kvarts.chain. Blocks of prompts with adapters, salts or images have other keys and are not found [vllm]")
    of("--namespace", type=_namespace, metavar="HEX", help="the namespace of the model's blocks in the stores [the latest namespace of the request's model]")
    of("--times", type=_times, metavar="FILE|MODEL@DEVICE[xN]",
       help="the compute times of the engines: a file with samples in the form of `kvarts plan calibrate`, or the name of a data sheet such as "
            "llama-3.1-8b@h100x2 [10,000 tokens a second]")
    of("--token-file", metavar="FILE", help="the file with the token for the Kvarts servers")
    of("--ask-timeout", type=float, default=0.5, metavar="SECONDS", help="the timeout of each call to a Kvarts server [0.5]")
    of("--first-byte", type=float, default=600.0, metavar="SECONDS", help="the timeout for the first byte of an engine's answer [600]")
    of("--stall", type=float, default=120.0, metavar="SECONDS", help="the longest pause between two pieces of an engine's answer [120]")
    of("--body-max", type=int, default=32 << 20, metavar="BYTES", help="the maximum size of the body of one request [33554432]")
    of("--bodies-max", type=int, default=1 << 30, metavar="BYTES", help="the maximum size of all request bodies in memory together [1073741824]")
    of("--connections", type=int, default=1024, metavar="N", help="the maximum number of open client connections [1024]")
    of("--seed", type=int, help="the seed of the random numbers of --policy random")
    of("--json", action="store_true", help="print the listening address as JSON")
    return parser


def _of_files(option, made, *files):
    try:
        return made(*files)
    except OSError as error:
        # The TLS library does not name the file.
        raise OSError(f"{option}: {', '.join(filter(None, files))}: {error}") from None


def _settings(given):
    parser = arguments()
    settings = parser.parse_args(given)
    secure = any(url.startswith("https:") for url, *_ in settings.engines)
    if (settings.certificate is None) != (settings.key is None):
        parser.error("--certificate and --key must be given together")
    if settings.engine_ca and not secure:
        parser.error("--engine-ca: no engine has an https:// address: remove the option, or use https:// addresses in --engine")
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
    print(json.dumps(told) if settings.json else f"serving {told['listen']}: policy {settings.policy}, {told['engines']} engines", flush=True)
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
        print(f"kvarts.route: cannot listen on {settings.listen[0]}:{settings.listen[1]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
