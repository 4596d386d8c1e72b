"""The settings that determine the bytes of SGLang's caches, beside the pools themselves. Both connectors for SGLang use them."""

import json

import kvarts

from .link import configuration_of, told
from .sglang_compat import needed

#: Settings of SGLang that determine the bytes, beside the path and the revision, with the value of an absent setting.
_SETTINGS = {
    "dtype": None,
    "quantization": None,
    "kv_cache_dtype": None,
    "json_model_override_args": "{}",
    "load_format": None,
    "model_impl": None,
    "model_config_parser": "auto",
    "quantization_param_path": None,
    "modelopt_quant": None,
    "modelopt_checkpoint_restore_path": None,
    "qsa_indexer_dtype": "auto",
}
_LACKS = object()


def settings():
    """(path of the model, its revision, other settings that determine the bytes) of SGLang in this process. The name under which the model is served is
    left out, because the operator may choose any name."""
    model = needed("sglang.srt.runtime_context", "get_model")()
    path = getattr(model, "model_path", None)
    if not path:
        raise ValueError("model_path: SGLang's settings have no model path, so the blocks have no identity: start SGLang with --model-path")
    found = {}
    for name, absent in _SETTINGS.items():
        value = getattr(model, name, _LACKS)
        if value is _LACKS and absent is None and name in ("dtype", "quantization", "kv_cache_dtype"):
            raise ValueError(f"{name}: this version of SGLang has no such setting, but the bytes of blocks depend on it: install a tested version")
        found[name] = told(absent if value is _LACKS else value) or "none"
    _expect_one_rope(model, path)
    return path, getattr(model, "revision", None), found


def _expect_one_rope(model, path):
    """Raises `ValueError` if the keys of tokens may depend on other requests. SGLang uses LongRoPE's long factors for a whole batch if any position in
    the batch exceeds the trained length. A model with LongRoPE is therefore refused unless no prompt can exceed that length."""
    config = {**(configuration_of(path, getattr(model, "revision", None)) or {})}
    config.update(json.loads(getattr(model, "json_model_override_args", None) or "{}"))
    for one in (config, config.get("text_config") or {}):
        for rope in (one.get("rope_scaling"), one.get("rope_parameters")):
            if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) in ("longrope", "su"):
                trained = rope.get("original_max_position_embeddings") or one.get("original_max_position_embeddings") or 0
                if not getattr(model, "context_length", None) or model.context_length > trained:
                    raise ValueError(f"context_length: with LongRoPE, longer prompts change the keys of other requests: set context_length to at most {trained}")


def expect_namespaces():
    """Raises `ValueError` unless page hashes differ by adapter and by salt. Otherwise a page of one adapter would be restored for another."""
    seed = needed("sglang.srt.mem_cache.utils", "storage_namespace_seed")
    needed("sglang.srt.mem_cache.utils", "get_storage_hash_str")
    if len({seed(None, None), seed("adapter", None), seed("other", None), seed(None, "salt")}) != 4:
        raise ValueError("storage_namespace_seed: SGLang's page hashes are the same for different adapters or salts: install a tested version of SGLang")


def names_of(keys):
    """The keys of SGLang's pages. SGLang's digests of 64 hexadecimal digits become the same 32 bytes; other names are hashed."""
    return [bytes.fromhex(key) if len(key) == 64 and key.isalnum() else kvarts.key("sglang", key) for key in keys]
