"""The settings that determine the bytes of vLLM's KV blocks, for both connectors.

A setting belongs here if engines with different values may compute other bytes for the same tokens, or arrange the bytes in another
way. Engines that differ in any of these settings share no blocks. A setting without a text that is the same in every process is
refused.
"""

import json
import os
import platform

import torch

from .link import contract, differing, revision_of, told
from .vllm_compat import ALIKE, current_platform
from .vllm_compat import __version__ as vllm_version

#: Fields of vLLM's configurations that determine the bytes. Fields that a version does not have are left out.
_MODEL = (
    "model_weights",
    "quantization_config",
    "config_format",
    "model_class_overrides",
    "model_impl",
    "disable_sliding_window",
    "code_revision",
)
_CACHE = (
    "kv_cache_dtype_skip_layers",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "mamba_cache_mode",
    "use_replayssm",
)
_ATTENTION = (
    "backend",
    "backend_per_kind",
    "flash_attn_version",
    "use_trtllm_attention",
    "mla_prefill_backend",
    "indexer_kv_dtype",
)
#: Environment variables that determine how a backend arranges a block.
_ARRANGING = (
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_ROCM_USE_AITER",
    "VLLM_ROCM_USE_AITER_MHA",
    "VLLM_ROCM_USE_AITER_MLA",
    "VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION",
)
_LONG_ROPE = ("longrope", "su")


def identity_of(vllm_config, revision=None, kv_cache_config=None):
    """The settings that determine the bytes of a KV block, except for groups, types and workers of the offloading configuration.
    `kv_cache_config` adds the specification of each group's cache."""
    model = vllm_config.model_config
    cache = getattr(vllm_config, "cache_config", None)
    if getattr(cache, "calculate_kv_scales", False):
        raise ValueError("calculate_kv_scales: the scales depend on the first prompts of a process, so other processes cannot use its blocks: switch calculate_kv_scales off")
    if callable(model.hf_overrides):
        raise ValueError("hf_overrides: a function cannot be part of the identity of blocks, because its text differs between processes: set plain values instead")
    found = {
        "revision": revision_of(model.model, revision or model.revision),
        "weights": str(model.dtype),
        "quantisation": str(model.quantization),
        "overrides": told(model.hf_overrides),
        "config": _configuration(getattr(model, "hf_config_path", None)),
        "long-rope": _long_rope(model),
        "load": str(vllm_config.load_config.load_format),
        "device": _device(),
        "draft": _draft(vllm_config.speculative_config),
        "arranging": told({name: os.environ[name] for name in _ARRANGING if name in os.environ}),
        **_fields("model", model, _MODEL),
        **_fields("cache", cache, _CACHE),
        **_fields("attention", getattr(vllm_config, "attention_config", None), _ATTENTION),
    }
    if kv_cache_config is not None:
        groups = kv_cache_config.kv_cache_groups
        found["caches"] = told([[differing(group.kv_cache_spec), list(group.layer_names)] for group in groups])
    return found


def _fields(whose, config, names):
    """The fields of a configuration that are set, as text."""
    found = {}
    for name in names:
        value = getattr(config, name, None)
        # An unset field is equal to a field that an older version does not have.
        if value is not None and value is not False and value != "" and value != [] and value != {}:
            try:
                found[f"{whose}-{name}"] = told(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return found


def _configuration(path):
    """The identity of a configuration that replaces the model's own one."""
    return "none" if not path else told([os.fspath(path), revision_of(os.fspath(path))])


def _long_rope(model):
    """Whether a model with LongRoPE uses its long factors: `yes`, `no` or `none`. A model with two sets of factors selects one when it is loaded: the
    long factors if the longest prompt exceeds the trained length. The length itself does not change the bytes, so it is left out."""
    chosen = set()
    for config in (getattr(model, "hf_config", None), getattr(model, "hf_text_config", None)):
        for place in ("rope_parameters", "rope_scaling"):
            rope = getattr(config, place, None)
            if not isinstance(rope, dict):
                continue
            # There is one for all layers, or one for each kind of layer.
            for one in [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]:
                if (one.get("rope_type") or one.get("type")) in _LONG_ROPE:
                    trained = one.get("original_max_position_embeddings")
                    trained = trained or getattr(config, "original_max_position_embeddings", None)
                    if not trained:
                        raise ValueError(
                            "original_max_position_embeddings: the model's configuration has LongRoPE and lacks this field: add it to the model's config.json"
                        )
                    chosen.add("yes" if model.max_model_len > trained else "no")
    return ",".join(sorted(chosen)) or "none"


def _device():
    """The kind of device, on which the arrangement of blocks depends: for a CPU with its instruction sets, for a device with its generation, which
    determines the default backend."""
    if current_platform.device_type != "cpu":
        able = getattr(current_platform, "get_device_capability", lambda: None)()
        return f"{current_platform.device_type}-{'any' if able is None else '.'.join(map(str, able))}"
    able = [name for name in ("avx2", "avx512", "amx_tile") if getattr(torch.cpu, f"_is_{name}_supported", bool)()]
    return "-".join(["cpu", platform.machine(), *able])


def _draft(speculative):
    """The identity of the draft model, whose layers are in the blocks, too."""
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return str(getattr(speculative, "method", None))
    return json.dumps([speculative.method, draft.model, revision_of(draft.model, draft.revision)])


def layout_version(*facts):
    """The layout's version: a digest over the arrangement of blocks and over vLLM's version (see `contract`)."""
    return contract("vllm", vllm_version, ALIKE, *facts)
