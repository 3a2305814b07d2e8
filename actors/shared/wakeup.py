"""How one process of a replica wakes another at once: one Unix datagram socket per role.

The sockets are in a short private directory, because socket paths over 107 bytes do not bind. A wakeup carries no data:
the shared fields say what to do. Sending never blocks. A full buffer means that a wakeup is pending already. A missing
receiver polls anyway, so a lost wakeup only delays.
Source: RocketMQ ServiceThread#wakeup and #waitForRunning (one pending wakeup is remembered).
"""

from __future__ import annotations

import hashlib
import os
import select
import shlex
import socket
import stat
import threading

from raymq.store.base.errors import Unavailable
from raymq.store.base.files import Files

_ROOT = "/tmp"
#: stop draining here: a sender that is faster than this process leaves a wakeup pending, which is right
_DRAIN_LIMIT = 512


def wakeup_directory(replica_dir: str) -> str:
    """The directory of a replica's sockets: the same for every process of the replica, at most 40 bytes long."""
    digest = hashlib.sha256(os.path.realpath(replica_dir).encode()).hexdigest()
    return f"{_ROOT}/raymq-{os.getuid()}/{digest[:12]}"


class Wakeup:
    """The wakeup socket of one role of one replica. It also wakes the other roles.

    Callers: one process per role (it holds `<role>.lock`). One thread waits, any thread wakes.
    """

    def __init__(self, replica_dir: str, role: str, *, files: Files) -> None:
        """Raises: Unavailable if the directory belongs to another user."""
        self._files = files
        self._directory = wakeup_directory(replica_dir)
        for path in (os.path.dirname(self._directory), self._directory):
            files.make_dirs(path, mode=0o700)
            _check_private(path)

        self._path = f"{self._directory}/{role}"
        # A socket file here is of a dead process: the caller holds the role's lock.
        if files.exists(self._path):
            files.unlink(self._path)

        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.bind(self._path)

        #: guards `_senders`
        self._lock = threading.Lock()
        #: role -> a socket connected to its wakeup: sending by path costs twice as much
        self._senders: dict[str, socket.socket] = {}

        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        #: of the socket, and of a process whose end also ends a wait
        self._wait_poll = select.poll()
        self._wait_poll.register(self._socket, select.POLLIN)

    def wake(self, role: str) -> None:
        """Wake that role. Never blocks. Without a receiver it does nothing."""
        with self._lock:
            sender = self._senders.get(role)
            if sender is not None:
                try:
                    sender.send(b"!")
                    return
                except BlockingIOError:
                    return
                except OSError:
                    # That receiver has ended. It may have a successor.
                    sender.close()
                    del self._senders[role]
            self._connect(role)

    def _connect(self, role: str) -> None:
        """The first wakeup of a receiver, by its path. Needs the lock."""
        try:
            sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        except OSError:
            # No descriptor is free: a lost wakeup only delays.
            return
        sender.setblocking(False)
        try:
            sender.connect(f"{self._directory}/{role}")
            sender.send(b"!")
        except (BlockingIOError, FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
            sender.close()
            return
        self._senders[role] = sender

    def wait(self, timeout_ms: int) -> bool:
        """Wait for a wakeup since the last wait. Returns: whether the wait ended before the timeout."""
        if not self._wait_poll.poll(max(0, timeout_ms)):
            return False
        for _ in range(_DRAIN_LIMIT):
            try:
                self._socket.recv(1)
            except BlockingIOError:
                break
            # A poll costs less than the exception of an empty socket.
            if not self._poll.poll(0):
                break
        return True

    def watch(self, pidfd: int) -> None:
        """Let the end of a process end each wait, too, until `unwatch`. Callers: the thread that waits."""
        self._wait_poll.register(pidfd, select.POLLIN)

    def unwatch(self, pidfd: int) -> None:
        """Undo `watch`."""
        self._wait_poll.unregister(pidfd)

    def close(self) -> None:
        """Remove the socket. Wakeups of this role then do nothing."""
        if self._socket.fileno() < 0:
            return
        self._poll.unregister(self._socket)
        self._wait_poll.unregister(self._socket)
        self._close_sockets()
        if self._files.exists(self._path):
            self._files.unlink(self._path)

    def _close_sockets(self) -> None:
        """Close every socket, which is all that a SIGKILL does: the name stays."""
        self._socket.close()
        with self._lock:
            for sender in self._senders.values():
                sender.close()
            self._senders.clear()


def _check_private(path: str) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise Unavailable(
            f"{path} is not a directory of user {os.getuid()}; remove it or make it one", path=path
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise Unavailable(
            f"{path} has mode {stat.S_IMODE(status.st_mode):o}; it must be 700: chmod 700 "
            f"{shlex.quote(str(path))}",
            path=path,
        )
