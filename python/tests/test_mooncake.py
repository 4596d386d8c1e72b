"""Mooncake's surface over a real server: numbers as engines read them, memory that is registered, several sizes, and damage."""

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

from kvarts import mooncake
from served import Served, pattern

KIB = 1 << 10
SIZES = (64 * KIB, 24 * KIB + 8)


class Memory:
    """Memory of an engine's, by address."""

    def __init__(self, nbytes):
        self.bytes = mmap.mmap(-1, nbytes)
        self._first = ctypes.c_char.from_buffer(self.bytes)
        self.address = ctypes.addressof(self._first)

    def __getitem__(self, part):
        return self.bytes[part]

    def fill(self, at, content):
        self.bytes[at : at + len(content)] = content

    def close(self):
        del self._first
        self.bytes.close()


class Mooncake(Served):
    def store(self, tenant=None, nbytes=0):
        """A store of one tenant, and memory that it knows."""
        store = mooncake.MooncakeDistributedStore()
        tenant = self.id() if tenant is None else tenant
        told = store.setup("localhost", "P2PHANDSHAKE", 4 << 30, 1 << 30, "tcp", "", f"kvarts:{self.server.socket}", tenant_id=tenant)
        self.assertEqual(told, 0)
        self.addCleanup(store.close)
        if not nbytes:
            return store
        memory = Memory(nbytes)
        self.addCleanup(memory.close)
        self.assertEqual(store.register_buffer(memory.address, nbytes), 0)
        # Before the memory goes away.
        self.addCleanup(store.unregister_buffer, memory.address)
        return store, memory

    def test_values_of_two_sizes_come_back_whole_from_registered_memory(self):
        store, memory = self.store(nbytes=1 << 20)
        keys, sizes = ["a", "b", "c"], [SIZES[0], SIZES[1], SIZES[0]]
        addresses = [memory.address + at * 128 * KIB + 3 for at in range(3)]
        for at, size in enumerate(sizes):
            memory.fill(at * 128 * KIB + 3, pattern(at, size))
        self.assertEqual(store.batch_is_exist(keys), [0, 0, 0])
        self.assertEqual(store.batch_put_from(keys, addresses, sizes), [0, 0, 0])
        self.assertEqual(store.batch_is_exist([*keys, "d"]), [1, 1, 1, 0])
        self.assertEqual([store.get_size(key) for key in [*keys, "d"]], [*sizes, mooncake.OBJECT_NOT_FOUND])
        into = [memory.address + (4 + at) * 128 * KIB for at in range(4)]
        self.assertEqual(store.batch_get_into([*reversed(keys), "d"], into, [*reversed(sizes), 8]), [*reversed(sizes), mooncake.OBJECT_NOT_FOUND])
        for at, size in zip(range(3), reversed(sizes)):
            self.assertEqual(memory[(4 + at) * 128 * KIB :][:size], pattern(2 - at, size))
        # Another process, which has asked for nothing yet.
        other, _ = self.store(nbytes=1 << 12)
        self.assertEqual(other.batch_is_exist([*keys, "d"]), [1, 1, 1, 0])
        self.assertEqual(other.get("b"), pattern(1, SIZES[1]))
        self.assertEqual(self.store(tenant="another").batch_is_exist(keys), [0, 0, 0])

    def test_a_value_that_is_there_stays_as_it_is_whatever_is_put(self):
        store, memory = self.store(nbytes=1 << 20)
        memory.fill(0, pattern(1, SIZES[0]))
        self.assertEqual(store.put_from("key", memory.address, SIZES[0]), 0)
        memory.fill(0, pattern(2, SIZES[0]))
        self.assertEqual(store.put_from("key", memory.address, SIZES[0]), 0)
        self.assertEqual(store.put("key", pattern(3, SIZES[1])), 0)
        self.assertEqual((store.get("key"), store.get_size("key")), (pattern(1, SIZES[0]), SIZES[0]))
        # There is no second one behind it.
        self.assertEqual((store.remove("key"), store.is_exist("key")), (0, 0))
        # Equal keys in one call: the first one counts; of reads each has memory of its own.
        self.assertEqual(store.put_batch(["twice", "twice"], [pattern(4, 512), pattern(5, 512)]), [0, 0])
        places = [memory.address, memory.address + 4096]
        self.assertEqual(store.batch_get_into(["twice", "twice"], places, [512, 512]), [512, 512])
        self.assertEqual((memory[:512], memory[4096:4608]), (pattern(4, 512), pattern(4, 512)))

    def test_a_removed_key_does_not_come_back_under_another_size(self):
        store = self.store()
        self.assertEqual(store.put("a", bytes(200)), 0)
        # In a batch that has both sizes, and with a key that stands again with another one.
        self.assertEqual(store.put_batch(["a", "b", "b"], [bytes(100), bytes(200), bytes(100)]), [0, 0, 0])
        self.assertEqual([store.get_size(key) for key in "ab"], [200, 200])
        # Two processes that stored it at the same moment: neither knew of the other one's size.
        other = self.store()
        other._values.of(300).put(["a"], [bytes(300)])
        self.assertEqual(store.remove("a"), 0)
        self.assertEqual([one.is_exist("a") for one in (store, other, self.store())], [0, 0, 0])
        # What another process has brought just now goes with all others.
        other._values.of(400).put(["c"], [bytes(400)])
        self.assertEqual(store.remove_all(), 2)
        self.assertEqual(self.store().batch_is_exist(["b", "c"]), [0, 0])

    def test_memory_of_another_length_and_memory_that_is_not_registered(self):
        store, memory = self.store(nbytes=1 << 20)
        self.assertEqual(store.put("key", pattern(1, 4096)), 0)
        # Longer memory is well, shorter is not, and what is behind the value is left alone.
        memory.fill(0, b"x" * 8192)
        self.assertEqual(store.get_into("key", memory.address, 8192), 4096)
        self.assertEqual(memory[:8192], pattern(1, 4096) + b"x" * 4096)
        self.assertEqual(store.get_into("key", memory.address, 4095), mooncake.INVALID_PARAMS)
        end = memory.address + (1 << 20)
        for address, size in ((end, 4096), (end - 4095, 4096), (memory.address - 1, 4096), (16, 4096), (memory.address, 0)):
            self.assertEqual(store.get_into("key", address, size), mooncake.INVALID_PARAMS)
            self.assertEqual(store.batch_put_from(["other", "good"], [address, memory.address], [size, 4096])[0], mooncake.INVALID_PARAMS)
            self.assertEqual(store.remove("good"), 0)
        self.assertEqual(store.batch_is_exist(["other", "good"]), [0, 0])
        self.assertEqual(store.batch_put_from(["other"], [memory.address], []), [mooncake.INVALID_PARAMS])
        # Registered again it is the same memory; what is none of this process's is refused.
        self.assertEqual(store.register_buffer(memory.address, 1 << 20), 0)
        self.assertEqual(store.register_buffer(memory.address, 4096), mooncake.INVALID_PARAMS)
        self.assertEqual(store.register_buffer(4096, 4096), mooncake.INVALID_PARAMS)
        # So is memory of which another one has some bytes, until that one is unregistered.
        apart = mmap.mmap(-1, 1 << 20)
        place = ctypes.addressof(ctypes.c_char.from_buffer(apart))
        self.assertEqual(store.register_buffer(place + 4096, 8192), 0)
        for begin, size in [(0, 4097), (0, 1 << 20), (8192, 4096), (12287, 1), (8192, 8192)]:
            with self.subTest(begin), self.assertLogs("kvarts", "ERROR") as said:
                self.assertEqual(store.register_buffer(place + begin, size), mooncake.INVALID_PARAMS)
            self.assertIn("already registered", said.output[-1])
        for begin in (0, 12288):
            self.assertEqual(store.register_buffer(place + begin, 4096), 0)
        self.assertEqual(store.unregister_buffer(place + 4096), 0)
        self.assertEqual(store.register_buffer(place + 4096, 4096), 0)
        library = ctypes.CDLL(None).mmap
        library.restype, library.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        nothing = library(None, 8192, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.assertEqual(store.register_buffer(nothing, 8192), mooncake.INVALID_PARAMS)
        self.assertEqual(store.unregister_buffer(memory.address), 0)
        self.assertEqual(store.unregister_buffer(memory.address), mooncake.INVALID_PARAMS)
        self.assertEqual(store.get_into("key", memory.address, 4096), mooncake.INVALID_PARAMS)

    def test_values_of_several_pieces_of_memory(self):
        store, memory = self.store(nbytes=1 << 20)
        memory.fill(0, pattern(1, 4096))
        memory.fill(8192, pattern(2, 1000))
        base, config = memory.address, mooncake.ReplicateConfig()
        pieces, sizes = [[base, base + 8192], [base]], [[4096, 1000], [4096]]
        self.assertEqual(store.batch_put_from_multi_buffers(["two", "one"], pieces, sizes, config), [0, 0])
        self.assertEqual(store.get("two"), pattern(1, 4096) + pattern(2, 1000))
        into = [[base + 65536, base + 131072], [base + 200000]]
        split = [[96, 5000], [4096]]
        self.assertEqual(store.batch_get_into_multi_buffers(["two", "one"], into, split), [5096, 4096])
        self.assertEqual(memory[65536 : 65536 + 96] + memory[131072 : 131072 + 5000], pattern(1, 4096) + pattern(2, 1000))
        self.assertEqual(memory[200000 : 200000 + 4096], pattern(1, 4096))
        # Other lengths, what is absent, and memory that is not registered: nothing is written.
        memory.fill(65536, b"x" * 5097)
        for lengths, code in (([96, 4999], mooncake.INVALID_PARAMS), ([97, 5000], mooncake.TRANSFER_FAIL)):
            self.assertEqual(store.batch_get_into_multi_buffers(["two"], [[base + 65536, base + 65632]], [lengths]), [code])
        found = store.batch_get_into_multi_buffers(["none", "two"], [[base + 65536], [16]], [[96], [5096]])
        self.assertEqual(found, [mooncake.OBJECT_NOT_FOUND, mooncake.INVALID_PARAMS])
        self.assertEqual(memory[65536 : 65536 + 5097], b"x" * 5097)
        config.with_hard_pin = True
        self.assertEqual(store.batch_put_from_multi_buffers(["pinned"], [[base]], [[4096]], config), [mooncake.INVALID_PARAMS])

    def test_bytes_are_put_got_and_removed(self):
        store = self.store()
        # As SGLang's storage begins.
        self.assertEqual((store.put("warm-up", bytes(4 * KIB)), store.is_exist("warm-up")), (0, 1))
        self.assertEqual(store.get("warm-up"), bytes(4 * KIB))
        self.assertEqual(store.put_parts("parts", b"one", bytearray(b"two")), 0)
        self.assertEqual(store.get_batch(["parts", "none", "warm-up"]), [b"onetwo", b"", bytes(4 * KIB)])
        self.assertEqual(store.put("empty", b""), mooncake.INVALID_PARAMS)
        self.assertEqual((store.remove("parts"), store.remove("parts"), store.is_exist("parts")), (0, mooncake.OBJECT_NOT_FOUND, 0))
        self.assertEqual(store.put("parts", b"anew"), 0)
        self.assertEqual((store.remove_all(), store.is_exist("parts"), store.remove_all(True)), (2, 0, 0))
        self.assertEqual(store.get_hostname(), "localhost")
        self.assertEqual((store.close(), store.close()), (0, 0))
        self.assertEqual((store.is_exist("warm-up"), store.get("warm-up"), store.put("key", b"x")), (-1, b"", mooncake.INVALID_PARAMS))

    def test_a_size_that_another_process_brings_is_found_a_moment_later(self):
        one, other = self.store(), self.store()
        self.assertEqual(one.put("key", pattern(1, 4096)), 0)
        now = mooncake.time.monotonic() + mooncake.REFRESH + 1
        with mock.patch("kvarts.mooncake.time.monotonic", return_value=now):
            self.assertEqual((other.is_exist("key"), other.get("key")), (1, pattern(1, 4096)))
            self.assertEqual(one.put("another", pattern(2, 512)), 0)
            # The server is not asked anew for each key that is absent.
            self.assertEqual(other.is_exist("another"), 0)
        with mock.patch("kvarts.mooncake.time.monotonic", return_value=now + mooncake.REFRESH + 1):
            self.assertEqual(other.is_exist("another"), 1)

    def test_sizes_have_a_bound(self):
        store = self.store()
        with mock.patch("kvarts.mooncake.SIZES_MAX", 2):
            self.assertEqual([store.put(f"key {size}", bytes(size)) for size in (8, 16, 24, 8)], [0, 0, mooncake.INVALID_PARAMS, 0])

    def test_several_threads_use_one_store(self):
        store, failed = self.store(), []

        def work(number):
            for turn in range(10):
                content = pattern(number * 100 + turn, SIZES[turn % 2])
                if store.put(f"{number} {turn}", content) != 0 or store.get(f"{number} {turn}") != content:
                    failed.append((number, turn))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual((failed, [thread.is_alive() for thread in threads]), ([], [False] * 4))

    def test_no_server_and_no_name_of_one_are_numbers(self):
        store = mooncake.MooncakeDistributedStore()
        with mock.patch.dict(os.environ):
            os.environ.pop("KVARTS_SERVER", None)
            self.assertEqual(store.setup("localhost", master_server_addr="10.0.0.1:50051"), mooncake.INVALID_PARAMS)
            self.assertLess(store.setup("localhost", master_server_addr="kvarts:/nowhere/at/all"), 0)
            os.environ["KVARTS_SERVER"] = self.server.socket
            self.assertEqual(store.setup({"local_hostname": "here", "master_server_address": "10.0.0.1:50051"}), 0)
        self.addCleanup(store.close)
        self.assertEqual((store.get_hostname(), store.register_buffer(0, 0)), ("here", mooncake.INVALID_PARAMS))
        # By this SGLang finds out what a version does not know.
        with self.assertRaisesRegex(TypeError, "something_new"):
            store.setup("localhost", something_new=1)

    def test_the_package_takes_the_name_where_it_is_told_to_and_never_a_real_ones(self):
        place = tempfile.mkdtemp(dir=self.server.place)
        run = [sys.executable, "-m", "kvarts.mooncake"]
        told = subprocess.run([*run, place], capture_output=True, text=True, timeout=60, check=True).stdout
        self.assertEqual(told, f"PYTHONPATH={place}\n")
        # Written again it is the same.
        subprocess.run([*run, place], env={**os.environ, "PYTHONPATH": f"{place}:{os.environ['PYTHONPATH']}"}, timeout=60, check=True, capture_output=True)
        code = "from mooncake.store import MooncakeDistributedStore as store, ReplicateConfig; print(store.__module__)"
        path = {**os.environ, "PYTHONPATH": f"{place}:{os.environ['PYTHONPATH']}"}
        self.assertEqual(subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, timeout=60).stdout, "kvarts.mooncake\n")
        real = tempfile.mkdtemp(dir=self.server.place)
        os.mkdir(os.path.join(real, "mooncake"))
        for name in ("__init__.py", "engine.py"):
            open(os.path.join(real, "mooncake", name), "w").close()
        path = {**os.environ, "PYTHONPATH": f"{real}:{os.environ['PYTHONPATH']}"}
        for folder in (place, real):
            done = subprocess.run([*run, folder], env=path, capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 1, done)
        self.assertEqual(sorted(os.listdir(os.path.join(real, "mooncake")))[-1], "engine.py")


