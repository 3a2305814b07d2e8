"""A TCP proxy that can cut every connection: a server that dies in mid-flight, seen from outside."""

from __future__ import annotations

import contextlib
import socket
import threading


class TcpProxy:
    """Forwards 127.0.0.1:`port` to a target that may change."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._refusing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return

            with self._lock:
                refusing = self._refusing
            if refusing:
                client.close()
                continue

            try:
                server = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                client.close()
                continue

            with self._lock:
                self._sockets |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for each in (source, sink):
            with self._lock:
                self._sockets.discard(each)
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self, *, refuse: bool = False) -> None:
        """Break every connection. With `refuse`, also every new one until `mend`."""
        with self._lock:
            self._refusing = refuse
            sockets = list(self._sockets)
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def mend(self, target_port: int | None = None) -> None:
        """Let connections through again, to another port if given."""
        with self._lock:
            self._refusing = False
        if target_port is not None:
            self.target_port = target_port

    def close(self) -> None:
        """Stop listening and cut all."""
        self._listener.close()
        self.cut(refuse=True)
