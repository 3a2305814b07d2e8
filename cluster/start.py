"""start, connect and stop: the life of a cluster as a user sees it.

`start` creates or resumes a data directory: same call after a crash, in a new Ray, with a new
version. It returns when every shard is up: RUNNING, or READ_ONLY, of which it warns. `stop` ends
the cluster's actors in order and, if `start` started it, Ray; data stays. `connect` finds a running
cluster; on its own machine, or with raymq://, without Ray.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from raymq.actors.shared.control_block import check_architecture
from raymq.store.clock import Clock
from raymq.store.config import StoreConfig
from raymq.store.errors import RayMQError, Rejected, Unavailable
from raymq.store.files import Files
from raymq.store.log.transient_pool import check_room

from .arguments import check_choice
from .cluster import Cluster
from .cluster_record import (
    ClusterRecord,
    Wanted,
    known_clusters,
    load_record,
    new_record,
    remember,
    resume_record,
    save_record,
)
from .deploy import actor_set, owned_ray, placement, ray_client, ray_host, run_sweep
from .deploy.placement import NODE_HOST
from .deploy.ray_host import Progress, RayTarget
from .deploy.resolve import FileResolver, RayResolver, load_endpoints, save_endpoints
from .paths import (
    ClusterPaths,
    DirectoryLock,
    load_or_make_token,
    load_token,
    prepare_data_dir,
    volatile_reason,
)
from .transport import tls

if TYPE_CHECKING:
    from .transport.connection import Transport

_LOGGER = logging.getLogger("raymq")


@dataclass(frozen=True, kw_only=True)
class StopReport:
    """What `stop` found and did."""

    #: every shard closed in order: the next start needs no recovery
    clean: bool
    #: actor name -> "closed", "not running" or why it was ended without an orderly close
    actors: dict[str, str] = field(default_factory=dict)
    #: "stopped", "left running" (not ours) or "not running"
    ray: str = "not running"


def start(
    data_dir: str | os.PathLike[str],
    *,
    name: str | None = None,
    shards: int | None = None,
    replication: Literal["single", "mirror"] | None = None,
    flush: Literal["sync", "async"] | None = None,
    transient_pool: bool | None = None,
    file_reserved_hours: float | None = None,
    address: str | None = None,
    ephemeral: bool = False,
    segment_size_bytes: int | None = None,
    host: str | None = None,
    insecure: bool = False,
    nodes: Sequence[str] | None = None,
    timeout_s: float = 180.0,
    progress: Progress | None = None,
) -> Cluster:
    """Creates the cluster of `data_dir`, or resumes the one there; returns when it serves.

    A shard that is READ_ONLY serves reads; its line is a warning.

    Args:
        data_dir: a directory on a disk of this machine; made (0700) if missing.
        name: how `connect` finds it; "default" if not given. Like `shards`, `replication`,
            `segment_size_bytes` and `nodes` it is decided at the first start; later starts may leave it out.
        shards: commit logs that the topics are spread over; 1 if not given.
        replication: "single" (default) or "mirror" (each shard kept twice, no failover).
        flush: "sync" (default: acknowledged after the disk's sync) or "async"; may change at each start.
        transient_pool: leaders append into shared memory, from where CommitRealTime moves the bytes
            into the files: readers and followers see them then (async: 200 ms later), and with
            flush="async" a machine that ends takes them. May change at each start.
        file_reserved_hours: a file of messages may be deleted so long after the last one in it; 72
            if not given. May change at each start.
        address: the Ray to run in. Without it: the Ray that this process is connected to, else the one
            in RAY_ADDRESS, else an own one that lives until `stop`.
        ephemeral: allow a data directory that does not survive a reboot (/tmp, tmpfs).
        host: the address that shards listen on; "node": the one that Ray knows their node by, which is
            the default with `nodes`; else 127.0.0.1.
        insecure: allow it to be reachable from other machines although the connection is not encrypted
            (RAY_USE_TLS=1 encrypts it, see docs/operating.md).
        nodes: values of the label `raymq-node`, by which the shards are spread over Ray's nodes,
            followers on other nodes than their leaders; `data_dir` is then a path on each of them.
            None: all on this machine.
        timeout_s: how long the whole start may take: Ray's answer, a Ray that has to be started or replaced, and the
            shards' recovery. `progress` says what is waited for, and the error what was waited for.
        progress: called with one line at a time.
    Raises: Rejected (an option is wrong; nothing was started), Unavailable (with each shard's state and
        error; what was started goes on trying, `stop` ends it), Corrupt (a store is damaged),
        StorageFull (no room for the transient pools; nothing was started).
    Durable: the cluster's identity, before the first actor starts.
    """
    if nodes is None:
        # With nodes each replica looks at its own machine.
        check_architecture(os.uname().machine)
    files, clock, tell = Files(), Clock(), progress or _LOGGER.info
    deadline = clock.monotonic_ms() + int(timeout_s * 1000)

    def left_s() -> float:
        return max(0.0, (deadline - clock.monotonic_ms()) / 1000)

    warn = progress or _LOGGER.warning
    wanted = Wanted(
        name=name,
        shards=shards,
        replication=replication,
        flush=flush,
        segment_size_bytes=segment_size_bytes,
        host=host,
        nodes=nodes,
        tls=tls.wanted(os.environ),
        insecure=insecure,
        transient_pool=transient_pool,
        file_reserved_hours=file_reserved_hours,
    )
    if host not in (None, NODE_HOST):
        tls.check_exposed(str(host), tls=bool(wanted.tls), insecure=insecure)
    place = os.fspath(data_dir)
    # A directory that was once declared ephemeral stays so.
    earlier = load_record(ClusterPaths(place), files)
    ephemeral = ephemeral or (earlier is not None and earlier.ephemeral)
    paths = prepare_data_dir(place, ephemeral=ephemeral, files=files)
    with DirectoryLock(paths, files):
        stored, record, options = plan_start(paths, wanted, ephemeral=ephemeral, files=files)
        token = load_or_make_token(paths, files)
        ca = _trusted(paths, record, files)
        run_sweep.sweep(files, clock)
        target = ray_host.find_ray(paths, address, files)
        answers_s: float | None = left_s()
        if target is not None and target.owned is not None:
            target = _ray_that_answers(paths, target, timeout_s, files, clock, tell)
            answers_s = None
        elif target is not None:
            tell(f"waiting for Ray at {target.address} to answer")
        if target is None:
            target = _own_ray(
                paths, record, files, clock, tell, first=stored is None, timeout_s=left_s()
            )
            answers_s = None
        with ray_host.session(target, answers_s) as ray:
            tell(f"starting {record.shards} shard(s) of {record.name!r} in Ray at {target.address}")
            # "auto" and the like would mean something else in another shell.
            address = ray.get_runtime_context().gcs_address
            for line in _check_addresses(ray, record, first=stored is None):
                warn(line)
            if stored is None:
                save_record(paths, record, files)
            actors, ours = actor_set.create(
                ray, record, paths, token, options, ca, timeout_s=left_s()
            )
            save_record(paths, record, files)
            ray_host.save_target(paths, replace(target, address=address), files)
            endpoints = actor_set.wait_running(
                ray, actors, clock=clock, timeout_s=left_s(), progress=tell, warn=warn
            )
        if record.placement is not None:
            save_endpoints(paths, endpoints, files)
            record = replace(record, formed=True)
            save_record(paths, record, files)
        remember(record, paths, files)
    tell(f"cluster {record.name!r} runs: {record.shards} shard(s), data in {paths.data_dir}")
    return Cluster(
        name=record.name,
        cluster_id=record.cluster_id,
        shards=record.shards,
        token=token,
        endpoints=endpoints,
        resolver=_resolver(paths, record, address),
        data_dir=paths.data_dir,
        ray_address=address,
        stop_on_exit=ours,
        ca=ca,
        placement=record.placement,
    )


def plan_start(
    paths: ClusterPaths, wanted: Wanted, *, ephemeral: bool, files: Files
) -> tuple[ClusterRecord | None, ClusterRecord, dict[str, Any]]:
    """What a start would do with a directory; changes nothing. `raymq doctor` asks it too.

    Returns: the record of an earlier start, the record of this one, the options of its stores.
    Raises: Rejected for an option, Corrupt for a damaged record, StorageFull for the transient pools.
    """
    stored = load_record(paths, files)
    if stored is not None:
        record = resume_record(stored, wanted)
    else:
        volatile = volatile_reason(paths.data_dir, files) is not None
        record = new_record(wanted, ephemeral=volatile or (wanted.nodes is not None and ephemeral))
    options = _store_options(record)
    _check_pool_room(paths, record, options, files)
    return stored, record, options


def connect(
    target: str | os.PathLike[str] | None = None,
    *,
    token: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    transport: Transport | None = None,
) -> Cluster:
    """A handle on a running cluster.

    Args:
        target: a data directory; a cluster's name; "raymq://host:port" (with TLS
            "raymq+tls://host:port") of any of its shards; or None for the only cluster that this
            user started on this machine. A name that is not known here is looked up in Ray: the one
            this process is connected to, or RAY_ADDRESS.
        transport: "flight" (default), or "ray": every operation is a call of the shards' actors, by a
            process that is connected to their Ray. Through Ray Client it is "ray" by itself: for
            target "ray://host:port" (of several clusters "ray://host:port/NAME"), and for a name in a
            process that did ray.init("ray://...").
        token: the content of the data directory's file `token`, or RAYMQ_TOKEN; needed with raymq:// only.
        ca: a PEM file, which must have signed the shards' certificates; without it what `start` saw in
            RAY_TLS_CA_CERT, or with raymq+tls:// this process's own.
    Raises: Rejected (no such cluster, no token, wrong certificate), Unavailable (it does not answer).
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
    if target is not None:
        text = os.fspath(target)
        if text.startswith(ray_client.SCHEME):
            return ray_client.connect_url(text)
        if tls.parse_url(text) is not None:
            return Cluster.bootstrap(
                text,
                token=token or os.environ.get("RAYMQ_TOKEN"),
                ca=given or tls.trusted(os.environ, files),
            )
        if os.sep in text or files.exists(ClusterPaths(text).cluster):
            return _connect_data_dir(ClusterPaths(text), files, given)
    if ray_client.is_connected() and transport != "flight":
        return ray_client.find(None if target is None else os.fspath(target))
    data_dir = _known_data_dir(None if target is None else os.fspath(target), files)
    if data_dir is not None:
        return _connect_data_dir(ClusterPaths(data_dir), files, given)
    return _connect_through_ray("default" if target is None else os.fspath(target), given)


