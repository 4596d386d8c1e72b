"""What decides the bytes of SGLang's caches, beside the pools themselves: for both ways to keep them in Kvarts."""

import json

import kvarts

from .link import configuration_of, told
from .sglang_compat import needed

#: Settings of SGLang that decide bytes, beside the path and the revision, and what an absent one means.
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
    """(path of the model, its revision, what else decides bytes), as SGLang runs with it in this process. The name under which the
    model is served is the operator's to choose, and says nothing."""
    model = needed("sglang.srt.runtime_context", "get_model")()
    path = getattr(model, "model_path", None)
    if not path:
        raise ValueError("model_path: the setting is missing in SGLang's settings")
    found = {}
    for name, absent in _SETTINGS.items():
        value = getattr(model, name, _LACKS)
        if value is _LACKS and absent is None and name in ("dtype", "quantization", "kv_cache_dtype"):
            raise ValueError(f"{name}: the setting is missing in SGLang's settings, but the bytes of blocks depend on its value")
        found[name] = told(absent if value is _LACKS else value) or "none"
    _expect_one_rope(model, path)
    return path, getattr(model, "revision", None), found


def _expect_one_rope(model, path):
    """SGLang takes LongRoPE's long factors where any position of a batch is beyond what the model was trained for: then the same tokens
    have other keys, by what else is computed with them. That is refused unless no prompt can be so long."""
    config = {**(configuration_of(path, getattr(model, "revision", None)) or {})}
    config.update(json.loads(getattr(model, "json_model_override_args", None) or "{}"))
    for one in (config, config.get("text_config") or {}):
        for rope in (one.get("rope_scaling"), one.get("rope_parameters")):
            if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) in ("longrope", "su"):
                trained = rope.get("original_max_position_embeddings") or one.get("original_max_position_embeddings") or 0
                if not getattr(model, "context_length", None) or model.context_length > trained:
                    raise ValueError(f"context_length: with LongRoPE the keys of SGLang depend on the batch; set at most {trained}")


def expect_namespaces():
    """Page hashes must differ by adapter and by salt: else a page of one adapter would be restored for another."""
    seed = needed("sglang.srt.mem_cache.utils", "storage_namespace_seed")
    needed("sglang.srt.mem_cache.utils", "get_storage_hash_str")
    if len({seed(None, None), seed("adapter", None), seed("other", None), seed(None, "salt")}) != 4:
        raise ValueError("storage_namespace_seed: SGLang's page hashes are the same for different adapters or salts")


def names_of(keys):
    """SGLang's keys are digests in hexadecimal digits: 32 bytes are taken as they are."""
    return [bytes.fromhex(key) if len(key) == 64 and key.isalnum() else kvarts.key("sglang", key) for key in keys]
