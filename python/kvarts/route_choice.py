"""The choice of an engine for a request of the proxy `python -m kvarts.route`.

The proxy keeps only the requests under way and, for a while, which engines and servers did not answer. For each request it queries the Kvarts servers
for the contents of the engines' stores.
"""

import asyncio
import concurrent.futures
import hashlib
import pickle
import random
import time

import kvarts

#: Seconds for which an engine or a server is excluded after it did not answer.
PAUSE = 5.0
#: Seconds for which a server's list of models is cached.
_MODELS_KEPT = 10.0
#: The limits of a prompt's blocks in a query: over all stores together, and of one prompt.
_ENTRIES_MAX, _KEYS_MAX = 1 << 20, 65_536
#: Characters of a piece of text, and the number of leading pieces that the hash of a prompt covers.
PIECE, PIECES = 256, 4
#: The assumed rate of the disks of a server that is not in the queried server's cluster.
_DISK_BYTES_PER_MS = 2e6
#: Two costs count as equal if they differ by no more than this fraction plus this number of milliseconds.
_EQUAL, _EQUAL_MS = 0.01, 0.1


class Engine:
    """An engine, and its requests under way."""

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
    """A request at an engine. It waits until its answer begins, and then decodes."""

    def __init__(self, engine, ms):
        self.engine, self.ms, self.waits = engine, ms, True
        engine.waiting += 1
        engine.queue_ms += ms

    def begins(self):
        if self.waits:
            self.waits = False
            self.engine.waiting -= 1
            # An empty queue has no rounding error left.
            self.engine.queue_ms = max(0.0, self.engine.queue_ms - self.ms) if self.engine.waiting else 0.0
            self.engine.decoding += 1

    def ends(self):
        self.begins()
        self.engine.decoding -= 1


class Server:
    """A Kvarts server beside engines. Its calls wait for `timeout` seconds at most, so they run on other threads."""

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
        """Returns the result of `work(client)`; `None` if the server does not answer. Later calls return `None` at once for a while."""
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
        """The name of the server's store, queried once."""
        if self.store is None:
            told = self.ask(lambda client: client.route([], times=times, prompt_tokens=1))
            self.store = told and told["here"]
        return self.store

    def close(self):
        if self._client is not None:
            self._client.close(1.0)


def keys_of(naming, tokens, block_tokens):
    """The keys of a prompt's blocks, computed as the connectors that stored them do."""
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
    """The part of a prompt that the hash covers: its first whole pieces, or the whole text if it is shorter than a piece."""
    whole = min(len(text) // PIECE, PIECES) * PIECE
    return text[: whole or len(text)].encode("utf-8", "surrogatepass")


def by_hash(engines, place):
    """Chooses an engine by a consistent hash: adding or removing an engine moves only that engine's share of prompts."""
    return max(engines, key=lambda engine: hashlib.sha256(engine.url.encode() + b"\0" + place).digest())


class Prompt:
    """A request's prompt: its text, its tokens if they are known, and the keys of its blocks."""

    def __init__(self, text, tokens, model):
        self.text, self.tokens, self.model = text, tokens, model
        self.keys, self.namespace, self.block_tokens = [], None, 1

    def count(self):
        # Without tokens, four characters count as one token.
        return max(1, len(self.tokens) if self.tokens is not None else len(self.text) // 4)


class Choice:
    """A chosen engine, the reason, and the estimated milliseconds of its prefill."""

    def __init__(self, engine, reason, ms=0.0):
        self.engine, self.reason, self.ms = engine, reason, ms


class Chooser:
    """The policies."""

    def __init__(self, engines, servers, settings):
        self.engines, self._servers, self._settings = engines, servers, settings
        self._turn, self._random = 0, random.Random(settings.seed)
        self._threads = concurrent.futures.ThreadPoolExecutor(8, "kvarts-route")

    async def choose(self, prompt, engines):
        """Chooses one of these engines by the policy. Engines that did not answer lately are excluded if there are others."""
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
        """The engine with the lowest cost; among equal costs, the engine whose store has most of the prompt."""
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
        """The engine with the shortest queue beside the owner's store."""
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

    # The following methods wait for servers, on threads of the pool.

    def _asked(self, prompt, up):
        """The reply of the first server that answers, or `None`."""
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
        """The values of an engine for `Client.route`."""
        node = {"node": engine.number, "queue_ms": engine.queue_ms, "decoding": engine.decoding}
        store = engine.server and engine.server.known(self._settings.times)
        return {**node, "store": store} if store else node

    def _route(self, server, nodes, prompt):
        asked = dict(times=self._settings.times, prompt_tokens=prompt.count(), namespace=prompt.namespace, keys=prompt.keys)
        told = server.ask(lambda client: client.route(nodes, **asked))
        return told and {**told, "prompt_tokens": prompt.count()}

    def _completed(self, told, server, nodes, prompt, up):
        """Completes a reply: queries servers outside the cluster for their own stores, then routes again with the results."""
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
        # The result of a server's own query counts as its number of blocks.
        for node in again["nodes"]:
            given = next(one for one in nodes if one["node"] == node["node"])
            if node["blocks"] is None and "disk_tokens" in given:
                node["blocks"] = given["disk_tokens"] // prompt.block_tokens
        return again

    def _name(self, prompt, servers):
        """Sets the namespace of the prompt's model and the keys of the prompt's blocks."""
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