def stop(
    target: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float = 60.0,
    progress: Progress | None = None,
) -> StopReport:
    """Ends the cluster of a data directory (or of a name known on this machine); deletes no data.

    Actors are closed in order (flush, checkpoint), then ended; then Ray, if `start` started it.
    Stopping what does not run is not an error.

    Raises: Rejected (no such cluster here), Unavailable (something cannot be ended).
    """
    files, clock, tell = Files(), Clock(), progress or _LOGGER.info
    if target is None:
        _check_only_one(files)
    paths = local_paths(target, files)
    record = load_record(paths, files)
    if record is None:
        raise Rejected(
            f"{paths.data_dir} is not the data directory of a cluster (no cluster.json)",
            field="target",
        )
    tell(f"stopping cluster {record.name!r} of {paths.data_dir}")
    with DirectoryLock(paths, files):
        return _stop_locked(paths, record, files, clock, timeout_s, tell)


def _stop_locked(
    paths: ClusterPaths,
    record: ClusterRecord,
    files: Files,
    clock: Clock,
    timeout_s: float,
    tell: Progress,
) -> StopReport:
    outcomes: dict[str, str] = {}
    recorded = ray_host.load_target(paths, files)
    running = ray_host.running_target(paths, files)
    runs = running is not None
    if running is not None:
        try:
            if running.owned is not None:
                ailment = owned_ray.ailment(running.owned, files)
                if ailment is not None:
                    raise Unavailable(ailment, address=running.address)
            with ray_host.session(running, timeout_s) as ray:
                if actor_set.is_another(ray, record, clock=clock):
                    # The Ray it ran in is gone, and this one at its address serves somebody else.
                    tell(f"another cluster named {record.name!r} runs in Ray at {running.address}")
                    runs = False
                else:
                    tell(f"closing {record.shards} shard(s) of {record.name!r}")
                    outcomes = actor_set.close(ray, record, clock=clock, timeout_s=timeout_s)
        except Unavailable as error:
            # An owned Ray is ended below in any case; one that is not ours is the caller's to
            # repair.
            if running.owned is None:
                raise
            outcomes = {"ray": f"does not answer: {error}"}
    ray_outcome = "left running" if runs else "not running"
    if recorded is not None and recorded.owned is not None:
        tell("stopping Ray")
        ray_host.leave(recorded.owned)
        owned_ray.stop_owned(paths, files=files, clock=clock)
        ray_outcome = "stopped" if runs else "not running"
    elif recorded is not None:
        files.unlink(paths.ray)
    replicas = [
        paths.replica(shard, r) for shard in range(record.shards) for r in range(record.replicas)
    ]
    run_sweep.sweep(files, clock, replicas)
    clean = all(outcome in ("closed", "not running") for outcome in outcomes.values())
    return StopReport(clean=clean, actors=outcomes, ray=ray_outcome)


