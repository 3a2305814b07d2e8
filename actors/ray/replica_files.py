"""Small files of a replica: where it and its peers listen, what it leads, and why its last process gave up.

Its generation is there, too: how often the replica had been replaced when the directory was made.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, RayMQError
from raymq.store.base.files import Files


def write_last_end(root: Path, reason: str) -> None:
    """Note why this process gives up. A directory that cannot be written changes nothing."""
    with contextlib.suppress(OSError, RayMQError):
        write_json(root, "last-end", {"time_ms": Clock().now_ms(), "reason": reason})


def read_last_end(root: Path) -> Any:
    """When and why a process of this replica gave up last, for status; None: never."""
    with contextlib.suppress(OSError):
        return read_json(root, "last-end")
    return None


def read_json(root: Path, name: str) -> Any:
    """The value that a replica wrote last, or None before the first, or if the file is damaged."""
    try:
        return json.loads(Files().read_file(root / "raymq" / name))
    except (FileNotFoundError, ValueError):
        return None


def write_json(root: Path, name: str, value: Mapping[str, object]) -> None:
    """Replace the value. Durable: the file. Raises: OSError."""
    Files().write_file_atomic(root / "raymq" / name, json.dumps(value).encode())


def read_endpoint(root: Path) -> str | None:
    """The endpoint that a replica wrote last, or None before its first start."""
    value = read_json(root, "endpoint")
    if value is None:
        return None
    return endpoint_of(value["host"], value["port"], tls=value.get("tls", False))


def generation_of(root: Path) -> int:
    """The generation of the replica whose directory this is; 0 for the first one.

    Raises: Corrupt for a damaged file: a complete store must not count as one of an older replica; OSError.
    """
    path = root / "raymq" / "generation"
    try:
        return int(json.loads(Files().read_file(path))["generation"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(
            f'{path} is damaged: write {{"generation": N}} there, with N of this replica in cluster.json',
            path=str(path),
            rule="generation",
        ) from error


def write_generation(root: Path, generation: int) -> None:
    """Note whose directory this is. Durable: at return. Raises: OSError."""
    write_json(root, "generation", {"generation": generation})


def write_leadership(root: Path, epoch: int) -> None:
    """Note the epoch that this replica leads. Of a shard's replicas, the one with the highest epoch leads."""
    with contextlib.suppress(OSError, RayMQError):
        write_json(root, "leadership", {"epoch": epoch})


def read_led_epoch(root: Path) -> int | None:
    """The epoch that a replica led last, or None if it never led, or the file is damaged. Raises: OSError."""
    led = read_json(root, "leadership")
    return int(led["epoch"]) if isinstance(led, dict) and "epoch" in led else None


def resolve_ip(host: str) -> str:
    """The IP address of an address that may be a DNS name. Raises: OSError if the name is not known."""
    try:
        return str(ipaddress.ip_address(host.strip("[]").partition("%")[0]))
    except ValueError:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        # The first: what a client tries first.
        return str(found[0][4][0]).partition("%")[0]


class PeerAddresses:
    """Where the other replicas of a shard listen. Elections and log streams so need no Ray.

    On one machine their endpoint files say it. Over nodes, each replica names its address, and those that it knows, in
    its messages of elections. They are kept in the file `raymq/peers`. While the address of the file does not work,
    attempts alternate between it and the one that was heard last. Callers: any thread.
    """

    def __init__(self, root: Path, directories: dict[int, Path], *, over_nodes: bool) -> None:
        """Args: `root`: of this replica. `directories`: of the others, by replica."""
        self._root = root
        self._directories = directories
        self._over_nodes = over_nodes
        #: held while the file changes
        self._lock = threading.Lock()
        #: replica -> the endpoint that was heard last, from any replica
        self._heard: dict[int, str] = {}
        #: replica -> the endpoint that failed last
        self._failed: dict[int, str] = {}

    def find(self, replica: int) -> str | None:
        """The endpoint to try next; None: not known yet."""
        if not self._over_nodes:
            return read_endpoint(self._directories[replica])
        named = (read_json(self._root, "peers") or {}).get(str(replica))
        known = None if named is None else str(named)
        fails = known is None or known == self._failed.get(replica)
        return self._heard.get(replica, known) if fails else known

    def note(self, replica: int, endpoint: str, *, is_own: bool) -> None:
        """Remember where a replica listens. On one machine its own file says it.

        Args: `is_own`: that replica said it itself. The word of another one may be out of date: it is only tried when
        the known endpoint fails.
        """
        if not self._over_nodes or replica not in self._directories:
            return
        self._heard[replica] = endpoint
        if is_own:
            self._failed.pop(replica, None)
        with self._lock:
            peers = read_json(self._root, "peers") or {}
            known = peers.get(str(replica))
            if known is None or (is_own and known != endpoint):
                with contextlib.suppress(OSError, RayMQError):
                    write_json(self._root, "peers", {**peers, str(replica): endpoint})

    def note_failure(self, replica: int, endpoint: str) -> None:
        """Let `find` name another endpoint, if one was heard."""
        self._failed[replica] = endpoint

    def known(self) -> dict[str, str]:
        """replica -> endpoint, of those that are known. Nothing on one machine, where each replica reads the files."""
        if not self._over_nodes:
            return {}
        found = {replica: self.find(replica) for replica in self._directories}
        return {str(replica): endpoint for replica, endpoint in found.items() if endpoint}


class ShardAddresses:
    """The addresses of all replicas of a shard, this one included: the `PeerAddressBook` of its host."""

    def __init__(
        self, peers: PeerAddresses, replica: int, own_endpoint: Callable[[], str | None]
    ) -> None:
        """Args: `replica`: this one. `own_endpoint`: where it listens; None: it does not yet."""
        self._peers = peers
        self._replica = replica
        self._own_endpoint = own_endpoint

    def find(self, replica: int) -> str | None:
        """See `PeerAddressBook.find`."""
        return self._own_endpoint() if replica == self._replica else self._peers.find(replica)

    def note(self, replica: int, endpoint: str, *, is_own: bool) -> None:
        """See `PeerAddresses.note`."""
        self._peers.note(replica, endpoint, is_own=is_own)


def write_endpoint(root: Path, host: str, port: int, *, tls: bool) -> None:
    write_json(root, "endpoint", {"host": host, "port": port, "tls": tls})


def write_door(root: Path, protocol: str, host: str, port: int) -> None:
    """Note where the replica's server for clients of a protocol listens. Raises: OSError."""
    write_json(root, f"door-{protocol}", {"host": host, "port": port})


def read_door(root: Path, protocol: str) -> tuple[str, int] | None:
    """Where the replica's server for clients of a protocol listens, or listened last; None: it has had none."""
    value = read_json(root, f"door-{protocol}")
    return (str(value["host"]), int(value["port"])) if isinstance(value, dict) else None


def forget_door(root: Path, protocol: str) -> None:
    """The replica has no server for clients of a protocol any more."""
    with contextlib.suppress(FileNotFoundError):
        Files().unlink(root / "raymq" / f"door-{protocol}")


def endpoint_of(host: str, port: int, *, tls: bool) -> str:
    return f"{'tls://' if tls else ''}{host}:{int(port)}"


def old_port(root: Path, host: str) -> int:
    """The port that this replica had, if it is free, else 0.

    gRPC listens with SO_REUSEPORT, so two servers could share a port unnoticed: a plain bind fails then.
    """
    endpoint = read_endpoint(root)
    if endpoint is None:
        return 0
    port = int(endpoint.rpartition(":")[2])
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return 0
    return port
