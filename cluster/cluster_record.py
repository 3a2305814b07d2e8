"""`cluster.json`, what a cluster is, and the list of clusters this user knows.

What a cluster is gets decided at its first start.

The list (`~/.raymq/clusters/<name>.json`) only saves typing: it maps a name to its data directory,
so that `connect("orders")` works in another shell. Losing it loses nothing: connect by the data
directory.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from raymq.store.config import StoreConfig
from raymq.store.errors import Corrupt, RayMQError, Rejected
from raymq.store.files import Files

from .deploy.placement import NODE_HOST, Placement, check_host, place
from .paths import ClusterPaths, check_name, home_dir

FORMAT = 1
_REPLICATION = ("single", "mirror")
_FLUSH = ("sync", "async")
_SHARDS_MAX = 256


@dataclass(frozen=True, kw_only=True)
class ClusterRecord:
    """What every start of the same data directory agrees on."""

    name: str
    #: 32 hexadecimal digits
    cluster_id: str
    shards: int
    #: "single" or "mirror"
    replication: str
    #: "sync" or "async"; a later start may change it
    flush: str
    segment_size_bytes: int
    ephemeral: bool
    #: 127.0.0.1 unless the operator chose otherwise; NODE_HOST: each node's own address
    host: str = "127.0.0.1"
    #: values of the node label, as given at the first start; None: all on one machine
    nodes: tuple[str, ...] | None = None
    #: where each replica is since the first start
    placement: Placement | None = None
    #: every shard has served: a store that is missing now was there
    formed: bool = False
    #: shards serve with TLS
    tls: bool = False
    #: the operator accepted that others on the network can read along
    insecure: bool = False
    #: leaders append through a pool in shared memory; a later start may change it
    transient_pool: bool = False
    #: hours for which a full file of messages is kept; a later start may change it
    file_reserved_hours: float = StoreConfig.file_reserved_hours

    @property
    def replicas(self) -> int:
        """Replicas of each shard."""
        return 2 if self.replication == "mirror" else 1

    def roles(self, replica: int) -> tuple[str, ...]:
        """The roles of one replica, in the order in which they are started. Replica 0 leads."""
        roles = ["commit_log", "group_commit" if self.flush == "sync" else "flush_real_time"]
        if self.transient_pool and replica == 0:
            roles.append("commit_real_time")
        if self.replication == "mirror" and replica == 0:
            roles.append("replication")
        return tuple(roles)


def new_record(
    *,
    name: str | None,
    shards: int | None,
    replication: str | None,
    flush: str | None,
    segment_size_bytes: int | None,
    ephemeral: bool,
    host: str | None,
    nodes: Sequence[str] | None = None,
    tls: bool = False,
    insecure: bool = False,
    transient_pool: bool | None = None,
    file_reserved_hours: float | None = None,
) -> ClusterRecord:
    """A new cluster; None takes the default. Raises: Rejected naming the option."""
    record = ClusterRecord(
        name=check_name("default" if name is None else name),
        cluster_id=uuid.uuid4().hex,
        shards=1 if shards is None else shards,
        replication=replication or "single",
        flush=flush or "sync",
        segment_size_bytes=1024**3 if segment_size_bytes is None else segment_size_bytes,
        ephemeral=ephemeral,
        host=host or ("127.0.0.1" if nodes is None else NODE_HOST),
        nodes=None if nodes is None else tuple(nodes),
        tls=tls,
        insecure=insecure,
        transient_pool=bool(transient_pool),
        file_reserved_hours=StoreConfig.file_reserved_hours
        if file_reserved_hours is None
        else file_reserved_hours,
    )
    if not 1 <= record.shards <= _SHARDS_MAX:
        raise Rejected(
            f"shards is {record.shards}; use 1 to {_SHARDS_MAX}", field="shards", limit=_SHARDS_MAX
        )
    _one_of("replication", record.replication, _REPLICATION)
    _one_of("flush", record.flush, _FLUSH)
    if record.nodes is None:
        return record
    check_host(record.host)
    return replace(record, placement=place(record.nodes, record.shards, record.replicas))


def resume_record(
    stored: ClusterRecord,
    *,
    name: str | None,
    shards: int | None,
    replication: str | None,
    flush: str | None,
    segment_size_bytes: int | None,
    host: str | None,
    nodes: Sequence[str] | None = None,
    tls: bool | None = None,
    insecure: bool = False,
    transient_pool: bool | None = None,
    file_reserved_hours: float | None = None,
) -> ClusterRecord:
    """The stored cluster with what a later start may change changed.

    That is flush, host, tls, insecure, transient_pool and file_reserved_hours.

    Raises: Rejected when an option contradicts what the directory holds.
    """
    fixed = {
        "name": name,
        "shards": shards,
        "replication": replication,
        "segment_size_bytes": segment_size_bytes,
        "nodes": None if nodes is None else tuple(nodes),
    }
    for option, value in fixed.items():
        kept = getattr(stored, option)
        if value is not None and value != kept:
            raise Rejected(
                f"{option}={value!r}, but this data directory was made with "
                f"{option}={kept!r}, which "
                "cannot be changed: leave the option out, or use another data directory",
                field=option,
                limit=kept,
            )
    if flush is not None:
        _one_of("flush", flush, _FLUSH)
    if stored.nodes is not None and host is not None:
        check_host(host)
    return replace(
        stored,
        flush=flush or stored.flush,
        host=host or stored.host,
        tls=stored.tls if tls is None else tls,
        insecure=insecure or stored.insecure,
        transient_pool=stored.transient_pool if transient_pool is None else transient_pool,
        file_reserved_hours=stored.file_reserved_hours
        if file_reserved_hours is None
        else file_reserved_hours,
    )


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise Rejected(
            f"{option} is {value!r}; use {' or '.join(map(repr, allowed))}",
            field=option,
            limit="|".join(allowed),
        )


def save_record(paths: ClusterPaths, record: ClusterRecord, files: Files) -> None:
    """Durable: the record survives power loss at return."""
    body: dict[str, Any] = {"format": FORMAT, **asdict(record)}
    files.write_file_atomic(paths.cluster, (json.dumps(body, indent=2) + "\n").encode())


def load_record(paths: ClusterPaths, files: Files) -> ClusterRecord | None:
    """The directory's record, None when it has none. Raises: Corrupt on a damaged or newer file."""
    if not files.exists(paths.cluster):
        return None
    try:
        body = json.loads(files.read_file(paths.cluster))
        version = body.pop("format")
        if version != FORMAT:
            raise Corrupt(
                f"{paths.cluster} has format {version}; this version reads {FORMAT}: "
                "use the RayMQ version that wrote it, or a newer one",
                path=str(paths.cluster),
                rule="format",
                expected=FORMAT,
                found=version,
            )
        # JSON knows no tuples.
        if body.get("nodes") is not None:
            body["nodes"] = tuple(body["nodes"])
            body["placement"] = tuple(tuple(row) for row in body["placement"])
        return ClusterRecord(**body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(
            f"{paths.cluster} is damaged ({error}); the messages lie in shard-*/ "
            "and are not touched",
            path=str(paths.cluster),
            rule="cluster.json",
        ) from error


def remember(record: ClusterRecord, paths: ClusterPaths, files: Files) -> None:
    """Lists the cluster among those this user knows.

    A home that cannot be written is not an.

        Error.
    """
    folder = home_dir() / "clusters"
    body = json.dumps({"data_dir": paths.data_dir, "cluster_id": record.cluster_id})
    try:
        files.make_dirs(folder, 0o700)
        files.write_file_atomic(folder / f"{record.name}.json", body.encode())
    except (OSError, RayMQError):
        return


def known_clusters(files: Files) -> dict[str, str]:
    """name -> data directory of the clusters this user started here whose directory still.

    Exists.
    """
    folder = home_dir() / "clusters"
    known: dict[str, str] = {}
    try:
        entries = files.list(folder)
    except OSError:
        return known
    for entry in entries:
        name = entry.removesuffix(".json")
        if name == entry:
            continue
        try:
            data_dir = json.loads(files.read_file(folder / entry))["data_dir"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(data_dir, str) and files.exists(ClusterPaths(data_dir).cluster):
            known[name] = data_dir
    return known
