"""What the simulator says of a mission before it is run: where the prompt tokens of the engines that prefill will come from, and, where the engines'
times were measured before, how long the first token takes."""

import json
import os
import subprocess

from common import BLOCK, PLACE
from workload import ANSWER
from world import CACHE_BLOCKS, DECODE, PREFILL

#: The simulator's routers by the proxy's policies.
ROUTERS = {"cost": "owner_serve", "owner": "cache_aware", "round-robin": "round_robin", "random": "random"}
#: Where nothing was measured: any times will do for the places of blocks.
_UNMEASURED = {"fixed_ms": 10.0, "computed_us": 100.0, "stored_us": 10.0}

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
gb_per_s = {rate}
write_gb_per_s = 1.0
[cold]
gb = 10.0
gb_per_s = {rate}
[network]
gb_per_s = 100.0
[engine]
plans = false
prefetch = "wait_complete"
[measured]
block_bytes = {bytes}
layers = {layers}
step_ms = {fixed_ms}
token_us = {computed_us}
"""


def shape_of(model):
    """(bytes of a block of all layers, layers) of a model whose layers are alike, as float32."""
    with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * layers * heads * head * BLOCK * 4, layers


def _trace(steps, prompts, answers):
    """The requests in their order, with what each goes on from; blocks that are equal up to their ends have equal numbers."""
    numbers, lines = {}, []
    for at, prompt in enumerate(prompts):
        # The state of the last token is never computed.
        tokens = [*prompt, *answers[at]][: len(prompt) + ANSWER - 1]
        ids = [numbers.setdefault(tuple(tokens[:end]), len(numbers)) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        parent = -1 if steps[at].parent is None else steps[at].parent
        line = {"timestamp": at, "input_length": len(prompt), "output_length": ANSWER, "hash_ids": ids}
        lines.append(json.dumps({**line, "chat_id": at, "parent_chat_id": parent, "type": steps[at].kind}))
    return "\n".join(lines) + "\n"


def fitted(samples):
    """The times of a request to its first token, as a sum: `fixed_ms`, and for each token that was computed or came from the store. Least squares over
    (computed, stored, ms); none of them is below zero."""
    rows = [(1.0, computed, stored) for computed, stored, _ in samples]
    times = [ms for _, _, ms in samples]
    used = [0, 1, 2]
    while True:
        found = _solved([[sum(row[i] * row[j] for row in rows) for j in used] + [sum(row[i] * ms for row, ms in zip(rows, times))] for i in used])
        if min(found) >= 0 or len(used) == 1:
            break
        used.pop(found.index(min(found)))
    of = dict(zip(used, found))
    return {"fixed_ms": max(of.get(0, 0.0), 0.01), "computed_us": max(1e3 * of.get(1, 0.0), 0.01), "stored_us": max(1e3 * of.get(2, 0.0), 0.01)}


def _solved(rows):
    """The solution of a few linear equations, each with its right side last; 0 for what they leave open."""
    for at in range(len(rows)):
        best = max(range(at, len(rows)), key=lambda row: abs(rows[row][at]))
        rows[at], rows[best] = rows[best], rows[at]
        if abs(rows[at][at]) < 1e-6:
            rows[at] = [0.0] * len(rows[at])
            rows[at][at] = 1.0
        for other in range(len(rows)):
            if other != at:
                factor = rows[other][at] / rows[at][at]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[at])]
    return [row[-1] / row[at] for at, row in enumerate(rows)]


def said(program, policy, seed, steps, right, model, budget_bytes, clients, times):
    """Tokens of all prompts by where they come from, and with measured times those of the first token, by kind."""
    place = os.path.join(PLACE, "mission")
    os.makedirs(place, exist_ok=True)
    trace, cluster = os.path.join(place, "trace.jsonl"), os.path.join(place, "cluster.toml")
    block_bytes, layers = shape_of(model)
    prompts, measured = right.prompts, times or _UNMEASURED
    with open(trace, "w", encoding="utf-8") as file:
        file.write(_trace(steps, prompts, right.answers))
    with open(cluster, "w", encoding="utf-8") as file:
        sizes = {"hbm": CACHE_BLOCKS * block_bytes / 1e9, "disk": budget_bytes / 1e9, "bytes": block_bytes, "layers": layers}
        rate = block_bytes / BLOCK / measured["stored_us"] / 1e3
        file.write(_CLUSTER.format(block=BLOCK, prefill=PREFILL, decode=DECODE, rate=rate, **sizes, **measured))
    command = [program, "sim", trace, "--cluster", cluster, "--router", ROUTERS[policy], "--seed", str(seed), "--clients", str(clients), "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    hits = {name: blocks * BLOCK for name, blocks in found["hits"].items()}
    device, store = hits["hbm"], hits["dram"] + hits["disk"] + hits["peer"] + hits["cold"]
    tokens = {"device": device, "store": store, "computed": sum(map(len, prompts)) - device - store, "stored_for_each_distinct": found["disk_duplicate_factor"]}
    if times is None:
        return tokens
    return {**tokens, "first_token_ms": {kind: {part: round(ms[part]) for part in ("p50", "p90")} for kind, ms in found["ttft_ms_by_type"].items()}}