class Damage(Served):
    def test_a_damaged_value_is_a_number_and_never_another_byte(self):
        store = mooncake.MooncakeDistributedStore()
        name = f"kvarts:{self.server.socket}"
        self.assertEqual(store.setup("localhost", master_server_addr=name), 0)
        self.assertEqual([store.put(f"key {at}", pattern(at, SIZES[0])) for at in range(3)], [0, 0, 0])
        store.close()
        self.server.kill()
        wanted, flipped = pattern(1, SIZES[0])[1000:1064], 0
        for folder, _, files in os.walk(os.path.join(self.server.place, "d")):
            for file in files:
                with open(os.path.join(folder, file), "r+b") as segment:
                    content = segment.read()
                    at = content.find(wanted)
                    if at >= 0:
                        segment.seek(at)
                        segment.write(bytes([content[at] ^ 1]))
                        flipped += 1
        self.assertEqual(flipped, 1)
        self.server.start()
        self.assertEqual(store.setup("localhost", master_server_addr=name), 0)
        self.addCleanup(store.close)
        memory = Memory(1 << 20)
        self.addCleanup(memory.close)
        self.assertEqual(store.register_buffer(memory.address, 1 << 20), 0)
        self.addCleanup(store.unregister_buffer, memory.address)
        places = [memory.address + at * SIZES[0] for at in range(3)]
        found = store.batch_get_into([f"key {at}" for at in range(3)], places, [SIZES[0]] * 3)
        self.assertEqual((found[0], found[2]), (SIZES[0], SIZES[0]))
        self.assertLess(found[1], 0)
        self.assertEqual((memory[: SIZES[0]], memory[2 * SIZES[0] : 3 * SIZES[0]]), (pattern(0, SIZES[0]), pattern(2, SIZES[0])))
        self.assertEqual(store.get("key 1"), b"")


if __name__ == "__main__":
    unittest.main()
