"""What is stored: page `n` has bytes that no other page has, and lies in memory that all contestants of a seam have alike."""

import mmap
import random
import struct
import tempfile

#: Bytes of a page.
PAGE = 1 << 20
#: `MADV_POPULATE_WRITE`, which Python does not name yet.
_POPULATE_WRITE = 23
_STEP = 64 << 10
_BASE = random.Random(18).randbytes(2 * PAGE)


def content(n):
    """The bytes of page `n`."""
    first = n * 64 % PAGE
    page = bytearray(_BASE[first : first + PAGE])
    for at in range(0, PAGE, _STEP):
        struct.pack_into("<QQ", page, at, n, at)
    return page


def needle(n):
    """Bytes in the middle of page `n` that are nowhere else, and where in the page they begin."""
    return struct.pack("<QQ", n, PAGE // 2), PAGE // 2


def private_memory(pages):
    """Memory of this process alone, in large pages where the kernel has them."""
    memory = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def engines_file(pages):
    """Memory as vLLM's offloading and LMCache's pool have it: a file in `/dev/shm`, shared by its processes, in pages of the usual size, all of them
    made at once. The file goes when it is closed."""
    file = tempfile.TemporaryFile(dir="/dev/shm")
    file.truncate(pages * PAGE)
    memory = mmap.mmap(file.fileno(), pages * PAGE)
    memory.madvise(_POPULATE_WRITE)
    return file, memory


class Slots:
    """Places for pages in one piece of memory."""

    def __init__(self, buffer):
        self.buffer = buffer
        self.view = memoryview(buffer).cast("B")
        self.count = len(self.view) // PAGE

    def page(self, slot):
        return self.view[slot * PAGE : (slot + 1) * PAGE]

    def fill(self, slot, n):
        self.page(slot)[:] = content(n)

    def clear(self):
        for slot in range(self.count):
            self.page(slot)[:] = bytes(PAGE)

    def has(self, slot, n):
        return bytes(self.page(slot)) == content(n)
