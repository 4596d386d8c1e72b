"""The interface of Mooncake's `MooncakeDistributedStore` over a Kvarts server, for engines that import Mooncake's class by name.

    python -m kvarts.mooncake FOLDER

This command writes a package `mooncake` of two small files into FOLDER. An engine with FOLDER in its `PYTHONPATH` then imports this class instead of
Mooncake's class. If the real package is installed, the command writes nothing, because the new package would hide Mooncake's transfer engine.

The address of the server is set as `kvarts:SERVER` in the place of the address of Mooncake's master. SERVER is the path of a socket, or `HOST:PORT`.
Without this address, the server is `$KVARTS_SERVER`.

Each value is one block of one page. The identity of a value consists of its size and the tenant. The engine's keys must contain everything else that
determines the bytes; Kvarts cannot check this. The return codes are those of Mooncake.
"""

import ctypes
import importlib.util
import logging
import os
import sys
import threading
import time

import kvarts

from .shared import adopt

logger = logging.getLogger("kvarts")

INTERNAL_ERROR = -1
NO_AVAILABLE_HANDLE = -200
WRITE_FAIL = -500
INVALID_PARAMS = -600
INVALID_READ = -701
REPLICA_IS_NOT_READY = -703
OBJECT_NOT_FOUND = -704
TRANSFER_FAIL = -800
RPC_FAIL = -900
RPC_TIMEOUT = -901

#: Kinds of errors, and Mooncake's codes for them.
_CODES = {
    "miss": OBJECT_NOT_FOUND,
    "retry": RPC_FAIL,
    "refused": NO_AVAILABLE_HANDLE,
    "invalid": INVALID_PARAMS,
    "deadline": RPC_TIMEOUT,
    "corrupt": INVALID_READ,
    "read_only": WRITE_FAIL,
    "bug": INTERNAL_ERROR,
}
#: The limit of different sizes of a tenant's values. Each size is a model on the server, and the look-up of an absent key searches all sizes.
SIZES_MAX = 64
#: Seconds after which the look-up of an absent key reads the list of sizes from the server again.
REFRESH = 1.0
#: The limit of keys in one request.
_BATCH = 8192
_SERVER = "kvarts:"
_LAYOUT = "value-"


class ReplicateConfig:
    """Options of a put. A Kvarts server keeps one copy and evicts by its own rules, so the options have no effect. A put with a hard pin fails."""

    def __init__(self):
        self.replica_num = 1
        self.with_soft_pin = False
        self.with_hard_pin = False
        self.preferred_segment = ""
        self.preferred_segments = []
        self.prefer_alloc_in_same_node = False


def _code(error):
    if error.reason == "InFlight":
        return REPLICA_IS_NOT_READY
    return _CODES.get(getattr(error, "kind", None), INTERNAL_ERROR)


def _is_of_host(address, size):
    """Whether the whole range is writable memory of this process, and not memory of a device."""
    end = address
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            place, rights, _ = line.split(maxsplit=2)
            first, last = (int(number, 16) for number in place.split("-"))
            if first <= end < last:
                end = last
                if not rights.startswith("rw") or end >= address + size:
                    return rights.startswith("rw")
    return False


