"""`raymq doctor`: conditions that would make RayMQ fail or slow on this machine, with advice for each.

A check of the machine is a pure function of facts, so that each verdict is tested without such a machine. `examine`
gathers the facts. A data directory is judged by the code that `raymq start` runs.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from raymq.actors.protocol import tls
from raymq.actors.shared import memory_order
from raymq.cluster.bench.machine import version_of
from raymq.cluster.connect import connect
from raymq.cluster.deploy import door_set, ray_release
from raymq.cluster.record.cluster_record import ClusterRecord, StartOptions, load_record
from raymq.cluster.record.disk_room import disks_of
from raymq.cluster.record.paths import (
    ClusterPaths,
    check_data_dir,
    home_dirs,
    load_token,
    mount_of,
    nearest_existing,
    run_dir_fault,
    run_dir_path,
    volatile_reason,
    why_not_writable,
)
from raymq.cluster.record.placement import NODE_HOST
from raymq.cluster.start import plan_start
from raymq.spark import java
from raymq.store.base.clock import Clock
from raymq.store.base.errors import (
    RayMQError,
    Rejected,
    UntrustedReplica,
    UntrustedServer,
)
from raymq.store.base.files import Files

from .status_text import size_text
from .tls_check import CertificateRefused, validity

CheckLevel = Literal["ok", "warn", "fail"]

MIB = 1024 * 1024
GIB = 1024 * MIB
_PYTHON_MIN = (3, 10)
#: the first file of a log
_DISK_FAIL_BYTES = GIB
#: the first major version of pyarrow that RayMQ works with
_PYARROW_MIN = 19
_DISK_WARN_BYTES = 20 * GIB
_SHM_WARN_BYTES = 512 * MIB
_SHM_LOW_BYTES = 1 * MIB
_FILES_LOW = 1024
_FILES_WARN = 65_536
_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs"}
)
_CERTIFICATE_WARN_DAYS = 30
#: Ray's variable that lets its connections use the proxy of the environment
_RAY_PROXY = "RAY_grpc_enable_http_proxy"
#: how long a process that gave up is mentioned
_LAST_GIVE_UP_MS = 24 * 3_600_000


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    verdict: CheckLevel
    #: the state of the machine
    found: str
    #: empty when nothing must be done
    advice: str = ""


def _ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def _warn(name: str, found: str, advice: str) -> Check:
    return Check(name, "warn", found, advice)


def _fail(name: str, found: str, advice: str) -> Check:
    return Check(name, "fail", found, advice)


def examine(data_dir: str | None = None, *, ephemeral: bool = False) -> list[Check]:
    """All checks of this machine, with `data_dir` also the checks of that directory.

    `ephemeral`: judge the directory as `raymq start --ephemeral` would.
    """
    files = Files()
    java_path = java.find(os.environ)

    checks = [
        check_python(sys.version_info[:3]),
        check_machine(platform.system(), platform.machine()),
        check_ray(version_of("ray")),
        *(check_package(name, version_of(name), oldest) for name, oldest in _PACKAGES),
        check_crc(_has("google_crc32c"), _has("isal")),
        check_java(
            java_path,
            java.major_version(java_path) if java_path else 0,
            java.ray_directory_fault(),
        ),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
        check_shared_memory(*_space_of("/dev/shm")),
        check_auth(os.environ, version_of("ray")),
        check_run_dir(run_dir_fault(files)),
        check_home(home_dirs(), os.environ, files),
        check_proxy(os.environ),
        check_tls(os.environ, files, Clock().now_ms() / 1000),
    ]

    if data_dir is None:
        return [*checks, check_disk(os.getcwd(), _free_bytes(os.getcwd(), files), _DISK_FAIL_BYTES)]
    return checks + examine_data_dir(data_dir, files, ephemeral=ephemeral)


#: package -> the oldest major version that serves
_PACKAGES = (("pyarrow", _PYARROW_MIN), ("numpy", 1))


def check_python(version: tuple[int, int, int]) -> Check:
    """Ray's wheels and RayMQ's syntax need 3.10."""
    found = ".".join(map(str, version))
    if version[:2] < _PYTHON_MIN:
        return _fail("python", found, "use Python 3.10 or newer")
    return _ok("python", found)


def check_machine(system: str, machine: str) -> Check:
    """Linux calls (fallocate, pidfd), and an architecture that keeps the order of stores."""
    found = f"{system} {machine}"
    if system != "Linux":
        return _fail("machine", found, "RayMQ's actors run on Linux only")
    try:
        memory_order.check_architecture(machine)
    except Rejected as error:
        return _fail("machine", found, error.message)
    experimental = memory_order.experimental(machine)
    if experimental is not None:
        return _warn("machine", experimental, "for data that matters use x86_64")
    return _ok("machine", found)


def check_ray(version: str | None) -> Check:
    """Ray, in one of the releases that RayMQ is tested with. `raymq start` judges it in the same way."""
    tested = f"{ray_release.OLDEST} to {ray_release.NEWEST}"
    if version is None:
        return _fail("ray", "not installed", f"pip install 'ray=={ray_release.NEWEST}.*'")
    try:
        untested = ray_release.untested(version)
    except Rejected as error:
        return _fail("ray", version, f"{error.message}; {tested} are tested")
    if untested is not None:
        return _warn("ray", untested, f"if something fails, use one of {tested}")
    return _ok("ray", version)


def check_package(name: str, version: str | None, oldest: int) -> Check:
    """A required package. Args: `oldest`: the first major version that serves."""
    if version is None:
        return _fail(name, "not installed", f"pip install '{name}>={oldest}'")
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < oldest:
        return _fail(name, f"{version}, {oldest} is needed", f"pip install '{name}>={oldest}'")
    return _ok(name, version)


def check_crc(crc32c: bool, isal: bool) -> Check:
    """CRC-32C of every stored byte, CRC-32 of every body."""
    if not crc32c:
        found = "google-crc32c is missing: crcmod in pure Python does about 10 MB/s"
        return _warn("checksums", found, "pip install google-crc32c")
    if not isal:
        found = "google-crc32c; isal is missing, zlib takes its place (slower bodies)"
        return _ok("checksums", found)
    return _ok("checksums", "google-crc32c, isal")


def check_java(path: str | None, major: int, ray_directory: str | None) -> Check:
    """Java, which only Spark needs.

    Args: `major`: its version; 0: not known. `ray_directory`: why Ray's Java cannot start for this user.
    """
    if path is None:
        advice = (
            "only Spark needs it: install Java 17 (pip install 'raymq[spark]' brings one) and put its bin on PATH "
            "before `raymq start`"
        )
        return _warn("java", "not on PATH", advice)
    if major != java.MAJOR:
        advice = f"Spark 3.5 works with Java {java.MAJOR}: put that one first on PATH before `raymq start`"
        return _warn("java", f"{path}: version {major or 'unknown'}", advice)
    if ray_directory is not None:
        return _warn(
            "java", f"{path}: version {major}", f"Spark by RayDP does not start: {ray_directory}"
        )
    return _ok("java", f"{path}: version {major}")


def check_open_files(limits: tuple[int, int]) -> Check:
    """Ray's files, and up to three for each commit log file. Queues share a bounded number (`OPEN_FILES_MAX`)."""
    soft, hard = limits
    found = f"soft limit {_limit(soft)}, hard limit {_limit(hard)}"
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < _FILES_LOW:
        advice = f"enough to begin, and too few for 300 files of the log: ulimit -n {_FILES_WARN}"
        return _warn("open files", found, advice)
    if soft != unlimited and soft < _FILES_WARN:
        return _warn(
            "open files", found, f"above 150 GiB of log per shard: ulimit -n {_FILES_WARN}"
        )
    return _ok("open files", found)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_shared_memory(size: int | None, free: int | None) -> Check:
    """The space of Ray's object store and of the transient pools."""
    if size is None or free is None:
        return _fail("/dev/shm", "missing", "mount a tmpfs there: Ray needs it")
    found = f"{size_text(free)} free of {size_text(size)}"
    if free < _SHM_LOW_BYTES:
        advice = (
            "Ray keeps its objects on disk, slowly, and --transient-pool is refused: delete the files of dead "
            "processes there, or make it larger (a container: --shm-size)"
        )
        return _warn("/dev/shm", found, advice)
    if size < _SHM_WARN_BYTES:
        return _warn("/dev/shm", found, "Ray falls back to disk; in a container: --shm-size=2g")
    return _ok("/dev/shm", found)


