"""An engine of vLLM that takes commands, one JSON document a line, and answers each with one. Run by `stage.py`.

Its weights are made here, large enough that outputs depend on every block of the prefix: those that vLLM makes for
`--load-format dummy` are so small that any KV cache gives the same tokens."""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the engine prints goes to the log
settings = json.loads(sys.argv[1])

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.model_executor.model_loader import dummy_loader  # noqa: E402

#: By the ends of their names: how much larger than what keeps the size of an activation.
GAINS = {"qkv_proj.weight": 1.6, "o_proj.weight": 2.0, "lm_head.weight": 4.0}
#: Likeliest tokens that are told for each token of an output.
LIKELY = 5


def fill(loader, model, model_config):
    """The same weights in every process on the same device."""
    generators = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                weight.fill_(1.0)
                continue
            if weight.device not in generators:
                generators[weight.device] = torch.Generator(device=weight.device).manual_seed(1)
            gain = next((gain for end, gain in GAINS.items() if name.endswith(end)), 1.0)
            weight.normal_(0.0, gain / weight.shape[-1] ** 0.5, generator=generators[weight.device])


dummy_loader.DummyModelLoader.load_weights = fill
connector = {}
if settings.get("connector"):
    given = dict(settings["connector"])
    transfer = {"kv_connector": given.pop("class"), "kv_role": "kv_both", "kv_connector_extra_config": given}
    # The name of vLLM's own memory, which may stay behind when the engine is ended.
    transfer["engine_id"] = f"pack-{os.getpid()}"
    if "module" in given:
        transfer["kv_connector_module_path"] = given.pop("module")
    connector["kv_transfer_config"] = transfer
began = time.monotonic()
engine = LLM(
    model=settings["model"],
    load_format="dummy",
    skip_tokenizer_init=True,
    enforce_eager=True,
    disable_log_stats=False,
    seed=0,
    **{**connector, **settings["engine"]},
)


def facts():
    import vllm.version

    config = engine.llm_engine.vllm_config
    cache = config.cache_config
    return {
        "vllm": vllm.version.__version__,
        "torch": torch.__version__,
        "runner": "v2" if getattr(config, "use_v2_model_runner", False) else "v1",
        "blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "layers": len(caches()),
        "shape": list(caches()[0].shape),
        "start_s": round(time.monotonic() - began, 1),
    }


def caches():
    """The tensors of KV caches of the one worker that there is. Nothing of it runs on the device when this is called."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return engine.collective_rpc(caches_of)[0]


def caches_of(worker):
    return list(worker.model_runner.kv_caches)


def generate(prompts, tokens, likely):
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=LIKELY if likely else None)
    begun = time.monotonic()
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    seconds = time.monotonic() - begun
    found = [output.outputs[0] for output in outputs]
    answer = {"tokens": [list(one.token_ids) for one in found], "seconds": seconds}
    if likely:
        answer["likely"] = [[{str(token): value.logprob for token, value in place.items()} for place in one.logprobs] for one in found]
    return answer


def counters():
    """Prompt tokens by where their KV came from."""
    found = {}
    for metric in engine.get_metrics():
        if metric.name.startswith("vllm:prompt_tokens_cached_by_source") and hasattr(metric, "value"):
            source = metric.labels.get("source", "")
            found[source] = found.get(source, 0) + metric.value
    return found


def empty():
    """Nothing is left in the device's pages."""
    tensors = caches()
    for tensor in tensors:
        tensor.zero_()
    caches()
    return {"tensors": len(tensors)}


def spoil():
    """One page of those that hold something becomes zeros, in every layer."""
    tensors = caches()
    place = list(tensors[0].shape).index(engine.llm_engine.vllm_config.cache_config.num_gpu_blocks)
    others = [at for at in range(tensors[0].dim()) if at != place]
    used = (tensors[0] != 0).sum(dim=others).nonzero().flatten().tolist()
    page = used[len(used) // 2]
    for tensor in tensors:
        tensor.select(place, page).zero_()
    caches()
    return {"pages": len(used), "spoilt": page}


def answer(document):
    print(json.dumps(document), file=answers, flush=True)


answer({"ready": True, **facts()})
for line in sys.stdin:
    command = json.loads(line)
    does = command["do"]
    if does == "generate":
        answer(generate(command["prompts"], command["tokens"], command["likely"]))
    elif does == "reset":
        answer({"reset": engine.llm_engine.reset_prefix_cache(reset_connector=command["connector"])})
    elif does == "counters":
        answer(counters())
    elif does == "empty":
        answer(empty())
    elif does == "spoil":
        answer(spoil())
    else:
        break
engine.llm_engine.engine_core.shutdown()
