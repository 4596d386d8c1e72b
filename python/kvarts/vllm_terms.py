"""The terms of a request: how the connectors load, store and protect its blocks. Both connectors read them from vLLM's `kv_transfer_params`.

    {"max_load_tokens": 4096, "max_offload_tokens": 8192, "ttl": 3600, "pin": 600, "skip_save": false,
     "session": "agent-7", "session_of": "agent-3", "session_shared_tokens": 320, "session_ends": false}

An invalid value is ignored, and a message with the valid form is logged, because an exception in vLLM's scheduler would end the engine. The connectors
ignore the parameters of other connectors.
"""

import math
from typing import NamedTuple

from .link import logger

UNBOUNDED = 1 << 62
#: The limit of a pin in seconds, as the server enforces it.
PIN_MAX = 24 * 3600.0
#: The limit of characters of a session's name.
NAME_MAX = 128
_NAME = f"text of 1 to {NAME_MAX} printable characters, such as agent-7"
#: A hundred years. A longer time to live is not valid.
_TTL_MAX = 100 * 365 * 24 * 3600.0
#: The limit of remembered complaints. A remembered complaint is not logged again.
_TOLD = 64
_told: dict[str, bool] = {}


def params_of(request):
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, dict) else {}


class Terms(NamedTuple):
    """The terms of a request: limits in tokens, and times in seconds."""

    max_load_tokens: int = UNBOUNDED
    max_offload_tokens: int = UNBOUNDED
    #: The time to live of blocks that are stored for this request. Blocks that were stored before keep their own time.
    ttl: float | None = None
    #: How long the request's blocks are protected from eviction after its end.
    pin: float | None = None
    #: Whether the request's blocks are not stored.
    skip_save: bool = False
    #: The conversation of which the request is a turn; the conversation from which that one was forked; the number of leading tokens that other
    #: conversations share; whether it is the last turn.
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


#: name -> (conversion, description of a valid value).
_FIELDS = {
    "max_load_tokens": (_tokens, "a whole number of tokens, such as 4096"),
    "max_offload_tokens": (_tokens, "a whole number of tokens, such as 4096"),
    "ttl": (_seconds(_TTL_MAX), "a number of seconds above 0, such as 3600"),
    "pin": (_seconds(PIN_MAX), f"a number of seconds above 0 and at most {PIN_MAX:.0f}, such as 600"),
    "skip_save": (_flag, "true or false"),
    "session": (_name, _NAME),
    "session_of": (_name, _NAME),
    "session_shared_tokens": (_tokens, "a whole number of tokens, such as 320"),
    "session_ends": (_flag, "true or false"),
    # A store evicts by the time that a block saves and by its cost.
    "priority": (_impossible, "removed, because a store has no priorities of blocks; use `pin` to protect blocks, or `ttl` to limit their time to live"),
}


def terms_of(request):
    """The terms of a request. Logs and ignores invalid values. Never raises."""
    found, params = {}, params_of(request)
    for name, (made, right) in _FIELDS.items():
        value = params.get(name)
        if value is None:
            continue
        if (good := made(value)) is None:
            complain(f"kv_transfer_params: {name}: {_brief(value)} is ignored; the value must be {right}")
        else:
            found[name] = good
    return Terms(**found)


def _brief(value):
    """A short text of a client's value, which may be anything of any length."""
    try:
        return repr(value)[:64]
    except Exception:
        return f"a {type(value).__name__}"


def complain(text):
    """Logs a complaint once."""
    if text not in _told:
        if len(_told) >= _TOLD:
            del _told[next(iter(_told))]
        _told[text] = True
        logger.warning("kvarts: %s", text)
