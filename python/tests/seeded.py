"""Seeded courses of a connector with faults behind it: every seed must hold, and some seed must find each bug that is planted.

KVARTS_SEEDS=N runs N seeds."""

import contextlib
import os
from unittest import mock

SEEDS = int(os.environ.get("KVARTS_SEEDS", "60"))


class Seeded:
    """For a `TestCase`: `course` makes the course of a seed, which `go()` runs. A course raises what does not hold."""

    course = None

    def every_seed(self, times=1):
        """Runs every seed, or so many times as many, and gives each course to the caller when it is over."""
        for seed in range(times * SEEDS):
            with self.subTest(seed=seed):
                course = type(self).course(seed)
                course.go()
                yield course

    def expect_seen(self, wanted, *bugs):
        """Some seed says this of a connector with these bugs, each the place, the name and what stands there instead."""
        said = set()
        for seed in range(10 * SEEDS):
            with contextlib.ExitStack() as stack:
                for where, name, what in bugs:
                    stack.enter_context(mock.patch.object(where, name, what))
                try:
                    type(self).course(seed).go()
                except Exception as error:
                    said.add(str(error).split(":")[0])
                    if str(error).startswith(wanted):
                        return
        self.fail(f"of {10 * SEEDS} seeds none says {wanted}: {said}")
