"""The hand-over from a prefill engine to a decode engine, in vLLM's `kv_transfer_params`.

    in the request for the prefill      {"do_remote_decode": true}
    in its answer                       {"do_remote_prefill": true, "kvarts": {"namespace", "tokens", "last_key", "tail_tokens"}}

The router copies the answer's parameters into the request for the decode engine. They name blocks but do not contain them: the blocks are transferred
through the store, and the decode engine computes missing ones. The parameters are not trusted: a request can delay only itself, and no longer than a
look-up without any result.
"""

from typing import NamedTuple

from .vllm_terms import params_of


def is_prefill(request):
    """Whether another engine decodes what this request computes."""
    return bool(params_of(request).get("do_remote_decode"))


def offered(request, plan, namespace, blocks):
    """The parameters for the decode engine. `blocks`: the number of the prompt's blocks that are stored or being stored."""
    tokens = blocks * plan.block_tokens
    kvarts = {"namespace": namespace.hex(), "tokens": tokens, "tail_tokens": request.num_prompt_tokens - tokens}
    if blocks:
        kvarts["last_key"] = plan.keys(request, blocks - 1, blocks)[0].hex()
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvarts": kvarts}


class Expected(NamedTuple):
    """The number of leading blocks of a prompt that another engine has computed. `why`: the reason for which they cannot be used."""

    blocks: int
    why: str | None = None


def expected(request, plan, namespace, last):
    """The blocks that were handed over for a request that needs `last` blocks at most."""
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
        # The blocks are of another prompt, or of a hash with another seed.
        return Expected(min(blocks, last), "OtherKeys")
    return Expected(min(blocks, last))
