"""What a start or an operation checks of a record: the addresses of its shards, and the memory of their pools."""

from __future__ import annotations

from types import ModuleType

from raymq.actors.protocol import tls
from raymq.cluster.record.cluster_record import ClusterRecord, store_config
from raymq.cluster.record.paths import ClusterPaths
from raymq.cluster.record.placement import NODE_HOST
from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files
from raymq.store.log.transient_pool import check_room

from . import node_labels, ray_release


def check_pools(paths: ClusterPaths, record: ClusterRecord, files: Files) -> None:
    """Raises: StorageFull if the transient pools of the leaders do not fit into shared memory."""
    # With `nodes` each shard checks its own machine.
    if record.transient_pool and record.nodes is None:
        config = store_config(record)
        leaders = [paths.replica(shard, 0) for shard in range(record.shards)]
        pool_bytes = config.transient_pool_slices * config.transient_pool_slice_bytes
        check_room(leaders, pool_bytes, files=files)


def check_own_ray(record: ClusterRecord, version: str | None, *, loopback: bool) -> list[str]:
    """Warnings about a Ray that `start` is about to start: its release may have no token.

    Args: `loopback`: it listens on 127.0.0.1 only.
    Raises: Rejected when other machines would reach such a Ray, and `insecure` does not accept that.
    """
    if ray_release.has_token(version):
        return []
    why = ray_release.tokenless(version)
    if not loopback and not record.insecure:
        raise Rejected(
            f"{why}, and other machines would reach them: install a newer Ray, leave Ray on 127.0.0.1 (no host, no "
            "TLS), or accept it with insecure=True (command line: --insecure)",
            field="host",
            limit="127.0.0.1",
            found=record.host,
        )
    return [f"WARNING: {why}"]


def check_addresses(ray: ModuleType, record: ClusterRecord, *, first: bool) -> list[str]:
    """Warnings about addresses at which other machines can read the traffic.

    Raises: Rejected when `insecure` does not accept that, or when nodes are missing or named twice.
    """
    addresses: list[str] = []
    if record.nodes is not None:
        # A replica that was replaced may be on a node that the first start did not name.
        nodes = {node for row in record.placement or () for node in row}
        addresses = node_labels.check_nodes(ray, record.nodes if first else nodes, first=first)
    elif record.host == NODE_HOST:
        addresses = [ray.util.get_node_ip_address()]
    hosts = addresses if record.host == NODE_HOST else [record.host]
    exposed = [
        host for host in hosts if tls.check_exposed(host, tls=record.tls, insecure=record.insecure)
    ]
    return [
        f"WARNING: any machine on the network of {host} can read the token and every message: the "
        "connection is not encrypted (--insecure)"
        for host in exposed
    ]
