"""start, connect and stop: the life cycle of a cluster.

`start` creates a data directory or resumes one. The call is the same after a crash, in a new Ray and with a new
version. `stop` ends the cluster's actors in order, and then Ray, if `start` started that Ray. Data stays. `connect`
finds a running cluster on its own machine, or without Ray through raymq://.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from raymq.actors.protocol import tls
from raymq.actors.shared.control_block import check_architecture
from raymq.client.arguments import check_choice
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected, Unavailable
from raymq.store.base.files import Files
from raymq.store.config.promise import Flush
from raymq.store.log.transient_pool import check_room

from . import add_shards, cluster_record
from .cluster import Cluster
from .cluster_record import ClusterRecord, StartOptions, store_config
from .deploy import (
    actor_set,
    controller_actor,
    owned_ray,
    placement,
    ray_client,
    ray_host,
    run_sweep,
)
from .deploy.placement import NODE_HOST
from .deploy.ray_host import Progress, RayTarget
from .deploy.resolve import FileResolver, RayResolver, load_endpoints, save_endpoints
from .paths import (
    ClusterPaths,
    directory_lock,
    load_or_make_token,
    load_token,
    prepare_data_dir,
    volatile_reason,
)

if TYPE_CHECKING:
    from raymq.client.transport.connection import Transport

logger = logging.getLogger("raymq")


class StartPlan(NamedTuple):
    """The decisions of a start before it changes anything."""

    #: the record of an earlier start; None: this is the first
    stored: ClusterRecord | None
    #: the record of this start
    record: ClusterRecord
    #: the options of its stores
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StopReport:
    """The result of `stop`."""

    #: whether every shard closed in order: the next start then needs no recovery
    clean: bool
    #: actor name -> "closed", "not running", or why the actor was ended without an orderly close
    actors: dict[str, str] = field(default_factory=dict)
    #: "stopped", "left running" (`start` did not start it) or "not running"
    ray: str = "not running"


#: what the shards get after a new Ray has started, however late that was
SHARDS_S = 30.0


def start(
    data_dir: str | os.PathLike[str],
    *,
    name: str | None = None,
    shards: int | None = None,
    replicas: Literal[1, 2, 3, 5] | None = None,
    flush: Flush | None = None,
    transient_pool: bool | None = None,
    file_reserved_hours: float | None = None,
    producer_expiry_hours: float | None = None,
    catch_up_bytes_per_s: int | None = None,
    address: str | None = None,
    ephemeral: bool = False,
    segment_size_bytes: int | None = None,
    host: str | None = None,
    insecure: bool = False,
    nodes: Sequence[str] | None = None,
    timeout_s: float = 180.0,
    progress: Progress | None = None,
) -> Cluster:
    """Create the cluster of a data directory, or resume the one there, and return when it serves.

    The cluster's processes are Ray actors that outlive the caller. The call is the same after a crash, in another Ray
    and with a new version of RayMQ, because `start` recovers the shards and continues. If the cluster runs already, the
    call attaches to it. A shard that is READ_ONLY serves reads, and `progress` gets a warning.

    Example:
        ```python
        import raymq

        with raymq.start("raymq-data", flush="sync") as cluster:
            print(cluster.name, cluster.shards)
        ```

    Args:
        data_dir: a directory on a local disk of this machine; created with mode 0700 if it is missing.
        name: the name by which `connect` finds the cluster, "default" if not given. The first start fixes it, and also
            `shards`, `replicas`, `segment_size_bytes` and `nodes`. Later starts may leave these out.
        shards: number of commit logs over which topics are spread, 1 to 256 (default 1). Each shard costs at least two
            processes and one file of `segment_size_bytes`. `Cluster.add_shards` adds more later.
        replicas: copies of each shard: 1 (default), 2, 3 or 5, at as many times the disk space. With `acks` "quorum" a
            receipt waits for 2, 2 and 3 of them, the leader included. 3 replicas go on without any one of them, 5
            without any two: they elect another leader within seconds. 2 wait for the one that is away. A running
            cluster of one replica gets others by `Cluster.set_replicas`.
        flush: "sync" (default) acknowledges after fdatasync. "async" acknowledges after the write to the page cache: a
            power loss may lose the last 0.5 s, or 10 s of a trickle. May change at each start.
        transient_pool: leaders append to a pool in shared memory (2 x 64 MiB each), and CommitRealTime moves the bytes
            to the files. Readers and followers see a message after that, about 200 ms later with `flush="async"`. A
            crash of the machine then loses the bytes in the pool. Only with 1 or 2 replicas. May change at each start;
            False by default.
        file_reserved_hours: hours after its newest message for which a full file is kept; 72 by default. May change at
            each start. More hours cost disk space.
        producer_expiry_hours: hours without a message after which a full table of producers forgets one; 168 by
            default, 1 at least. A shard remembers a million (producer, topic, queue). With fewer hours more new
            producers may come, such as those of a stream's batches. A message or a write that is repeated later than
            that may be stored twice. May change at each start.
        catch_up_bytes_per_s: bytes per second that a leader sends to a follower that was away or is new, while enough
            others keep up; 0 (default): as fast as disks and network allow, at the cost of producers meanwhile. Less
            than producers send lets the follower never catch up. May change at each start.
        address: the Ray to run in, as `ray.init` takes it. Default: the Ray to which this process is connected, else
            the one in RAY_ADDRESS, else a new Ray on this machine that lives until `stop`.
        ephemeral: accept a data directory that does not survive a reboot (/tmp, tmpfs). False by default.
        segment_size_bytes: size of one commit log file; 1 GiB by default.
        host: the address on which shards listen: 127.0.0.1 by default; "node" (default with `nodes`) is the address by
            which Ray knows the node of each shard.
        insecure: accept that other machines can reach an unencrypted port, where they can read the token and every
            message. RAY_USE_TLS=1 encrypts it. False by default.
        nodes: values of the node label `raymq-node` over which the shards are spread, each follower on another node
            than its leader. `data_dir` is then a path on each node. None (default): everything on this machine.
        timeout_s: seconds for the whole start, which may find, start or replace a Ray, and recovers every shard. 180
            by default. A new Ray gets up to a minute more while its processes make progress, and its shards then have
            half a minute in any case.
        progress: called with one line of text at a time; None (default) logs the lines.

    Guarantees:
        The cluster's identity is durable before the first actor starts. Every message that was acknowledged is there.

    Raises:
        Rejected: an option is wrong, or contradicts the first start. Nothing was started.
        Unavailable: some shard does not serve in time. The message has each shard's state and error. Started
            processes keep trying, and `stop` ends them.
        Corrupt: a store is damaged.
        StorageFull: shared memory has no room for the transient pools. Nothing was started.
    """
    if nodes is None:
        # With `nodes` each replica checks its own machine.
        check_architecture(os.uname().machine)

    wanted = StartOptions(
        name=name,
        shards=shards,
        replicas=replicas,
        flush=flush,
        segment_size_bytes=segment_size_bytes,
        host=host,
        nodes=nodes,
        tls=tls.wanted(os.environ),
        insecure=insecure,
        transient_pool=transient_pool,
        file_reserved_hours=file_reserved_hours,
        producer_expiry_hours=producer_expiry_hours,
        catch_up_bytes_per_s=catch_up_bytes_per_s,
    )

    if host not in (None, NODE_HOST):
        tls.check_exposed(str(host), tls=bool(wanted.tls), insecure=insecure)

    files, paths = Files(), ClusterPaths(data_dir)
    # A directory that was declared ephemeral once stays ephemeral.
    earlier = cluster_record.load_record(paths, files)
    ephemeral = ephemeral or (earlier is not None and earlier.ephemeral)
    prepare_data_dir(paths.data_dir, ephemeral=ephemeral, files=files)

    with directory_lock(paths, files):
        plan = plan_start(paths, wanted, ephemeral=ephemeral, files=files)
        return _Start(paths, files, timeout_s, progress).run(plan, address)


class _LockedCall:
    """State of one `start` or `stop` call: the locked directory and the deadline."""

    def __init__(
        self, paths: ClusterPaths, files: Files, timeout_s: float, progress: Progress | None
    ) -> None:
        self._paths = paths
        self._files = files
        self._clock = Clock()
        self._timeout_s = timeout_s
        self._deadline = self._clock.monotonic_ms() + int(timeout_s * 1000)
        self._report = progress or logger.info
        self._warn = progress or logger.warning


class _Start(_LockedCall):
    """A call of `start`."""

    def run(self, plan: StartPlan, address: str | None) -> Cluster:
        """Create or find the actors. Returns: a handle on the cluster, which serves."""
        paths, files = self._paths, self._files
        stored, record, options = plan
        first = stored is None
        token = load_or_make_token(paths, files)
        ca = _save_authority(paths, record, files)
        run_sweep.sweep(files, self._clock)
        target, answers_s = self._find_or_start_ray(record, address, first=first)

        with ray_host.session(target, answers_s) as ray:
            self._report(
                f"starting {record.shards} shard(s) of {record.name!r} in Ray at {target.address}"
            )
            if record.nodes is None and not record.has_one_replica:
                self._report(cluster_record.protection(record.replicas, None))
            for line in check_addresses(ray, record, first=first):
                self._warn(line)
            if first:
                self._save(record)

            specs = actor_set.specs(record, paths, token, options, ca)
            actors, ours = actor_set.create(ray, record, specs, timeout_s=self._left_s())
            self._save(record)

            # "auto" may mean another Ray in another shell.
            target = replace(target, address=ray.get_runtime_context().gcs_address)
            ray_host.save_target(paths, target, files)

            endpoints = actor_set.wait_running(
                ray,
                actors,
                clock=self._clock,
                timeout_s=self._left_s(),
                progress=self._report,
                warn=self._warn,
            )
            controller_actor.make(ray, record, paths, clock=self._clock, warn=self._warn)

        if record.placement is not None:
            save_endpoints(paths, endpoints, files)
        # From now on an empty store is a lost one.
        if record.now_formed() != record:
            record = record.now_formed()
            self._save(record)

        cluster_record.remember(record, paths, files)
        cluster = _handle(paths, record, token, endpoints, target.address, ca, stop_on_exit=ours)
        if record.joined_shards is not None:
            add_shards.join(cluster, record, files, self._report)
        self._report(
            f"cluster {record.name!r} runs: {record.shards} shard(s), data in {paths.data_dir}"
        )
        return cluster

    def _left_s(self) -> float:
        return max(0.0, (self._deadline - self._clock.monotonic_ms()) / 1000)

    def _save(self, record: ClusterRecord) -> None:
        cluster_record.save_record(self._paths, record, self._files)

    def _find_or_start_ray(
        self, record: ClusterRecord, address: str | None, *, first: bool
    ) -> tuple[RayTarget, float | None]:
        """Find or start the Ray. Returns: that Ray, and the time it may take to answer (None: it has answered)."""
        target = ray_host.find_ray(self._paths, address, self._files)
        if target is None:
            return self._start_own_ray(record, first=first), None
        if target.owned is None:
            self._report(f"waiting for Ray at {target.address} to answer")
            return target, self._left_s()
        if self._leave_if_dying(target, target.owned):
            target = self._start_own_ray(record, first=first)
        return target, None

    def _leave_if_dying(self, target: RayTarget, owned: ray_host.OwnedRay) -> bool:
        """Wait until the Ray that an earlier start started accepts drivers, or leave it if it is dying.

        Returns: whether it was left. Raises: Unavailable when it does not answer although its processes run. Other
        drivers may use it, so only `stop` may end it.
        """

        def why_unhealthy() -> str | None:
            return owned_ray.why_unhealthy(owned, self._files)

        fault = why_unhealthy()
        if fault is None and ray_host.connected_address() is None:
            self._report(f"waiting for Ray at {target.address} to answer")
            fault = ray_host.wait_for_answer(
                target,
                timeout_s=self._timeout_s,
                clock=self._clock,
                why_unhealthy=why_unhealthy,
            )
            if fault is not None and why_unhealthy() is None:
                raise Unavailable(
                    f"Ray at {target.address} does not answer: {fault}. End it with `raymq stop "
                    f"{shlex.quote(str(self._paths.data_dir))}`",
                    address=target.address,
                )

        if fault is not None:
            ray_host.leave(owned)
        return fault is not None

    def _start_own_ray(self, record: ClusterRecord, *, first: bool) -> RayTarget:
        """Start a Ray that lives until `stop`, which finds it even if this process ends now.

        A first start that fails here fixes no options, unless it leaves a Ray: the next start may choose others.
        Raises: Rejected for a cluster over several nodes; Unavailable.
        """
        paths, files = self._paths, self._files
        if record.nodes is not None:
            raise Rejected(
                "a cluster over several nodes runs in a Ray that runs on them already: start Ray on "
                "each, and give its address (address=..., RAY_ADDRESS)",
                field="address",
            )

        if first:
            self._save(record)

        try:
            owned = owned_ray.start_owned(
                paths,
                files=files,
                clock=self._clock,
                progress=self._report,
                # With TLS the certificate names Ray's address, and Ray accepts only drivers with a certificate.
                loopback=tls.is_loopback(record.host) and not tls.wanted(os.environ),
                timeout_s=self._left_s(),
            )
        except RayMQError:
            # If a Ray is left, `stop` needs the record to end it.
            if first and ray_host.load_owned(paths, files) is None:
                files.unlink(paths.cluster)
            raise

        # A Ray that started slowly leaves the shards some time.
        at_least_ms = self._clock.monotonic_ms() + int(min(self._timeout_s, SHARDS_S) * 1000)
        self._deadline = max(self._deadline, at_least_ms)
        return RayTarget(address=owned.address, owned=owned)


def _handle(
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
        placement=record.placement,
    )


def plan_start(
    paths: ClusterPaths, wanted: StartOptions, *, ephemeral: bool, files: Files
) -> StartPlan:
    """The plan of a start for a directory. Changes nothing. `raymq doctor` uses it too.

    Raises: Rejected for an option, Corrupt for a damaged record, StorageFull for the transient pools.
    """
    stored = cluster_record.load_record(paths, files)
    if stored is not None:
        record = cluster_record.resume_record(stored, wanted)
    else:
        volatile = volatile_reason(paths.data_dir, files) is not None
        record = cluster_record.new_record(
            wanted, ephemeral=volatile or (wanted.nodes is not None and ephemeral)
        )

    check_pools(paths, record, files)
    return StartPlan(stored, record, asdict(store_config(record)))


def check_pools(paths: ClusterPaths, record: ClusterRecord, files: Files) -> None:
    """Raises: StorageFull if the transient pools of the leaders do not fit into shared memory."""
    # With `nodes` each shard checks its own machine.
    if record.transient_pool and record.nodes is None:
        config = store_config(record)
        leaders = [paths.replica(shard, 0) for shard in range(record.shards)]
        pool_bytes = config.transient_pool_slices * config.transient_pool_slice_bytes
        check_room(leaders, pool_bytes, files=files)


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
        return ray_client.connect_url(text)

    if text is not None and tls.parse_url(text) is not None:
        trusted = given or tls.trusted(os.environ, files)
        return Cluster.bootstrap(text, token=token or os.environ.get("RAYMQ_TOKEN"), ca=trusted)

    if not _is_path(text, files) and ray_client.is_connected() and transport != "flight":
        return ray_client.find(text)

    data_dir = _find_data_dir(text, files)
    if data_dir is not None:
        return _connect_data_dir(ClusterPaths(data_dir), files, given)
    return _connect_through_ray(text or "default", given)


def stop(
    target: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float = 60.0,
    progress: Progress | None = None,
) -> StopReport:
    """Stop the cluster of a data directory, or of a name known on this machine. No data is deleted.

    The actors flush, write a checkpoint and end, in order. Ray ends after them if `start` started it. A cluster that
    does not run is already stopped. The log is synced up to its end, so the next start needs no recovery.

    Example:
        ```python
        import raymq

        raymq.start("raymq-data").close()
        report = raymq.stop("raymq-data", timeout_s=30)
        print(report.clean, report.ray)
        ```

    Args:
        target: a data directory, or the name of a cluster that was started on this machine. None (default) for the only
            cluster that this user started here.
        timeout_s: seconds that the orderly end of all actors may take (default 60). Then they are ended as a crash
            would end them: nothing acknowledged is lost, `clean` is False, and the next start recovers.
        progress: is called with one line for each step. Default: nothing is called.

    Raises:
        Rejected: `target` is not a cluster of this machine, or several clusters are known and `target` is None.
        Unavailable: a process cannot be ended.
    """
    files = Files()
    if target is None:
        _check_only_one(files)
    paths = local_paths(target, files)
    record = cluster_record.load_record(paths, files)
    if record is None:
        message = f"{paths.data_dir} is not the data directory of a cluster (no cluster.json)"
        raise Rejected(message, field="target")
    with directory_lock(paths, files):
        return _Stop(paths, files, timeout_s, progress).run(record)


class _Stop(_LockedCall):
    """A call of `stop`."""

    def run(self, record: ClusterRecord) -> StopReport:
        """Close the actors, end Ray if `start` started it, and remove their files in /tmp."""
        paths, files = self._paths, self._files
        self._report(f"stopping cluster {record.name!r} of {paths.data_dir}")

        recorded = ray_host.load_target(paths, files)
        running = ray_host.running_target(paths, files)
        outcomes = None if running is None else self._close_actors(running, record)
        ray_outcome = "not running" if outcomes is None else "left running"

        if recorded is not None and recorded.owned is not None:
            self._report("stopping Ray")
            ray_host.leave(recorded.owned)
            owned_ray.stop_owned(paths, files=files, clock=self._clock)
            ray_outcome = "not running" if outcomes is None else "stopped"
        elif recorded is not None:
            files.unlink(paths.ray)

        shards, replicas = range(record.shards), range(record.replicas)
        closed = [paths.replica(shard, replica) for shard in shards for replica in replicas]
        run_sweep.sweep(files, self._clock, closed)

        actors = outcomes or {}
        clean = all(outcome in ("closed", "not running") for outcome in actors.values())
        return StopReport(clean=clean, actors=actors, ray=ray_outcome)

    def _close_actors(self, running: RayTarget, record: ClusterRecord) -> dict[str, str] | None:
        """Close the actors. Returns: the outcome of each; None: that Ray runs another cluster."""

        def why_unhealthy() -> str | None:
            return (
                None
                if running.owned is None
                else owned_ray.why_unhealthy(running.owned, self._files)
            )

        try:
            fault = why_unhealthy()
            if fault is not None:
                raise Unavailable(fault, address=running.address)

            # A server of Ray may stop or end at any time before the answer.
            with ray_host.session(running, self._timeout_s, why_unhealthy=why_unhealthy) as ray:
                if actor_set.is_another(ray, record, clock=self._clock):
                    # The cluster's Ray has ended, and the Ray at this address runs another cluster.
                    other = f"another cluster named {record.name!r}"
                    self._report(f"{other} runs in Ray at {running.address}")
                    return None
                self._report(f"closing {record.shards} shard(s) of {record.name!r}")
                return actor_set.close(ray, record, clock=self._clock, timeout_s=self._timeout_s)
        except Unavailable as error:
            # A Ray that `start` started is ended anyway. Any other Ray is the caller's to repair.
            if running.owned is None:
                raise
            return {"ray": f"does not answer: {error}"}


def local_paths(target: str | os.PathLike[str] | None, files: Files) -> ClusterPaths:
    """The data directory on this machine that `target` (a directory, a name, None) names.

    Raises: Rejected when there is none.
    """
    text = None if target is None else os.fspath(target)
    if text is not None and "://" in text:
        message = (
            f"{text} is an address. Run this command on the machine with the data directory, and pass that directory "
            "or the cluster's name"
        )
        raise Rejected(message, field="target", limit="a data directory or name")
    data_dir = _find_data_dir(text, files)
    if data_dir is not None:
        return ClusterPaths(data_dir)
    if text is None:
        raise Rejected("no cluster is known here: name its data directory", field="target")
    message = f"{text!r} is neither a data directory nor a cluster started here; known: {_known_names(files)}"
    raise Rejected(message, field="target")


def _check_only_one(files: Files) -> None:
    """Raises: Rejected when several clusters are known: the one to stop must then be named."""
    known = cluster_record.known_clusters(files)
    if len(known) < 2:
        return
    each = [
        f"{name} in {data_dir}"
        + ("" if ray_host.running_target(ClusterPaths(data_dir), files) else " (does not run)")
        for name, data_dir in sorted(known.items())
    ]
    message = (
        f"several clusters are known here: {'; '.join(each)}. Nothing was stopped: name one of them"
    )
    raise Rejected(message, field="target", limit=", ".join(sorted(known)))


def _is_path(target: str | None, files: Files) -> bool:
    """Whether a target is a data directory, not a name."""
    return target is not None and (os.sep in target or files.exists(ClusterPaths(target).cluster))


def _find_data_dir(target: str | None, files: Files) -> str | None:
    """The directory that a path or a known name means; None: no such cluster is known here.

    Raises: Rejected when `target` is None and several clusters are known.
    """
    if _is_path(target, files):
        return target
    known = cluster_record.known_clusters(files)
    if target is not None:
        return known.get(target)
    if len(known) > 1 and "default" not in known:
        message = f"several clusters are known here ({', '.join(sorted(known))}): say which one"
        raise Rejected(message, field="target")
    return known.get("default") or next(iter(known.values()), None)


def _known_names(files: Files) -> str:
    return ", ".join(sorted(cluster_record.known_clusters(files))) or "none"


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
    ca = ca or _known_ca(paths, files)
    return _handle(paths, record, token, endpoints, ray_address, ca)


def _connect_through_ray(name: str, ca: bytes | None) -> Cluster:
    address = ray_host.connected_address() or os.environ.get("RAY_ADDRESS")
    if not address:
        raise Rejected(
            f"no cluster {name!r} was started on this machine (known: {_known_names(Files())}), and this process is "
            "not connected to a Ray. Give its data directory, raymq://host:port, or set RAY_ADDRESS",
            field="target",
        )

    if address.startswith(ray_client.SCHEME):
        return ray_client.connect_url(f"{address}/{name}")
    with ray_host.session(RayTarget(address=address)) as ray:
        cluster = ray_client.handle_of(ray, name)

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


def _save_authority(paths: ClusterPaths, record: ClusterRecord, files: Files) -> bytes | None:
    """Keep the authority of the shards' certificates for `connect` in other shells, or delete it without TLS.

    Returns: the authority; None without TLS.
    """
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


def check_addresses(ray: Any, record: ClusterRecord, *, first: bool) -> list[str]:
    """Warnings about addresses at which other machines can read the traffic.

    Raises: Rejected when `insecure` does not accept that, or when nodes are missing or named twice.
    """
    addresses: list[str] = []
    if record.nodes is not None:
        # A replica that was replaced may be on a node that the first start did not name.
        nodes = {node for row in record.placement or () for node in row}
        addresses = placement.check_nodes(ray, record.nodes if first else nodes, first=first)
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
