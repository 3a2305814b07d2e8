"""start: creates a data directory or resumes one.

The call is the same after a crash, in a new Ray and with a new version.
"""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from raymq.actors.protocol import tls
from raymq.actors.ray.actor_spec import RocketMQAccess
from raymq.actors.ray.process_setup import check_log_level
from raymq.actors.shared import memory_order
from raymq.client.arguments import check_number
from raymq.store.base.errors import RayMQError, Rejected, Unavailable
from raymq.store.base.files import Files
from raymq.store.config.promise import Flush
from raymq.store.config.store_config import WHILE_RUNNING

from .cluster import Cluster
from .connect import known_ca, local_handle
from .controller import controller_actor
from .deploy import actor_end, actor_set, door_set, owned_ray, ray_host, ray_release, run_sweep
from .deploy.ray_host import Progress, RayTarget
from .deploy.resolve import save_endpoints
from .deploy.start_checks import check_addresses, check_own_ray, check_pools
from .operations import add_shards, set_config
from .operations.context import DirectoryCall
from .record import cluster_record
from .record.cluster_record import ClusterRecord, StartOptions
from .record.disk_room import check_room
from .record.paths import (
    ClusterPaths,
    directory_lock,
    load_or_make_token,
    prepare_data_dir,
    volatile_reason,
)
from .record.placement import NODE_HOST
from .record.store_options import StoreOptions


class StartPlan(NamedTuple):
    """The decisions of a start before it changes anything."""

    #: the record of an earlier start; None: this is the first
    stored: ClusterRecord | None
    #: the record of this start
    record: ClusterRecord
    #: the options that the caller gave and that change while the stores are open
    running: dict[str, Any]


#: how long a start waits for the servers for foreign clients, without which the shards serve
DOORS_S = 30.0
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
    config: StoreOptions | None = None,
    address: str | None = None,
    ephemeral: bool = False,
    segment_size_bytes: int | None = None,
    host: str | None = None,
    insecure: bool = False,
    rocketmq: bool | int | None = None,
    rocketmq_access: RocketMQAccess | None = None,
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
            each start, and while the cluster runs. More hours cost disk space.
        producer_expiry_hours: hours without a message after which a full table of producers forgets one; 168 by
            default, 1 at least. A shard remembers a million (producer, topic, queue). With fewer hours more new
            producers may come, such as those of a stream's batches. A message or a write that is repeated later than
            that may be stored twice. May change at each start, and while the cluster runs.
        catch_up_bytes_per_s: bytes per second that a leader sends to a follower that was away or is new, while enough
            others keep up; 0 (default): as fast as disks and network allow, at the cost of producers meanwhile. Less
            than producers send lets the follower never catch up. May change at each start, and while the cluster runs.
        config: further options of the stores, such as `{"flush_interval_ms": 200}`. docs/reference/configuration.md has
            their names, ranges and defaults, and says which of them the first start decides. The cluster keeps what was
            given: later starts may leave it out, and change the others. Those that may change while the cluster runs
            do so at once. The value that a shard took last holds, by a start or by `Cluster.set_config`.
        address: the Ray to run in, as `ray.init` takes it. Default: the Ray to which this process is connected, else
            the one in RAY_ADDRESS, else a new Ray on this machine that lives until `stop`.
        ephemeral: accept a data directory that does not survive a reboot (/tmp, tmpfs). False by default.
        segment_size_bytes: size of one commit log file; 1 GiB by default.
        host: the address on which shards listen: 127.0.0.1 by default; "node" (default with `nodes`) is the address by
            which Ray knows the node of each shard.
        insecure: accept that other machines can reach an unencrypted port, where they can read the token and every
            message. RAY_USE_TLS=1 encrypts it. With a Ray before 2.52, which has no token, accept also that they can
            run code in a Ray that this call starts. False by default.
        rocketmq: serve RocketMQ's own clients, too: True at port 9876 of each node, where they look for a name server,
            or at the port that is given. False: do so no more. Default: as at the last start, at first False. Each
            replica gets one more process, 90 MB. It needs the extra `raymq[rocketmq]`. See
            docs/guides/from-rocketmq.md.
        rocketmq_access: "key": these clients sign each request with AccessKey `raymq` and the cluster's token as
            SecretKey. "open": they need not, only with host 127.0.0.1. Default: as at the last start, at first "key".
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
        memory_order.check_architecture(os.uname().machine)
    check_log_level(os.environ)

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
        rocketmq_access=rocketmq_access,
        config=config,
    )

    if host not in (None, NODE_HOST):
        tls.check_exposed(str(host), tls=bool(wanted.tls), insecure=insecure)

    files, paths = Files(), ClusterPaths(data_dir)
    # A directory that was declared ephemeral once stays ephemeral.
    earlier = cluster_record.load_record(paths, files)
    ephemeral = ephemeral or (earlier is not None and earlier.ephemeral)
    wanted = replace(wanted, rocketmq_port=_rocketmq_port(rocketmq, earlier))
    prepare_data_dir(paths.data_dir, ephemeral=ephemeral, files=files)

    with directory_lock(paths, files):
        plan = plan_start(paths, wanted, ephemeral=ephemeral, files=files)
        call = _Start(lambda: paths, timeout_s=timeout_s, progress=progress)
        return call.run(plan, address)


