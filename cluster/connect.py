"""connect: finds a running cluster on its own machine, through Ray, or without Ray through raymq://."""

from __future__ import annotations

import os
import shlex
from dataclasses import fields
from typing import TYPE_CHECKING

from raymq.actors.protocol import tls
from raymq.client.arguments import check_choice
from raymq.client.handle import ClusterHandle
from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files

from .cluster import Cluster
from .deploy import ray_client, ray_host
from .deploy.ray_host import RayTarget
from .deploy.resolve import FileResolver, RayResolver, load_endpoints
from .record import cluster_record
from .record.cluster_record import ClusterRecord
from .record.paths import ClusterPaths, load_token
from .record.targets import find_data_dir, is_path, known_names

if TYPE_CHECKING:
    from raymq.client.transport.connection import Transport


def connect(
    target: str | os.PathLike[str] | None = None,
    *,
    token: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    transport: Transport | None = None,
) -> Cluster:
    """Find a running cluster and return a handle on it.

    A data directory or a name known on this machine needs no Ray. Any other name is looked up in the Ray to which this
    process is connected, otherwise in RAY_ADDRESS. With raymq:// the caller needs nothing but a shard's port.

    Example:
        ```python
        import raymq

        with raymq.connect("raymq-data") as cluster:
            print(cluster.describe()["version"])
        ```

    Args:
        target: a data directory (with a "/" in it, or existing); a cluster's name; "raymq://host:port" of any shard, or
            "raymq+tls://host:port" with TLS; "ray://host:port" through Ray Client ("ray://host:port/NAME" if several
            clusters run there); None (default) for the only cluster that this user started on this machine.
        token: the content of the file `token` in the data directory; None (default) reads RAYMQ_TOKEN. Only raymq://
            needs it.
        ca: a PEM file with the authority that signed the shards' certificates. Default: the authority in
            RAY_TLS_CA_CERT of `start`; with raymq+tls:// the variable of this process.
        transport: "flight" (default) talks to the shards by Arrow Flight. "ray" makes every operation a call of the
            shards' actors, for processes that reach only Ray. A call costs several times as much. Ray Client always
            uses "ray".

    Raises:
        Rejected: the cluster is unknown here, the token is missing or wrong, or the certificate is not trusted.
        Unavailable: the cluster does not answer.
    """
    if transport is not None:
        check_choice("transport", transport, ("flight", "ray"))
    cluster = _connect(target, token, ca, transport)
    cluster.transport = transport or cluster.transport
    return cluster


def _connect(
    target: str | os.PathLike[str] | None,
    token: str | None,
    ca: str | os.PathLike[str] | None,
    transport: Transport | None,
) -> Cluster:
    files = Files()
    given = tls.read_ca(ca, files) if ca else None
    text = None if target is None else os.fspath(target)
    if text is not None and text.startswith(ray_client.SCHEME):
        return _cluster_of(ray_client.connect_url(text))

    if text is not None and tls.parse_url(text) is not None:
        trusted = given or tls.trusted(os.environ, files)
        return Cluster.bootstrap(text, token=token or os.environ.get("RAYMQ_TOKEN"), ca=trusted)

    if not is_path(text, files) and ray_client.is_connected() and transport != "flight":
        return _cluster_of(ray_client.find(text))

    data_dir = find_data_dir(text, files)
    if data_dir is not None:
        return _connect_data_dir(ClusterPaths(data_dir), files, given)
    return _connect_through_ray(text or "default", given)


def _cluster_of(handle: ClusterHandle) -> Cluster:
    """The cluster of a handle."""
    return Cluster(**{each.name: getattr(handle, each.name) for each in fields(ClusterHandle)})


def _connect_data_dir(paths: ClusterPaths, files: Files, ca: bytes | None) -> Cluster:
    record = cluster_record.load_record(paths, files)
    if record is None:
        raise Rejected(
            f"{paths.data_dir} is not the data directory of a cluster: start it with raymq start "
            f"{shlex.quote(str(paths.data_dir))}",
            field="target",
        )

    running = ray_host.running_target(paths, files)
    ray_address = None if running is None else running.address
    if running is not None and running.owned is not None:
        ray_host.let_join(running.owned)

    if record.placement is None:
        endpoints = FileResolver(paths.data_dir)()
    else:
        endpoints = load_endpoints(paths, files)

    token = load_token(paths, files)
    ca = ca or known_ca(paths, files)
    return local_handle(paths, record, token, endpoints, ray_address, ca)


def _connect_through_ray(name: str, ca: bytes | None) -> Cluster:
    address = ray_host.connected_address() or os.environ.get("RAY_ADDRESS")
    if not address:
        raise Rejected(
            f"no cluster {name!r} was started on this machine (known: {known_names(Files())}), and this process is "
            "not connected to a Ray. Give its data directory, raymq://host:port, or set RAY_ADDRESS",
            field="target",
        )

    if address.startswith(ray_client.SCHEME):
        return _cluster_of(ray_client.connect_url(f"{address}/{name}"))
    with ray_host.session(RayTarget(address=address)) as ray:
        cluster = _cluster_of(ray_client.handle_of(ray, name))

    cluster.resolver = RayResolver(address, name)
    cluster.ray_address = address
    cluster.ca = ca or cluster.ca
    return cluster


def _resolver(
    paths: ClusterPaths, record: ClusterRecord, ray_address: str | None
) -> FileResolver | RayResolver | None:
    """Looks up the shards' endpoints: in files on one machine, in Ray over nodes; None: ask the shards."""
    if record.placement is None:
        return FileResolver(paths.data_dir)
    return None if ray_address is None else RayResolver(ray_address, record.name)


def local_handle(
    paths: ClusterPaths,
    record: ClusterRecord,
    token: str,
    endpoints: dict[int, str],
    ray_address: str | None,
    ca: bytes | None,
    *,
    stop_on_exit: bool = False,
) -> Cluster:
    """A handle for a program on the cluster's machine."""
    return Cluster(
        name=record.name,
        cluster_id=record.cluster_id,
        shards=record.joined,
        token=token,
        endpoints=endpoints,
        resolver=_resolver(paths, record, ray_address),
        data_dir=paths.data_dir,
        ray_address=ray_address,
        stop_on_exit=stop_on_exit,
        ca=ca,
        replicas=record.replicas,
        delay_levels=len(cluster_record.store_config(record).delay_levels_ms),
        placement=record.placement,
    )


def known_ca(paths: ClusterPaths, files: Files) -> bytes | None:
    return tls.read_ca(paths.ca, files) if files.exists(paths.ca) else None
