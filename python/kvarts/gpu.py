"""Blocks of a pool in pages of an engine's memory on a device, and back.

Everything that is landed is in the pool already, verified, so nothing but the device can fail. No call waits for the device, but
`Stream.synchronize` and those that take a timeout; none holds the interpreter's lock meanwhile. What each promises stands in the stub.
"""

import sysconfig as _sysconfig
import typing as _typing

if _sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError("kvarts.gpu is not tested with a free-threaded Python: use a Python with the interpreter lock")

from ._kvarts import Device, Landed, Lander, Saved, Saving, Stream
from ._kvarts import DevicePages as Pages

#: What calls take, for annotations: the stub says it in full.
Stretches = _typing.Sequence[_typing.Tuple[int, int, int, int]]
Rows = _typing.Tuple[int, int, int]
Part = _typing.Tuple[int, int, int, int, Rows, Rows, int]

__all__ = ["Device", "Landed", "Lander", "Pages", "Saved", "Saving", "Stream"]
