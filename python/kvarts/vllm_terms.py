"""What a request says of its blocks in vLLM's `kv_transfer_params`, to either connector.

    {"max_load_tokens": 4096, "max_offload_tokens": 8192, "ttl": 3600, "pin": 600, "skip_save": false,
     "session": "agent-7", "session_of": "agent-3", "session_shared_tokens": 320, "session_ends": false}

A value that is not understood is told in the log, with what would be, and ignored: an exception in vLLM's scheduler ends the engine. What
other connectors put there is theirs.
"""

import math
from typing import NamedTuple

from .link import logger

UNBOUNDED = 1 << 62
#: Seconds that a pin lasts at most: what a server grants.
PIN_MAX = 24 * 3600.0
#: Letters of a session's name at most.
NAME_MAX = 128
_NAME = f"text of 1 to {NAME_MAX} printable letters, as agent-7"
#: A hundred years: what lives longer has no time to live.
_TTL_MAX = 100 * 365 * 24 * 3600.0
#: Complaints that are remembered, so that each is told once.
_TOLD = 64
_told: dict[str, bool] = {}


def params_of(request):
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, dict) else {}


class Terms(NamedTuple):
    """Bounds in tokens, and times in seconds."""

    max_load_tokens: int = UNBOUNDED
    max_offload_tokens: int = UNBOUNDED
    #: How long what is stored for this request lives at most; what was stored before keeps its own time.
    ttl: float | None = None
    #: How long its blocks are held against eviction when it is over.
    pin: float | None = None
    #: Whether nothing of it is stored.
    skip_save: bool = False
    #: The conversation whose turn it is; the one that this was forked from; leading tokens that other conversations have, too; whether it is the last
    #: turn.
    session: str | None = None
    session_of: str | None = None
    session_shared_tokens: int = 0
    session_ends: bool = False


def _tokens(value):
    return value if type(value) is int and value >= 0 else None


def _seconds(most):
    def seconds(value):
        good = type(value) in (int, float) and math.isfinite(value) and 0 < value <= most
        return float(value) if good else None

    return seconds


def _flag(value):
    return value if type(value) is bool else None


def _name(value):
    return value if type(value) is str and 0 < len(value) <= NAME_MAX and value.isprintable() else None


def _impossible(value):
    return None


#: Of each field what it is made of, and what would be right.
_FIELDS = {
    "max_load_tokens": (_tokens, "a whole number of tokens, as 4096"),
    "max_offload_tokens": (_tokens, "a whole number of tokens, as 4096"),
    "ttl": (_seconds(_TTL_MAX), "seconds above 0, as 3600"),
    "pin": (_seconds(PIN_MAX), f"seconds above 0 and at most {PIN_MAX:.0f}, as 600"),
    "skip_save": (_flag, "true or false"),
    "session": (_name, _NAME),
    "session_of": (_name, _NAME),
    "session_shared_tokens": (_tokens, "a whole number of tokens, as 320"),
    "session_ends": (_flag, "true or false"),
    # A store evicts by what a block spares and what it costs to have.
    "priority": (_impossible, "removed: a store has no priorities of blocks; use `pin` to protect them, `ttl` to limit their time"),
}


def terms_of(request):
    """Never raises."""
    found, params = {}, params_of(request)
    for name, (made, right) in _FIELDS.items():
        value = params.get(name)
        if value is None:
            continue
        if (good := made(value)) is None:
            complain(f"kv_transfer_params: {name}: {_brief(value)} is ignored; it must be {right}")
        else:
            found[name] = good
    return Terms(**found)


def _brief(value):
    """What a client sent, which may be anything and of any length."""
    try:
        return repr(value)[:64]
    except Exception:
        return f"a {type(value).__name__}"


def complain(text):
    """Tells it once."""
    if text not in _told:
        if len(_told) >= _TOLD:
            del _told[next(iter(_told))]
        _told[text] = True
        logger.warning("kvarts: %s", text)
