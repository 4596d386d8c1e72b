"""What an engine that is installed has of the hooks that Kvarts' connectors use.

    python -m kvarts.probe vllm|sglang|lmcache [--place DIR] [--json]

Nothing of the engine is imported or started. `--place`: the directory (`site-packages`) that has the engine, where it is not this Python's. Exit
codes: 0 the connectors find what they need; 1 they do not, or the engine is not there; 2 wrong arguments."""

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
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--place", metavar="DIR", help="the directory that has the engine's package")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    engine = engine_of(given.engine)
    report = hooks.look(engine, given.place)
    if given.json:
        print(json.dumps(document(report), indent=2))
    else:
        print("\n".join([*hooks.told(report), *_good(engine, report)]))
    return 1 if report.verdict == "bad" else 0


def _good(engine, report):
    """Connectors of which there is nothing to tell."""
    if report.version is None:
        return []
    return [f"{part.module}: the engine has all interfaces that the connector needs" for part in engine.parts if not report.of(part.module)]


if __name__ == "__main__":
    sys.exit(main())
