"""What the connectors share: a connection for which no engine waits, and the name of a model's bytes."""

import hashlib
import json
import logging
import os
import queue
import threading
import time

import kvarts

logger = logging.getLogger("kvarts")


def token_of(file):
    """The content of a token's file; `None` where none is named."""
    if file is None:
        return None
    with open(file, encoding="utf-8") as text:
        return text.read(1 << 16).strip()


class Link:
    """A client that a thread of this object connects, so that an engine starts and goes on while no server is there.

    After an answer that means "the server is away", `away` is true for `pause` seconds: meanwhile the connectors ask nothing and
    answer misses. The first request after that tries again."""

    def __init__(self, connect, pause):
        self._connect = connect
        self._pause = pause
        self._client = None
        self._away_until = 0.0
        self._was_away = False
        self._work = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvarts", daemon=True)
        self._thread.start()

    @property
    def away(self):
        return time.monotonic() < self._away_until

    def failed(self, error):
        """Takes notice of an error. Only an error that says that the server does not answer counts as one of the server; one of a block
        that another process is storing right now (`InFlight`) is an answer."""
        if not isinstance(error, (kvarts.Retry, kvarts.Deadline)) or error.reason in ("Cancelled", "Closed", "InFlight"):
            return
        if not self._was_away:
            logger.warning("kvarts: the server is away, the engine goes on without it: %s", error)
        self._was_away = True
        self._away_until = time.monotonic() + self._pause

    def answered(self):
        """Takes notice of an answer."""
        if self._was_away:
            logger.warning("kvarts: the server is back")
        self._was_away = False

    def learn(self, results, errors):
        """Takes notice of the answer to a batch. A server that gave some of it is there, also where the rest came too late, as blocks
        do that a bucket brings slowly."""
        if not any(results):
            for error in errors:
                self.failed(error)
        if any(results) or not errors:
            self.answered()

    def do(self, work, failed):
        """Calls `work(client)` in the thread of this object, or `failed(error)` if that or connecting did not work."""
        self._work.put((work, failed))

    def _run(self):
        while (item := self._work.get()) is not None:
            work, failed = item
            try:
                if self.away:
                    raise kvarts.Retry("the server is away")
                if self._client is None:
                    self._client = self._first()
                work(self._client)
            except kvarts.Error as error:
                self.failed(error)
                failed(error)
            except Exception as error:  # a defect here must not end the thread, and with it the engine's cache
                logger.exception("kvarts: a request failed")
                failed(error)

    def _first(self):
        try:
            return self._connect()
        except kvarts.Error as error:
            if isinstance(error, (kvarts.Retry, kvarts.Deadline)):
                raise
            # Whatever it is, no server answers: it is asked again later.
            raise kvarts.Retry(str(error), error.reason) from error

    def stop(self, timeout=10.0):
        """Ends the thread: nothing is opened any more."""
        self._work.put(None)
        self._thread.join(timeout)

    def close(self, timeout=10.0):
        self.stop(timeout)
        if self._client is not None:
            self._client.close(timeout)


def revision_of(model, revision=None):
    """Which bytes a model is made of: `revision` if one is named; else the commit of the local copy of a model of a hub, or a
    digest over the configuration and over name, size and time of every other file of a directory. Raises `ValueError` where
    nothing says it: two revisions of a model must never share a cache."""
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
    try:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(model, "config.json", revision=revision)
    except Exception:  # not installed, or not a name of a hub
        file = None
    if isinstance(file, str):
        return os.path.basename(os.path.dirname(file))
    if revision:
        return revision
    raise ValueError(f"revision: nothing says which revision of {model!r} this is; name it")
