"""Kvarts: its module, and a server whose memory holds the pages (`direct`), or pages in memory of the engine's own."""

import contextlib
import mmap
import os

import kvarts
import pages
from contestant import Contestant

IDENTITY = dict(model="bench/model", revision="1", dtype="bf16", engine="bench", layout="pages")


class Kvarts(Contestant):
    """`memory`: direct, adopted (a file in memory that the engine made), or copied (private memory)."""

    def __init__(self, place, count, settings):
        self._client = kvarts.connect(settings["socket"], timeout=120)
        self._pages = self._client.pages(pages.PAGE, durable=settings.get("durable", False), **IDENTITY)
        if settings["memory"] == "direct":
            self._memory = self._client.memory(count * pages.PAGE)
            buffer = self._memory.view
        elif settings["memory"] == "adopted":
            file = os.memfd_create("pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(file, count * pages.PAGE)
            buffer = mmap.mmap(file, count * pages.PAGE)
            memoryview(buffer)[:: mmap.PAGESIZE] = bytes(count * pages.PAGE // mmap.PAGESIZE)
            with contextlib.suppress(OSError):  # where the kernel finds no large pages now
                buffer.madvise(25)  # MADV_COLLAPSE: large pages, as the documentation advises
            self._memory = self._client.adopt(buffer, fd=file)
        else:
            buffer = pages.private_memory(count)
        self.slots = pages.Slots(memoryview(buffer)[: count * pages.PAGE])

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
