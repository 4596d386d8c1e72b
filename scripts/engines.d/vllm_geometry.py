"""What vLLM's own classes say of the caches of a model: `vllm_geometry.py CONFIG.json[:CACHE_DTYPE]...`, a line of JSON each.

The model is built from its configuration alone, without weights and on no device; every layer that keeps something then gives the
specification from which vLLM would allocate its cache. `vllm_geometry.py types` lists the `model_type`s that this vLLM serves."""

import importlib.abc
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from types import SimpleNamespace
from unittest import mock

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TRANSFORMERS_VERBOSITY="error")

import torch  # noqa: E402
import transformers  # noqa: E402
import vllm.version  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402

#: A processor has none for sparse attention and for formats with scales; this is what a device has.
SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
SCALED = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
SCALED_GROUPS = "vllm.v1.attention.backends.flashinfer.FlashInferBackend"


class Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of a device's kernels, which layers name when they are loaded and call when they compute."""

    NAMES = ("cutlass", "cuda", "quack", "flashinfer", "deep_gemm", "tilelang")

    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self, is_package=True) if name.split(".")[0] in self.NAMES else None

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def pretend():
    """What a processor's build of vLLM lacks is not needed to construct a layer: kernels are looked up when they are called."""
    from vllm.model_executor.models import registry
    from vllm.v1.worker.workspace import init_workspace_manager
    from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig

    sys.meta_path.append(Kernels())

    class Absent:
        def __init__(self, *_, **__):
            pass

    torch.cuda.Event = torch.cuda.Stream = Absent
    init_workspace_manager(torch.device("cpu"))
    current_platform.num_compute_units = lambda *_, **__: 132
    chosen = current_platform.get_attn_backend_cls

    def backend(*asked, **named):
        config = named.get("attn_selector_config") or asked[1]
        dtype = config.kv_cache_dtype or ""
        if config.use_sparse:
            return SPARSE
        if dtype.endswith("per_token_head") and not config.use_mla:
            return SCALED
        return SCALED_GROUPS if dtype.startswith("nvfp4") and not config.use_mla else chosen(*asked, **named)

    current_platform.get_attn_backend_cls = backend
    # In this process, where the pretence holds.
    registry._run_in_subprocess = lambda function: function()

    class Bailing(transformers.PretrainedConfig):
        model_type = "bailing_hybrid"  # the checkpoint brings this class

    transformers.AutoConfig.register("bailing_hybrid", Bailing)
    transformers.AutoConfig.register("minimax_m3_text", MiniMaxM3TextConfig)


def world():
    from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel

    if not torch.distributed.is_initialized():
        init_distributed_environment(1, 0, "file://" + tempfile.mktemp(), 0, "gloo")
    else:
        # A model with experts has a group that others have not.
        destroy_model_parallel()
    initialize_model_parallel(1, 1)


def without_experts(config):
    """Experts keep nothing for a prompt, and their kernels are chosen when a layer is constructed: without them where it can be."""
    if config["model_type"] == "minimax_m3_text":
        return config | {"moe_layer_freq": [0] * config["num_hidden_layers"]}
    return config


def layers(config, cache_dtype):
    """Each layer's specification; layers that read the cache of another have none, as in vLLM's own runner."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import get_model_architecture, initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    place = tempfile.mkdtemp()
    with open(os.path.join(place, "config.json"), "w", encoding="utf-8") as file:
        json.dump(without_experts(config), file)
    settings = EngineArgs(
        model=place,
        tokenizer=place,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=2048,
        dtype="bfloat16",
        kv_cache_dtype=cache_dtype,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
    ).create_engine_config()
    with set_current_vllm_config(settings):
        world()
        # Modules make constants when they are loaded: before tensors are without data.
        get_model_architecture(settings.model_config)
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            initialize_model(settings)
        for layer in settings.compilation_config.static_forward_context.values():
            if not isinstance(layer, AttentionLayerBase) or getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            spec = layer.get_kv_cache_spec(settings)
            if spec is not None:
                yield spec


def told(spec):
    """What of a specification moves bytes. vLLM pads pages; the bytes without padding are compared."""
    name = type(spec).__name__
    fact = SimpleNamespace(spec=name, window=None, tokens=None, bytes=None, layers=1)
    if name == "MambaSpec":
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes)]
        fact.bytes = sorted(sizes)
        return fact
    fact.tokens = int(spec.tokens_per_state)
    # One state of all heads.
    fact.bytes = spec.num_heads * spec.state_content_size_bytes
    fact.window = getattr(spec, "sliding_window", None)
    return fact


def model(path, cache_dtype):
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    counted = {}
    for spec in layers(config, cache_dtype):
        fact = told(spec)
        key = (fact.spec, fact.window, fact.tokens, str(fact.bytes))
        if key in counted:
            counted[key].layers += 1
        else:
            counted[key] = fact
    return [vars(fact) for fact in counted.values()]


def types():
    """Every `model_type` that this vLLM has a class of configuration or a model for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS, _MULTIMODAL_MODELS
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    served = set(_TEXT_GENERATION_MODELS) | set(_MULTIMODAL_MODELS)
    found = set(_CONFIG_REGISTRY)
    for kind in CONFIG_MAPPING_NAMES:
        for table in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_MAPPING_NAMES):
            classes = table.get(kind) or ()
            if served & {classes, *(() if isinstance(classes, str) else classes)}:
                found.add(kind)
    return sorted(found)


def main():
    pretend()
    if sys.argv[1:] == ["types"]:
        print(json.dumps({"types": types(), "version": vllm.version.__version__}))
        return
    for argument in sys.argv[1:]:
        path, _, cache_dtype = argument.partition(":")
        try:
            facts = model(path, cache_dtype or "auto")
            print(json.dumps({"config": argument, "layers": facts}), flush=True)
        except Exception as error:  # what vLLM cannot construct here is told, not skipped
            print(json.dumps({"config": argument, "error": f"{type(error).__name__}: {error}"[:300]}), flush=True)
            traceback.print_exc()


if __name__ == "__main__":
    main()
