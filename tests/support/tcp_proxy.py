"""A TCP proxy that can cut or freeze every connection: a server that dies or stops in mid-flight, seen from outside."""

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
        #: connections that were let through so far
        self.accepted = 0
        self._flows = threading.Event()
        self._flows.set()
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
                self.accepted += 1
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                sink.sendall(data)
        for each in (source, sink):
            with self._lock:
                self._sockets.discard(each)
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def addresses(self) -> set[tuple[str, int]]:
        """The addresses of the connections' ends here: as what the server sees its clients, among others."""
        with self._lock:
            return {each.getsockname() for each in self._sockets}

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

    def freeze(self) -> None:
        """Let nothing pass until `thaw`, and keep all connections open: the server is stopped."""
        self._flows.clear()

    def thaw(self) -> None:
        """Let everything pass again, also what was sent meanwhile."""
        self._flows.set()

    def close(self) -> None:
        """Stop listening and cut all."""
        self._flows.set()
        with contextlib.suppress(OSError):
            # Closing alone does not wake the thread that accepts.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut(refuse=True)