def check_auth(environment: Mapping[str, str], ray: str | None) -> Check:
    """How Ray authenticates: an owned Ray uses tokens unless RAY_AUTH_MODE says otherwise.

    Args: `ray`: the version of Ray. Before 2.52 it has no token.
    """
    mode = environment.get("RAY_AUTH_MODE")
    if not ray_release.has_token(ray):
        try:
            ray_release.own_auth_mode(environment, ray)
        except Rejected as error:
            return _fail("ray token", error.message, "`raymq start` refuses it")
        advice = "install a newer Ray, unless all users of this machine may do that"
        return _warn("ray token", ray_release.tokenless(ray), advice)
    if mode is None:
        return _ok("ray token", "RAY_AUTH_MODE unset: an own Ray uses a token")
    if mode.lower() == "disabled":
        found = (
            "RAY_AUTH_MODE=disabled: anyone who reaches Ray's ports may run any code as this user"
        )
        return _warn("ray token", found, "unset RAY_AUTH_MODE")
    if mode.lower() != "token":
        return _fail("ray token", f"RAY_AUTH_MODE={mode}", "use token or disabled, or unset it")
    return _ok("ray token", "RAY_AUTH_MODE=token")


def check_run_dir(fault: str | None) -> Check:
    """The directory of sockets and of Ray's session. Args: `fault`: why it cannot be had."""
    if fault is not None:
        return _fail("run dir", fault, "`raymq start` refuses to start without it")
    return _ok("run dir", f"{run_dir_path()} for sockets and Ray's session")


