"""KV-cache blocks on disk, shared between processes and kept across restarts.

A read returns exactly the bytes that one producer put under that key and identity, or it is an error or a miss. The stub beside
this file (`__init__.pyi`) documents each call.
"""

import atexit as _atexit
import os as _os
import typing as _typing
import weakref as _weakref

from . import _kvarts
from ._kvarts import (
    Client,
    Completion,
    Draft,
    Event,
    Events,
    Layer,
    Layers,
    Lease,
    Match,
    Memory,
    Missing,
    Paged,
    Pages,
    Plan,
    Pool,
    Session,
    Stage,
    Times,
    __version__,
    chain,
    kept_windows,
    key,
    window_interval,
)
from .errors import Bug, Corrupt, Deadline, Error, Invalid, Miss, ReadOnly, Refused, Retry

__all__ = [
    "Bug", "Client", "Completion", "Corrupt", "Deadline", "Draft", "Error", "Event", "Events", "Invalid", "Layer", "Layers", "Lease", "Match",
    "Memory", "Miss", "Missing", "Paged", "Pages", "Plan", "Pool", "ReadOnly", "Refused", "Retry", "Session", "Stage", "Times", "__version__", "chain",
    "connect", "kept_windows", "key", "open", "window_interval",
]

#: Types of arguments, for annotations; the stub has their details.
Buffer = _typing.Union[_typing.Any, int]
Key = _typing.Union[bytes, str]
Places = _typing.Union[_typing.Sequence[Buffer], Buffer, Paged]

#: Seconds that the interpreter's exit waits for requests under way.
_EXIT = 2.0
_clients = _weakref.WeakSet()


def _kept(client):
    _clients.add(client)
    return client


@_atexit.register
def _end():
    for client in list(_clients):
        try:
            client.close(timeout=_EXIT)
        except Error:
            pass  # a client of another process, or memory to which a disk still writes: it is not freed


def _endpoint(server):
    if server.startswith(("http://", "https://", "unix:")):
        return server
    if "/" in server or _os.path.exists(server):
        return "unix:" + server
    return "http://" + server


def connect(
    server=None,
    token=None,
    *,
    via="best",
    timeout=60.0,
    authority=None,
    certificate=None,
    private_key=None,
    server_name=None,
    server_uid=None,
    threads=2,
    of_cluster=False,
):
    if server is None:
        server = _os.environ.get("KVARTS_SERVER") or "127.0.0.1:7440"
    server = _os.fspath(server)
    if token is None and "KVARTS_TOKEN_FILE" in _os.environ:
        with _builtin_open(_os.environ["KVARTS_TOKEN_FILE"], encoding="utf-8") as file:
            token = file.read(1 << 16).strip()
    if server_uid is None and "KVARTS_SERVER_UID" in _os.environ:
        server_uid = int(_os.environ["KVARTS_SERVER_UID"])
    return _kept(
        _kvarts.connect(
            _endpoint(server),
            token,
            via=via,
            timeout=timeout,
            authority=authority,
            certificate=certificate,
            private_key=private_key,
            server_name=server_name,
            server_uid=server_uid,
            threads=threads,
            of_cluster=of_cluster,
        )
    )


_builtin_open = open


def open(dirs, budget, *, executors=None):  # noqa: A001, as the stub says
    if isinstance(dirs, (str, bytes, _os.PathLike)):
        dirs = [dirs]
    dirs = [_os.fsdecode(one) for one in dirs]
    return _kept(_kvarts.open(dirs, budget, executors=executors))


# The native module has the docstrings of the stub.
for _made in (connect, open):
    _made.__doc__ = getattr(_kvarts, _made.__name__).__doc__
