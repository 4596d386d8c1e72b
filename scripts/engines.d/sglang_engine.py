"""SGLang's engine on the processor, which takes commands, one JSON document a line, and answers each with one. Run by
scripts/engines.

{"do": "generate", "prompts": [...]}; {"do": "right", "prompts": [...]} answers with what each says alone; {"do": "course", "prompts": [...], "seed": N,
"count": N} asks for N of them at once and gives some up; {"do": "hand", "prompt": [...], "room": N, "rid": "...", "tokens": N, "salt": "..."} is a
prefill engine's or a decode engine's part of a request; {"do": "blocks", "prompts": [...]} answers with a digest, and a few numbers, of every page
that is stored; {"do": "reset"}; {"do": "end"}."""

import asyncio
import collections
import hashlib
import json
import os
import random
import sys
import time

#: Likeliest tokens that are told for each token of an output.
LIKELY = 5

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to the log
    settings = json.loads(sys.argv[1])
    here = os.path.dirname(os.path.abspath(__file__))
    # For this process and for those that it starts.
    sys.path.insert(0, os.path.join(here, "sglang_stub"))
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
    os.environ["SGLANG_USE_CPU_ENGINE"] = "0"
    # Workers share the processors.
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(["0-" + str(os.cpu_count() - 1)] * settings["engine"].get("tp_size", 1)))
    import sglang

    cache = {}
    if settings["storage"]:
        extra = {"backend_name": "kvarts", "module_path": "kvarts.sglang", "class_name": "Kvarts", "interface_v1": 1}
        extra.update(prefetch_threshold=16, **settings["storage"])
        cache = dict(enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_write_policy="write_through")
        cache.update(hicache_mem_layout="page_first", hicache_storage_prefetch_policy="wait_complete")
        cache.update(hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=json.dumps(extra))
    if settings.get("role") == "prefill":
        cache.update(disaggregation_mode="prefill", disaggregation_transfer_backend="nixl")
    elif settings.get("role") == "decode":
        # An engine that decodes offloads without a cache of its own.
        del cache["enable_hierarchical_cache"]
        cache.update(disaggregation_mode="decode", disaggregation_transfer_backend="fake", disaggregation_decode_enable_offload_kvcache=True)
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
        sleep_on_idle=True,
        mem_fraction_static=0.3,
        log_level="info",
        **{"max_total_tokens": 8192, "context_length": 1024, **cache, **settings.get("engine", {})},
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

    def handed(prompt, room, rid, tokens, salt=None):
        """The part of a request that an engine of this role has: what it says, and prompt tokens that came from storage."""
        from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        where = dict(bootstrap_host="127.0.0.1" if settings["role"] == "prefill" else FAKE_BOOTSTRAP_HOST, bootstrap_room=room, rid=rid, cache_salt=salt)
        out = engine.loop.run_until_complete(engine.async_generate(input_ids=prompt, sampling_params=sampling, **where))
        return {"tokens": out["output_ids"], "cached": out["meta_info"].get("cached_tokens_details") or {}, "ended": out["meta_info"]["finish_reason"]}

    async def say(text, prompt, tokens, rid=None):
        """What it says: tokens, and of each the likeliest with their logarithms. Nothing if it was given up."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        likely = dict(return_logprob=True, top_logprobs_num=LIKELY)
        out = await engine.async_generate(input_ids=prompt, sampling_params=sampling, rid=rid, **likely)
        about = out["meta_info"]
        if about["finish_reason"]["type"] == "abort":
            return text, None, about["finish_reason"].get("message", "")
        found = [{str(token): value for value, token, *_ in place} for place in about["output_top_logprobs"]]
        return text, {"tokens": [out["output_ids"]], "likely": [found]}, about["cached_tokens_details"] or {}

    async def course(prompts, tokens, seed, count):
        chance, under, ended, seen = random.Random(seed), {}, [], collections.Counter()

        def over(task):
            text, said, about = task.result()
            if said is None:
                seen["given up" if "load failed" not in about else "loads failed"] += 1
            else:
                ended.append([text, said])
                seen["tokens restored"] += about.get("host", 0)

        for number in range(count):
            text, rid = chance.randrange(len(prompts)), f"{seed}-{number}"
            under[rid] = asyncio.ensure_future(say(text, prompts[text], tokens, rid))
            under[rid].add_done_callback(over)
            await asyncio.sleep(chance.choice((0, 0, 0.01, 0.05, 0.2)))
            under = {rid: task for rid, task in under.items() if not task.done()}
            if under and chance.random() < 0.3:
                engine.tokenizer_manager.abort_request(rid=chance.choice(list(under)))
            while len(under) > 8:
                await asyncio.wait(under.values(), return_when=asyncio.FIRST_COMPLETED)
                under = {rid: task for rid, task in under.items() if not task.done()}
        if under:
            await asyncio.wait(under.values())
        await asyncio.sleep(0)
        return {"ended": ended, "seen": seen}

    async def right(prompts, tokens):
        return {"right": [(await say(text, prompt, tokens))[1] for text, prompt in enumerate(prompts)]}

    def blocks(prompts):
        """(text, page, group, rank) -> a digest, and some numbers out of it: computed in another batch the last bits of these may differ."""
        import numpy
        from sglang.srt.mem_cache.utils import get_hash_str

        import kvarts
        from kvarts.sglang_identity import names_of

        with open(os.environ["KVARTS_TOLD"], encoding="utf-8") as file:
            told = json.load(file)
        told["windows"] = {int(group): tokens for group, tokens in told["windows"].items()}
        client, found = kvarts.connect(settings["linker"]["server"]), {}
        pages = client.pages(**told)
        for text, prompt in enumerate(prompts):
            keys = names_of(get_hash_str(prompt[: len(prompt) // 16 * 16], None, page_size=16))
            for rank in range(told["tp_size"]):
                there = pages.exists(keys, rank=rank)
                wanted = [(at, key) for at, (key, here) in enumerate(zip(keys, there)) if here]
                places = [numpy.zeros(pages.block_bytes(0), dtype=numpy.uint8) for _ in wanted]
                if wanted and not (done := pages.get([key for _, key in wanted], places, rank=rank)).ok:
                    raise SystemExit(f"a stored page cannot be read: {done.reasons}")
                for (at, _), content in zip(wanted, places):
                    values = (content.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
                    numbers = [float(one) for one in values[:: max(1, len(values) // 64)]]
                    found[f"{text} {at} 0 {rank}"] = [hashlib.sha256(content).hexdigest()[:16], *numbers]
        client.close()
        return {"blocks": found}

    def answer(document):
        print(json.dumps(document), file=answers, flush=True)

    answer({"ready": True})
    for command in map(json.loads, sys.stdin):
        match command["do"]:
            case "generate":
                answer(generate(command["prompts"]))
            case "hand":
                answer(handed(*(command[name] for name in ("prompt", "room", "rid", "tokens", "salt"))))
            case "right":
                answer(engine.loop.run_until_complete(right(command["prompts"], command["tokens"])))
            case "course":
                answer(engine.loop.run_until_complete(course(*(command[name] for name in ("prompts", "tokens", "seed", "count")))))
            case "blocks":
                answer(blocks(command["prompts"]))
            case "reset":
                answer({"reset": engine.flush_cache().success})
            case _:
                break
    engine.shutdown()