class _Start(DirectoryCall):
    """A call of `start`."""

    def run(self, plan: StartPlan, address: str | None) -> Cluster:
        """Create or find the actors. Returns: a handle on the cluster, which serves."""
        paths, files = self.paths, self.files
        stored, record = plan.stored, plan.record
        first = stored is None
        # A start that is refused leaves neither a Ray nor a record.
        door_set.check(None, record, before=stored)
        warnings = [ray_release.untested(ray_release.installed())]
        if record.nodes is None:
            warnings.append(memory_order.experimental(os.uname().machine))
        for warning in filter(None, warnings):
            self.warn(f"WARNING: {warning}")
        token = load_or_make_token(paths, files)
        ca = _save_authority(paths, record, files)
        run_sweep.sweep(files, self.clock)
        target, answers_s = self._find_or_start_ray(record, address, first=first)

        with ray_host.session(target, answers_s) as ray:
            self.report(
                f"starting {record.shards} shard(s) of {record.name!r} in Ray at {target.address}"
            )
            if record.nodes is None and not record.has_one_replica:
                self.report(cluster_record.protection(record.replicas, None))
            for line in check_addresses(ray, record, first=first):
                self.warn(line)
            door_set.check(ray, record, before=stored)
            if stored is not None and stored.door_options != record.door_options:
                # A start that is refused changes nothing.
                actor_set.check_running(ray, record)
                # Servers that run keep their options.
                for_good = record.rocketmq_port is None
                actor_end.end_doors(ray, stored, clock=self.clock, for_good=for_good)
            if first:
                self.save(record)

            actors, ours = actor_set.converge(ray, record, paths, token, ca, timeout_s=self.left_s)
            self.save(record)

            # "auto" may mean another Ray in another shell.
            target = replace(target, address=ray.get_runtime_context().gcs_address)
            ray_host.save_target(paths, target, files)

            endpoints = actor_set.wait_running(
                ray,
                actors,
                clock=self.clock,
                timeout_s=self.left_s,
                progress=self.report,
                warn=self.warn,
            )
            controller_actor.make(ray, record, paths, clock=self.clock, warn=self.warn)
            door_set.await_doors(
                ray,
                record,
                clock=self.clock,
                timeout_s=min(self.left_s, DOORS_S),
                progress=self.report,
                warn=self.warn,
            )

        if record.placement is not None:
            save_endpoints(paths, endpoints, files)
        # From now on an empty store is a lost one.
        if record.now_formed() != record:
            record = record.now_formed()
            self.save(record)

        cluster_record.remember(record, paths, files)
        cluster = local_handle(
            paths, record, token, endpoints, target.address, ca, stop_on_exit=ours
        )
        if record.joined_shards is not None:
            add_shards.join(cluster, record, files, self.report)
        if not first:
            self._set_options(cluster, plan.running)
        self.report(
            f"cluster {record.name!r} runs: {record.shards} shard(s), data in {paths.data_dir}"
        )
        return cluster

    def _set_options(self, cluster: Cluster, wanted: Mapping[str, Any]) -> None:
        """Set the options that this start has named, if the logs of the shards have other values.

        The logs have what operators have set since earlier starts, and the last value that was given holds.
        """
        if not wanted:
            return
        try:
            found = set_config.differing(wanted, set_config.config(cluster))
            if found:
                set_config.set_config(cluster, found)
                self.report(f"set {', '.join(f'{name}={value}' for name, value in found.items())}")
        except RayMQError as error:
            # The cluster serves, a READ_ONLY shard for example.
            self.warn(
                f"WARNING: {', '.join(wanted)}: not every shard has the value of this start ({error.message}). Repeat "
                "the start, or use `raymq config set`"
            )

    def _find_or_start_ray(
        self, record: ClusterRecord, address: str | None, *, first: bool
    ) -> tuple[RayTarget, float | None]:
        """Find or start the Ray. Returns: that Ray, and the time it may take to answer (None: it has answered)."""
        target = ray_host.find_ray(self.paths, address, self.files)
        if target is None:
            return self._start_own_ray(record, first=first), None
        if target.owned is None:
            self.report(f"waiting for Ray at {target.address} to answer")
            return target, self.left_s
        if self._leave_if_dying(target, target.owned):
            target = self._start_own_ray(record, first=first)
        return target, None

    def _leave_if_dying(self, target: RayTarget, owned: ray_host.OwnedRay) -> bool:
        """Wait until the Ray that an earlier start started accepts drivers, or leave it if it is dying.

        Returns: whether it was left. Raises: Unavailable when it does not answer although its processes run. Other
        drivers may use it, so only `stop` may end it.
        """

        def why_unhealthy() -> str | None:
            return owned_ray.why_unhealthy(owned, self.files)

        fault = why_unhealthy()
        if fault is None and ray_host.connected_address() is None:
            self.report(f"waiting for Ray at {target.address} to answer")
            fault = ray_host.wait_for_answer(
                target,
                timeout_s=self.timeout_s,
                clock=self.clock,
                why_unhealthy=why_unhealthy,
            )
            if fault is not None and why_unhealthy() is None:
                raise Unavailable(
                    f"Ray at {target.address} does not answer: {fault}. End it with `raymq stop "
                    f"{shlex.quote(str(self.paths.data_dir))}`",
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
        paths, files = self.paths, self.files
        if record.nodes is not None:
            raise Rejected(
                "a cluster over several nodes runs in a Ray that runs on them already: start Ray on "
                "each, and give its address (address=..., RAY_ADDRESS)",
                field="address",
            )

        # With TLS the certificate names Ray's address, and Ray accepts only drivers with a certificate.
        loopback = tls.is_loopback(record.host) and not tls.wanted(os.environ)
        for line in check_own_ray(record, ray_release.installed(), loopback=loopback):
            self.warn(line)
        if first:
            self.save(record)

        try:
            owned = owned_ray.start_owned(
                paths,
                files=files,
                clock=self.clock,
                progress=self.report,
                loopback=loopback,
                timeout_s=self.left_s,
                # This process needs it next, and has nothing else to do.
                meanwhile=lambda: importlib.import_module("ray"),
            )
        except RayMQError:
            # If a Ray is left, `stop` needs the record to end it.
            if first and ray_host.load_owned(paths, files) is None:
                files.unlink(paths.cluster)
            raise

        # A Ray that started slowly leaves the shards some time.
        self.extend_deadline(min(self.timeout_s, SHARDS_S))
        return RayTarget(address=owned.address, owned=owned)


def _rocketmq_port(wanted: bool | int | None, earlier: ClusterRecord | None) -> int | None:
    """The port of the servers for RocketMQ's clients, as `StartOptions` has it."""
    if wanted is True:
        known = None if earlier is None else earlier.rocketmq_port
        return known or cluster_record.ROCKETMQ_PORT
    if wanted is False:
        return cluster_record.NO_PORT
    if wanted is not None:
        check_number("rocketmq", wanted, 1, tls.PORT_MAX)
    return wanted


def plan_start(
    paths: ClusterPaths, wanted: StartOptions, *, ephemeral: bool, files: Files
) -> StartPlan:
    """The plan of a start for a directory. Changes nothing. `raymq doctor` uses it too.

    Raises: Rejected for an option, Corrupt for a damaged record, StorageFull for the transient pools, and
    for the files of a first start.
    """
    stored = cluster_record.load_record(paths, files)
    if stored is not None:
        record = cluster_record.resume_record(stored, wanted)
    else:
        volatile = volatile_reason(paths.data_dir, files) is not None
        record = cluster_record.new_record(
            wanted, ephemeral=volatile or (wanted.nodes is not None and ephemeral)
        )

    # Before anything is written: a record keeps a wrong option for good.
    cluster_record.store_config(record)
    check_pools(paths, record, files)
    if stored is None:
        check_room(paths, record, files)
    given = {**vars(wanted), **(wanted.config or {})}
    running = {name: given[name] for name in WHILE_RUNNING if given.get(name) is not None}
    return StartPlan(stored, record, running)


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
    return trusted or known_ca(paths, files)