def check_home(homes: Sequence[Path], environment: Mapping[str, str], files: Files) -> Check:
    """Where the list of clusters is kept. Args: `homes`: where it may be, in the order of preference."""
    fault: str | None = "this user has no home"
    if homes:
        fault = why_not_writable(nearest_existing(homes[0], files))
    if fault is None:
        return _ok("home", f"{homes[0]} has the list of clusters")
    if environment.get("RAYMQ_HOME"):
        advice = "let RAYMQ_HOME name a directory that this user may write, or name the data directory to each command"
        return _warn("home", f"{fault}: no list of clusters is kept", advice)
    found = (
        f"{fault}: {run_dir_path()} has the list of clusters, and the data directory Ray's token"
    )
    return _ok("home", found)


def check_proxy(environment: Mapping[str, str]) -> Check:
    """Proxies in the environment: RayMQ uses none, and Ray one only if it is asked to."""
    # gRPC's order. Their values may contain a password.
    proxies = [
        name for name in ("grpc_proxy", "https_proxy", "http_proxy") if environment.get(name)
    ]
    if not proxies:
        return _ok("proxy", "none in the environment")
    found = f"{', '.join(proxies)} set"
    if environment.get(_RAY_PROXY, "0").lower() in ("1", "true"):
        found += f", and {_RAY_PROXY} sends Ray's own connections through it"
        return _warn("proxy", found, f"unset {_RAY_PROXY} before `raymq start` and in clients")
    return _ok("proxy", f"{found}: connections to replicas and to Ray do not use it")


