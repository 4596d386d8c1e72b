"""Which ranges of a model's heads a rank has, by the count of ranges that engines of different tensor parallelism agree on.

A block of layers with heads has a column for each range, and every range has as many heads: range `n` of `count` has the heads from `n * heads /
count` on. A rank has a part of all ranges that follow each other, or shares one range with other ranks that hold the same heads; then the
first of these saves it. So what a column has is the same whatever the ranks of the engine that wrote it.
"""

from typing import NamedTuple


class Ranges(NamedTuple):
    """Of `count` ranges those that a rank has."""

    count: int
    own: range
    saves: bool


def ranges_of(rank, ranks, count):
    """Those of one of `ranks` ranks; one of both numbers divides the other."""
    first = rank * count // ranks
    return Ranges(count, range(first, first + max(1, count // ranks)), rank * count % ranks == 0)


def counts_of(heads, ranks):
    """Numbers of ranges into which this number of heads can be split for an engine of this number of ranks."""
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    return [count for count in divisors if count % ranks == 0 or (count == heads and ranks % heads == 0)]


def count_of(given, heads, ranks):
    """The count that an operator has given, if it can be used; by default the least, which costs a rank nothing."""
    possible = counts_of(heads, ranks)
    if given is None and possible:
        return possible[0]
    if given in possible:
        return given
    instead = f"name one of {', '.join(map(str, possible))}" if possible else "leave it out"
    raise ValueError(f"head_ranges: {given!r} ranges of {heads} heads do not go with {ranks} ranks; {instead}")
