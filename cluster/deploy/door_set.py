"""The servers for foreign clients beside the replicas: what they need, and whether they serve.

Functions over an initialised `ray` module.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import socket
from types import ModuleType
from typing import Any

from raymq.actors.protocol.tls import is_loopback
from raymq.cluster.record.cluster_record import ClusterRecord
from raymq.cluster.record.placement import NODE_HOST
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected

from .actor_states import DOOR_ROLES, LOOKUP_TIMEOUT_S, Member, all_actor_keys, find
from .ray_host import Progress

#: older ones end the process at deeply nested JSON
_ORJSON_MIN = (3, 9, 15)
_STEP_MS = 200


def check(ray: ModuleType | None, record: ClusterRecord, *, before: ClusterRecord | None) -> None:
    """Check that the servers of a record can work on this machine. Raises: Rejected.

    Args: `ray`: None: before there is one, so that a server which has the port may be ours. `before`: the record of
    those that may run now; None: none do.
    """
    port = record.rocketmq_port
    if port is None:
        return

    missing = missing_package()
    if missing is not None:
        raise Rejected(
            f"the server for RocketMQ's clients needs {missing}: pip install 'raymq[rocketmq]'",
            field="rocketmq",
            limit=missing,
        )

    if record.rocketmq_access == "open" and not is_loopback(record.host):
        raise Rejected(
            f"rocketmq_access='open' takes requests from each machine that reaches {record.host}: leave it out, and "
            "give the clients AccessKey and SecretKey",
            field="rocketmq_access",
            limit="key, unless the host is 127.0.0.1",
            found="open",
        )

    # Over nodes, or on an address that only Ray knows, each server says it.
    is_here = record.placement is None and record.host != NODE_HOST
    is_ours = False
    if before is not None and before.rocketmq_port == port:
        is_ours = ray is None or bool(_members(ray, before))
    if is_here and not is_ours and not _is_free(record.host, port):
        raise Rejected(
            f"port {port} of {record.host} is taken by another program, a RocketMQ name server perhaps: choose another "
            "one with rocketmq=PORT (command line: --rocketmq PORT)",
            field="rocketmq",
            limit="a free port",
            found=port,
        )


def missing_package() -> str | None:
    """The package that the server for RocketMQ's clients lacks here; None: it is there."""
    if _orjson_version() >= _ORJSON_MIN:
        return None
    return f"orjson {'.'.join(map(str, _ORJSON_MIN))} or newer"


def await_doors(
    ray: ModuleType,
    record: ClusterRecord,
    *,
    clock: Clock,
    timeout_s: float,
    progress: Progress,
    warn: Progress,
) -> bool:
    """Wait until the servers of a record work, and say where. Returns: whether all do.

    The shards serve without them: one that does not work is a line of `warn`.
    """
    if record.rocketmq_port is None:
        return True
    members = _members(ray, record)
    deadline_ms = clock.monotonic_ms() + int(timeout_s * 1000)
    while True:
        rows = _ask(ray, members)
        works = all(row.get("state") == "RUNNING" for row in rows)
        is_found = any(row.get("node_port") for row in rows)
        if works and is_found:
            access = "" if record.rocketmq_access == "key" else ", without a key"
            progress(f"RocketMQ clients: name server port {record.rocketmq_port}{access}")
            return True
        if clock.monotonic_ms() > deadline_ms:
            break
        clock.sleep_ms(_STEP_MS)

    for member, row in zip(members, rows, strict=True):
        if row.get("state") != "RUNNING":
            warn(f"WARNING: {member.name} does not work yet: {row.get('error') or 'no answer'}")
    if not is_found:
        causes = {str(row["node_port_error"]) for row in rows if row.get("node_port_error")}
        warn(
            f"WARNING: no server has port {record.rocketmq_port} for name server requests: "
            f"{'; '.join(sorted(causes)) or 'none works yet'}"
        )
    return False


def _members(ray: ModuleType, record: ClusterRecord) -> list[Member]:
    keys = [key for key in all_actor_keys(record) if key[2] in DOOR_ROLES]
    return find(ray, record.name, keys)


def _ask(ray: ModuleType, members: list[Member]) -> list[dict[str, Any]]:
    """The status of each server; {} for one that does not answer."""
    calls = [member.handle.status.remote() for member in members]
    rows = []
    for call in calls:
        row: dict[str, Any] = {}
        with contextlib.suppress(ray.exceptions.RayError):
            row = ray.get(call, timeout=LOOKUP_TIMEOUT_S)
        rows.append(row)
    return rows


def _orjson_version() -> tuple[int, ...]:
    try:
        found = importlib.metadata.version("orjson")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in found.split(".")[:3] if part.isdecimal())


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
