"""Shared parts of the connectors: a connection that never blocks the engine, the detection of a silent server, and the identity of a model."""

import dataclasses
import enum
import hashlib
import json
import logging
import os
import queue
import re
import threading
import time

import kvarts

logger = logging.getLogger("kvarts")


def token_of(file):
    """The content of the token's file; `None` if no file is configured."""
    if file is None:
        return None
    with open(file, encoding="utf-8") as text:
        return text.read(1 << 16).strip()


def whole_number(extra, name, least):
    """A setting of a connector: a whole number, `least` or more; `least` if it is not set."""
    value = extra.get(name, least)
    if type(value) is not int or value < least:
        raise ValueError(f"{name}: {value!r} is not valid: set a whole number, {least} or more")
    return value


def seconds(extra, name, plain):
    """A setting of a connector, in seconds; `plain` if it is not set."""
    value = extra.get(name, plain)
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        raise ValueError(f"{name}: {value!r} is not valid: set a number of seconds, 0 or more and below 1e9")
    return float(value)


#: The lowest rate of a working server, in bytes a second. A slower server counts as silent.
SLOWEST = 64 << 20
#: The limit of characters of a setting in an identity. A longer setting is replaced by its digest.
_LONG = 1024
#: Bytes of a part of a large request. Each part that arrives shows that the server works.
PART = 16 << 20


def allowed(timeout, nbytes):
    """Seconds that a request of `nbytes` may take. The timeout limits silence, so a larger request may take longer."""
    return timeout + nbytes / SLOWEST


class Silence:
    """Detects that no part of the requests under way has arrived for too long."""

    def __init__(self, timeout):
        self._timeout = timeout
        self._parts = {}  # part -> bytes
        self._heard_at = 0.0

    @property
    def nbytes(self):
        """Bytes of the parts under way."""
        return sum(self._parts.values())

    def began(self, part, nbytes):
        if not self._parts:
            self._heard_at = time.monotonic()
        self._parts[part] = nbytes

    def heard(self, part, good, reasons):
        """Records the answer to a part. An answer that this process made itself at the deadline does not count as a sign of the server."""
        known = self._parts.pop(part, None) is not None
        if known and (good or any(not isinstance(error, (kvarts.Retry, kvarts.Deadline)) for error, _ in reasons.values())):
            self._heard_at = time.monotonic()

    def broken(self):
        """Returns the parts to give up, once, if the silence has lasted too long."""
        if not self._parts or time.monotonic() - self._heard_at <= allowed(self._timeout, max(self._parts.values())):
            return []
        parts, self._parts = list(self._parts), {}
        return parts


def reason_of(error):
    """The reason of an error, as counters name it."""
    return getattr(error, "reason", None) or type(error).__name__


def of_server(error):
    """Whether an error means that the server does not answer. `InFlight` (another process is storing the block at this moment) is an answer."""
    return isinstance(error, (kvarts.Retry, kvarts.Deadline)) and error.reason not in ("Cancelled", "Closed", "InFlight")


class Link:
    """A client that a thread of this object connects, so that an engine starts and continues without a server.

    After an error that means "the server cannot be reached", `away` is true for `pause` seconds. Meanwhile the connectors send no
    requests and answer misses. The first request after that tries again. Failed puts suspend only puts (`puts_away`), because a
    server that is overloaded with writes can still serve reads."""

    def __init__(self, connect, pause):
        self._connect = connect
        self.pause = pause
        self._client = None
        self._away_until = self._puts_until = 0.0
        self._was_away = False
        self._work = queue.SimpleQueue()
        self._watched = None
        self._thread = threading.Thread(target=self._run, name="kvarts", daemon=True)
        self._thread.start()

    @property
    def away(self):
        return time.monotonic() < self._away_until

    @property
    def puts_away(self):
        return time.monotonic() < max(self._away_until, self._puts_until)

    def failed(self, error):
        """Records an error of a look-up or a load. Only an error of a server that does not answer sets `away`."""
        if not of_server(error):
            return
        if not self._was_away:
            logger.warning("kvarts: the server cannot be reached; the engine continues without it, and Kvarts retries: %s", error)
        self._was_away = True
        self._away_until = time.monotonic() + self.pause

    def put_failed(self, error):
        """Records an error of a put. Only an error of a server that does not answer suspends puts."""
        if not of_server(error):
            return
        if time.monotonic() >= self._puts_until + self.pause:
            logger.warning("kvarts: the server did not store blocks; the connector stores no blocks for %g seconds, then tries again: %s", self.pause, error)
        self._puts_until = time.monotonic() + self.pause

    def answered(self):
        """Records an answer."""
        if self._was_away:
            logger.warning("kvarts: the server can be reached again")
        self._was_away = False

    def learn(self, good, reasons, put=False):
        """Records the result of a batch. `good`: whether any key succeeded; `reasons`: `Completion.reasons`. A partial success counts as an
        answer of the server, even if other blocks arrived too late, for example from a slow bucket."""
        if good or not reasons:
            self.answered()
            return
        notice = self.put_failed if put else self.failed
        for error, _ in reasons.values():
            notice(error)

    def do(self, work, failed):
        """Calls `work(client)` in the thread of this object, or `failed(error)` if the work or the connection failed."""
        self._work.put((work, failed))

    def then(self, work):
        """Calls `work()` in the thread of this object, after all earlier work, also while the server is away."""
        self._work.put((lambda client: work(), None))

    def watch(self, look):
        """Calls `look()` in the thread of this object repeatedly, between its other work, until `look` returns false. `look` may wait for a moment.
        Only the thread of this object may call this method."""
        self._watched = look

    def _next(self):
        while self._watched is not None:
            try:
                return self._work.get_nowait()
            except queue.Empty:
                pass
            try:
                is_watching = self._watched()
            except Exception:  # a defect here must not end the thread
                logger.exception("kvarts: a defect in Kvarts ended the loop that polls for finished requests; report it")
                is_watching = False
            if not is_watching:
                self._watched = None
        # ends: `stop` puts the last item; the thread is a daemon
        return self._work.get()

    def _run(self):
        while (item := self._next()) is not None:
            work, failed = item
            try:
                if failed is None:
                    work(None)
                    continue
                if self.away:
                    # No request was sent, so the error is no sign of the server.
                    failed(kvarts.Retry("the server cannot be reached; Kvarts retries after a pause"))
                    continue
                if self._client is None:
                    self._client = self._first()
                work(self._client)
            except kvarts.Error as error:
                self.failed(error)
                if failed is not None:
                    failed(error)
            except Exception as error:  # a defect here must not end the thread, and with it the engine's cache
                logger.exception("kvarts: a request failed because of a defect in Kvarts; report it")
                if failed is not None:
                    failed(error)

    def _first(self):
        try:
            return self._connect()
        except kvarts.Error as error:
            if isinstance(error, (kvarts.Retry, kvarts.Deadline)):
                raise
            # Whatever the cause, there is no connection: it is retried later.
            raise kvarts.Retry(str(error), error.reason) from error

    def stop(self, timeout=10.0):
        """Ends the thread after its pending work. Work that is given later is not done."""
        self._work.put(None)
        self._thread.join(timeout)

    def close(self, timeout=10.0):
        self.stop(timeout)
        if self._client is not None:
            self._client.close(timeout)


