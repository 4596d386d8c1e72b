"""Kvarts: its module, and a server on the same host; pages in memory that it hands out (`shared`), or in the engine's own."""

import kvarts
import pages
from contestant import Contestant

IDENTITY = dict(model="bench/model", revision="1", dtype="bf16", engine="bench", layout="pages")


class Kvarts(Contestant):
    """`memory`: shared (disks write into it), or copied (private memory)."""

    def __init__(self, place, count, settings):
        self._client = kvarts.connect(settings["socket"], timeout=120)
        self._pages = self._client.pages(pages.PAGE, durable=settings.get("durable", False), **IDENTITY)
        if settings["memory"] == "shared":
            self._memory = self._client.memory(count * pages.PAGE)
            buffer = memoryview(self._memory.view)[: count * pages.PAGE]
        else:
            buffer = pages.private_memory(count)
        self.slots = pages.Slots(buffer)

    def begin(self, kind, numbers, slots):
        submit = self._pages.submit_put if kind == "put" else self._pages.submit_get
        return submit([kvarts.key("page", n) for n in numbers], [self.slots.page(slot) for slot in slots])

    def finished(self):
        answers = []
        for done in self._pages.wait():
            if done.error is not None:
                print(f"{done.kind}: {done.error!r}", flush=True)
            answers.append((done.id, done.results))
        return answers

    def close(self):
        self._pages.close()
        self._client.close()
