"""What runs on the machine, in which order, for how long, and what of it is judged. Nothing here starts or measures anything."""

import json
import os
import statistics
import time
from typing import NamedTuple


class Stage(NamedTuple):
    name: str
    least: int  # seconds without which it is not begun
    most: int  # seconds after which it is ended
    text: str


#: The most valuable first: one that is cut short costs what stands behind it.
STAGES = (
    Stage("machine", 5, 90, "device, libraries, imports of the engine, the disk's own rate"),
    Stage("plain", 40, 180, "the engine without a cache: the outputs that all other stages must have, and the times of computing"),
    Stage("layers", 45, 200, "Kvarts layer by layer: outputs and times with prefixes from its pool and from disk"),
    Stage("disk", 60, 280, "Kvarts on the disk: outputs and times with prefixes from disk and from the host tier, with a flipped bit and with a killed server"),
    Stage("own", 45, 150, "vLLM's own offloading to host memory"),
    Stage("memory", 50, 180, "Kvarts on a file system in memory"),
)
#: Seconds at the end of a run that belong to no stage: what is left is ended, results are written.
RESERVE = 8


class Budget:
    """Seconds for everything together."""

    def __init__(self, seconds, clock=time.monotonic):
        self._clock = clock
        self._end = clock() + seconds

    def left(self):
        return self._end - self._clock() - RESERVE

    def limit(self, stage):
        """Seconds for this stage; `None` if it is not to be begun."""
        left = self.left()
        return None if left < stage.least else min(stage.most, left)


def chosen(names, patience=1):
    """The stages of these names, or all; each may take `patience` times as long."""
    unknown = set(names) - {stage.name for stage in STAGES}
    if unknown:
        raise ValueError(f"there is no stage {', '.join(sorted(unknown))}: --help lists the stages")
    return [stage._replace(most=stage.most * patience) for stage in STAGES if not names or stage.name in names]


def run(stages, budget, results, start):
    """Runs the stages that are not done yet. `start(stage, seconds, fact)` answers `None`, or why it failed; each fact that it hands
    over is written at once."""
    for stage in stages:
        if results.state(stage.name) == "done":
            continue
        seconds = budget.limit(stage)
        if seconds is None:
            results.end(stage.name, "not begun", f"only {max(0, budget.left()):.0f} s were left, but the stage needs {stage.least} s")
            continue
        begun = time.monotonic()
        results.begin(stage.name)
        why = start(stage, seconds, lambda fact, name=stage.name: results.add(name, fact))
        results.end(stage.name, "failed" if why else "done", why, time.monotonic() - begun)


#: What makes a fact another one than those before it.
KEY = ("what", "source", "length", "fault")


def key_of(fact):
    return tuple(fact.get(name) for name in KEY)


class Results:
    """Facts and states of stages: kept at `place` for a run that goes on later, and written to `out` each time."""

    def __init__(self, place, out, made=None):
        self._files = [os.path.join(folder, "results.json") for folder in (place, out)]
        self._page = os.path.join(out, "report.txt")
        os.makedirs(out, exist_ok=True)
        try:
            with open(self._files[0], encoding="utf-8") as file:
                self.document = json.load(file)
        except (OSError, ValueError):
            self.document = {"stages": {}, "facts": []}
        self.document["made"] = made
        self.write()

    def state(self, name):
        return self.document["stages"].get(name, {}).get("state")

    def begin(self, name):
        self.document["stages"][name] = {"state": "begun", "when": time.strftime("%Y-%m-%d %H:%M:%S")}
        self.write()

    def end(self, name, state, why=None, seconds=None):
        self.document["stages"].setdefault(name, {}).update(state=state, why=why, seconds=seconds)
        self.write()

    def add(self, stage, fact):
        """A fact that was there already is replaced: the later run knows better."""
        key = key_of(fact)
        self.document["facts"] = [one for one in self.document["facts"] if key_of(one) != key or one["stage"] != stage]
        self.document["facts"].append({"stage": stage, **fact})
        self.write()

    def known(self, stage):
        return [list(key_of(fact)) for fact in self.document["facts"] if fact["stage"] == stage]

    def write(self):
        self.document["musts"] = musts(self.document["facts"])
        texts = [(file, json.dumps(self.document, indent=1)) for file in self._files] + [(self._page, page(self.document))]
        for file, text in texts:
            with open(file + ".new", "w", encoding="utf-8") as target:
                target.write(text + "\n")
            os.replace(file + ".new", file)


