"""What an engine that prefills hands over to one that decodes, in vLLM's `kv_transfer_params`.

    in the request that is prefilled    {"do_remote_decode": true}
    in its answer                       {"do_remote_prefill": true, "kvarts": {"namespace", "tokens", "last_key", "tail_tokens"}}

The answer is passed on in the request that is decoded. It names blocks and has none: they go through the store, and what of them does not come
is computed. What is said here is not trusted: a request can make nothing but itself wait, and no longer than a look-up does for which
nothing comes.
"""

from typing import NamedTuple

from .vllm_terms import params_of


def is_prefill(request):
    """Whether another engine decodes what this request computes."""
    return bool(params_of(request).get("do_remote_decode"))


def offered(request, plan, namespace, blocks):
    """What is said of a request that was prefilled: of its prompt `blocks` are stored, or on their way to the store."""
    tokens = blocks * plan.block_tokens
    kvarts = {"namespace": namespace.hex(), "tokens": tokens, "tail_tokens": request.num_prompt_tokens - tokens}
    if blocks:
        kvarts["last_key"] = plan.keys(request, blocks - 1, blocks)[0].hex()
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvarts": kvarts}


class Expected(NamedTuple):
    """How many leading blocks of a prompt another engine has computed. `why`: why they cannot be expected all the same."""

    blocks: int
    why: str | None = None


def expected(request, plan, namespace, last):
    """What was handed over for a request that needs `last` blocks at most."""
    params = params_of(request)
    told = params.get("kvarts")
    if not params.get("do_remote_prefill") or not isinstance(told, dict):
        return Expected(0)
    tokens = told.get("tokens")
    blocks = tokens // plan.block_tokens if type(tokens) is int else 0
    if blocks <= 0:
        return Expected(0)
    if told.get("namespace") != namespace.hex():
        return Expected(min(blocks, last), "OtherIdentity")
    if blocks * plan.block_tokens > request.num_tokens or plan.keys(request, blocks - 1, blocks)[0].hex() != told.get("last_key"):
        # Another prompt, or a hash with another seed.
        return Expected(min(blocks, last), "OtherKeys")
    return Expected(min(blocks, last))
