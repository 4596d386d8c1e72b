"""What agents ask: conversations that begin with a few system prompts, grow by small turns and long outputs of tools, fork, and come back after a
while. One seed draws all of it, as requests in an order that the requests of each conversation keep."""

import random
from typing import NamedTuple

#: Tokens of an answer, and of what several conversations begin with.
ANSWER, SYSTEM = 8, 320
#: No prompt may have more, so that an answer has room.
_LONGEST = 1500
_VOCABULARY = (5, 505)


class Step(NamedTuple):
    """One request. `parent`: the step whose prompt and answer its prompt begins with, or none; `own`: the tokens behind those."""

    number: int
    kind: str
    conversation: int
    parent: int | None
    own: tuple


def drawn(seed, steps, conversations=8):
    """The steps of a seed."""
    chance = random.Random(seed)
    system = [_text(chance, SYSTEM) for _ in range(3)]
    found, last, lengths, begun = [], {}, {}, 0

    def add(kind, conversation, parent, own):
        before = 0 if parent is None else lengths[parent] + ANSWER
        found.append(Step(len(found), kind, conversation, parent, tuple(own)))
        lengths[len(found) - 1] = before + len(own)
        last[conversation] = len(found) - 1

    idle = []
    while len(found) < steps:
        live = [one for one in last if lengths[last[one]] < _LONGEST - 450 and one not in idle]
        what = chance.random()
        if len(live) < conversations // 2 or what < 0.06:
            add("new", begun, None, [*chance.choice(system), *_text(chance, chance.randrange(40, 240))])
            begun += 1
        elif what < 0.20:
            parent = last[chance.choice(live)]
            add("fork", begun, parent, _text(chance, chance.randrange(20, 60)))
            begun += 1
        elif what < 0.30 and idle:
            one = idle.pop(0)
            add("return", one, last[one], _text(chance, chance.randrange(20, 60)))
        elif what < 0.38 and len(live) > 2:
            idle.append(chance.choice(live))
        else:
            one = chance.choice(live)
            long = what > 0.75
            add("tool" if long else "turn", one, last[one], _text(chance, chance.randrange(200, 400) if long else chance.randrange(20, 60)))
    return found


def _text(chance, tokens):
    return [chance.randrange(*_VOCABULARY) for _ in range(tokens)]


def prompts_of(steps, answers):
    """Of each step its prompt, where `answers` are those of the steps before."""
    prompts = []
    for step in steps:
        before = [] if step.parent is None else [*prompts[step.parent], *answers[step.parent]]
        prompts.append([*before, *step.own])
    return prompts


def distinct_blocks(prompts, block):
    """Full blocks that differ, by all tokens up to their end."""
    return len({tuple(prompt[: end]) for prompt in prompts for end in range(block, len(prompt) + 1, block)})