def local_paths(target: str | os.PathLike[str] | None, files: Files) -> ClusterPaths:
    """The data directory that `target` (a directory, a name, None) means on this machine.

    Raises: Rejected when it means none.
    """
    if target is not None:
        text = os.fspath(target)
        if "://" in text:
            raise Rejected(
                f"{text} is an address: do this on the machine that has its data directory, and "
                "name that, or the cluster",
                field="target",
                limit="a data directory or name",
            )
        if os.sep in text or files.exists(ClusterPaths(text).cluster):
            return ClusterPaths(text)
    data_dir = _known_data_dir(None if target is None else os.fspath(target), files)
    if data_dir is None:
        raise Rejected(
            "no cluster is known here: name its data directory"
            if target is None
            else f"{os.fspath(target)!r} is neither a data directory nor a cluster "
            "started here; known: "
            f"{', '.join(sorted(known_clusters(files))) or 'none'}",
            field="target",
        )
    return ClusterPaths(data_dir)


def _check_only_one(files: Files) -> None:
    """Raises: Rejected when several clusters are known: what is stopped must then be named."""
    known = known_clusters(files)
    if len(known) < 2:
        return
    each = [
        f"{name} in {place}"
        + ("" if ray_host.running_target(ClusterPaths(place), files) else " (does not run)")
        for name, place in sorted(known.items())
    ]
    raise Rejected(
        f"several clusters are known here: {'; '.join(each)}. Nothing was stopped: name one of them",
        field="target",
        limit=", ".join(sorted(known)),
    )


