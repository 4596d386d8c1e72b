"""What vLLM runs in each of its processes when this module is installed (entry point `vllm.general_plugins`).

It makes vLLM's factory know both connectors by name: `--kv-transfer-config '{"kv_connector": "KvartsLayers", "kv_role": "kv_both"}'`.

With `KVARTS_VLLM` in the environment an engine to which no `--kv-transfer-config` was given gets one: its value is the path of a server's socket, or
JSON as `kv_connector_extra_config` takes it, in which `connector` may name `Kvarts` instead of `KvartsLayers`. vLLM has no hook by which a plugin
sets a configuration, so `EngineArgs.create_engine_config` is wrapped; where it is not there, the log says that nothing was switched on.
"""

import functools
import json
import logging
import os

logger = logging.getLogger("kvarts")

#: The connectors, and where they are.
CONNECTORS = {"KvartsLayers": "kvarts.vllm_layers", "Kvarts": "kvarts.vllm"}
VARIABLE = "KVARTS_VLLM"


def register():
    """vLLM does not catch what a plugin raises."""
    try:
        _register()
        if value := os.environ.get(VARIABLE):
            _switch_on(configuration(value))
    except Exception:
        logger.exception("kvarts: an error occurred, and vLLM continues without the plugin")


def _register():
    from .vllm_compat import KVConnectorFactory

    for name, module in CONNECTORS.items():
        try:
            KVConnectorFactory.register_connector(name, module, name)
        except ValueError:
            pass  # by an earlier run of this plugin


def configuration(value):
    """What `KVTransferConfig` takes, out of the variable's value."""
    if not value.lstrip().startswith("{"):
        extra = {"server": value}
    else:
        try:
            extra = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: the value is neither the path of a socket nor valid JSON: {error}") from None
    name = extra.pop("connector", "KvartsLayers")
    if name not in CONNECTORS:
        raise ValueError(f"{VARIABLE}: connector: {name!r} does not exist; use one of {', '.join(CONNECTORS)}")
    return {"kv_connector": name, "kv_connector_module_path": CONNECTORS[name], "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _switch_on(given):
    from .vllm_compat import EngineArgs, KVTransferConfig

    made = EngineArgs.create_engine_config
    if getattr(made, "of_kvarts", False):
        return

    @functools.wraps(made)
    def create_engine_config(self, *args, **kwargs):
        if self.kv_transfer_config is not None or getattr(self, "kv_offloading_size", None) is not None:
            logger.warning("kvarts: %s is ignored, because vLLM has its own connector configuration", VARIABLE)
        else:
            self.kv_transfer_config = KVTransferConfig(**given)
            logger.warning("kvarts: %s switches on %s, with %s", VARIABLE, given["kv_connector"], given["kv_connector_extra_config"])
        return made(self, *args, **kwargs)

    create_engine_config.of_kvarts = True
    EngineArgs.create_engine_config = create_engine_config
