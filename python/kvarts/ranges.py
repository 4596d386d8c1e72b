"""Which ranges of a model's heads a rank has, by the count of ranges that engines of different tensor parallelism agree on.

A block of layers with heads has a column for each range, and every range has as many heads: range `n` of `count` has the heads from `n * heads /
count` on. A rank has a part of all ranges that follow each other, or shares one range with other ranks that hold the same heads; then the
first of these saves it. So what a column has is the same whatever the ranks of the engine that wrote it.
"""

from typing import NamedTuple


class Ranges(NamedTuple):
    """Of `total` ranges those that a rank has."""

    total: int
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


def expect_count(given, heads, ranks):
    """Refuses a count that an operator has given, if it cannot be used."""
    possible = counts_of(heads, ranks)
    if given not in possible:
        instead = f"set one of {', '.join(map(str, possible))}" if possible else "remove the setting"
        raise ValueError(f"head_ranges: {given!r} ranges of {heads} heads cannot be divided among {ranks} ranks; {instead}")


def expect_number(given):
    if given is not None and (type(given) is not int or given < 1):
        raise ValueError(f"head_ranges: {given!r} is not a number of ranges of heads")


def expect_even(configuration, heads):
    """Refuses a model whose layers may differ in their number of heads. Of more ranks than heads each has one of every layer, whatever number the
    layer has: which ranks have the same one, its caches do not say. `configuration`: the model's."""
    found = list(_numbers(configuration))
    if not found or any(number != heads for number in found):
        raise ValueError(f"head_ranges: the model's configuration does not give {heads} heads for every layer; set at least as many ranges as there are ranks")


def _numbers(configuration, is_named=False):
    """All numbers of heads that a configuration has, by the names of what has them."""
    if isinstance(configuration, dict):
        for name, value in configuration.items():
            yield from _numbers(value, is_named or any(part in str(name) for part in _NAMES))
    elif isinstance(configuration, (list, tuple)):
        for value in configuration:
            yield from _numbers(value, is_named)
    elif is_named and configuration is not None:
        yield configuration


#: Parts of names under which models have numbers of heads of keys and values.
_NAMES = ("key_value_heads", "kv_heads", "kv_n_heads", "query_groups", "attention_groups", "heads_in_group")
