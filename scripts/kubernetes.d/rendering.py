"""What Helm makes of the chart, and kustomize of the recipes. Run as a program it prints packaging/kubernetes/daemonset.yaml."""

import os
import subprocess

import yaml

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDER = os.path.join(ROOT, "packaging", "kubernetes")
CHART = os.path.join(FOLDER, "chart")
RECIPES = os.path.join(FOLDER, "recipes")
#: The page's file that needs no Helm.
PLAIN = os.path.join(FOLDER, "daemonset.yaml")
#: How long one program may take.
SECONDS = 60
HEAD = """\
# One server on each node with local disks. This file is the output of the chart with its default values (`scripts/kubernetes render` writes the
# file). docs/guides/kubernetes.md describes the requirements of the nodes, and how to create the Secret kvarts-tokens. The chart can also create
# alert rules for the Prometheus operator, and a dashboard.
"""


class Refused(Exception):
    """What a program said on standard error."""


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise Refused(done.stderr)
    return done.stdout


def values_file(name):
    return os.path.join(CHART, "ci", f"{name}.yaml")


def text(*sets, values=None, release="kvarts"):
    """The chart's text, for `name=value` sets and a file of values."""
    files = ["--values", values_file(values)] if values else []
    return run("helm", "template", release, CHART, "--namespace", "kvarts", *files, *(part for one in sets for part in ("--set-json", one)))


def objects(rendered):
    return [one for one in yaml.safe_load_all(rendered) if one]


def render(*sets, **kwargs):
    return objects(text(*sets, **kwargs))


def kustomize(folder):
    return objects(run("kubectl", "kustomize", folder))


def of_kind(all_objects, kind):
    return [one for one in all_objects if one["kind"] == kind]


def plain():
    return HEAD + text()


if __name__ == "__main__":
    print(plain(), end="")