class _Values:
    """The values of a tenant, with a handle for each size of values."""

    def __init__(self, client, tenant):
        self._client, self._tenant = client, tenant
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._handles = {}
        self._asked_at = None

    def of(self, size, is_stored=False):
        """The handle on values of this size. `is_stored`: the server has values of this size already."""
        with self._lock:
            if size not in self._handles:
                if not 0 < size:
                    raise kvarts.Invalid("the value is empty: a value must have at least one byte")
                if len(self._handles) >= SIZES_MAX and not is_stored:
                    raise kvarts.Invalid(f"the tenant's values already have {SIZES_MAX} different sizes: a value of another size cannot be stored")
                identity = dict(model="mooncake", revision=self._tenant, dtype="bytes", engine="mooncake", layout=f"{_LAYOUT}{size}")
                self._handles[size] = self._client.pages(size, **identity, durable=True)
            return self._handles[size]

    def sizes(self):
        with self._lock:
            return list(self._handles)

    def refresh(self, now=False):
        """Reads from the server which sizes other processes have stored, at most once in `REFRESH` seconds or `now`. Returns whether there is a
        new size."""
        with self._asking:
            if not now and self._asked_at is not None and time.monotonic() < self._asked_at + REFRESH:
                return False
            models = self._client.models()
            self._asked_at = time.monotonic()
        own = [one["layout"] for one in models if (one["model"], one["engine"], one["revision"]) == ("mooncake", "mooncake", self._tenant)]
        sizes = {int(layout[len(_LAYOUT) :]) for layout in own if layout.startswith(_LAYOUT) and layout[len(_LAYOUT) :].isdecimal()}
        new = sizes - {0} - set(self.sizes())
        for size in new:
            self.of(size, is_stored=True)
        return bool(new)

    def sizes_of(self, key):
        """All sizes under which the key has a value: usually one, and two if two processes stored the key at the same time."""
        self.refresh(now=True)
        return [size for size in self.sizes() if self.of(size).exists([key])[0]]

    def find(self, keys):
        """The size of each key's value; `None` for an absent key."""
        found = self._look(keys, self.sizes())
        if None in found:
            before = set(self.sizes())
            if self.refresh():
                lost = [at for at, size in enumerate(found) if size is None]
                new = [size for size in self.sizes() if size not in before]
                for at, size in zip(lost, self._look([keys[at] for at in lost], new)):
                    found[at] = size
        return found

    def _look(self, keys, sizes):
        found = [None] * len(keys)
        for size in sizes:
            lost = [at for at, known in enumerate(found) if known is None]
            for begin in range(0, len(lost), _BATCH):
                some = lost[begin : begin + _BATCH]
                for at, is_here in zip(some, self.of(size).exists([keys[at] for at in some])):
                    found[at] = size if is_here else None
        return found


