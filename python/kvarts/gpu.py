"""Copies blocks from a pool into an engine's memory on a device, and back.

Blocks that land are in the pool already and verified, so only the device can fail. No call waits for the device except `Stream.synchronize` and
calls with a timeout; these release the interpreter's lock while they wait. The stub documents each call.
"""

import sysconfig as _sysconfig
import typing as _typing

if _sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError("kvarts.gpu is not tested with free-threaded Python builds: use a Python build with the global interpreter lock")

from ._kvarts import Device, Landed, Lander, Saved, Saving, Stream
from ._kvarts import DevicePages as Pages

#: Types of arguments, for annotations; the stub has their details.
Stretches = _typing.Sequence[_typing.Tuple[int, int, int, int]]
Rows = _typing.Tuple[int, int, int]
Part = _typing.Tuple[int, int, int, int, Rows, Rows, int]

__all__ = ["Device", "Landed", "Lander", "Pages", "Saved", "Saving", "Stream"]
