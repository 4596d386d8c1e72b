"""The parts of Kvarts' adapter that depend on LMCache's version: the methods that LMCache calls. The module imports nothing of LMCache."""

import importlib.metadata
import logging

from . import hooks

#: Versions that were tested with the adapter.
TRIED = ("0.5.6",)
_ADAPTERS = "lmcache.v1.distributed.l2_adapters"

ENGINE = hooks.Engine(
    package="lmcache",
    distributions=("lmcache",),
    tried=TRIED,
    parts=(
        hooks.Part(
            module="kvarts.lmcache",
            names=(f"{_ADAPTERS}.native_plugin_l2_adapter:NativePluginL2AdapterConfig", f"{_ADAPTERS}.native_connector_l2_adapter:NativeConnectorL2Adapter"),
            called=(hooks.Called("lmcache:Kvarts", f"{_ADAPTERS}.native_connector_l2_adapter", "_client"),),
        ),
    ),
)


def version():
    try:
        return importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def probe(part):
    """Logs differences between the installed LMCache and the tested ones when LMCache starts. Never raises."""
    hooks.tell(ENGINE, part, logging.getLogger("kvarts"))