def _known_data_dir(name: str | None, files: Files) -> str | None:
    known = known_clusters(files)
    if name is not None:
        return known.get(name)
    if len(known) > 1:
        if "default" in known:
            return known["default"]
        raise Rejected(
            f"several clusters are known here ({', '.join(sorted(known))}): say which one",
            field="target",
        )
    return next(iter(known.values()), None)


def _connect_data_dir(paths: ClusterPaths, files: Files, ca: bytes | None) -> Cluster:
    record = load_record(paths, files)
    if record is None:
        raise Rejected(
            f"{paths.data_dir} is not the data directory of a cluster: start it with "
            f"raymq start {paths.data_dir}",
            field="target",
        )
    running = ray_host.running_target(paths, files)
    ray_address = None if running is None else running.address
    if running is not None and running.owned is not None:
        ray_host.let_join(running.owned)
    resolver = _resolver(paths, record, ray_address)
    if record.placement is None:
        endpoints = FileResolver(paths.data_dir, record.shards)()
    else:
        endpoints = load_endpoints(paths, files)
    return Cluster(
        name=record.name,
        cluster_id=record.cluster_id,
        shards=record.shards,
        token=load_token(paths, files),
        endpoints=endpoints,
        resolver=resolver,
        data_dir=paths.data_dir,
        ray_address=ray_address,
        ca=ca or _known_ca(paths, files),
        placement=record.placement,
    )


def _connect_through_ray(name: str, ca: bytes | None) -> Cluster:
    address = ray_host.connected_address() or os.environ.get("RAY_ADDRESS")
    if not address:
        known = ", ".join(sorted(known_clusters(Files()))) or "none"
        raise Rejected(
            f"no cluster {name!r} was started on this machine (known: {known}), and "
            "this process is not "
            "connected to a Ray. Give its data directory, raymq://host:port, or set RAY_ADDRESS",
            field="target",
        )
    if address.startswith(ray_client.SCHEME):
        return ray_client.connect_url(f"{address}/{name}")
    with ray_host.session(RayTarget(address=address)) as ray:
        facts = actor_set.credentials(ray, name)
    resolver = RayResolver(address, name, int(facts["shards"]))
    return Cluster(
        name=name,
        cluster_id=facts["cluster_id"],
        shards=int(facts["shards"]),
        token=facts["token"],
        endpoints=resolver(),
        resolver=resolver,
        data_dir=None,
        ray_address=address,
        ca=ca or (facts["ca"].encode() if facts.get("ca") else None),
        placement=facts.get("placement"),
    )


def _store_options(record: ClusterRecord) -> dict[str, Any]:
    """The store's options as a plain dict, checked. Raises: Rejected."""
    flush: Literal["sync", "async"] = "async" if record.flush == "async" else "sync"
    config = StoreConfig(
        segment_size_bytes=record.segment_size_bytes,
        flush=flush,
        transient_pool=record.transient_pool,
        file_reserved_hours=record.file_reserved_hours,
    )
    return asdict(config)


