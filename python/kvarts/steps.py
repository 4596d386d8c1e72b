"""How long an engine computes a prompt, by its own steps: what the planner asks, and what a store takes its blocks to be worth.

A prompt counts when it was computed in steps that computed hardly anything else, none of which waited for a load. What counts is the time of
all of its tokens together, however many steps they took. A step lasts from when it was made, or from the end of the step before, where the
engine makes a step ahead.
"""

import threading
import time
from collections import deque

import kvarts

#: Prompts that are measured before anything is said.
_LEAST = 16
#: Tokens of a prompt that says anything.
_TOKENS = 64
#: How many times as long the longest prompt must be as the shortest: prompts alike do not tell what a step takes from what a token does, and
#: a hit would seem to spare nothing.
_WIDTH = 4
#: How much of a step's tokens a prompt must have for the step to count as its own.
_OWN = 0.9
#: Prompts of like lengths of which the one in the middle counts.
_KEPT = 5
#: Classes of lengths, the latest ones: a request carries no more.
_CLASSES = 128
#: Steps that are made and whose end was not told: more of them no engine has.
_AHEAD = 8


class _Prompt:
    """A prompt that is being computed."""

    def __init__(self, cached, left):
        self.cached, self.left = cached, left
        self.made = 0  # tokens in steps that were made
        self.new, self.ms, self.counts = 0, 0.0, True


class Steps:
    """`given`: what the operator says of the engine's times, as `kvarts.Times` takes it; what is measured is added to it."""

    def __init__(self, given=None):
        self._given = dict(given or {})
        self._times = kvarts.Times(**self._given) if self._given else None
        self._prompts, self._made, self._ended = {}, deque(), 0.0
        self._lock = threading.Lock()
        self._samples, self._count, self._is_new = {}, 0, False

    # Of the scheduler's thread.

    def begin(self, counts, cached, left, waits=False):
        """A step is made: of each request its tokens; `cached(name)`: those that were computed before it, `left(name)`: those of its prompt
        behind them. `waits`: whether it waits for a load."""
        own = {}
        for name, count in counts.items():
            prompt = self._prompts.get(name)
            if prompt is not None and cached(name) != prompt.cached + prompt.made:
                # The engine took back what it had computed.
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
            # The engine does not tell.
            self._made.clear()
            self._prompts.clear()

    def end(self):
        """The oldest step that was made has run."""
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
        """A request is over. One of one token is over before the end of its step is told: its prompt counts all the same."""
        prompt = self._prompts.get(name)
        if prompt is not None and prompt.made < prompt.left:
            del self._prompts[name]

    def add(self, cached, new, ms):
        """A prompt was computed."""
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
        """What is known of the engine; `None` until enough is."""
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
