"""Ranges of a model's heads, so that engines with different tensor parallelism share blocks. The engines must use the same number of ranges.

A block of layers with heads has a column for each range, and all ranges have the same number of heads: range `n` of `count` begins at head `n * heads
/ count`. A rank has several consecutive ranges, or shares one range with other ranks that have the same heads; then the first of these ranks saves
the range. The bytes of a column therefore do not depend on the number of ranks of the engine that wrote it.
"""

from typing import NamedTuple


class Ranges(NamedTuple):
    """The ranges that a rank has, out of `total`."""

    total: int
    own: range
    saves: bool


def ranges_of(rank, ranks, count):
    """The ranges of rank `rank` of `ranks`. One of `ranks` and `count` must divide the other."""
    first = rank * count // ranks
    return Ranges(count, range(first, first + max(1, count // ranks)), rank * count % ranks == 0)


def counts_of(heads, ranks):
    """The numbers of ranges into which `heads` heads can be split for an engine with `ranks` ranks."""
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    return [count for count in divisors if count % ranks == 0 or (count == heads and ranks % heads == 0)]


def expect_count(given, heads, ranks):
    """Raises `ValueError` if the configured number of ranges cannot be used."""
    possible = counts_of(heads, ranks)
    if given not in possible:
        instead = f"set one of {', '.join(map(str, possible))}" if possible else "remove the setting"
        raise ValueError(f"head_ranges: {given!r} is not a possible number of ranges for {heads} heads and {ranks} tensor-parallel ranks; {instead}")


def expect_number(given):
    if given is not None and (type(given) is not int or given < 1):
        raise ValueError(f"head_ranges: {given!r} is not valid: set the number of ranges of heads, a whole number of 1 or more")


def expect_even(configuration, heads):
    """Raises `ValueError` for a model whose layers may differ in their number of heads. With more ranks than heads, each rank has one head of every
    layer, and the caches do not show which ranks have the same head. `configuration`: the model's."""
    found = list(_numbers(configuration))
    if not found or any(number != heads for number in found):
        raise ValueError(f"head_ranges: the model's configuration does not have {heads} heads for every layer: set head_ranges to the number of ranks or more")


def _numbers(configuration, is_named=False):
    """All numbers of heads in a configuration, found by the names of its fields."""
    if isinstance(configuration, dict):
        for name, value in configuration.items():
            yield from _numbers(value, is_named or any(part in str(name) for part in _NAMES))
    elif isinstance(configuration, (list, tuple)):
        for value in configuration:
            yield from _numbers(value, is_named)
    elif is_named and configuration is not None:
        yield configuration


#: Parts of the names of fields that have the number of heads of keys and values.
_NAMES = ("key_value_heads", "kv_heads", "kv_n_heads", "query_groups", "attention_groups", "heads_in_group")
