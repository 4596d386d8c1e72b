"""Which engine a request goes to: what the proxy `python -m kvarts.route` knows of engines now, and how it chooses.

All that is kept is what is under way, and for a while which engine or server did not answer. What engines' storage has the Kvarts servers are
asked, with each request.
"""

import asyncio
import concurrent.futures
import hashlib
import pickle
import random
import time

import kvarts

#: Seconds for which an engine or a server that did not answer is left out.
PAUSE = 5.0
#: Seconds for which what a server said of its models counts.
_MODELS_KEPT = 10.0
#: Blocks of a prompt that are asked for, over all stores.
_ENTRIES_MAX, _KEYS_MAX = 1 << 20, 65_536
#: Characters of a piece of text, and how many pieces decide where a prompt goes of which nothing better is known.
PIECE, PIECES = 256, 4
#: What the disks of a server are taken for that is in no cluster with the one that is asked.
_DISK_BYTES_PER_MS = 2e6
#: Costs are equal that differ by no more than this part and these milliseconds.
_EQUAL, _EQUAL_MS = 0.01, 0.1


class Engine:
    """An engine, and what goes to it now."""

    def __init__(self, number, url, server=None, role="both"):
        self.number, self.url, self.server, self.role = number, url, server, role
        self.waiting, self.decoding, self.queue_ms = 0, 0, 0.0
        self.away_until, self.tokenises = 0.0, True
        self.answered, self.failed = {}, {}
        self.failures = {}  # by kind

    def is_away(self):
        return time.monotonic() < self.away_until

    def load(self):
        return self.is_away(), self.queue_ms, self.waiting + self.decoding, self.number

    def told(self):
        return {
            "url": self.url, "role": self.role, "server": self.server and self.server.endpoint, "is_away": self.is_away(),
            "waiting": self.waiting, "decoding": self.decoding, "queue_ms": round(self.queue_ms, 3),
            "answered": self.answered, "failed": self.failed,
        }


class Turn:
    """A request that is with an engine: waiting until its answer begins, and then decoding."""

    def __init__(self, engine, ms):
        self.engine, self.ms, self.waits = engine, ms, True
        engine.waiting += 1
        engine.queue_ms += ms

    def begins(self):
        if self.waits:
            self.waits = False
            self.engine.waiting -= 1
            # What floating point leaves is no queue.
            self.engine.queue_ms = max(0.0, self.engine.queue_ms - self.ms) if self.engine.waiting else 0.0
            self.engine.decoding += 1

    def ends(self):
        self.begins()
        self.engine.decoding -= 1


class Server:
    """A Kvarts server beside engines. Its calls wait, so they are made on other threads, `timeout` seconds each at most."""

    def __init__(self, endpoint, token, timeout):
        self.endpoint, self._token, self._timeout = endpoint, token, timeout
        self._client, self._away_until, self._models, self._models_until = None, 0.0, [], 0.0
        self.store, self.why = None, None

    def is_away(self):
        return time.monotonic() < self._away_until

    def _connected(self):
        if self._client is None:
            self._client = kvarts.connect(self.endpoint, self._token, via="grpc", timeout=self._timeout)
        return self._client

    def ask(self, work):
        """What `work(client)` says; `None` where the server does not answer, which costs no other request anything for a while."""
        if self.is_away():
            return None
        try:
            found = work(self._connected())
            self.why = None
            return found
        except kvarts.Invalid as error:
            self.why = str(error)
        except kvarts.Error as error:
            self.why, self._away_until = str(error), time.monotonic() + PAUSE
        return None

    def models(self):
        if time.monotonic() >= self._models_until:
            self._models = self.ask(lambda client: client.models()) or []
            self._models_until = time.monotonic() + _MODELS_KEPT
        return self._models

    def known(self, times):
        """Its store's name, asked once."""
        if self.store is None:
            told = self.ask(lambda client: client.route([], times=times, prompt_tokens=1))
            self.store = told and told["here"]
        return self.store

    def close(self):
        if self._client is not None:
            self._client.close(1.0)