def times(facts):
    """Median seconds to the first token, by source and length."""
    return {(fact["source"], fact["length"]): statistics.median(fact["seconds"]) for fact in facts if fact["what"] == "first token"}


def musts(facts):
    """What must hold, as (text, found, most, whether it holds); `None` where it was not measured."""
    found = []
    taken = times(facts)
    for fact in facts:
        if fact["what"] == "output":
            text = f"{fact['source']}, {fact['length']} tokens: {fact['of']}"
            found.append({"must": text, "found": fact["verdict"], "holds": fact["holds"]})
        elif fact["what"] == "fault":
            found.append({"must": f"{fact['fault']}: {fact['expected']}", "found": fact["found"], "holds": fact["holds"]})
        elif fact["what"] == "first token" and fact.get("otherwise"):
            text = f"{fact['source']}, {fact['length']} tokens: the whole prefix came from this source each time"
            found.append({"must": text, "found": json.dumps(fact["otherwise"]), "holds": False})
    small = any(fact["what"] == "tiny" for fact in facts)
    for length in sorted({length for _, length in taken}):
        ratio(found, f"host tier of Kvarts beside vLLM's own, {length} tokens", taken.get(("kvarts host", length)), taken.get(("vllm host", length)), 1.1, small)
        rate = next((fact["bytes_per_second"] for fact in facts if fact["what"] == "disk rate" and fact["stage"] == "disk"), None)
        size = next((fact["bytes"] for fact in facts if fact["what"] == "stored" and fact["stage"] == "disk" and fact["length"] == length), None)
        rest = taken.get(("device", length))
        bound = max(size / rate, rest) if rate and size and rest else None
        text = f"the larger of disk time and the rest of the prefill, {length} tokens"
        ratio(found, f"from disk, of {text}", taken.get(("kvarts disk", length)), bound, 1.15, small)
        if ("layers pool", length) in taken:
            text = f"layer by layer, %s, {length} tokens"
            ratio(found, text % "from the pool beside vLLM's own host tier", taken["layers pool", length], taken.get(("vllm host", length)), 1.1, small)
            ratio(found, text % "from disk beside the larger of disk time and the rest of the prefill", taken.get(("layers disk", length)), bound, 1.15, small)
    return found


def ratio(found, text, ours, other, most, small):
    if ours is None or not other:
        found.append({"must": f"{text}: at most {most}", "found": "not measured", "holds": None})
    else:
        found.append({"must": f"{text}: at most {most}", "found": f"{ours / other:.2f}", "holds": None if small else ours / other <= most})


def page(document):
    """One page of text."""
    lines = []
    for stage in STAGES:
        state = document["stages"].get(stage.name, {"state": "not begun"})
        seconds = f"{state['seconds']:.0f} s" if state.get("seconds") else ""
        lines.append(f"{stage.name:<8} {state['state']:<9} {seconds:>6}  {(state.get('why') or '').strip()[-300:]}")
    facts = document["facts"]
    taken = times(facts)
    lengths = sorted({length for _, length in taken})
    if taken:
        lines += ["", "SECONDS TO THE FIRST TOKEN, median", f"{'':<22}" + "".join(f"{length:>10}" for length in lengths)]
        for source in dict.fromkeys(source for source, _ in taken):
            cells = (f"{taken[source, length]:10.3f}" if (source, length) in taken else f"{'-':>10}" for length in lengths)
            lines.append(f"{source:<22}" + "".join(cells))
    if document.get("musts"):
        words = {True: "holds", False: "DOES NOT HOLD", None: "not judged"}
        lines += ["", "MUSTS"] + [f"{words[must['holds']]:<14} {must['must']}: {must['found']}" for must in document["musts"]]
    notes = [fact for fact in facts if fact["what"] not in ("output", "fault", "first token")]
    if notes:
        lines += ["", "FACTS"] + [f"{fact['stage']}: " + json.dumps({k: v for k, v in fact.items() if k != "stage"}) for fact in notes]
    return "\n".join(lines)
