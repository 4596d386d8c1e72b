"""What the simulator says of a mission before it is run: where the prompt tokens of the engines that prefill will come from."""

import json
import os
import subprocess

from common import BLOCK, PLACE
from workload import ANSWER
from world import CACHE_BLOCKS, DECODE, PREFILL

#: The simulator's routers by the proxy's policies.
ROUTERS = {"cost": "owner_serve", "owner": "cache_aware", "round-robin": "round_robin", "random": "random"}
#: Between requests: none waits for another one, so the figures are of where blocks are, not of queues.
_GAP_MS = 10_000

_CLUSTER = """model = "llama-3.1-8b"
block_tokens = {block}
[nodes]
prefill = {prefill}
decode = {decode}
device = "h100"
devices = 1
[hbm]
gb = {hbm}
[disk]
gb = {disk}
gb_per_s = 1.0
write_gb_per_s = 1.0
[cold]
gb = 10.0
gb_per_s = 1.0
[network]
gb_per_s = 1.0
[engine]
plans = false
prefetch = "wait_complete"
[measured]
block_bytes = {bytes}
layers = {layers}
step_ms = 10.0
token_us = 100.0
"""


def shape_of(model):
    """(bytes of a block of all layers, layers) of a model whose layers are alike, as float32."""
    with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * layers * heads * head * BLOCK * 4, layers


def _trace(prompts, answers):
    """The requests, one after the other; blocks that are equal up to their ends have equal numbers."""
    numbers, lines = {}, []
    for at, prompt in enumerate(prompts):
        # The state of the last token is never computed.
        tokens = [*prompt, *answers[at]][: len(prompt) + ANSWER - 1]
        ids = [numbers.setdefault(tuple(tokens[:end]), len(numbers)) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        lines.append(json.dumps({"timestamp": at * _GAP_MS, "input_length": len(prompt), "output_length": ANSWER, "hash_ids": ids}))
    return "\n".join(lines) + "\n"


def said(program, policy, seed, prompts, answers, model, budget_bytes):
    """Tokens of all prompts by where they come from."""
    place = os.path.join(PLACE, "mission")
    os.makedirs(place, exist_ok=True)
    trace, cluster = os.path.join(place, "trace.jsonl"), os.path.join(place, "cluster.toml")
    block_bytes, layers = shape_of(model)
    with open(trace, "w", encoding="utf-8") as file:
        file.write(_trace(prompts, answers))
    with open(cluster, "w", encoding="utf-8") as file:
        file.write(_CLUSTER.format(block=BLOCK, prefill=PREFILL, decode=DECODE, hbm=CACHE_BLOCKS * block_bytes / 1e9, disk=budget_bytes / 1e9, bytes=block_bytes, layers=layers))
    command = [program, "sim", trace, "--cluster", cluster, "--router", ROUTERS[policy], "--seed", str(seed), "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    hits = {name: blocks * BLOCK for name, blocks in found["hits"].items()}
    device, store = hits["hbm"], hits["dram"] + hits["disk"] + hits["peer"] + hits["cold"]
    return {"device": device, "store": store, "computed": sum(map(len, prompts)) - device - store, "stored_for_each_distinct": found["disk_duplicate_factor"]}
