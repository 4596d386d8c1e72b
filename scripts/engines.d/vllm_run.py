"""An engine of vLLM that takes commands, one JSON document a line, and answers each with one. Run by scripts/engines."""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the engine prints goes to the log
settings = json.loads(sys.argv[1])

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVEventsConfig  # noqa: E402


def without_dict():
    """vLLM looks into the `__dict__` of everything in every module, and a library that LMCache brings answers with a function."""
    from llvmlite.binding import ffi

    found = type(ffi.lib).__getattr__

    def attribute(self, name):
        if name == "__dict__":
            raise AttributeError(name)
        return found(self, name)

    type(ffi.lib).__getattr__ = attribute


connector = {}
if settings.get("connector"):
    given = dict(settings["connector"])
    name = given.pop("class")
    role, is_by_name = given.pop("role", "kv_both"), given.pop("by_name", False)
    transfer = connector["kv_transfer_config"] = {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": given}
    # The name of vLLM's own memory, which stays behind when the engine is killed.
    transfer["engine_id"] = f"check-{os.getpid()}"
    if name == "Kvarts":
        given.update(cpu_bytes_to_use=64 << 20, spec_name="CpuTieringSpec", spec_module_path="vllm_cpu")
        transfer["kv_connector_module_path"] = "kvarts.vllm"
    elif name == "KvartsLayers":
        given.setdefault("pool_bytes", 64 << 20)
        # A tiny model computes sooner than a disk reads.
        given.setdefault("plans", False)
        transfer["kv_connector_module_path"] = "kvarts.vllm_layers"
    else:
        without_dict()
    if is_by_name:
        # As the plugin has registered it.
        transfer.pop("kv_connector_module_path")
if "kv_events_config" in settings.get("engine", {}):
    settings["engine"]["kv_events_config"] = KVEventsConfig(**settings["engine"]["kv_events_config"])
engine = LLM(
    model=settings["model"],
    skip_tokenizer_init=True,
    enforce_eager=True,
    max_model_len=1024,
    disable_log_stats=False,
    seed=0,
    **{"max_num_seqs": 4, **connector, **settings.get("engine", {})},
)


def counters():
    """What vLLM counts: prompt tokens by where their KV came from, and what the tiers did."""
    found = {}
    for metric in engine.get_metrics():
        if metric.name.startswith(("vllm:prompt_tokens_cached_by_source", "vllm:kv_offload_tiering", "vllm:kv_offload_kvarts", "vllm:kvarts")):
            if hasattr(metric, "value"):
                labels = {name: value for name, value in metric.labels.items() if name in ("source", "tier", "reason")}
                found[" ".join([metric.name, *labels.values()])] = metric.value
    return found


def generate(prompts, tokens, transfer=None):
    """`transfer`: of each prompt its `kv_transfer_params`."""
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=one and {"kv_transfer_params": one})
        for one in transfer or [None] * len(prompts)
    ]
    began = time.monotonic()
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "transfer": [output.kv_transfer_params for output in outputs],
        "seconds": time.monotonic() - began,
    }


def reset(host):
    """Forgets what the engine has in memory, and with `host` what the connector has in the host's."""
    return {"reset": engine.llm_engine.reset_prefix_cache(reset_connector=host)}


def measured():
    """How long the connector `Kvarts` takes a prompt of a thousand tokens to be computed, by the engine's own steps."""
    times = engine.llm_engine.engine_core.engine_core.scheduler.connector._watch._steps.times
    return {"ms": times and times.prefill_ms(0, 1000)}


def answer(document):
    print(json.dumps(document), file=answers, flush=True)


answer({"ready": True})
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "generate":
        answer(generate(command["prompts"], command["tokens"], command.get("transfer")))
    elif command["do"] == "reset":
        answer(reset(command.get("host", True)))
    elif command["do"] == "counters":
        answer(counters())
    elif command["do"] == "measured":
        answer(measured())
    else:
        break
engine.llm_engine.engine_core.shutdown()