def check_tls(environment: Mapping[str, str], files: Files, now_s: float) -> Check:
    """The certificates in Ray's variables, as a shard on this machine would use them.

    Args: `now_s`: the wall clock. Shards on loopback need no certificate.
    """
    advice = "set the variables where Ray's node and `raymq start` are started"
    try:
        if not tls.wanted(environment):
            return _ok("tls", f"{tls.USE_TLS} is not on: shards serve 127.0.0.1 in clear")
        tls.server_identity(environment, files)
        ca = tls.trusted(environment, files)
    except Rejected as error:
        return _fail("tls", str(error), advice)

    if ca is None:
        missing = f"{tls.CA_CERT} is not set: replicas cannot check each other's certificate"
        return _fail("tls", missing, f"name the authority's PEM file there: {advice}")

    certificate = environment[tls.SERVER_CERT]
    try:
        valid = validity(certificate, environment[tls.SERVER_KEY], ca)
    except CertificateRefused as error:
        refusal = f"{certificate} is refused by clients that trust {environment[tls.CA_CERT]}"
        advice = "have this authority sign a certificate for this node's address, and name it"
        return _fail("tls", f"{refusal}: {error}", f"{advice} in {tls.SERVER_CERT}")

    days = int((valid.end_s - now_s) // 86_400)
    names = ", ".join(valid.names) or "no address"
    found = f"{certificate} for {names}, {days} days left"
    if not valid.names:
        return _fail("tls", found, "give it a subjectAltName with this node's address")
    if days < _CERTIFICATE_WARN_DAYS:
        return _warn("tls", found, "renew it: clients refuse it after that")
    return _ok("tls", found)


def check_disk(directory: str, free: int | None, needed: int) -> Check:
    """Space on a disk. Args: `needed`: the bytes without which `start` refuses."""
    if free is None:
        return _fail("disk space", f"{directory} cannot be examined", "name an existing disk")

    found = f"{size_text(free)} free at {directory}"
    if free < needed:
        advice = (
            f"a first start takes {size_text(needed)} (less with --segment-size-bytes): free some, or choose another "
            "disk"
        )
        return _fail("disk space", found, advice)

    if free < _DISK_WARN_BYTES:
        advice = (
            "messages are deleted after 72 hours (--file-reserved-hours), not earlier: watch it"
        )
        return _warn("disk space", found, advice)

    return _ok("disk space", found)


def examine_data_dir(data_dir: str, files: Files, *, ephemeral: bool = False) -> list[Check]:
    """One data directory, judged by the code of `raymq start` and in its words. Changes nothing."""
    paths = ClusterPaths(data_dir)
    refused = "`raymq start` refuses this directory"

    try:
        record = load_record(paths, files)
        accepted = ephemeral or (record is not None and record.ephemeral)
        check_data_dir(data_dir, ephemeral=accepted, files=files)
        wanted = StartOptions(tls=tls.wanted(os.environ))
        plan = plan_start(paths, wanted, ephemeral=accepted, files=files)
        if files.exists(paths.token):
            load_token(paths, files)
    except RayMQError as error:
        return [_fail("data dir", str(error), refused)]

    checks = [_check_directory(paths.root, files)]
    for disk in disks_of(paths, plan.record, files):
        # Of a first start `plan_start` has judged it.
        checks.append(check_disk(str(disk.place), disk.free_bytes, 0))
    if plan.stored is not None:
        checks.append(_check_address(plan.record))
        if plan.record.doors:
            checks.append(check_rocketmq(door_set.missing_package()))
        checks += _check_cluster(paths, plan.record, files)
    return checks


def check_rocketmq(missing: str | None) -> Check:
    """What the servers for RocketMQ's clients need. Args: `missing`: a package; None: it is there."""
    if missing is not None:
        return _fail("rocketmq", f"without {missing}", "pip install 'raymq[rocketmq]'")
    return _ok("rocketmq", "the servers for RocketMQ's clients have what they need")


def _check_directory(directory: Path, files: Files) -> Check:
    """A directory that `start` accepts, with its risks."""
    reason = volatile_reason(directory, files)
    if reason is not None:
        advice = "choose a disk, unless the messages may be lost"
        return _warn("data dir", f"{reason}; accepted as ephemeral", advice)

    kind = mount_of(directory, files).kind
    if kind in _NETWORK_FILE_SYSTEMS:
        advice = "locks and syncs over a network are as good as its server: use a local disk"
        return _warn("data dir", f"{directory} is on {kind}", advice)
    if kind == "overlay":
        advice = "it is deleted with the container: mount a volume"
        return _warn("data dir", f"{directory} is in a container's own layer", advice)

    if not files.exists(directory):
        return _ok("data dir", f"{directory} on {kind}; `raymq start` makes it")

    mode = os.stat(directory).st_mode & 0o777
    note = f"; mode {mode:04o}, which `raymq start` makes 0700" if mode & 0o077 else ""
    return _ok("data dir", f"{directory} on {kind}{note}")


def _check_address(record: ClusterRecord) -> Check:
    """The address on which the shards listen, with the same check as at the start."""
    if record.host == NODE_HOST:
        return _ok("address", "each shard listens on its node's own address")
    try:
        exposed = tls.check_exposed(record.host, tls=record.tls, insecure=record.insecure)
    except Rejected as error:
        return _fail("address", str(error), "`raymq start` refuses this address")
    if exposed:
        found = f"{record.host} is reachable from other machines, unencrypted (--insecure)"
        return _warn("address", found, f"set {tls.USE_TLS}=1, or listen on 127.0.0.1 (--host)")
    return _ok("address", f"shards listen on {record.host}")


def _check_cluster(paths: ClusterPaths, record: ClusterRecord, files: Files) -> list[Check]:
    token = "token readable by this user only"
    if not files.exists(paths.token):
        token = "its token is missing: `raymq start` makes another"
    found = f"{record.name!r}, {token}"

    try:
        with connect(paths.data_dir) as cluster:
            cluster.describe()
            shards = cluster.status()["shards"]
            # Here: it imports Arrow, which the other checks need not wait for.
            from raymq.client.replica_status import statuses

            rows = [] if record.has_one_replica else statuses(cluster)
    except RayMQError as error:
        if isinstance(error, (UntrustedServer, UntrustedReplica)):
            refused = f"{record.name!r} runs, and its certificate is refused: {error}"
            advice = "mend that certificate, and start its replica again: see docs/operating/security.md, 'TLS'"
            return [_fail("cluster", refused, advice)]
        if not isinstance(error, Rejected):
            return [_ok("cluster", f"{found}; it does not run or does not answer")]
        refused = f"{record.name!r} runs and refuses this token: {error}"
        advice = f"put the token it was started with back into {paths.token}, or `raymq stop` and start it"
        return [_fail("cluster", refused, advice)]

    now_ms = Clock().now_ms()
    return [
        _ok("cluster", f"{found}; it runs and accepts the token"),
        *(check_shard(facts, now_ms) for facts in shards),
        *(
            check_replicas(shard, list(group))
            for shard, group in groupby(rows, lambda row: row["shard"])
        ),
    ]


def check_shard(facts: Mapping[str, Any], now_ms: int) -> Check:
    """A running shard. Args: `facts`: its part of `Cluster.status()`."""
    name, state, cause = f"shard {facts.get('shard')}", facts.get("state"), facts.get("error")

    if state != "RUNNING":
        found = f"{state}: {cause or 'no cause is known'}"
        return _fail(name, found, 'see docs/operating.md, "When something is wrong"')

    if cause and "certificates" in (facts.get("failures") or {}):
        advice = "mend that certificate, and start its replica again: see docs/operating/security.md, 'TLS'"
        return _warn(name, f"RUNNING, but {cause}", advice)

    if cause or facts.get("writable") is False:
        advice = "RayMQ tries again by itself; repair the named cause, and check this machine's limits and disk"
        return _warn(name, f"RUNNING, but {cause}", advice)

    leases = facts.get("supervisor", {}).get("roles", {})
    idle = [role for role, lease in leases.items() if not lease["granted"]]
    if idle:
        advice = "Ray restarts it; if that takes longer than seconds, see Ray's log of the actor"
        return _warn(name, f"RUNNING without {', '.join(idle)}", advice)

    last = facts.get("last_end")
    if last and now_ms - last["time_ms"] < _LAST_GIVE_UP_MS:
        minutes = (now_ms - last["time_ms"]) // 60_000
        found = f"RUNNING; its process ended itself {minutes} minutes ago: {last['reason']}"
        return _warn(name, found, "Ray started it again; repair the named cause")

    return _ok(name, "RUNNING")


def check_replicas(shard: int, rows: Sequence[Mapping[str, Any]]) -> Check:
    """The replicas of a shard. Args: `rows`: as of `replica_status.statuses`."""
    name = f"shard {shard} replicas"
    faults = []
    for row in rows:
        if row["state"] != "RUNNING":
            faults.append(
                f"replica {row['replica']} is {row['state']}: {row['error'] or 'no cause'}"
            )
        elif not row["is_complete"]:
            faults.append(f"replica {row['replica']} is not complete, and does not count yet")

    if faults:
        advice = "see `raymq shard describe` and docs/operating/runbook.md, 'A shard is under-replicated'"
        return _warn(name, "; ".join(faults), advice)

    lost = max((len(row["unclean_recoveries"] or []) for row in rows), default=0)
    if lost:
        found = f"DATA-LOSS-POSSIBLE: a majority of the replicas was lost {lost} time(s)"
        return _warn(name, found, "see docs/operating/runbook.md, 'A majority is gone for good'")
    return _ok(name, f"all {len(rows)} run and are complete")


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _space_of(path: str) -> tuple[int | None, int | None]:
    """Size and free bytes of a file system, or None if the system does not say."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None, None
    return usage.total, usage.free


def _free_bytes(directory: str, files: Files) -> int | None:
    try:
        return files.free_bytes(nearest_existing(Path(directory).expanduser().absolute(), files))
    except OSError:
        return None