def _own_ray(
    paths: ClusterPaths,
    record: ClusterRecord,
    files: Files,
    clock: Clock,
    tell: Progress,
    *,
    first: bool,
    timeout_s: float,
) -> RayTarget:
    """A Ray that lives until `stop`, which finds it whenever this process ends.

    A first start that fails here decides nothing, unless a Ray is left: the next one may have other options.
    Raises: Rejected for a cluster over several nodes; Unavailable.
    """
    if record.nodes is not None:
        raise Rejected(
            "a cluster over several nodes runs in a Ray that runs on them already: start Ray on "
            "each, and give its address (address=..., RAY_ADDRESS)",
            field="address",
        )
    if first:
        save_record(paths, record, files)
    try:
        owned = owned_ray.start_owned(
            paths,
            files=files,
            clock=clock,
            progress=tell,
            # With TLS Ray is known by the address in its certificate, and takes only drivers that have one too.
            loopback=tls.is_loopback(record.host) and not tls.wanted(os.environ),
            timeout_s=timeout_s,
        )
    except RayMQError:
        # One that could not be ended either is there: `stop` needs the record to try again.
        if first and ray_host.load_owned(paths, files) is None:
            files.unlink(paths.cluster)
        raise
    return RayTarget(address=owned.address, owned=owned)


def _ray_that_answers(
    paths: ClusterPaths,
    target: RayTarget,
    timeout_s: float,
    files: Files,
    clock: Clock,
    tell: Progress,
) -> RayTarget | None:
    """The directory's own Ray when it takes drivers; None: it is dying, start another in its place.

    Raises: Unavailable when it is silent although its processes are well: others may work in it, so `stop` must end it.
    """
    owned = target.owned
    if owned is None:
        return target
    fault = owned_ray.ailment(owned, files)
    if fault is None and ray_host.connected_address() is None:
        tell(f"waiting for Ray at {target.address} to answer")
        fault = ray_host.wait_for_answer(
            target,
            timeout_s=timeout_s,
            clock=clock,
            ailment=lambda: owned_ray.ailment(owned, files),
        )
        if fault is not None and owned_ray.ailment(owned, files) is None:
            raise Unavailable(
                f"Ray at {target.address} does not answer: {fault}. End it with `raymq stop {paths.data_dir}`",
                address=target.address,
            )
    if fault is None:
        return target
    ray_host.leave(owned)
    return None


def _check_pool_room(
    paths: ClusterPaths, record: ClusterRecord, options: dict[str, Any], files: Files
) -> None:
    """Raises: StorageFull, with the numbers. On other nodes each shard finds out itself."""
    if record.transient_pool and record.nodes is None:
        slices = options["transient_pool_slices"]
        leaders = [paths.replica(shard, 0) for shard in range(record.shards)]
        check_room(leaders, slices * options["transient_pool_slice_bytes"], files=files)


def _resolver(
    paths: ClusterPaths, record: ClusterRecord, ray_address: str | None
) -> FileResolver | RayResolver | None:
    """Who knows where the shards are: files on one machine, Ray over nodes, None: the shards."""
    if record.placement is None:
        return FileResolver(paths.data_dir, record.shards)
    return None if ray_address is None else RayResolver(ray_address, record.name, record.shards)


def _trusted(paths: ClusterPaths, record: ClusterRecord, files: Files) -> bytes | None:
    """With TLS, who must have signed the shards' certificates; kept for `connect` in other shells."""
    if not record.tls:
        if files.exists(paths.ca):
            files.unlink(paths.ca)
        return None
    trusted = tls.trusted(os.environ, files)
    if trusted is not None:
        files.write_file_atomic(paths.ca, trusted)
    return trusted or _known_ca(paths, files)


def _known_ca(paths: ClusterPaths, files: Files) -> bytes | None:
    return tls.read_ca(paths.ca, files) if files.exists(paths.ca) else None


def _check_addresses(ray: Any, record: ClusterRecord, *, first: bool) -> list[str]:
    """Warnings about addresses on which others can read along.

    Raises: Rejected when that was not accepted, or when nodes are missing or named twice.
    """
    found: list[str] = []
    if record.nodes is not None:
        found = placement.check_nodes(ray, record.nodes, first=first)
    elif record.host == NODE_HOST:
        found = [ray.util.get_node_ip_address()]
    hosts = found if record.host == NODE_HOST else [record.host]
    exposed = [
        host for host in hosts if tls.check_exposed(host, tls=record.tls, insecure=record.insecure)
    ]
    return [
        f"WARNING: whoever is on the network of {host} can read the token and every message: the "
        "connection is not encrypted (--insecure)"
        for host in exposed
    ]
