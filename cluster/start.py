"""start, connect and stop: the life of a cluster as a user sees it.

`start` creates or resumes a data directory: same call after a crash, in a new Ray, with a new
version. It returns when every shard is RUNNING. `stop` ends the cluster's actors in order and, if
`start` started it, Ray; data stays. `connect` finds a running cluster; on its own machine, or with
raymq://, without Ray.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from raymq.store.clock import Clock
from raymq.store.config import StoreConfig
from raymq.store.errors import Rejected, Unavailable
from raymq.store.files import Files

from . import actor_set, ray_host
from .cluster import Cluster
from .cluster_record import (
    ClusterRecord,
    known_clusters,
    load_record,
    new_record,
    remember,
    resume_record,
    save_record,
)
from .paths import (
    ClusterPaths,
    DirectoryLock,
    load_or_make_token,
    load_token,
    prepare_data_dir,
    volatile_reason,
)
from .ray_host import Progress, RayTarget
from .resolve import FileResolver, RayResolver

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
    address: str | None = None,
    ephemeral: bool = False,
    segment_size_bytes: int | None = None,
    host: str | None = None,
    insecure: bool = False,
    timeout_s: float = 120.0,
    progress: Progress | None = None,
) -> Cluster:
    """Creates the cluster of `data_dir`, or resumes the one there; returns when it serves.

    Args:
        data_dir: a directory on a disk of this machine; made (0700) if missing.
        name: how `connect` finds it; "default" if not given. Like `shards`, `replication` and
            `segment_size_bytes` it is decided at the first start; later starts may leave it out.
        shards: commit logs that the topics are spread over; 1 if not given. replication: "single"
        (default) or "mirror" (each shard kept twice, no failover). flush: "sync" (default:
        acknowledged after the disk's sync) or "async"; may change at each start. address: the Ray
        to run in. Without it: the Ray that this process is connected to, else the one in
            RAY_ADDRESS, else an own one that lives until `stop`.
        ephemeral: allow a data directory that does not survive a reboot (/tmp, tmpfs). host: the
        address that shards listen on; 127.0.0.1 if not given. insecure: allow `host` to be
        reachable from other machines although the connection is not encrypted. timeout_s: how long
        shards may take to recover and serve. progress: called with one line at a time.
    Raises: Rejected (an option is wrong; nothing was started), Unavailable (with each shard's state
    and
        error; what was started goes on trying, `stop` ends it), Corrupt (a store is damaged).
    Durable: the cluster's identity, before the first actor starts.
    """
    files, clock, tell = Files(), Clock(), progress or _LOGGER.info
    if host is not None:
        _check_host(host, insecure)
    place = os.fspath(data_dir)
    # A directory that was once declared ephemeral stays so.
    earlier = load_record(ClusterPaths(place), files)
    ephemeral = ephemeral or (earlier is not None and earlier.ephemeral)
    paths = prepare_data_dir(place, ephemeral=ephemeral, files=files)
    with DirectoryLock(paths, files):
        stored = load_record(paths, files)
        if stored is None:
            record = new_record(
                name=name,
                shards=shards,
                replication=replication,
                flush=flush,
                segment_size_bytes=segment_size_bytes,
                ephemeral=volatile_reason(paths.data_dir, files) is not None,
                host=host,
            )
        else:
            record = resume_record(
                stored,
                name=name,
                shards=shards,
                replication=replication,
                flush=flush,
                segment_size_bytes=segment_size_bytes,
                host=host,
            )
        options = _store_options(record)
        token = load_or_make_token(paths, files)
        if stored is None:
            save_record(paths, record, files)
        target = ray_host.find_ray(paths, address, files)
        if target is None:
            owned = ray_host.start_owned(paths, files=files, clock=clock, progress=tell)
            target = RayTarget(address=owned.address, owned=owned)
        with ray_host.session(target) as ray:
            tell(f"starting {record.shards} shard(s) of {record.name!r} in Ray at {target.address}")
            # "auto" and the like would mean something else in another shell.
            address = ray.get_runtime_context().gcs_address
            actors, ours = actor_set.create(ray, record, paths, token, options)
            save_record(paths, record, files)
            ray_host.save_target(paths, replace(target, address=address), files)
            endpoints = actor_set.wait_running(
                ray, actors, clock=clock, timeout_s=timeout_s, progress=tell
            )
        remember(record, paths, files)
    tell(f"cluster {record.name!r} runs: {record.shards} shard(s), data in {paths.data_dir}")
    return Cluster(
        name=record.name,
        cluster_id=record.cluster_id,
        shards=record.shards,
        token=token,
        endpoints=endpoints,
        resolver=FileResolver(paths.data_dir, record.shards),
        data_dir=paths.data_dir,
        ray_address=address,
        stop_on_exit=ours,
    )


def connect(target: str | os.PathLike[str] | None = None, *, token: str | None = None) -> Cluster:
    """A handle on a running cluster.

    Args:
        target: a data directory; a cluster's name; "raymq://host:port" of any of its shards; or
        None for
            the only cluster that this user started on this machine. A name that is not known here
            is looked up in Ray: the one this process is connected to, or RAY_ADDRESS.
        token: the content of the data directory's file `token`, or RAYMQ_TOKEN; needed with
        raymq:// only.
    Raises: Rejected (no such cluster, no token), Unavailable (it does not answer).
    """
    files = Files()
    if target is not None:
        text = os.fspath(target)
        if text.startswith("raymq://"):
            return Cluster.bootstrap(text, token=token or os.environ.get("RAYMQ_TOKEN"))
        if os.sep in text or files.exists(ClusterPaths(text).cluster):
            return _connect_data_dir(ClusterPaths(text), files)
    data_dir = _known_data_dir(None if target is None else os.fspath(target), files)
    if data_dir is not None:
        return _connect_data_dir(ClusterPaths(data_dir), files)
    return _connect_through_ray("default" if target is None else os.fspath(target))


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
    paths = local_paths(target, files)
    record = load_record(paths, files)
    if record is None:
        raise Rejected(
            f"{paths.data_dir} is not the data directory of a cluster (no cluster.json)",
            field="target",
        )
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
    if running is not None:
        try:
            with ray_host.session(running) as ray:
                tell(f"closing {record.shards} shard(s) of {record.name!r}")
                outcomes = actor_set.close(ray, record, clock=clock, timeout_s=timeout_s)
        except Unavailable as error:
            # An owned Ray is ended below in any case; one that is not ours is the caller's to
            # repair.
            if running.owned is None:
                raise
            outcomes = {"ray": f"does not answer: {error}"}
    ray_outcome = "not running" if running is None else "left running"
    if recorded is not None and recorded.owned is not None:
        tell("stopping Ray")
        ray_host.stop_owned(paths, files=files, clock=clock)
        ray_outcome = "not running" if running is None else "stopped"
    elif recorded is not None:
        files.unlink(paths.ray)
    clean = all(outcome in ("closed", "not running") for outcome in outcomes.values())
    return StopReport(clean=clean, actors=outcomes, ray=ray_outcome)


def local_paths(target: str | os.PathLike[str] | None, files: Files) -> ClusterPaths:
    """The data directory that `target` (a directory, a name, None) means on this machine.

    Raises: Rejected when it means none.
    """
    if target is not None:
        text = os.fspath(target)
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


def _connect_data_dir(paths: ClusterPaths, files: Files) -> Cluster:
    record = load_record(paths, files)
    if record is None:
        raise Rejected(
            f"{paths.data_dir} is not the data directory of a cluster: start it with "
            f"raymq start {paths.data_dir}",
            field="target",
        )
    resolver = FileResolver(paths.data_dir, record.shards)
    running = ray_host.running_target(paths, files)
    return Cluster(
        name=record.name,
        cluster_id=record.cluster_id,
        shards=record.shards,
        token=load_token(paths, files),
        endpoints=resolver(),
        resolver=resolver,
        data_dir=paths.data_dir,
        ray_address=None if running is None else running.address,
    )


def _connect_through_ray(name: str) -> Cluster:
    address = ray_host.connected_address() or os.environ.get("RAY_ADDRESS")
    if not address:
        known = ", ".join(sorted(known_clusters(Files()))) or "none"
        raise Rejected(
            f"no cluster {name!r} was started on this machine (known: {known}), and "
            "this process is not "
            "connected to a Ray. Give its data directory, raymq://host:port, or set RAY_ADDRESS",
            field="target",
        )
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
    )


def _store_options(record: ClusterRecord) -> dict[str, Any]:
    """The store's options as a plain dict, checked. Raises: Rejected."""
    flush: Literal["sync", "async"] = "async" if record.flush == "async" else "sync"
    return asdict(StoreConfig(segment_size_bytes=record.segment_size_bytes, flush=flush))


def _check_host(host: str, insecure: bool) -> None:
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not insecure:
        raise Rejected(
            f"host {host} is reachable from other machines and the connection is "
            "not encrypted: keep "
            "127.0.0.1, or accept it with insecure=True (command line: --insecure)",
            field="host",
        )
