"""SGLang's engine on the processor, which takes commands, one JSON document a line, and answers each with one. Run by
scripts/engines."""

import json
import os
import sys
import time

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to the log
    settings = json.loads(sys.argv[1])
    here = os.path.dirname(os.path.abspath(__file__))
    # For this process and for those that it starts.
    sys.path.insert(0, os.path.join(here, "sglang_stub"))
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
    os.environ.update(SGLANG_EXTERNAL_MODEL_PACKAGE="sglang_cpu", SGLANG_USE_CPU_ENGINE="0")
    import sglang

    cache = {}
    if settings["storage"]:
        extra = {"backend_name": "kvarts", "module_path": "kvarts.sglang", "class_name": "Kvarts", "interface_v1": 1}
        extra.update(prefetch_threshold=16, **settings["storage"])
        cache = dict(enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_write_policy="write_through")
        cache.update(hicache_mem_layout="page_first", hicache_storage_prefetch_policy="wait_complete")
        cache.update(hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=json.dumps(extra))
    if settings.get("linker"):
        linker = {"linker": "KvartsLinker", "linker_module_path": "kvarts.sglang_linker", "linker_extra_config": settings["linker"]}
        cache = dict(enable_unified_cache_external_linker=True, unified_cache_external_linker_backend="dynamic")
        cache.update(unified_cache_external_linker_config=linker)
    engine = sglang.Engine(
        model_path=settings["model"],
        device="cpu",
        dtype="bfloat16",
        page_size=16,
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        max_total_tokens=8192,
        context_length=1024,
        mem_fraction_static=0.3,
        log_level="info",
        **cache,
        **settings.get("engine", {}),
    )

    def generate(prompts):
        """The output, prompt tokens that came from storage, seconds."""
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        began, tokens, stored = time.monotonic(), [], 0
        for prompt in prompts:
            out = engine.generate(input_ids=prompt, sampling_params=sampling)
            tokens.append(out["output_ids"])
            # What a linker brings SGLang counts as of the host.
            details = out["meta_info"].get("cached_tokens_details") or {}
            stored += details.get("host" if settings.get("linker") else "storage", 0)
        return {"tokens": tokens, "stored": stored, "seconds": time.monotonic() - began}

    def answer(document):
        print(json.dumps(document), file=answers, flush=True)

    answer({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "generate":
            answer(generate(command["prompts"]))
        elif command["do"] == "reset":
            answer({"reset": engine.flush_cache().success})
        else:
            break
    engine.shutdown()
