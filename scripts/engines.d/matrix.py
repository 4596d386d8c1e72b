"""Which checks were run with which version of an engine, and what became of them: as a page of the journal, and in between as a file.

Every check that ends is written down (`record`). `write` moves that into the page, beside what stands there of other versions, so the page says
nothing that no run has said."""

import json
import os
import re
import subprocess
import time

from common import PLACE, ROOT

PAGE = os.path.join(ROOT, "journal", "engines.md")
_FILE = os.path.join(PLACE, "results.json")
#: Which checks try a feature of an engine. One that no check tries stands in the table, too.
FEATURES = {
    "prefix caching": ("restart", "layers-restart", "linker-restart", "engine"),
    "chunked prefill": ("layers-course",),
    "windows (hybrids)": ("hybrid", "layers-hybrid", "pools", "linker-pools"),
    "recurrent states (hybrids)": ("layers-states",),
    "tensor parallelism": ("layers-ranks", "layers-heads", "linker-ranks"),
    "pipeline parallelism": ("layers-stages",),
    "prefill and decode apart": ("layers-handover", "decode-offload"),
    "cache of 8 bits (fp8)": (),
    "adapters (LoRA)": (),
    "draft models (MTP)": (),
}
_HEAD = """# Engines that were run

`scripts/engines matrix` writes this page from the results of `scripts/engines check`: a row for each check that has ended. The checks run on a CPU,
with tiny random models and a real server. Checks without a row were not run. [Engines](../docs/engines.md#tests-with-the-real-engines) describes the
checks and their figures.
"""
_ROW = re.compile(r"^\| (\S+ \S+) \| `([\w-]+)` \| (passed|FAILED|SKIPPED)(?:: (.*?))? \| (\S+) \| (\S+) \|$")


def record(engine, check, result, note=""):
    rows = _recorded()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    # Why something was left out belongs to it; figures and traces do not.
    why = note.splitlines()[0].replace("|", "/")[:160] if result == "SKIPPED" and note else ""
    rows[f"{engine} {check}"] = [engine, check, result, why, time.strftime("%Y-%m-%d", time.gmtime()), commit]
    os.makedirs(PLACE, exist_ok=True)
    with open(_FILE + ".new", "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)
    os.replace(_FILE + ".new", _FILE)


def _recorded():
    try:
        with open(_FILE, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def _of_page():
    try:
        with open(PAGE, encoding="utf-8") as page:
            found = [_ROW.match(line.rstrip("\n")) for line in page]
    except OSError:
        return {}
    return {f"{row[1]} {row[2]}": [part or "" for part in row.groups()] for row in found if row}


def write():
    rows = {**_of_page(), **_recorded()}
    with open(PAGE, "w", encoding="utf-8") as page:
        page.write(page_of([rows[name] for name in sorted(rows)]))
    return f"{len(rows)} rows in {os.path.relpath(PAGE, ROOT)}"


def page_of(rows):
    engines = sorted({engine for engine, *_ in rows})
    lines = [_HEAD, "| Feature | " + " | ".join(engines) + " |", "|---" * (1 + len(engines)) + "|"]
    for feature, checks in FEATURES.items():
        lines.append(f"| {feature} | " + " | ".join(_told(rows, engine, checks) for engine in engines) + " |")
    lines += ["", "| Engine | Check | Result | Date | Commit |", "|---|---|---|---|---|"]
    lines += [f"| {engine} | `{check}` | {result}{': ' + why if why else ''} | {date} | {commit} |" for engine, check, result, why, date, commit in rows]
    return "\n".join(lines) + "\n"


def _told(rows, engine, checks):
    """What was run of a feature: the worst of it first."""
    found = {check: result for of, check, result, *_ in rows if of == engine and check in checks}
    for result in ("FAILED", "passed", "SKIPPED"):
        named = [f"`{check}`" for check, one in found.items() if one == result]
        if named:
            return f"{result}: {', '.join(named)}" if result != "SKIPPED" else f"not run here: {', '.join(named)}"
    return "not run"
