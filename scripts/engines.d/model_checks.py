"""The geometry of models, beside what vLLM's own classes say of the same configurations (scripts/engines)."""

import collections
import glob
import json
import os
import subprocess
import tempfile

from common import PATIENCE, PLACE, ROOT, RUNNERS, Skipped, environment, expect, python_of

CONFIGS = os.path.join(ROOT, "layout", "testdata", "configs")
PAGE = os.path.join(ROOT, "docs", "models.md")
BLOCK = 256
#: Number formats beside the model's own: what `kvarts model import` is told, and what vLLM.
OTHERS = (("qwen2", "fp8", "fp8"), ("nemotron_h", "fp8", "fp8"), ("gemma4", "fp8", "fp8"))
#: Models whose default is not the model's own format.
OWN = {"glm_moe_dsa": "bf16", "hy_v4": "bf16"}
BEGIN, END = "<!-- written by scripts/engines check vllm models-types, with KVARTS_BLESS=1 -->\n", "<!-- end of it -->\n"


def configs(place):
    """The tests' configurations, each in a file; those of `families.json` are written to `place`."""
    paths = {os.path.basename(path)[: -len(".json")]: path for path in glob.glob(os.path.join(CONFIGS, "*.json"))}
    with open(paths.pop("families"), encoding="utf-8") as file:
        families = json.load(file)
    for name, config in families.items():
        paths[name] = os.path.join(place, name + ".json")
        with open(paths[name], "w", encoding="utf-8") as file:
            json.dump(config, file)
    return paths


class Models:
    PREFIX = "models-"
    CHECKS = ("geometry", "types")

    def __init__(self):
        self.python = python_of("vllm")
        self.program = os.environ.get("KVARTS_PROGRAM") or os.path.join(PLACE, "vllm", "bin", "kvarts")
        if not os.path.exists(self.program):
            raise Skipped("there is no program kvarts: run scripts/wheel and scripts/engines setup again, or set KVARTS_PROGRAM")

    def versions(self):
        return "models"

    def close(self):
        pass

    def engine(self, *arguments):
        """What vllm_geometry.py says, a line of JSON each."""
        command = [self.python, os.path.join(RUNNERS, "vllm_geometry.py"), *arguments]
        # Construction of a large model takes long on a loaded machine.
        found = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=4 * PATIENCE, check=False)
        if not found.stdout:
            raise RuntimeError(f"vllm_geometry.py printed no result: {found.stderr[-2000:]}")
        return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]

    def kvarts(self, *arguments, text=None):
        return subprocess.run([self.program, "model", *arguments], input=text, capture_output=True, text=True, check=False)

    def check_geometry(self):
        with tempfile.TemporaryDirectory() as place:
            return self.compared(configs(place))

    def compared(self, paths):
        names = sorted(paths)
        cases = [(name, OWN.get(name), "auto") for name in names] + list(OTHERS)
        answers = self.engine(*(f"{paths[name]}:{theirs}" for name, _, theirs in cases))
        expect(len(answers) == len(cases), f"{len(answers)} answers for {len(cases)} configurations")
        same, not_built = [], []
        for (name, ours, theirs), answer in zip(cases, answers):
            if "error" in answer:
                not_built.append(f"{name} ({answer['error'][:100]})")
                continue
            here, there = self.kept(paths[name], ours), kept_there(answer["layers"])
            expect(here == there, f"{name} in {theirs}: kvarts computes {here}, and vLLM {there}")
            same.append(name if theirs == "auto" else f"{name} in {theirs}")
        expect(same, f"vLLM could not build any of the models: {not_built}")
        return f"the same: {', '.join(same)}; not built by this vLLM: {', '.join(not_built) or 'none'}"

    def kept(self, path, dtype):
        """Bytes of a layer and how many layers, by role."""
        arguments = ["import", path] + (["--kv-dtype", dtype] if dtype else [])
        spec = self.kvarts(*arguments)
        expect(spec.returncode == 0, spec.stderr)
        shown = self.kvarts("show", "-", "--json", "--block-tokens", str(BLOCK), text=spec.stdout)
        expect(shown.returncode == 0, shown.stderr)
        kept = collections.Counter()
        for part in json.loads(shown.stdout)["parts"]:
            if part["empty_at_multiple_of"]:
                kept["ring"] += part["layers"]
            else:
                kept[part["role"], part["window_tokens"], part["layer_bytes_per_block"]] += part["layers"]
        return kept

    def check_types(self):
        """The page's table of what vLLM serves is the one that this vLLM and this program give."""
        (answer,) = self.engine("types")
        known, unknown = [], []
        for kind in answer["types"]:
            refusal = self.kvarts("import", "-", text=json.dumps({"model_type": kind})).stderr
            (unknown if f"architecture `{kind}` is not supported" in refusal else known).append(kind)
        table = "".join(
            f"| {title} | {', '.join(f'`{kind}`' for kind in kinds)} |\n" for title, kinds in (("known", known), ("unknown", unknown))
        )
        table = f"vLLM {answer['version']}: {len(known)} known, {len(unknown)} unknown.\n\n| | `model_type` |\n|---|---|\n{table}"
        with open(PAGE, encoding="utf-8") as file:
            page = file.read()
        before, rest = page.split(BEGIN)
        _, after = rest.split(END)
        wanted = f"{before}{BEGIN}\n{table}\n{END}{after}"
        if os.environ.get("KVARTS_BLESS"):
            with open(PAGE, "w", encoding="utf-8") as file:
                file.write(wanted)
        else:
            expect(page == wanted, "the table in docs/models.md is out of date: run the check with KVARTS_BLESS=1 to write it")
        return f"{len(known)} known, {len(unknown)} unknown: {', '.join(unknown)}"


def kept_there(layers):
    kept = collections.Counter()
    for layer in layers:
        if layer["spec"] == "MambaSpec":
            for size in layer["bytes"]:
                kept["state", None, size] += layer["layers"]
        elif layer["spec"] == "CircularBufferSpec":
            kept["ring"] += layer["layers"]
        elif layer["window"]:
            kept["window", layer["window"], layer["bytes"] * layer["window"]] += layer["layers"]
        else:
            kept["stream", None, layer["bytes"] * BLOCK // layer["tokens"]] += layer["layers"]
    return kept