class MooncakeDistributedStore:
    """Values on a server, by key. Calls wait, and may come from any thread. They return a negative number for an error and raise no exception."""

    def __init__(self):
        self._client = self._values = None
        self._hostname = ""
        self._buffers = {}  # address -> (bytes, Memory)
        self._lock = threading.Lock()

    def setup(
        self,
        local_hostname,
        metadata_server="",
        global_segment_size=0,
        local_buffer_size=0,
        protocol="",
        rdma_devices="",
        master_server_addr="",
        engine=None,
        *,
        tenant_id="default",
        enable_client_http_server=False,
        client_http_port=0,
        enable_ssd_offload=False,
        ssd_offload_path=None,
    ):
        """Connects to the server. Of Mooncake's arguments only the master's address and the tenant have an effect."""
        if isinstance(local_hostname, dict):
            wanted = local_hostname
            master_server_addr = wanted.get("master_server_addr", wanted.get("master_server_address", ""))
            tenant_id = wanted.get("tenant_id", tenant_id)
            local_hostname = wanted.get("local_hostname", "")
        server = os.environ.get("KVARTS_SERVER")
        if (master_server_addr or "").startswith(_SERVER):
            server = master_server_addr[len(_SERVER) :]
        if not server:
            logger.error("kvarts: no server is configured: set KVARTS_SERVER, or set the address of Mooncake's master to kvarts:SERVER")
            return INVALID_PARAMS
        try:
            client = kvarts.connect(server)
            values = _Values(client, tenant_id)
            values.refresh()
        except kvarts.Error as error:
            logger.error("kvarts: could not connect to the server: %s", error)
            return _code(error)
        self._client, self._values, self._hostname = client, values, local_hostname
        return 0

    def close(self):
        client, self._client, self._values = self._client, None, None
        with self._lock:
            self._buffers.clear()
        if client is not None:
            client.close()
        return 0

    def get_hostname(self):
        return self._hostname

    # Memory.

    def register_buffer(self, buffer_ptr, size):
        """Registers memory, which must stay mapped until it is unregistered. If it is a file in memory, the server's disks write into it directly."""
        if self._client is None or size <= 0:
            return INVALID_PARAMS
        if not _is_of_host(buffer_ptr, size):
            logger.error("kvarts: %d bytes at %#x are not writable host memory: use the connector of the engine for blocks in device memory", size, buffer_ptr)
            return INVALID_PARAMS
        with self._lock:
            if buffer_ptr in self._buffers:
                return 0 if self._buffers[buffer_ptr][0] == size else INVALID_PARAMS
            try:
                memory = adopt(self._client, (ctypes.c_char * size).from_address(buffer_ptr))
            except kvarts.Error as error:
                logger.error("kvarts: could not register the memory: %s", error)
                return _code(error)
            self._buffers[buffer_ptr] = (size, memory)
        return 0

    def unregister_buffer(self, buffer_ptr):
        with self._lock:
            _, memory = self._buffers.pop(buffer_ptr, (0, None))
        if memory is None:
            return INVALID_PARAMS
        try:
            memory.close()
        except kvarts.Error as error:
            return _code(error)
        return 0

    def _is_known(self, address, size):
        with self._lock:
            return size > 0 and any(begin <= address and address + size <= begin + bytes_ for begin, (bytes_, _) in self._buffers.items())

    # Values from and into registered memory.

    def put_from(self, key, buffer_ptr, size, config=None):
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def batch_put_from(self, keys, buffer_ptrs, sizes, config=None):
        """Returns 0 for each value that is stored, now or before. A value that was stored before does not change, whatever its size."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        known = [self._is_known(address, size) for address, size in zip(buffer_ptrs, sizes)]
        return self._put(keys, buffer_ptrs, sizes, known, config)

    def get_into(self, key, buffer_ptr, size):
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(self, keys, buffer_ptrs, sizes):
        """Returns the number of bytes of each value that is complete and verified in its memory. The memory may be longer than the value."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        codes = [INVALID_PARAMS] * len(keys)
        known = [at for at, (address, size) in enumerate(zip(buffer_ptrs, sizes)) if self._is_known(address, size)]
        for at, code in zip(known, self._get([(keys[at], buffer_ptrs[at], sizes[at]) for at in known])):
            codes[at] = code
        return codes

    def batch_put_from_multi_buffers(self, keys, all_buffer_ptrs, all_sizes, config=None):
        """Puts values that consist of several pieces of memory, one after the other. This process first copies the pieces together."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID_PARAMS] * len(keys)
        values, known = [], []
        for addresses, sizes in zip(all_buffer_ptrs, all_sizes):
            is_known = self._are_known(addresses, sizes)
            known.append(is_known)
            values.append(b"".join(ctypes.string_at(address, size) for address, size in zip(addresses, sizes)) if is_known else b"")
        return self._put(keys, values, [len(value) for value in values], known, config)

    def batch_get_into_multi_buffers(self, keys, all_buffer_ptrs, all_sizes, prefer_alloc_in_same_node=False):
        """Gets values into several pieces of memory each. The pieces together must be as long as the value."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID_PARAMS] * len(keys)
        codes = [INVALID_PARAMS] * len(keys)
        known = [at for at in range(len(keys)) if self._are_known(all_buffer_ptrs[at], all_sizes[at])]
        whole = {at: bytearray(sum(all_sizes[at])) for at in known}
        for at, code in zip(known, self._get([(keys[at], whole[at], len(whole[at])) for at in known])):
            # Mooncake, too, refuses memory that is longer than the value here.
            codes[at] = TRANSFER_FAIL if 0 < code < len(whole[at]) else code
            if codes[at] < 0:
                continue
            begin, source = 0, (ctypes.c_char * len(whole[at])).from_buffer(whole[at])
            for address, size in zip(all_buffer_ptrs[at], all_sizes[at]):
                ctypes.memmove(address, ctypes.addressof(source) + begin, size)
                begin += size
        return codes

    def _are_known(self, addresses, sizes):
        return len(addresses) == len(sizes) > 0 and all(map(self._is_known, addresses, sizes))

    # Values as bytes.

    def put(self, key, value, config=None):
        return self.put_batch([key], [value], config)[0]

    def put_parts(self, key, *parts, config=None):
        return self.put(key, b"".join(bytes(memoryview(part).cast("B")) for part in parts), config)

    def put_batch(self, keys, values, config=None):
        if len(keys) != len(values):
            return [INVALID_PARAMS] * len(keys)
        values = [memoryview(value).cast("B") for value in values]
        return self._put(keys, values, [len(value) for value in values], [True] * len(keys), config)

    def get(self, key):
        """Returns the value; no bytes for an absent key or an error."""
        return self.get_batch([key])[0]

    def get_batch(self, keys):
        sizes = self._sizes(keys)
        values = [bytearray(max(size, 0)) for size in sizes]
        here = [at for at, size in enumerate(sizes) if size > 0]
        for at, code in zip(here, self._get([(keys[at], values[at], sizes[at]) for at in here])):
            if code != sizes[at]:
                values[at] = b""
        return [bytes(value) for value in values]

    # What is there.

    def _sizes(self, keys):
        """The size of each value, or a code for the error."""
        if self._values is None:
            return [INVALID_PARAMS] * len(keys)
        try:
            return [OBJECT_NOT_FOUND if size is None else size for size in self._values.find(keys)]
        except kvarts.Error as error:
            return [_code(error)] * len(keys)

    def is_exist(self, key):
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys):
        """Returns for each key 1 if its value can be read now, 0 if it is absent, and -1 if that is unknown."""
        return [1 if size > 0 else 0 if size == OBJECT_NOT_FOUND else -1 for size in self._sizes(keys)]

    def get_size(self, key):
        return self._sizes([key])[0]

    def remove(self, key, force=False):
        """Deletes a value permanently. Returns 0 if the value was stored."""
        if self._values is None:
            return INVALID_PARAMS
        try:
            sizes = self._values.sizes_of(key)
            done = [self._values.of(size).delete([key]) for size in sizes]
        except kvarts.Error as error:
            return _code(error)
        failed = next((one for one in done if not one.ok), None)
        return _code(failed.error) if failed is not None else 0 if done else OBJECT_NOT_FOUND

    def remove_all(self, force=False):
        """Deletes every value of the tenant; returns the number of deleted values."""
        if self._values is None:
            return INVALID_PARAMS
        try:
            self._values.refresh(now=True)
            return sum(self._values.of(size).delete_all() for size in self._values.sizes())
        except kvarts.Error as error:
            return _code(error)

    # How.

    def _put(self, keys, values, sizes, known, config):
        codes = [INVALID_PARAMS] * len(keys)
        if self._values is None or getattr(config, "with_hard_pin", False):
            return codes
        try:
            # A value that is stored under another size stays, too: engines put keys without a look-up.
            there = self._values.find(keys) if self._values.refresh() or len({*self._values.sizes(), *sizes}) > 1 else [None] * len(keys)
            first = {}
            for at, key in enumerate(keys):
                # For a repeated key, its first value counts.
                if known[at] and first.setdefault(key, at) != at:
                    there[at] = sizes[first[key]]
            for size in {size for size, is_known in zip(sizes, known) if is_known}:
                wanted = [at for at, one in enumerate(sizes) if one == size and known[at]]
                for at in wanted:
                    codes[at] = 0
                left = [at for at in wanted if there[at] is None]
                for begin in range(0, len(left), _BATCH):
                    some = left[begin : begin + _BATCH]
                    done = self._values.of(size).put([keys[at] for at in some], [values[at] for at in some])
                    for at, error in done.errors.items():
                        codes[some[at]] = _code(error)
            for at, key in enumerate(keys):
                codes[at] = codes[first[key]] if known[at] else codes[at]
        except kvarts.Error as error:
            logger.warning("kvarts: a put of %d values failed: %s", len(keys), error)
            return [_code(error)] * len(keys)
        return codes

    def _get(self, wanted):
        """Reads values into places that are at least as long. Returns the sizes of the values, or codes for errors."""
        codes = [OBJECT_NOT_FOUND] * len(wanted)
        if self._values is None:
            return [INVALID_PARAMS] * len(wanted)
        try:
            # Usually a place is as long as its value. For the other keys the size is looked up.
            exact = [(at, size) for at, (_, _, size) in enumerate(wanted)]
            missed = self._read(wanted, exact, codes)
            if missed:
                others = self._values.find([wanted[at][0] for at in missed])
                found = [(at, size) for at, size in zip(missed, others) if size is not None]
                for at, size in found:
                    codes[at] = INVALID_PARAMS if size > wanted[at][2] else codes[at]
                self._read(wanted, [(at, size) for at, size in found if size < wanted[at][2]], codes)
        except kvarts.Error as error:
            logger.warning("kvarts: a get of %d values failed: %s", len(wanted), error)
            return [_code(error)] * len(wanted)
        return codes

    def _read(self, wanted, places, codes):
        """Reads values of the given sizes. Returns the positions of absent values."""
        missed = []
        for size in sorted({size for _, size in places}):
            left = [at for at, one in places if one == size]
            if size not in self._values.sizes():
                missed += left
                continue
            while left:
                some, left = left[:_BATCH], left[_BATCH:]
                done = self._values.of(size).get([wanted[at][0] for at in some], [self._first(wanted[at], size) for at in some])
                errors = done.errors
                for place, at in enumerate(some):
                    error = errors.get(place)
                    codes[at] = size if error is None else _code(error)
                    if error is not None and error.reason == "Duplicate":
                        # A repeated key has its own memory: the next request reads it.
                        left.append(at)
                    elif isinstance(error, kvarts.Miss):
                        missed.append(at)
        return missed

    @staticmethod
    def _first(wanted, size):
        """The first `size` bytes of a place."""
        _, place, _ = wanted
        return place if isinstance(place, int) else memoryview(place)[:size]


