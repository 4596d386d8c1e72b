"""Batches of blocks for asyncio: the promises of `kvarts.Pages`, and no thread beside those that it has."""

import asyncio

__all__ = ["AsyncPages"]


class AsyncPages:
    """Batches as coroutines. It takes all completions of its handle, on the running loop."""

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
        # Nothing is drained between these lines: the loop runs this task.
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
        return await self._answer(self._pages.submit_exists, keys, **kwargs)

    async def delete(self, keys, **kwargs):
        return await self._answer(self._pages.submit_delete, keys, **kwargs)

    async def close(self):
        """Gives the handle back, and closes it."""
        for fd in self._fds():
            self._loop.remove_reader(fd)
        for waiting in self._waiting.values():
            waiting.cancel()
        self._waiting.clear()
        # ends: `close` waits for batches, which have a timeout
        await self._loop.run_in_executor(None, self._pages.close)

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, error, trace):
        await self.close()
