"""What a replica's CommitLog does on its node before it opens its store. Actors load it by name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from raymq.actors.protocol import tls
from raymq.actors.ray.actor_spec import ActorSpec
from raymq.cluster.record.paths import prepare_data_dir
from raymq.cluster.record.placement import NODE_HOST, WILDCARDS
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files

from .replaced_store import take_place


class Address(NamedTuple):
    """The address on which a replica listens, and the address that it gives to clients."""

    bind: str
    advertised: str


def prepare_replica(spec: ActorSpec, *, restarted: bool) -> Address:
    """Run by a replica's CommitLog before it opens its store: the directory and the address.

    With nodes, the data directory is made here (0700), where the actor runs. It is refused when it belongs to another
    replica, or is empty although this replica's store was made before and no other replica may lead: with a new, empty
    disk it would assign offsets a second time. Args: `restarted`: Ray has restarted the actor.

    Raises: Rejected (directory or address cannot be used), Unavailable (the store is not here).
    """
    files = Files()
    if spec["node"] is not None:
        prepare_data_dir(spec["cluster_dir"], ephemeral=spec["ephemeral"], files=files, member=True)
    take_place(spec, files, Clock())
    if spec["node"] is not None:
        _check_store(spec, files, made_before=restarted or spec["formed"])
    return address_of(spec)


def address_of(spec: ActorSpec) -> Address:
    """The address of an actor's node. Raises: Rejected when other machines could read what must not be read."""
    host = spec["host"]
    bind = _node_address() if host == NODE_HOST else host
    tls.check_exposed(bind, tls=spec["tls"], insecure=spec["insecure"])
    return Address(bind, _node_address() if bind in WILDCARDS else bind)


def _check_store(spec: ActorSpec, files: Files, *, made_before: bool) -> None:
    # Imported on use: it loads Arrow, which neither start nor the controller needs.
    from raymq.store.log.control_files.meta import Meta

    path = Path(spec["data_dir"]) / "raymq" / "meta"
    if not files.exists(path):
        if made_before and spec["candidates"] == (spec["replica"],):
            message = (
                f"node {spec['node']} has no store in {spec['data_dir']}, where this replica's was made: mount its "
                "disk there, or start Ray with this label on the machine that has it. If nothing was stored yet, "
                "`raymq stop` and `raymq start` make it"
            )
            raise Unavailable(message, path=spec["data_dir"], node=spec["node"])
        return

    with contextlib.closing(Meta.open(path, files=files)) as meta:
        for name in ("cluster_id", "shard", "replica"):
            found = meta.get(name)
            if found is not None and found != spec[name]:
                message = (
                    f"{spec['data_dir']} of node {spec['node']} is the store of {name} {found!r}, not {spec[name]!r}: "
                    "is it the disk of another node or cluster?"
                )
                raise Rejected(message, field=name, limit=spec[name], path=spec["data_dir"])


def _node_address() -> str:
    # Only actors come here. Clients that only name a placement need no Ray.
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address
