"""Doorbells: how one process of a replica wakes another at once.

A Unix datagram socket a role, in a short private directory because socket paths over 107 bytes do not bind.
A wakeup carries no data: what to do is in the shared words. Ringing never blocks; a full buffer means that the
wakeup is already ringing; a missing receiver polls anyway, so a lost wakeup only delays.
Source: RocketMQ ServiceThread#wakeup and #waitForRunning (one pending wake-up is remembered).
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import stat
import threading

from raymq.store.errors import Unavailable
from raymq.store.files import Files

_ROOT = "/tmp"
#: stop draining here: a sender faster than us leaves the wakeup ringing, which is right
_DRAIN_LIMIT = 512


def wakeup_directory(replica_dir: str) -> str:
    """The directory of a replica's sockets: the same for every process of the replica, at most 40 bytes long."""
    digest = hashlib.sha256(os.path.realpath(replica_dir).encode()).hexdigest()
    return f"{_ROOT}/raymq-{os.getuid()}/{digest[:12]}"


class Wakeup:
    """The wakeup of one role of one replica, and the way to ring the others.

    Callers: one process a role (it holds `<role>.lock`); one thread waits, any thread rings.
    """

    def __init__(self, replica_dir: str, role: str, *, files: Files) -> None:
        """Raises: Unavailable if somebody else owns the directory."""
        self._files = files
        self._directory = wakeup_directory(replica_dir)
        for path in (os.path.dirname(self._directory), self._directory):
            files.make_dirs(path, mode=0o700)
            _check_private(path)
        self._path = f"{self._directory}/{role}"
        self._role = role
        # What is there is a dead process's: the caller holds the role's lock.
        if files.exists(self._path):
            files.unlink(self._path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.bind(self._path)
        #: guards `_ways`
        self._ringing = threading.Lock()
        #: role -> a socket that is connected to its wakeup: a ring by path costs twice as much
        self._ways: dict[str, socket.socket] = {}
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def wake(self, role: str) -> None:
        """Wake that role. Never blocks, never fails for want of a receiver."""
        with self._ringing:
            way = self._ways.get(role)
            if way is not None:
                try:
                    way.send(b"!")
                    return
                except BlockingIOError:
                    return
                except OSError:
                    # That receiver is gone; perhaps there is another one.
                    way.close()
                    del self._ways[role]
            self._connect(role)

    def _connect(self, role: str) -> None:
        """The first ring of a receiver, by its path. Needs the lock."""
        try:
            way = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        except OSError:
            # No descriptor is free: a lost wakeup only delays.
            return
        way.setblocking(False)
        try:
            way.connect(f"{self._directory}/{role}")
            way.send(b"!")
        except (BlockingIOError, FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
            way.close()
            return
        self._ways[role] = way

    def wake_own(self) -> None:
        """Wake the thread that waits on this wakeup."""
        self.wake(self._role)

    def wait(self, timeout_ms: int) -> bool:
        """Wait until rung since the last wait, at most so long. Returns: whether it rang."""
        if not self._poll.poll(max(0, timeout_ms)):
            return False
        for _ in range(_DRAIN_LIMIT):
            try:
                self._socket.recv(1)
            except BlockingIOError:
                break
            # A look costs less than the exception of an empty socket.
            if not self._poll.poll(0):
                break
        return True

    def close(self) -> None:
        """Take the wakeup down; ringing it is then like ringing nobody."""
        if self._socket.fileno() < 0:
            return
        self._poll.unregister(self._socket)
        self._let_go()
        if self._files.exists(self._path):
            self._files.unlink(self._path)

    def _let_go(self) -> None:
        """Close every socket, which is all that a SIGKILL does: the name stays."""
        self._socket.close()
        with self._ringing:
            for way in self._ways.values():
                way.close()
            self._ways.clear()


def _check_private(path: str) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise Unavailable(
            f"{path} is not a directory of user {os.getuid()}; remove it or set it right", path=path
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise Unavailable(
            f"{path} has mode {stat.S_IMODE(status.st_mode):o}; it must be 700: chmod 700 {path}",
            path=path,
        )
