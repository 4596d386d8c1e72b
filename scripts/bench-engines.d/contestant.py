"""What every contestant can do."""

import queue
import threading

import pages


class Contestant:
    """A store in `place`, with pages in `self.slots`. Batches are begun, and answered later with one result for each page."""

    #: Pages of a batch, and how many batches are under way at a time: 128 pages altogether.
    batch, depth = 16, 8

    def __init__(self, place, count, settings):
        """Makes `self.slots` with `count` pages, too."""
        raise NotImplementedError

    def begin(self, kind, numbers, slots):
        """Begins to "put" or "get" the pages `numbers` from or into `slots`; a name for the batch."""
        raise NotImplementedError

    def finished(self):
        """Waits until a batch is answered: [(name, [whether it went well])]."""
        raise NotImplementedError

    def close(self):
        raise NotImplementedError


class Waiting(Contestant):
    """One whose calls wait. An engine makes them in one thread for each direction, and so does this."""

    batch, depth = 128, 1

    def __init__(self, place, count, settings):
        self.slots = pages.Slots(pages.private_memory(count))
        self._answers = queue.SimpleQueue()
        self._work = {kind: queue.SimpleQueue() for kind in ("put", "get")}
        self._names = 0
        for kind, work in self._work.items():
            threading.Thread(target=self._run, args=(getattr(self, kind), work), daemon=True).start()

    def _run(self, call, work):
        while (item := work.get()) is not None:
            name, numbers, slots = item
            try:
                results = call(numbers, slots)
            except Exception as error:  # a batch that failed, whatever the reason
                print(f"batch failed: {error!r}", flush=True)
                results = [False] * len(numbers)
            self._answers.put((name, results))

    def begin(self, kind, numbers, slots):
        self._names += 1
        self._work[kind].put((self._names, numbers, slots))
        return self._names

    def finished(self):
        return [self._answers.get()]

    def close(self):
        for work in self._work.values():
            work.put(None)
