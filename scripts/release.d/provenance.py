"""Writes where a release comes from, as an in-toto statement with the predicate of SLSA 1: what was built, from which commit, by what.

    provenance.py FILE... >FILE        of these files, by their digests

The facts that the script which builds knows come in the environment: COMMIT, TAG, FLAGS, PROFILE, TARGETS, SOURCE_DATE_EPOCH."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys


def digest(path):
    return {"sha256": hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()}


def said(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main(files):
    given = os.environ
    tools = {"rustc": said("rustc", "-vV"), "cargo": said("cargo", "-V"), "cc": said("cc", "--version").splitlines()[0]}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": pathlib.Path(file).name, "digest": digest(file)} for file in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:kvarts:scripts/release",
                "externalParameters": {"tag": given["TAG"] or None, "profile": given["PROFILE"], "targets": given["TARGETS"].split()},
                "internalParameters": {"RUSTFLAGS": given["FLAGS"], "SOURCE_DATE_EPOCH": given["SOURCE_DATE_EPOCH"], "tools": tools},
                "resolvedDependencies": [
                    {"name": "sources", "digest": {"gitCommit": given["COMMIT"]}},
                    {"name": "Cargo.lock", "digest": digest("Cargo.lock")},
                    {"name": "rust-toolchain.toml", "digest": digest("rust-toolchain.toml")},
                ],
            },
            "runDetails": {
                "builder": {"id": "urn:kvarts:scripts/release:by-hand"},
            },
        },
    }
    json.dump(statement, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main(sys.argv[1:])
