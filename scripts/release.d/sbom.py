"""Writes a bill of materials of the program, CycloneDX 1.6 as JSON: every crate that is linked into it or runs while it is built.

    sbom.py TARGET >FILE        of the programs `kvarts` and `kvarts-lab` with the features of a release, for this target

The same commit gives the same bytes: the time is SOURCE_DATE_EPOCH, the serial number follows from the contents."""

import datetime
import hashlib
import json
import os
import subprocess
import sys
import tomllib
import uuid

PROGRAMS = ("kvarts", "kvarts-bench")
REGISTRY = "registry+"


def resolved(target):
    """Packages by id, and those that each needs, as far as the programs reach."""
    asked = ["cargo", "metadata", "--locked", "--format-version", "1", "--features", "kvarts/s3", "--filter-platform", target]
    told = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    packages = {one["id"]: one for one in told["packages"]}
    needs = {}
    for node in told["resolve"]["nodes"]:
        linked = [dep["pkg"] for dep in node["deps"] if any(kind["kind"] != "dev" for kind in dep["dep_kinds"])]
        needs[node["id"]] = sorted(set(linked))
    left = [name for name, package in packages.items() if package["name"] in PROGRAMS and package["source"] is None]
    reached = set()
    while left:
        here = left.pop()
        if here not in reached:
            reached.add(here)
            left += needs[here]
    return {name: packages[name] for name in reached}, {name: needs[name] for name in reached}


def reference(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package, digests):
    """A crate as a component; one of the registry with the digest that Cargo.lock pins."""
    one = {
        "type": "application" if package["name"] in PROGRAMS else "library",
        "bom-ref": reference(package),
        "name": package["name"],
        "version": package["version"],
        "purl": reference(package),
        "scope": "required",
    }
    if package["description"]:
        one["description"] = " ".join(package["description"].split())
    if package["license"]:
        # Older crates divide alternatives by a slash.
        one["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    digest = digests.get((package["name"], package["version"]))
    if (package["source"] or "").startswith(REGISTRY) and digest:
        one["hashes"] = [{"alg": "SHA-256", "content": digest}]
    if package["repository"]:
        one["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return one


def main(target):
    packages, needs = resolved(target)
    with open("Cargo.lock", "rb") as lock:
        digests = {(one["name"], one["version"]): one.get("checksum") for one in tomllib.load(lock)["package"]}
    missing = [name for name, package in packages.items() if package["source"] and not digests.get((package["name"], package["version"]))]
    if missing:
        sys.exit(f"these crates have no digest in Cargo.lock: {missing}")
    program = next(one for one in packages.values() if one["name"] == "kvarts")
    components = sorted((component(one, digests) for one in packages.values() if one is not program), key=lambda one: one["bom-ref"])
    graph = [
        {"ref": reference(packages[name]), "dependsOn": sorted({reference(packages[need]) for need in needs[name]})}
        for name in sorted(needs, key=lambda name: reference(packages[name]))
    ]
    made = datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.timezone.utc)
    told = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": made.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": component(program, digests),
            "properties": [{"name": "kvarts:target", "value": target}, {"name": "kvarts:features", "value": "s3"}],
        },
        "components": components,
        "dependencies": graph,
    }
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    told["serialNumber"] = f"urn:uuid:{uuid.UUID(digest[:32], version=4)}"
    json.dump(told, sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