def write(folder):
    """Writes the package `mooncake` into a folder. Raises `FileExistsError` if the real package is installed, or the folder has another package of
    that name."""
    package = os.path.join(folder, "mooncake")
    real = importlib.util.find_spec("mooncake")
    if real is not None and os.path.realpath(os.path.dirname(real.origin or "")) != os.path.realpath(package):
        raise FileExistsError(f"the real package mooncake is installed ({real.origin}): uninstall it, or use a Python environment without it")
    told = '"""Kvarts in the place of Mooncake\'s store, written by `python -m kvarts.mooncake`."""\n'
    files = {"__init__.py": told, "store.py": told + "from kvarts.mooncake import MooncakeDistributedStore, ReplicateConfig  # noqa: F401\n"}
    if os.path.isdir(package) and set(os.listdir(package)) - set(files) - {"__pycache__"}:
        raise FileExistsError(f"the folder {package} has files of another package: name another folder")
    os.makedirs(package, exist_ok=True)
    for name, text in files.items():
        with open(os.path.join(package, name), "w", encoding="utf-8") as file:
            file.write(text)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python -m kvarts.mooncake FOLDER")
    try:
        write(sys.argv[1])
    except OSError as error:
        sys.exit(f"error: {error}")
    print(f"PYTHONPATH={os.path.abspath(sys.argv[1])}")


if __name__ == "__main__":
    main()
