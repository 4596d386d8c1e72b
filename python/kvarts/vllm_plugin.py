"""The plugin that vLLM runs in each of its processes if the package kvarts is installed (entry point `vllm.general_plugins`).

It registers both connectors by name, for `--kv-transfer-config '{"kv_connector": "KvartsLayers", "kv_role": "kv_both"}'`.

If `KVARTS_VLLM` is set in the environment, the plugin also configures a connector for an engine without `--kv-transfer-config`. The value of the variable
is the path of a server's socket, or JSON in the form of `kv_connector_extra_config`. In this JSON, `connector` may select `Kvarts` instead of
`KvartsLayers`. vLLM has no hook with which a plugin sets a configuration, so the plugin wraps `EngineArgs.create_engine_config`. If vLLM lacks this
method, the plugin logs the error and configures nothing.
"""

import functools
import json
import logging
import os

logger = logging.getLogger("kvarts")

#: The connectors, and their modules.
CONNECTORS = {"KvartsLayers": "kvarts.vllm_layers", "Kvarts": "kvarts.vllm"}
VARIABLE = "KVARTS_VLLM"


def register():
    """The entry point. It logs all errors, because vLLM does not catch exceptions of a plugin."""
    try:
        _register()
        if value := os.environ.get(VARIABLE):
            _switch_on(configuration(value))
    except Exception:
        logger.exception("kvarts: the plugin failed; vLLM continues without the plugin, so Kvarts stores and loads no blocks")


def _register():
    from .vllm_compat import KVConnectorFactory

    for name, module in CONNECTORS.items():
        try:
            KVConnectorFactory.register_connector(name, module, name)
        except ValueError:
            pass  # by an earlier run of this plugin


def configuration(value):
    """The arguments of `KVTransferConfig` for the value of the variable."""
    if not value.lstrip().startswith("{"):
        extra = {"server": value}
    else:
        try:
            extra = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: the value is neither the path of a socket nor valid JSON: {error}") from None
    name = extra.pop("connector", "KvartsLayers")
    if name not in CONNECTORS:
        raise ValueError(f"{VARIABLE}: there is no connector {name!r}: set connector to one of {', '.join(CONNECTORS)}")
    return {"kv_connector": name, "kv_connector_module_path": CONNECTORS[name], "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _switch_on(given):
    from .vllm_compat import EngineArgs, KVTransferConfig

    made = EngineArgs.create_engine_config
    if getattr(made, "of_kvarts", False):
        return

    @functools.wraps(made)
    def create_engine_config(self, *args, **kwargs):
        if self.kv_transfer_config is not None or getattr(self, "kv_offloading_size", None) is not None:
            logger.warning("kvarts: %s is ignored, because the options of vLLM already configure a connector or offloading", VARIABLE)
        else:
            self.kv_transfer_config = KVTransferConfig(**given)
            logger.warning("kvarts: %s enables the connector %s with the settings %s", VARIABLE, given["kv_connector"], given["kv_connector_extra_config"])
        return made(self, *args, **kwargs)

    create_engine_config.of_kvarts = True
    EngineArgs.create_engine_config = create_engine_config
