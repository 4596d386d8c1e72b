"""Measures an engine's prefill times by its own steps. The planner uses the times, and the store values blocks by them.

A prompt is measured if its steps computed almost nothing else and did not wait for a load. The measure is the time of all steps of the prompt together.
A step lasts from its creation, or from the end of the previous step if the engine creates steps ahead of time.
"""

import threading
import time
from collections import deque

import kvarts

#: The number of measured prompts before the times are used.
_LEAST = 16
#: The minimum of tokens of a measured prompt.
_TOKENS = 64
#: The minimal ratio of the longest to the shortest prompt. Prompts of similar lengths do not separate the time of a step from that of a token, and a
#: hit would seem to save no time.
_WIDTH = 4
#: The minimal fraction of a step's tokens that a prompt must have for the step to be measured.
_OWN = 0.9
#: The number of prompts in a class of lengths, of which the median counts.
_KEPT = 5
#: The limit of classes of lengths, for which the latest ones are kept. A request has no room for more.
_CLASSES = 128
#: The limit of created steps whose end was not reported. No engine creates more steps ahead.
_AHEAD = 8


class _Prompt:
    """A prompt that is being computed."""

    def __init__(self, cached, left):
        self.cached, self.left = cached, left
        self.made = 0  # tokens in steps that were made
        self.new, self.ms, self.counts = 0, 0.0, True


class Steps:
    """The engine's times. `given`: the operator's arguments of `kvarts.Times`; measured times are added to them."""

    def __init__(self, given=None):
        self._given = dict(given or {})
        self._times = kvarts.Times(**self._given) if self._given else None
        self._prompts, self._made, self._ended = {}, deque(), 0.0
        self._lock = threading.Lock()
        self._samples, self._count, self._is_new = {}, 0, False

    # Of the scheduler's thread.

    def begin(self, counts, cached, left, waits=False):
        """Records a new step. `counts`: name of a request -> its tokens in the step; `cached(name)`: tokens that were computed before the step;
        `left(name)`: the prompt's tokens behind these. `waits`: whether the step waits for a load."""
        own = {}
        for name, count in counts.items():
            prompt = self._prompts.get(name)
            if prompt is not None and cached(name) != prompt.cached + prompt.made:
                # The engine has discarded computed tokens.
                del self._prompts[name]
                prompt = None
            if prompt is None and left(name) > 1:
                prompt = self._prompts[name] = _Prompt(cached(name), left(name))
            if prompt is not None:
                prompt.counts &= count >= _OWN * sum(counts.values()) and not waits
                prompt.made += count
                own[name] = (prompt, count)
        self._made.append((time.monotonic(), own))
        if len(self._made) > _AHEAD:
            # The engine does not report the ends of steps.
            self._made.clear()
            self._prompts.clear()

    def end(self):
        """Records that the oldest step has run."""
        if not self._made:
            return
        (began, own), now = self._made.popleft(), time.monotonic()
        ms, self._ended = 1000 * (now - max(began, self._ended)), now
        for name, (prompt, count) in own.items():
            prompt.new += count
            prompt.ms += ms
            if prompt.new >= prompt.left and self._prompts.get(name) is prompt:
                del self._prompts[name]
                if prompt.counts:
                    self.add(prompt.cached, prompt.left, prompt.ms)

    def forget(self, name):
        """Records that a request has ended. A request with one token ends before the end of its step is reported; its prompt is still measured."""
        prompt = self._prompts.get(name)
        if prompt is not None and prompt.made < prompt.left:
            del self._prompts[name]

    def add(self, cached, new, ms):
        """Adds the measured time of a prompt."""
        if new < _TOKENS or ms <= 0:
            return
        place = cached.bit_length(), new.bit_length()
        with self._lock:
            like = self._samples.pop(place, None) or deque(maxlen=_KEPT)
            like.append((ms / new, cached, new, ms))
            self._samples[place] = like  # the latest last
            if len(self._samples) > _CLASSES:
                del self._samples[next(iter(self._samples))]
            self._count += 1
            self._is_new = True

    # Of any thread.

    @property
    def times(self):
        """The engine's times as `kvarts.Times`; `None` until enough prompts were measured."""
        with self._lock:
            if self._is_new and self._count >= _LEAST:
                self._is_new = False
                given = {(cached, new): ms for cached, new, ms in self._given.get("samples") or ()}
                for like in self._samples.values():
                    _, cached, new, ms = sorted(like)[len(like) // 2]
                    given[cached, new] = ms
                samples = [(cached, new, ms) for (cached, new), ms in given.items()]
                lengths = [new for _, new, _ in samples]
                if max(lengths) < _WIDTH * min(lengths):
                    return self._times
                self._times = kvarts.Times(**{**self._given, "samples": samples})
            return self._times
