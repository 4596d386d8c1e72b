"""Checks whether an installed engine has the interfaces that Kvarts' connectors use.

    python -m kvarts.probe vllm|sglang|lmcache [--place DIR] [--json]

The check imports and starts nothing of the engine. `--place`: the directory (`site-packages`) that contains the engine (default: this Python's). Exit
codes: 0: the engine has all required interfaces; 1: an interface is missing, or the engine is not installed; 2: wrong arguments."""

import argparse
import importlib
import json
import sys

from . import hooks

ENGINES = ("vllm", "sglang", "lmcache")


def engine_of(name):
    return importlib.import_module(f"kvarts.{name}_compat").ENGINE


def document(report):
    parts = {}
    for one in report.findings:
        parts.setdefault(one.part, []).append({"how": one.how, "name": one.name})
    is_tried = report.version in report.tried
    found = [{"connector": part, "findings": findings} for part, findings in parts.items()]
    return {
        "engine": report.engine,
        "version": report.version,
        "tried": list(report.tried),
        "is_tried": is_tried,
        "verdict": report.verdict,
        "connectors": found,
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="kvarts.probe", description=__doc__.split("\n", 1)[0])
    parser.add_argument("engine", choices=ENGINES, help="the engine to check")
    parser.add_argument("--place", metavar="DIR", help="the directory (site-packages) that contains the engine's package [this Python's]")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    given = parser.parse_args(arguments)
    engine = engine_of(given.engine)
    report = hooks.look(engine, given.place)
    if given.json:
        print(json.dumps(document(report), indent=2))
    else:
        print("\n".join([*hooks.told(report), *_good(engine, report)]))
    return 1 if report.verdict == "bad" else 0


def _good(engine, report):
    """Lines for the connectors without findings."""
    if report.version is None:
        return []
    return [f"{part.module}: the engine has all interfaces that the connector needs" for part in engine.parts if not report.of(part.module)]


if __name__ == "__main__":
    sys.exit(main())
