"""`kvarts.Pages` and `kvarts.Session` for asyncio, with the same guarantees. Batches need no additional thread. Look-ups, reads by layers and
calls of sessions wait in threads of the loop's executor."""

import asyncio
import functools

__all__ = ["AsyncPages", "AsyncSession"]


async def _away(call, *args, **kwargs):
    loop = asyncio.get_running_loop()
    # ends: each of these calls has a timeout, its own or the client's
    return await loop.run_in_executor(None, functools.partial(call, *args, **kwargs))


async def _ended(step):
    """The result of a call in the executor. A cancelled task continues only after the call has ended, because the call uses the task's buffers."""
    try:
        return await asyncio.shield(step)  # ends: as the call does
    except asyncio.CancelledError:
        # The task may be cancelled several times.
        while not step.done():
            try:
                await asyncio.wait([step])  # ends: as the call does
            except asyncio.CancelledError:
                pass
        raise


class AsyncPages:
    """A handle on blocks whose calls are coroutines on the running loop. This object drains all completions of the underlying handle."""

    def __init__(self, pages):
        self._pages = pages
        self._loop = asyncio.get_running_loop()
        self._waiting = {}
        for fd in self._fds():
            self._loop.add_reader(fd, self._drain)

    def _fds(self):
        return {self._pages.event_fd(lane) for lane in ("store", "lookup", "load")}

    def _drain(self):
        for completion in self._pages.drain():
            waiting = self._waiting.pop(completion.id, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(completion)

    async def _answer(self, submit, *args, **kwargs):
        # No completion is drained between these lines, because the loop runs this task.
        id = submit(*args, **kwargs)
        waiting = self._waiting[id] = self._loop.create_future()
        try:
            # ends: the batch has a timeout, after which it is answered
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._pages.cancel(id)
            # Its buffers belong to the batch until it is answered.
            while not waiting.done():
                try:
                    # ends: the batch was cancelled, and is answered once its memory is free
                    await asyncio.shield(waiting)
                except asyncio.CancelledError:
                    pass
            raise

    async def put(self, keys, buffers, **kwargs):
        return await self._answer(self._pages.submit_put, keys, buffers, **kwargs)

    async def get(self, keys, buffers, **kwargs):
        return await self._answer(self._pages.submit_get, keys, buffers, **kwargs)

    async def exists(self, keys, **kwargs):
        done = await self._answer(self._pages.submit_exists, keys, **kwargs)
        # An absent page and a page that is being stored are results; every other reason is an error.
        for reason, (error, _) in done.reasons.items():
            if reason not in ("NotHere", "InFlight"):
                raise error
        return done.results

    async def delete(self, keys, **kwargs):
        return await self._answer(self._pages.submit_delete, keys, **kwargs)

    async def delete_all(self):
        return await _away(self._pages.delete_all)

    async def match(self, keys, **kwargs):
        return await _away(self._pages.match, keys, **kwargs)

    async def missing(self, keys, **kwargs):
        return await _away(self._pages.missing, keys, **kwargs)

    async def pin(self, keys, **kwargs):
        return await _away(self._pages.pin, keys, **kwargs)

    async def layers(self, keys, buffers=None, **kwargs):
        reading = None
        try:
            # ends: it begins a read, and waits for none
            begun = self._loop.run_in_executor(None, functools.partial(self._pages.layers, keys, buffers, **kwargs))
            try:
                reading = await _ended(begun)
            except asyncio.CancelledError:
                # ends: it has ended
                reading = begun.result() if begun.exception() is None else None
                raise
            # ends: the read has a timeout
            while (layer := await _ended(self._loop.run_in_executor(None, next, reading, None))) is not None:
                yield layer
        finally:
            if reading is not None:
                await _ended(self._loop.run_in_executor(None, reading.close))  # ends: `close` has the client's timeout

    async def close(self):
        """Stops draining the handle, and closes the handle."""
        for fd in self._fds():
            self._loop.remove_reader(fd)
        for waiting in self._waiting.values():
            waiting.cancel()
        self._waiting.clear()
        await _away(self._pages.close)

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, error, trace):
        await self.close()


class AsyncSession:
    """A session whose calls are coroutines."""

    def __init__(self, session):
        self._session = session

    @classmethod
    async def open(cls, client, pages, keys, **kwargs):
        return cls(await _away(client.session, pages, keys, **kwargs))

    @property
    def session(self):
        return self._session

    async def fork(self, blocks=None, **kwargs):
        return AsyncSession(await _away(self._session.fork, blocks, **kwargs))

    async def extend(self, keys, **kwargs):
        return await _away(self._session.extend, keys, **kwargs)

    async def hold(self, first=0):
        return await _away(self._session.hold, first)

    async def renew(self):
        return await _away(self._session.renew)

    async def hand_over(self, to):
        return await _away(self._session.hand_over, to)

    async def close(self):
        return await _away(self._session.close)

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, error, trace):
        await self.close()
