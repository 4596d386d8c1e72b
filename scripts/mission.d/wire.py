"""The wire between nodes: what connects to one host goes on to another one, until it is cut. Then nothing arrives and nothing ends, as when a cable is pulled."""

import contextlib
import socket
import threading


class Wire:
    """From the host under which a node is known to the one at which it listens, for some ports."""

    def __init__(self, known, own, ports):
        self._own = own
        self._whole = threading.Event()
        self._whole.set()
        self._lock, self._ends = threading.Lock(), set()
        self._listeners = [socket.create_server((known, port)) for port in ports]
        for listener, port in zip(self._listeners, ports):
            threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()

    def cut(self):
        self._whole.clear()

    def mend(self):
        """New connections pass again; what was cut has lost bytes, so it ends."""
        with self._lock:
            for end in self._ends:
                _shut(end)
            self._ends.clear()
            self._whole.set()

    def close(self):
        self.mend()
        for listener in self._listeners:
            _shut(listener)

    def _accept(self, listener, port):
        with contextlib.suppress(OSError):
            while True:
                here, _ = listener.accept()
                threading.Thread(target=self._join, args=(here, port), daemon=True).start()

    def _join(self, here, port):
        self._whole.wait()
        try:
            there = socket.create_connection((self._own, port))
        except OSError:
            # No server listens there now.
            _shut(here)
            return
        for end in (here, there):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._ends |= {here, there}
        threading.Thread(target=self._pump, args=(there, here), daemon=True).start()
        self._pump(here, there)

    def _pump(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                if not self._whole.is_set():
                    # Until the wire is mended: then both ends are shut.
                    self._whole.wait()
                    break
                sink.sendall(data)
        with self._lock:
            self._ends -= {source, sink}
        _shut(source)
        _shut(sink)


def _shut(end):
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
