"""How long an engine computes, by its own steps."""

import unittest
from unittest import mock

import kvarts
from kvarts.steps import Steps


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class Prompts(unittest.TestCase):
    """Steps of an engine whose clock is turned by hand."""

    def setUp(self):
        self.clock = Clock()
        patch = mock.patch("kvarts.steps.time", self.clock)
        patch.start()
        self.addCleanup(patch.stop)
        self.steps = Steps()
        self.added = []
        self.steps.add = lambda *what: self.added.append((*what[:2], round(what[2], 6)))
        #: Tokens of a request that are computed, and those of its prompt.
        self.requests = {}

    def make(self, waits=False, **counts):
        computed = lambda name: self.requests[name][0]  # noqa: E731
        left = lambda name: self.requests[name][1] - self.requests[name][0]  # noqa: E731
        self.steps.begin(counts, computed, left, waits)
        for name, count in counts.items():
            self.requests[name][0] += count

    def run_for(self, seconds):
        self.clock.now += seconds
        self.steps.end()

    def test_a_prompt_is_measured_whole_however_many_steps_compute_it(self):
        self.requests = {"a": [512, 1512], "b": [900, 800]}
        for count in (400, 400, 200):
            # One that decodes beside it hardly counts.
            self.make(a=count, b=1)
            self.run_for(0.25)
        self.assertEqual(self.added, [(512, 1000, 750.0)])
        # What follows is decoding.
        self.make(a=1, b=1)
        self.run_for(0.01)
        self.assertEqual(len(self.added), 1)

    def test_a_request_that_is_over_before_the_end_of_its_step_is_told_counts(self):
        # One of one token, as all those that another engine decodes.
        self.requests = {"a": [0, 200], "b": [0, 200]}
        self.make(a=200)
        self.clock.now += 0.5
        self.steps.forget("a")
        self.run_for(0.0)
        self.assertEqual(self.added, [(0, 200, 500.0)])
        # One that is given up in between does not.
        self.make(b=100)
        self.steps.forget("b")
        self.run_for(0.5)
        self.assertEqual((len(self.added), self.steps._prompts), (1, {}))

    def test_of_a_step_that_is_made_ahead_the_time_behind_the_one_before_counts(self):
        self.requests = {"a": [0, 200]}
        self.make(a=100)
        self.clock.now += 0.1
        self.make(a=100)
        self.run_for(0.2)
        self.run_for(0.3)
        self.assertEqual(self.added, [(0, 200, 600.0)])

    def test_prompts_that_share_a_step_wait_for_a_load_or_are_taken_back_say_nothing(self):
        self.requests = {"a": [0, 100], "b": [0, 100]}
        self.make(a=100, b=100)
        self.run_for(1.0)
        self.requests = {"c": [0, 200]}
        self.make(c=100, waits=True)
        self.run_for(1.0)
        self.make(c=100)
        self.run_for(1.0)
        self.assertEqual(self.added, [])
        self.requests = {"d": [0, 200]}
        self.make(d=100)
        self.run_for(1.0)
        self.requests["d"][0] = 50  # it was stopped, and has a part of it left
        self.make(d=150)
        self.run_for(1.0)
        self.assertEqual(self.added, [(50, 150, 1000.0)])

    def test_an_engine_that_does_not_tell_of_the_end_of_steps_is_not_measured_and_nothing_grows(self):
        for n in range(100):
            self.requests = {f"r{n}": [0, 100]}
            self.make(**{f"r{n}": 100})
        self.assertLessEqual(len(self.steps._made), 8)
        self.assertLessEqual(len(self.steps._prompts), 9)
        self.assertEqual(self.added, [])


class Times(unittest.TestCase):
    def test_they_are_said_after_some_prompts_and_are_those_in_the_middle(self):
        steps = Steps()
        for n in range(15):
            steps.add(0, 1000, 1e6 if n % 5 == 4 else 100.0)
        self.assertIsNone(steps.times)
        steps.add(0, 10, 1e9)  # too short to say anything
        self.assertIsNone(steps.times)
        steps.add(0, 4000, 400.0)
        times = steps.times
        self.assertAlmostEqual(times.prefill_ms(0, 1000), 100.0)
        self.assertIs(steps.times, times)

    def test_prompts_of_one_length_do_not_tell_a_token_from_a_step(self):
        steps = Steps()
        for n in range(40):
            steps.add(0, 1000 + n, 100.0)
        self.assertIsNone(steps.times)

    def test_what_is_measured_is_added_to_what_the_operator_says(self):
        self.assertIsInstance(Steps({"samples": [(0, 100, 7.0)]}).times, kvarts.Times)
        steps = Steps({"samples": [(0, 100, 7.0)]})
        for _ in range(16):
            steps.add(0, 1000, 100.0)
        self.assertAlmostEqual(steps.times.prefill_ms(0, 100), 7.0)
        self.assertAlmostEqual(steps.times.prefill_ms(0, 1000), 100.0)

    def test_however_many_lengths_there_are_a_request_can_carry_them(self):
        steps = Steps()
        for cached in range(30):
            for new in range(7, 30):
                steps.add(2**cached, 2**new, 2.0**new)
        self.assertLessEqual(len(steps._samples), 128)
        self.assertIsNotNone(steps.times)


if __name__ == "__main__":
    unittest.main()
