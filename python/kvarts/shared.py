"""Finds the files in memory that an engine's buffers map, and registers them, so that the server's disks can write into them."""

import array
import ctypes
import fcntl
import os
import struct
import threading
from typing import NamedTuple

import kvarts

from .link import logger

#: `PROCMAP_QUERY`: returns the mapping of an address (Linux 6.11 and later).
_QUERY = 0xC0686611
_QUERY_BYTES = struct.Struct("=9Q4I2Q")
_WRITABLE_AND_SHARED = 0x2 | 0x8
_NAME_MAX = 4096


class Mapping(NamedTuple):
    """A range of addresses that maps one file, writable and shared."""

    first: int
    last: int
    offset: int
    device: tuple
    inode: int


def _asked(maps, address, name=None):
    """Queries the kernel for the mapping of an address; `None` for memory of another kind. Raises `OSError` if the kernel does not support the query."""
    place, size = name.buffer_info() if name is not None else (0, 0)
    query = bytearray(_QUERY_BYTES.pack(_QUERY_BYTES.size, 0, address, *[0] * 6, 0, 0, size, 0, place, 0))
    try:
        fcntl.ioctl(maps, _QUERY, query)
    except FileNotFoundError:
        return None
    _, _, _, first, last, flags, _, offset, inode, major, minor, *_ = _QUERY_BYTES.unpack(query)
    if flags & _WRITABLE_AND_SHARED != _WRITABLE_AND_SHARED or inode == 0:
        return None
    return Mapping(first, last, offset, (major, minor), inode)


def _read(address):
    """The mapping of an address, from the list of all mappings, and the file's name."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            place, access, offset, device, inode, *path = line.split(maxsplit=5)
            first, last = (int(part, 16) for part in place.split("-"))
            if first <= address < last:
                if access[1] != "w" or access[3] != "s" or inode == "0":
                    break
                device = tuple(int(part, 16) for part in device.split(":"))
                return Mapping(first, last, int(offset, 16), device, int(inode)), path[0].strip() if path else ""
    return None, ""


def _address_of(buffer):
    byte = ctypes.c_char.from_buffer(buffer)
    address = ctypes.addressof(byte)
    del byte
    return address


def _opened(mapping, name):
    """Opens a mapping's file; returns a descriptor that the caller must close, or `None`."""
    # A file without a name can still be opened if its creator has it open.
    for path in [name, *(f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))]:
        try:
            found = os.stat(path)
            if (mapping.device, mapping.inode) == ((os.major(found.st_dev), os.minor(found.st_dev)), found.st_ino):
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
    return None


def file_of(buffer):
    """The file in memory that a writable buffer maps: a descriptor, which the caller must close, and the offset of the buffer in the
    file. `None` for memory of another kind, or if the file cannot be opened."""
    begin = _address_of(buffer)
    mapping, name = _read(begin)
    if mapping is None or begin + memoryview(buffer).nbytes > mapping.last or (begin - mapping.first) % 4096:
        return None
    fd = _opened(mapping, name)
    return None if fd is None else (fd, mapping.offset + begin - mapping.first)


def adopt(client, buffer):
    """Registers an engine's memory. If it is a file in memory, the server's disks write into it directly; otherwise bytes are copied."""
    found = file_of(buffer)
    if found is not None:
        fd, offset = found
        try:
            return client.adopt(buffer, fd=fd, offset=offset)
        except kvarts.Error as error:
            logger.warning("kvarts: the server cannot write into the engine's memory directly, so this process copies the blocks (slower): %s", error)
        finally:
            os.close(fd)
    return client.adopt(buffer)


class Pools:
    """The files in memory of views that do not own their memory. A file is registered at the first use of one of its views.

    Such a view does not keep its memory mapped, and its address may belong to other memory later. Before each batch, the kernel is
    therefore queried whether every registered file is still mapped at its address, and a file that is not is unregistered. With a
    kernel without this query (before 6.11) no file is registered, and bytes are copied."""

    def __init__(self):
        self._lock = threading.Lock()
        self._known = {}  # mapping -> Memory
        self._refused = set()  # files that the server cannot write to
        try:
            self._maps = open("/proc/self/maps", "rb", buffering=0)
            _asked(self._maps, 0)
        except OSError:
            self._maps = None

    def close(self):
        """Closes the list of mappings. The client closes the files."""
        with self._lock:
            maps, self._maps = self._maps, None
        if maps is not None:
            maps.close()

    def is_ready(self, views):
        """Whether a batch with these views can be submitted. If not, call `prepare` first."""
        return self._unknown(views) is None

    def prepare(self, client, views):
        """Registers the file of the views, if they are in one. May wait for the server."""
        mapping = self._unknown(views)
        if mapping is None:
            return
        name = array.array("b", bytes(_NAME_MAX))
        if _asked(self._maps, mapping.first, name) != mapping:
            return
        fd = _opened(mapping, name.tobytes().split(b"\0", 1)[0].decode(errors="replace"))
        try:
            if fd is None:
                raise kvarts.Invalid("the file in memory cannot be opened")
            nbytes = mapping.last - mapping.first
            memory = client.adopt(mapping.first, fd=fd, offset=mapping.offset, nbytes=nbytes)
            with self._lock:
                self._known[mapping] = memory
            logger.info("kvarts: the server reads blocks from disk directly into %d MiB of the engine's memory", nbytes >> 20)
        except kvarts.Error as error:
            if isinstance(error, (kvarts.Retry, kvarts.Deadline)):
                raise
            logger.warning("kvarts: the server cannot write into the engine's memory directly, so this process copies the blocks (slower): %s", error)
            with self._lock:
                self._refused.add((mapping.device, mapping.inode))
        finally:
            if fd is not None:
                os.close(fd)

    def _unknown(self, views):
        """The mapping of the first view, if it is not registered and can be. Unregisters files that are no longer mapped."""
        if self._maps is None or not views:
            return None
        with self._lock:
            for mapping in [mapping for mapping in self._known if _asked(self._maps, mapping.first) != mapping]:
                self._known.pop(mapping).close()
            try:
                address = _address_of(views[0])
            except (TypeError, ValueError):  # a read-only or empty view
                return None
            if any(mapping.first <= address < mapping.last for mapping in self._known):
                return None
            mapping = _asked(self._maps, address)
            if mapping is None or (mapping.device, mapping.inode) in self._refused:
                return None
            return mapping
