"""A seeded course of a real vLLM behind `KvartsLayers`: requests come, share their beginnings, are given up in every state, lose their memory,
and the engine forgets its cache; between steps whoever runs this does things to the server. Run by scripts/engines.

  vllm_course.py {"model": DIRECTORY, "connector": {...}, "engine": {...}, "texts": [[TOKEN, ...], ...], "tokens": N}

Commands on standard input: {"do": "right"} answers with the output of every text alone, without a cache; {"do": "steps", "seed": N, "count": N} goes on
for so many steps; {"do": "settle"} ends all requests, and waits until nothing is behind; {"do": "blocks"} answers with a digest, and a few
numbers, of every block of the texts that is stored, read with the connector's own names; {"do": "counters"}; {"do": "end"}."""

import collections
import hashlib
import json
import os
import random
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the engine prints goes to the log
settings = json.loads(sys.argv[1])

import numpy  # noqa: E402
from vllm import EngineArgs, LLMEngine, SamplingParams  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

import kvarts  # noqa: E402

PATIENCE = 120
#: Likeliest tokens that are told for each token of an output.
LIKELY = 5

connector = {}
if settings.get("connector"):
    transfer = dict(kv_connector="KvartsLayers", kv_connector_module_path="kvarts.vllm_layers", kv_role="kv_both")
    connector["kv_transfer_config"] = {**transfer, "kv_connector_extra_config": {"plans": False, **settings["connector"]}}
engine = LLMEngine.from_engine_args(
    EngineArgs(
        model=settings["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        disable_log_stats=False,
        seed=0,
        **connector,
        **{"max_num_seqs": 6, **settings["engine"]},
    )
)
scheduler = engine.engine_core.engine_core.scheduler
texts, tokens = settings["texts"], settings["tokens"]
chance = random.Random(0)
#: Requests that are under way: their text. What came of those that ended well.
under, ended = {}, []
hashes = {}  # text -> hashes of its blocks
seen = collections.Counter()
number = 0

preempt = Scheduler._preempt_request


def preempted(self, request, *of, **named):
    seen["preempted"] += 1
    return preempt(self, request, *of, **named)


Scheduler._preempt_request = preempted


def ask(text):
    global number
    number += 1
    name = f"{number}"
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=LIKELY)
    engine.add_request(name, {"prompt_token_ids": texts[text]}, sampling)
    under[name] = text
    seen["asked"] += 1


def said(output):
    """Tokens, and of each the likeliest with their logarithms."""
    likely = [{str(token): value.logprob for token, value in place.items()} for place in output.logprobs]
    return {"tokens": [list(output.token_ids)], "likely": [likely]}


def step():
    for output in engine.step():
        if output.finished and output.request_id in under:
            ended.append([under.pop(output.request_id), said(output.outputs[0])])
    for request in scheduler.requests.values():
        name = request.request_id.split("-")[0]
        if name in under:
            hashes.setdefault(under[name], [bytes(one) for one in request.block_hashes])


def state_of(name):
    """In which state a request is: for counting what was tried."""
    request = next((one for key, one in scheduler.requests.items() if key.split("-")[0] == name), None)
    if request is None:
        return "unknown"
    finder = scheduler.connector._side
    if request.request_id in finder._stagings:
        return "staged" if finder._stagings[request.request_id][0].is_over else "staging"
    if any(save.known.request is request for save in finder._saves.values()):
        return "saving"
    return request.status.name.lower()


def some_steps(seed, count):
    chance.seed(seed)
    for _ in range(count):
        if chance.random() < 0.35 and len(under) < 10:
            text = chance.randrange(len(texts))
            for _ in range(chance.choice((1, 1, 2))):
                ask(text)
        # What is staged stays so for a step or two only.
        staged = [name for name in under if state_of(name) in ("staging", "staged", "saving")]
        if under and chance.random() < (0.3 if staged else 0.12):
            name = chance.choice(staged or list(under))
            seen[f"given up {state_of(name)}"] += 1
            del under[name]
            engine.abort_request([name])
        if chance.random() < 0.05:
            seen["forgotten"] += engine.reset_prefix_cache()
        step()
    return {"ended": take(), "seen": seen}


def take():
    global ended
    taken, ended = ended, []
    return taken


def settle():
    deadline = time.monotonic() + PATIENCE
    while engine.has_unfinished_requests() or scheduler.connector.has_pending_push_work():
        if time.monotonic() > deadline:
            raise SystemExit("the engine did not become idle in time")
        step()
    side = scheduler.connector._side
    left = [side._known, side._stagings, side._landing, side._saves]
    if any(left):
        raise SystemExit(f"the connector never releases these requests: {left}")
    return {"ended": take(), "seen": seen, "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks()}


def right():
    found = []
    for text in range(len(texts)):
        ask(text)
        while under:
            step()
        found.append(take()[0][1])
        engine.reset_prefix_cache()
    return {"right": found}


def blocks():
    """(text, block, group, rank) -> a digest, and some numbers out of it: computed in another batch the last bits of these may differ."""
    side, per = scheduler.connector._side, scheduler.connector._side.plan.hashes
    client = kvarts.connect(settings["connector"]["server"])
    pages = client.pages(**side._naming)
    found = {}
    for group in side._desk.groups:
        size = pages.block_bytes(group.number)
        for text, own in sorted(hashes.items()):
            keys = own[per - 1 :: per]
            for rank in group.ranks:
                there = pages.exists(keys, group=group.number, rank=rank)
                places = [numpy.zeros(size, dtype=numpy.uint8) for here in there if here]
                wanted = [(at, key) for at, (key, here) in enumerate(zip(keys, there)) if here]
                if not wanted:
                    continue
                done = pages.get([key for _, key in wanted], places, group=group.number, rank=rank)
                if not done.ok:
                    raise SystemExit(f"a stored block cannot be read: {done.reasons}")
                for (at, _), content in zip(wanted, places):
                    values = (content.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
                    name = f"{text} {at} {group.number} {rank}"
                    found[name] = [hashlib.sha256(content).hexdigest()[:16], *(float(one) for one in values[:: max(1, len(values) // 64)])]
    client.close()
    return {"blocks": found, "full": [group.number for group in side._desk.groups if group.window is None]}


def counters():
    found = {}
    for metric in engine.get_metrics():
        if metric.name.startswith("vllm:kvarts") and hasattr(metric, "value"):
            labels = [value for name, value in metric.labels.items() if name in ("source", "reason")]
            found[" ".join([metric.name, *labels])] = metric.value
    return found


def answer(document):
    print(json.dumps(document), file=answers, flush=True)


answer({"ready": True, "ahead": bool(engine.vllm_config.scheduler_config.async_scheduling)})
for command in map(json.loads, sys.stdin):
    match command["do"]:
        case "right":
            answer(right())
        case "steps":
            answer(some_steps(command["seed"], command["count"]))
        case "settle":
            answer(settle())
        case "blocks":
            answer(blocks())
        case "counters":
            answer(counters())
        case "end":
            break
engine.engine_core.shutdown()
