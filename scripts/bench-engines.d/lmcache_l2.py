"""An L2 adapter of LMCache's, made by its factory from what the command line would say."""

import argparse
import json
import os
import select
import threading

import pages
import torch
from contestant import Contestant
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd


class Adapter(Contestant):
    """`adapter`: the JSON of `--l2-adapter`. `file`: bytes of a file that is made before, because the adapter wants a device."""

    def __init__(self, place, count, settings):
        # As `lmcache server --shm-name` has it, and pins it.
        self._file, memory = pages.engines_file(count)
        self.slots = pages.Slots(memory)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._objects = [self._object(whole[slot * pages.PAGE : (slot + 1) * pages.PAGE]) for slot in range(count)]
        adapter = dict(settings["adapter"])
        if "file" in settings:
            adapter["device_path"] = os.path.join(place, "device")
            if not os.path.exists(adapter["device_path"]):
                with open(adapter["device_path"], "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, settings["file"])
        elif "socket" in settings:
            adapter["adapter_params"] = {**adapter["adapter_params"], "server": settings["socket"]}
        else:
            adapter["base_path"] = place
        [config] = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(adapter)])).adapters
        l1 = L1MemoryDesc(ptr=whole.data_ptr(), size=whole.numel(), align_bytes=4096, stable_registration_size=whole.numel())
        self._adapter = create_l2_adapter(config, l1_memory_desc=l1)
        self._fds = [self._adapter.get_store_event_fd(), self._adapter.get_load_event_fd()]
        self._poll = select.poll()
        for fd in self._fds:
            self._poll.register(fd, select.POLLIN)
        self._under_way = {}  # (kind, task) -> how many pages
        self._lock = threading.Lock()

    def _object(self, raw):
        metadata = MemoryObjMetadata(
            shape=raw.shape, dtype=raw.dtype, address=raw.data_ptr(), phy_size=pages.PAGE, fmt=MemoryFormat.KV_2LTD, ref_count=1
        )
        return TensorMemoryObj(raw, metadata, parent_allocator=None)

    def begin(self, kind, numbers, slots):
        keys = [ObjectKey(chunk_hash=n.to_bytes(32, "big"), model_name="bench-model", kv_rank=0) for n in numbers]
        objects = [self._objects[slot] for slot in slots]
        submit = self._adapter.submit_store_task if kind == "put" else self._adapter.submit_load_task
        with self._lock:
            task = submit(keys, objects)
            self._under_way[kind, task] = len(numbers)
        return kind, task

    def finished(self):
        answers = []
        while not answers:
            for fd, _ in self._poll.poll():
                try:
                    consume_fd(fd)
                except BlockingIOError:
                    pass
            with self._lock:
                answers = self._answered()
        return answers

    def _answered(self):
        answers = []
        for task, result in self._adapter.pop_completed_store_tasks().items():
            answers.append((("put", task), [result.is_successful()] * self._under_way.pop(("put", task))))
        for kind, task in list(self._under_way):
            if kind == "get" and (found := self._adapter.query_load_result(task)) is not None:
                answers.append((("get", task), [found.test(n) for n in range(self._under_way.pop(("get", task)))]))
        return answers

    def close(self):
        self._adapter.close()
