"""The part of `scripts/engine-pack` that runs on the machine with the device.

  python3 there.py keep PLACE            copies the folder of this file to PLACE, and lists the missing folders
  python3 there.py run PLACE OUT [OPTION...]
                                         copies the folder to PLACE, joins and unpacks all folders, and runs the stages that are not done yet
      --seconds N       the limit for the whole run, including joining (540)
      --stages A,B      the stages to run, of: machine, plain, disk, own, memory (all that are not done)
      --again           also runs the stages that are done
      --disk DIR        a directory on the disk to measure, with 20 GiB free (PLACE/disk)
      --memory DIR      a directory on a file system in memory, with 12 GiB free beside the 10 GiB of the engine's host tier (/dev/shm)
      --grow-shm        mounts /dev/shm again with a larger size if it is too small; requires root
      --tiny            uses shapes that a processor can compute, to check that every stage runs; the times are then meaningless
      --device KIND     cuda or cpu (cuda)
      --patience N      multiplies the limit of every stage by N, for a slow machine (1)

Keep PLACE between calls, so that the next call can continue. Each call writes results.json, report.txt and logs.txt to OUT, and writes them again after
each result."""

import argparse
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import parts  # noqa: E402
import stages  # noqa: E402

GIB = 1 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}
#: The shapes of Llama-3.1-8B, and of something that a processor computes.
SHAPES = {
    False: {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    True: {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
    },
}


def token_bytes(shape):
    return shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"] * 2


def settings_of(asked, joined):
    """What a stage is told."""
    shape = SHAPES[asked.tiny]
    lengths = [256, 512, 1024] if asked.tiny else [4096, 16384, 32768]
    block = 32 if asked.device == "cpu" else 16
    held = token_bytes(shape) * sum(lengths)
    host = (64 << 20) if asked.tiny else 10 * GIB
    engine = {
        "dtype": "bfloat16",
        "block_size": block,
        "max_model_len": lengths[-1] + 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": min(8192, lengths[-1] + 64),
    }
    own = {"cpu_bytes_to_use": host}
    if asked.device == "cpu":
        own.update(spec_name="CpuTieringSpec", spec_module_path="vllm_cpu")
    else:
        engine["gpu_memory_utilization"] = 0.8
    paths = [joined["engine"], joined["kvarts"], HERE]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_CACHE_ROOT": os.path.join(asked.place, "cache")}
    return {
        "place": asked.place,
        "device": asked.device,
        "tiny": asked.tiny,
        "model": os.path.join(asked.place, "model"),
        "vocabulary": shape["vocab_size"],
        "token_bytes": token_bytes(shape),
        "lengths": lengths,
        "repeats": 3,
        "engine": engine,
        "own": own,
        "tier": dict(own),
        "pool_bytes": host,
        "program": os.path.join(joined["kvarts"], "bin", "kvarts"),
        # Segments of the usual size want a budget that has many of them.
        "serve": ["--segment", "4 MiB"] if asked.tiny else [],
        "disk": asked.disk,
        "disk_budget": 4 * held + (64 << 20),
        "memory": asked.memory,
        "memory_budget": 2 * held + (64 << 20),
        "variables": variables,
    }


def start(settings, results):
    """Starts stages as processes; each is ended with everything that it started."""

    def one(stage, seconds, fact):
        begun = time.monotonic()
        asked = {**settings, "known": results.known(stage.name)}
        log_name = os.path.join(settings["place"], "logs", f"stage-{stage.name}.log")
        with open(log_name, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, os.path.join(HERE, "stage.py"), stage.name, json.dumps(asked)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **settings["variables"]},
                text=True,
                start_new_session=True,
            )
        late = threading.Event()

        def end():
            late.set()
            stop(process)

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            for line in process.stdout:
                told = json.loads(line)
                fact(told)
                print(f"{stage.name} {time.monotonic() - begun:5.1f} s: {line.strip()[:300]}", flush=True)
            code = process.wait()
        finally:
            timer.cancel()
            stop(process)
            for left in glob.glob("/dev/shm/vllm_offload_pack-*"):
                os.unlink(left)
        if late.is_set():
            return f"ended after {seconds:.0f} s"
        return None if code == 0 else f"{last_line(log_name)} (it ended with {code})"

    return one


