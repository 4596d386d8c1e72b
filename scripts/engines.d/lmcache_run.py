"""LMCache's adapter, as its factory makes it, with objects of its own: `lmcache_run.py SOCKET store|load REVISION`.
Prints how many objects were stored, or found and loaded with the right content, and how long that took. Run by scripts/engines."""

import argparse
import json
import sys
import time

import torch
from lmcache.v1.check import check_mode_test_l2_adapter as its
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

COUNT, ELEMENTS = 16, 65536
socket, what, revision = sys.argv[1:4]
parameters = {"server": socket, "revision": revision, "dtype": "float32", "timeout": 2.0}
adapter = {"type": "native_plugin", "module_path": "kvarts.lmcache", "class_name": "Kvarts", "adapter_params": parameters}
[config] = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(adapter)])).adapters
memory = torch.empty(COUNT * ELEMENTS, dtype=torch.float32)
adapter = create_l2_adapter(config, l1_memory_desc=its._create_l1_memory_desc(memory))
# The hash of a number is the same in every process; that of a text is not.
keys = [its._create_object_key("test-model", n + 1) for n in range(COUNT)]
parts = memory.view(COUNT, ELEMENTS)


def objects(value):
    return [
        its._create_memory_obj(raw_data=parts[n], fill_value=value(n), obj_size=ELEMENTS, dtype=torch.float32) for n in range(COUNT)
    ]


began = time.monotonic()
try:
    if what == "store":
        _, good = its._run_store_phase(adapter, keys, objects(lambda n: float(n + 1)))
        found = {"stored": COUNT if good else 0}
    else:
        into = objects(lambda n: 0.0)
        _, here = its._run_lookup_phase(adapter, keys)
        _, loaded = its._run_load_phase(adapter, keys, into)
        adapter.submit_unlock(keys)
        right = [bool((parts[n] == n + 1).all()) for n in range(COUNT)]
        found = {
            "found": sum(here.test(n) for n in range(COUNT)),
            "right": sum(right[n] for n in range(COUNT) if loaded.test(n)),
            "wrong": sum(not right[n] for n in range(COUNT) if loaded.test(n)),
        }
    found["seconds"] = time.monotonic() - began
finally:
    adapter.close()
print("RESULT " + json.dumps(found), flush=True)
