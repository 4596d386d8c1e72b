"""Compares Cargo.lock with advisories of RustSec, without a network.

    advisories.py DATABASE        a copy of the advisory database: a folder, or a git repository (a bare one, too)

An advisory is met by a version that its `patched` and `unaffected` do not cover. Those that deny.toml ignores are named with their reason;
an ignored one that no crate meets any more is a fault as well. Exit code 1 if something is found."""

import pathlib
import re
import subprocess
import sys
import tomllib

OPERATORS = {"<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b}


def key(text):
    """Versions in their order: one before its release has a mark that comes before all releases."""
    plain, _, before = text.split("+")[0].partition("-")
    numbers = [int(part) for part in plain.split(".")]
    marks = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in before.split(".")) if before else ((2, 0, ""),)
    return tuple(numbers + [0] * (3 - len(numbers))), marks


def above(text):
    """The first version that `^text` leaves out."""
    numbers = [int(part) for part in text.split("-")[0].split(".")]
    place = next((at for at, number in enumerate(numbers) if number), len(numbers) - 1)
    return tuple((numbers[:place] + [numbers[place] + 1] + [0, 0, 0])[:3]), ((0, -1, ""),)


def holds(requirement, version):
    """Whether a version is one of those that a requirement names: parts divided by commas, all of which hold."""
    for part in requirement.split(","):
        sign, text = re.fullmatch(r"\s*(<=|>=|<|>|=|\^|~)?\s*(\S+)\s*", part).groups()
        if text == "*":
            continue
        if sign in OPERATORS:
            good = OPERATORS[sign](key(version), key(text))
        elif sign == "=":
            good = key(version) == key(text)
        elif sign == "~":
            good = key(version) >= key(text) and key(version)[0][:2] == key(text)[0][:2]
        else:
            good = key(text) <= key(version) < above(text)
        if not good:
            return False
    return True


def advisories(database):
    """The head of each advisory of the database."""
    if (database / "crates").is_dir():
        texts = (path.read_text() for path in sorted(database.glob("crates/*/*.md")))
    else:
        git = ["git", "-C", str(database)]
        listed = subprocess.run([*git, "ls-tree", "-r", "--name-only", "HEAD", "crates"], check=True, capture_output=True, text=True).stdout
        names = [name for name in listed.splitlines() if name.endswith(".md")]
        asked = "".join(f"HEAD:{name}\n" for name in names).encode()
        out = subprocess.run([*git, "cat-file", "--batch"], input=asked, check=True, capture_output=True).stdout
        texts = []
        for _ in names:
            head, _, out = out.partition(b"\n")
            size = int(head.split()[2])
            texts.append(out[:size].decode())
            out = out[size + 1 :]
    for text in texts:
        yield tomllib.loads(text.split("```toml", 1)[1].split("```", 1)[0])


def main(database):
    locked = tomllib.loads(pathlib.Path("Cargo.lock").read_text())["package"]
    ignored = {one["id"]: one["reason"] for one in tomllib.loads(pathlib.Path("deny.toml").read_text())["advisories"]["ignore"]}
    versions = {}
    for package in locked:
        versions.setdefault(package["name"], []).append(package["version"])
    seen, found, met = 0, 0, set()
    for one in advisories(pathlib.Path(database)):
        head, covered = one["advisory"], one.get("versions", {})
        seen += 1
        if "withdrawn" in head:
            continue
        for version in versions.get(head["package"], []):
            if any(holds(good, version) for good in covered.get("patched", []) + covered.get("unaffected", [])):
                continue
            met.add(head["id"])
            if head["id"] in ignored:
                print(f"ignored: {head['id']} {head['package']} {version}: {ignored[head['id']]}")
            else:
                found += 1
                print(f"FOUND: {head['id']} {head['package']} {version} ({head.get('informational', 'vulnerability')}), {head['date']}")
    if seen < 500:
        sys.exit(f"{database}: the folder has only {seen} advisories, so it is not a copy of the advisory database")
    stale = sorted(set(ignored) - met)
    for name in stale:
        print(f"STALE: deny.toml ignores {name}, which no crate of Cargo.lock matches: remove the entry")
    print(f"{len(locked)} crates, {seen} advisories: {found} found, {len(met & set(ignored))} ignored, {len(stale)} stale")
    return 1 if found or stale else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