def stop(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def last_line(name):
    with open(name, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file.read()[-20000:].splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def logs(place, out):
    """The end of every log in one file."""
    with open(os.path.join(out, "logs.txt"), "w", encoding="utf-8") as target:
        for name in sorted(glob.glob(os.path.join(place, "logs", "*.log")) + glob.glob(os.path.join(place, "servers", "*", "log"))):
            with open(name, encoding="utf-8", errors="replace") as file:
                target.write(f"== {name}\n{file.read()[-100000:]}\n")


def grow(settings):
    """The engine's host tier is a file in /dev/shm."""
    wanted = settings["own"]["cpu_bytes_to_use"] + settings["memory_budget"] + GIB
    if shutil.disk_usage("/dev/shm").free < wanted:
        subprocess.run(["mount", "-o", f"remount,size={wanted}", "/dev/shm"], check=False)


def options():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("do", choices=("keep", "run"))
    parser.add_argument("place", type=os.path.abspath)
    parser.add_argument("out", type=os.path.abspath, nargs="?")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--stages", default="")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--disk", type=os.path.abspath)
    parser.add_argument("--memory", type=os.path.abspath, default="/dev/shm")
    parser.add_argument("--grow-shm", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--patience", type=float, default=1)
    asked = parser.parse_args()
    if asked.do == "run" and asked.out is None:
        parser.error("run: give the folder OUT for the results")
    asked.disk = asked.disk or os.path.join(asked.place, "disk")
    return asked


def main():
    asked = options()
    # What was started is ended also where this is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    budget = stages.Budget(asked.seconds)
    try:
        chosen = stages.chosen([name for name in asked.stages.split(",") if name], asked.patience)
        os.makedirs(asked.place, exist_ok=True)
        # The folder that this lies in, and those beside it that came with the same call.
        for folder in sorted(glob.glob(os.path.join(os.path.dirname(HERE), "*", parts.INDEX))):
            lost = parts.keep(os.path.dirname(folder), asked.place)
        index = parts.read_index(asked.place)
        numbers = [n for n, files in enumerate(index["folders"], 1) if set(files) & set(lost)]
        print(f"missing folders of {len(index['folders'])}: {numbers or 'none'}", flush=True)
        if asked.do == "keep":
            return 0
        joined = parts.join(asked.place)
    except (parts.Bad, ValueError) as error:
        print(f"there.py: {error}", file=sys.stderr)
        return 2
    os.chmod(os.path.join(joined["kvarts"], "bin", "kvarts"), 0o755)
    settings = settings_of(asked, joined)
    for folder in ("logs", "model"):
        os.makedirs(os.path.join(asked.place, folder), exist_ok=True)
    with open(os.path.join(settings["model"], "config.json"), "w", encoding="utf-8") as file:
        json.dump({**LLAMA, **SHAPES[asked.tiny]}, file, indent=1)
    if asked.grow_shm:
        grow(settings)
    results = stages.Results(asked.place, asked.out, index["made"])
    if asked.again:
        for stage in chosen:
            results.end(stage.name, "again")
    try:
        stages.run(chosen, budget, results, start(settings, results))
    finally:
        logs(asked.place, asked.out)
        shutil.rmtree(os.path.join(asked.memory, "kvarts-engine-pack"), ignore_errors=True)
    with open(os.path.join(asked.out, "report.txt"), encoding="utf-8") as file:
        print(file.read())
    good = all(results.state(stage.name) == "done" for stage in chosen) and all(must["holds"] is not False for must in results.document["musts"])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