def keys_of(naming, tokens, block_tokens):
    """The names of a prompt's blocks, as those who stored them made them."""
    if naming == "chain":
        return kvarts.chain(tokens, block_tokens)
    found = []
    # vLLM's seed where `PYTHONHASHSEED` is not set, and its hash `sha256`.
    parent = _pickled("vllm-none-hash") if naming == "vllm" else b""
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tuple(tokens[first : first + block_tokens])
        if naming == "vllm":
            parent = _pickled((parent, block, None))
        else:
            parent = hashlib.sha256(parent + b"".join(token.to_bytes(4, "little") for token in block)).digest()
        found.append(parent)
    return found


def _pickled(value):
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def place_of(text):
    """What decides where a prompt goes of which nothing better is known: its first pieces that are whole, or all of it."""
    whole = min(len(text) // PIECE, PIECES) * PIECE
    return text[: whole or len(text)].encode("utf-8", "surrogatepass")


def by_hash(engines, place):
    """The same engine for the same place; one that comes or goes moves its own share of them alone."""
    return max(engines, key=lambda engine: hashlib.sha256(engine.url.encode() + b"\0" + place).digest())


class Prompt:
    """What is known of a request's prompt."""

    def __init__(self, text, tokens, model):
        self.text, self.tokens, self.model = text, tokens, model
        self.keys, self.namespace, self.block_tokens = [], None, 1

    def count(self):
        # Without a tokeniser four characters are taken for a token.
        return max(1, len(self.tokens) if self.tokens is not None else len(self.text) // 4)


class Choice:
    """`engine`, why, and how long it is thought to compute."""

    def __init__(self, engine, reason, ms=0.0):
        self.engine, self.reason, self.ms = engine, reason, ms


class Chooser:
    """The policies."""

    def __init__(self, engines, servers, settings):
        self.engines, self._servers, self._settings = engines, servers, settings
        self._turn, self._random = 0, random.Random(settings.seed)
        self._threads = concurrent.futures.ThreadPoolExecutor(8, "kvarts-route")

    async def choose(self, prompt, engines):
        """Of these engines one, by the policy. Those that did not answer lately are left out while there are others."""
        up = [engine for engine in engines if not engine.is_away()] or engines
        policy = self._settings.policy
        if policy == "round-robin":
            self._turn += 1
            return Choice(up[(self._turn - 1) % len(up)], "round-robin", self._ms(prompt, 0))
        if policy == "random":
            return Choice(self._random.choice(up), "random", self._ms(prompt, 0))
        loop = asyncio.get_running_loop()
        # ends: each call to a server ends after `timeout`, and one that did not answer is left alone for `PAUSE`
        told = await loop.run_in_executor(self._threads, self._asked, prompt, up)
        found = told and (self._least(told, up) if policy == "cost" else self._owner(told, up))
        if found:
            return found
        if policy == "cost":
            return Choice(min(up, key=Engine.load), "least-queue" if told else "least-queue-unasked", self._ms(prompt, 0))
        return Choice(by_hash(up, place_of(prompt.text)), "hash", self._ms(prompt, 0))

    def _ms(self, prompt, cached):
        cached = min(cached, prompt.count() - 1)
        return self._settings.times.prefill_ms(cached, prompt.count() - cached)

    def _least(self, told, up):
        """The least cost; of equal ones where most of the prompt is."""
        by_number = {engine.number: engine for engine in up}
        blocks = {node["node"]: node["blocks"] or 0 for node in told["nodes"]}
        candidates = [one for one in told["candidates"] if one["node"] in by_number]
        if not candidates:
            return None
        most = candidates[0]["cost_ms"] * (1 + _EQUAL) + _EQUAL_MS
        equal = [one for one in candidates if one["cost_ms"] <= most]
        best = max(equal, key=lambda one: (blocks.get(one["node"], 0), -one["cost_ms"]))
        return Choice(by_number[best["node"]], best["action"], best["compute_ms"])

    def _owner(self, told, up):
        """Beside the owner's store the engine with the shortest queue."""
        if told["owner"] is None:
            return None
        number, tokens = told["owner"]
        owner = next((engine for engine in up if engine.number == number), None)
        if owner is None:
            return None
        store = owner.server and owner.server.store
        beside = [engine for engine in up if engine is owner or store and engine.server and engine.server.store == store]
        ms = self._settings.times.prefill_ms(tokens, max(1, told["prompt_tokens"] - tokens))
        return Choice(min(beside, key=Engine.load), "owner" if told["owner_has_lease"] else "most-of-it", ms)

    # What follows waits, on a thread of its own.

    def _asked(self, prompt, up):
        """What a server says of the route, or `None`."""
        servers = [server for server in self._servers if not server.is_away()]
        if not servers or prompt.tokens is None:
            return None
        self._name(prompt, servers)
        if not prompt.keys:
            return None
        nodes = [self._node(engine) for engine in up]
        for server in servers:
            told = self._route(server, nodes, prompt)
            if told is not None:
                return self._completed(told, server, nodes, prompt, up)
        return None

    def _node(self, engine):
        """What is known here of an engine."""
        node = {"node": engine.number, "queue_ms": engine.queue_ms, "decoding": engine.decoding}
        store = engine.server and engine.server.known(self._settings.times)
        return {**node, "store": store} if store else node

    def _route(self, server, nodes, prompt):
        asked = dict(times=self._settings.times, prompt_tokens=prompt.count(), namespace=prompt.namespace, keys=prompt.keys)
        told = server.ask(lambda client: client.route(nodes, **asked))
        return told and {**told, "prompt_tokens": prompt.count()}

    def _completed(self, told, server, nodes, prompt, up):
        """Servers that belong to no cluster are asked for their own stores, each."""
        unknown = {node["node"] for node in told["nodes"] if node["blocks"] is None}
        engines = [engine for engine in up if engine.number in unknown and engine.server is not server]
        for engine in engines:
            node = next(node for node in nodes if node["node"] == engine.number)
            own = self._route(engine.server, [node], prompt)
            blocks = own and own["nodes"] and own["nodes"][0]["blocks"]
            if blocks:
                node["disk_tokens"] = blocks * prompt.block_tokens
                node["disk_bytes_per_ms"] = _DISK_BYTES_PER_MS
        asked = any("disk_tokens" in node for node in nodes)
        again = self._route(server, nodes, prompt) if asked else None
        if again is None:
            return told
        # What they have themselves counts as what is known of them.
        for node in again["nodes"]:
            given = next(one for one in nodes if one["node"] == node["node"])
            if node["blocks"] is None and "disk_tokens" in given:
                node["blocks"] = given["disk_tokens"] // prompt.block_tokens
        return again

    def _name(self, prompt, servers):
        """The model's name in stores, and those of the prompt's blocks."""
        models = next((found for found in (server.models() for server in servers) if found), [])
        wanted = self._settings.namespace
        if wanted is not None:
            models = [one for one in models if one["namespace"] == wanted]
        elif any(one["model"] == prompt.model for one in models):
            models = [one for one in models if one["model"] == prompt.model]
        if not models:
            return
        model = max(models, key=lambda one: (one["last_used_ms"], one["namespace"]))
        prompt.namespace, prompt.block_tokens = model["namespace"], model["block_tokens"]
        most = min(_KEYS_MAX, _ENTRIES_MAX // max(1, len(self.engines)))
        tokens = prompt.tokens[: most * prompt.block_tokens]
        prompt.keys = keys_of(self._settings.keys, tokens, prompt.block_tokens)

    def close(self):
        # ends: calls under way have their `timeout`
        self._threads.shutdown(wait=True)
        for server in self._servers:
            server.close()