def told(value):
    """A setting as text that is the same in every process. Raises `ValueError` for a value without such a text, such as a function."""

    def other(value):
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, (set, frozenset)):
            return sorted(map(told, value))
        text = str(value)
        if callable(value) or " at 0x" in text:
            raise ValueError(f"{value!r} cannot be part of the identity of blocks, because its text differs between processes: set plain values instead")
        return text

    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=other)


def brief(facts):
    """Settings as values of an identity: as text, or as a digest if the text is long, empty or has unusual characters."""
    found = {}
    for name, value in facts.items():
        text = str(value)
        if len(text) > _LONG or not text.isprintable() or text != text.strip() or not text:
            text = "digest-" + hashlib.sha256(text.encode()).hexdigest()
        found[str(name)] = text
    return found


def differing(value):
    """The fields of a dataclass that differ from their defaults, as text. A field that a later version adds does not change the text."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    plain = {field.name: field.default for field in dataclasses.fields(value)}
    return told([type(value).__name__, {name: one for name, one in fields.items() if one is not plain[name] and one != plain[name]}])


def contract(engine, version, alike, *facts):
    """The version of a layout: a digest over the known rules by which an engine arranges bytes, and over the engine's version. `alike` maps a
    tested version to the first version with the same blocks. Builds and repackagings of a release (`0.33.0+cu130`, `0.33.0.post1`) count as
    that release."""
    release = re.fullmatch(r"(\d+\.\d+\.\d+)(\.post\d+)?(\+.*)?", version)
    version = release[1] if release else version
    text = json.dumps([engine, alike.get(version, version), *(told(fact) for fact in facts)])
    return "contract-" + hashlib.sha256(text.encode()).hexdigest()[:32]


def _configuration_of_a_hub(model, revision):
    """The local copy of a hub model's configuration file, or `None`."""
    try:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(model, "config.json", revision=revision)
    except Exception:  # not installed, or not a name of a hub
        file = None
    return file if isinstance(file, str) else None


def configuration_of(model, revision=None):
    """A model's own configuration, from its directory or from the local copy of a hub model; `None` if there is none."""
    file = os.path.join(model, "config.json") if os.path.isdir(model) else _configuration_of_a_hub(model, revision)
    try:
        with open(file, encoding="utf-8") as text:
            return json.load(text)
    except (TypeError, OSError, ValueError):
        return None


def revision_of(model, revision=None):
    """The revision of a model's bytes. For a directory: a digest over `revision`, the configuration, and name, size and time of every
    other file. For a model of a hub: the commit of the local copy, or else `revision`. Raises `ValueError` if the revision is
    unknown: two revisions of a model must never share a cache."""
    if os.path.isdir(model):
        digest = hashlib.sha256((revision or "").encode())
        for place, _, names in sorted(os.walk(model)):
            for name in sorted(names):
                file = os.path.join(place, name)
                facts = os.stat(file)
                digest.update(json.dumps([os.path.relpath(file, model), facts.st_size]).encode())
                if name.endswith(".json") and facts.st_size < 1 << 20:
                    with open(file, "rb") as content:
                        digest.update(content.read())
                else:
                    digest.update(str(facts.st_mtime_ns).encode())
        return "files-" + digest.hexdigest()[:40]
    file = _configuration_of_a_hub(model, revision)
    if file is not None:
        return os.path.basename(os.path.dirname(file))
    if revision:
        return revision
    raise ValueError(f"revision: the revision of {model!r} is unknown: set the setting revision to the model's commit or version")
