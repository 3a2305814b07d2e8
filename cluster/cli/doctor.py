"""`raymq doctor`: what of this machine would make RayMQ fail or slow, and what to do about each.

Every check is a pure function of facts, so that each verdict is tested without such a machine;
`examine` gathers the facts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from raymq.actors.shared.control_block import check_architecture
from raymq.cluster.cluster_record import load_record
from raymq.cluster.deploy.owned_ray import find_java
from raymq.cluster.paths import ClusterPaths, file_system_of, load_token, volatile_reason
from raymq.cluster.start import connect
from raymq.cluster.transport import tls
from raymq.store.clock import Clock
from raymq.store.errors import RayMQError, Rejected
from raymq.store.files import Files

from .tls_check import NotTaken, validity

Verdict = Literal["ok", "warn", "fail"]

MIB = 1024 * 1024
GIB = 1024 * MIB
_PYTHON_MIN = (3, 10)
#: Spark 3.5, the newest that RayDP takes, needs it; its Arrow breaks on 21
_JAVA_MAJOR = 17
_RAY = "2.60"
#: one segment and its successor, which is allocated ahead
_DISK_FAIL_BYTES = 3 * GIB
_DISK_WARN_BYTES = 20 * GIB
_SHM_WARN_BYTES = 512 * MIB
_SHM_FAIL_BYTES = 1 * MIB
_FILES_FAIL = 1024
_FILES_WARN = 65_536
_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs"}
)
_JAVA_TIMEOUT_S = 20
_CERTIFICATE_WARN_DAYS = 30
#: a process that gave up is told of for so long
_LAST_END_MS = 24 * 3_600_000


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    verdict: Verdict
    #: what is there
    found: str
    #: what to do; empty when nothing is
    advice: str = ""


def _amount(size: int) -> str:
    """Bytes for people."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size >> 20} MiB"


def examine(data_dir: str | None = None) -> list[Check]:
    """All checks of this machine; with `data_dir` also those of that directory."""
    files = Files()
    place = data_dir or os.getcwd()
    checks = [
        check_python(sys.version_info[:3]),
        check_machine(platform.system(), platform.machine()),
        *(check_package(name, _version(name), need) for name, need in _PACKAGES),
        check_crc(_has("google_crc32c"), _has("isal")),
        check_java(*_java(dict(os.environ))),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
        check_shared_memory(*_room_of("/dev/shm")),
        check_auth(os.environ),
        check_tls(os.environ, files, Clock().now_ms() / 1000),
        check_disk(place, _free_bytes(place, files)),
    ]
    if data_dir is not None:
        checks += check_data_dir(data_dir, files)
    return checks


#: package -> the version it must begin with, "" for any
_PACKAGES = (("ray", _RAY), ("pyarrow", ""), ("numpy", ""))


def check_python(version: tuple[int, int, int]) -> Check:
    """Ray's wheels and our syntax need 3.10."""
    found = ".".join(map(str, version))
    if version[:2] < _PYTHON_MIN:
        return Check("python", "fail", found, "use Python 3.10 or newer")
    return Check("python", "ok", found)


def check_machine(system: str, machine: str) -> Check:
    """Linux calls (fallocate, pidfd), and an architecture that keeps the order of stores."""
    found = f"{system} {machine}"
    if system != "Linux":
        return Check("machine", "fail", found, "RayMQ's actors run on Linux only")
    try:
        check_architecture(machine)
    except Rejected as error:
        return Check("machine", "fail", found, error.message)
    return Check("machine", "ok", found)


def check_package(name: str, version: str | None, need: str) -> Check:
    """A package that must be there, in the version we are made for."""
    if version is None:
        return Check(
            name, "fail", "not installed", f"pip install '{name}{f'=={need}.*' if need else ''}'"
        )
    if need and not (version + ".").startswith(need + "."):
        return Check(
            name, "warn", version, f"made and tested with {need}: pip install '{name}=={need}.*'"
        )
    return Check(name, "ok", version)


def check_crc(crc32c: bool, isal: bool) -> Check:
    """CRC-32C of every stored byte, CRC-32 of every body."""
    if not crc32c:
        return Check(
            "checksums",
            "warn",
            "google-crc32c is missing: crcmod in pure Python does about 10 MB/s",
            "pip install google-crc32c",
        )
    if not isal:
        return Check(
            "checksums",
            "ok",
            "google-crc32c; isal is missing, zlib takes its place (slower bodies)",
        )
    return Check("checksums", "ok", "google-crc32c, isal")


def check_java(path: str | None, text: str) -> Check:
    """Only Spark needs it. `text` is what `java -version` printed."""
    if path is None:
        return Check(
            "java",
            "warn",
            "not on PATH",
            "only Spark needs it: install Java 17 (pip install 'raymq[spark]' "
            "brings one) and put its bin on "
            "PATH before `raymq start`",
        )
    major = java_major(text)
    if major != _JAVA_MAJOR:
        return Check(
            "java",
            "warn",
            f"{path}: version {major or 'unknown'}",
            f"Spark 3.5 works with Java {_JAVA_MAJOR}: put that one first on PATH "
            "before `raymq start`",
        )
    return Check("java", "ok", f"{path}: version {major}")


def java_major(text: str) -> int:
    """The major version in what `java -version` prints; 0 if it is not there ("1.8.0" is 8)."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if found is None:
        return 0
    first, second = int(found[1]), int(found[2] or 0)
    return second if first == 1 else first


def check_open_files(limits: tuple[int, int]) -> Check:
    """Ray, and two files a queue."""
    soft, hard = limits
    found = f"soft limit {_limit(soft)}, hard limit {_limit(hard)}"
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < _FILES_FAIL:
        return Check("open files", "fail", found, f"ulimit -n {_FILES_WARN}")
    if soft != unlimited and soft < _FILES_WARN:
        return Check("open files", "warn", found, f"with many queues: ulimit -n {_FILES_WARN}")
    return Check("open files", "ok", found)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_shared_memory(size: int | None, free: int | None) -> Check:
    """Ray's object store and transient pools live there."""
    if size is None or free is None:
        return Check("/dev/shm", "fail", "missing", "mount a tmpfs there: Ray cannot run without")
    found = f"{_amount(free)} free of {_amount(size)}"
    if free < _SHM_FAIL_BYTES:
        return Check(
            "/dev/shm",
            "fail",
            found,
            "Ray keeps its objects on disk, slowly, and --transient-pool is refused: delete what "
            "processes that are gone have left there, or make it larger (a container: --shm-size)",
        )
    if size < _SHM_WARN_BYTES:
        return Check(
            "/dev/shm", "warn", found, "Ray falls back to disk; in a container: --shm-size=2g"
        )
    return Check("/dev/shm", "ok", found)


def check_auth(environment: Mapping[str, str]) -> Check:
    """How Ray authenticates: an owned Ray uses tokens unless told otherwise."""
    mode = environment.get("RAY_AUTH_MODE")
    if mode is None:
        return Check("ray token", "ok", "RAY_AUTH_MODE unset: an own Ray uses a token")
    if mode.lower() == "disabled":
        return Check(
            "ray token",
            "warn",
            "RAY_AUTH_MODE=disabled: whoever reaches Ray's ports may run any code as this user",
            "unset RAY_AUTH_MODE",
        )
    if mode.lower() != "token":
        return Check(
            "ray token", "fail", f"RAY_AUTH_MODE={mode}", "use token or disabled, or unset it"
        )
    return Check("ray token", "ok", "RAY_AUTH_MODE=token")


def check_tls(environment: Mapping[str, str], files: Files, now_s: float) -> Check:
    """The certificates in Ray's variables, as a shard on this machine would use them.

    Args: now_s: the wall clock. Loopback needs none of them.
    """
    where = "set the variables where Ray's node and `raymq start` are started"
    try:
        if not tls.wanted(environment):
            return Check("tls", "ok", f"{tls.USE_TLS} is not on: shards serve 127.0.0.1 in clear")
        tls.server_identity(environment, files)
        ca = tls.trusted(environment, files)
    except Rejected as error:
        return Check("tls", "fail", str(error), where)
    if ca is None:
        found = f"{tls.CA_CERT} is not set: replicas cannot check each other's certificate"
        return Check("tls", "fail", found, f"name the authority's PEM file there: {where}")
    certificate = environment[tls.SERVER_CERT]
    try:
        valid = validity(certificate, environment[tls.SERVER_KEY], ca)
    except NotTaken as error:
        return Check(
            "tls",
            "fail",
            f"{certificate} is refused by who trusts {environment[tls.CA_CERT]}: {error}",
            f"make a certificate that this authority signed for this node's address, and name it "
            f"in {tls.SERVER_CERT}",
        )
    days = int((valid.end_s - now_s) // 86_400)
    found = f"{certificate} for {', '.join(valid.names) or 'no address'}, {days} days left"
    if not valid.names:
        return Check("tls", "fail", found, "give it a subjectAltName with this node's address")
    if days < _CERTIFICATE_WARN_DAYS:
        return Check("tls", "warn", found, "renew it: clients refuse it from then on")
    return Check("tls", "ok", found)


def check_disk(place: str, free: int | None) -> Check:
    """ByteLimiter for a segment and the next one, which is allocated ahead."""
    if free is None:
        return Check("disk room", "fail", f"{place} cannot be looked at", "name an existing disk")
    found = f"{_amount(free)} free at {place}"
    if free < _DISK_FAIL_BYTES:
        return Check(
            "disk room",
            "fail",
            found,
            "a shard allocates 2 GiB at its start (less with "
            "--segment-size-bytes): free some or choose "
            "another disk",
        )
    if free < _DISK_WARN_BYTES:
        return Check(
            "disk room",
            "warn",
            found,
            "messages go after 72 hours (--file-reserved-hours), not earlier: watch it",
        )
    return Check("disk room", "ok", found)


def check_data_dir(data_dir: str, files: Files) -> list[Check]:
    """Of one data directory: survives a reboot, kind of file system, rights, token."""
    paths = ClusterPaths(data_dir)
    place = paths.root
    checks = []
    reason = volatile_reason(place, files)
    kind = file_system_of(place, files)
    if reason is not None:
        checks.append(
            Check("data dir", "warn", reason, "choose a disk, or accept the loss with --ephemeral")
        )
    elif kind in _NETWORK_FILE_SYSTEMS:
        checks.append(
            Check(
                "data dir",
                "warn",
                f"{place} is on {kind}",
                "locks and syncs over a network are as good as its server: use a local disk",
            )
        )
    elif kind == "overlay":
        checks.append(
            Check(
                "data dir",
                "warn",
                f"{place} is in a container's own layer",
                "it is deleted with the container: mount a volume",
            )
        )
    else:
        checks.append(Check("data dir", "ok", f"{place} on {kind}"))
    checks.append(_check_rights(place, files))
    if files.exists(paths.cluster):
        checks += _check_cluster(paths, files)
    return checks


def _check_rights(place: Path, files: Files) -> Check:
    parent = place
    while not files.exists(parent):
        parent = parent.parent
    if os.statvfs(parent).f_flag & os.ST_RDONLY:
        return Check(
            "writable",
            "fail",
            f"{parent} is mounted read-only",
            "mount it writable (the kernel makes a disk with errors read-only: see dmesg), or choose another disk",
        )
    if not parent.is_dir():
        return Check("writable", "fail", f"{parent} is a file", "name a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        return Check(
            "writable", "fail", f"{parent} cannot be written by this user", f"chown {parent}"
        )
    mode = os.stat(parent).st_mode & 0o777
    if parent == place and mode & 0o077:
        return Check(
            "writable", "warn", f"mode {mode:04o}: others may look in", f"chmod 700 {place}"
        )
    return Check("writable", "ok", str(place) if parent == place else f"{place} can be made")


def _check_cluster(paths: ClusterPaths, files: Files) -> list[Check]:
    try:
        record = load_record(paths, files)
        load_token(paths, files)
    except RayMQError as error:
        advice = "mend it as the message says, and look again"
        return [Check("cluster", "fail", str(error), advice)]
    name = "unknown" if record is None else record.name
    found = f"{name!r}, token readable by this user only"
    try:
        with connect(paths.data_dir) as cluster:
            cluster.describe()
            shards = cluster.status()["shards"]
    except Rejected as error:
        return [
            Check(
                "cluster",
                "fail",
                f"{name!r} runs and refuses this token: {error}",
                f"put the token it was started with back into {paths.token}, or `raymq stop` and start it",
            )
        ]
    except RayMQError:
        return [Check("cluster", "ok", f"{found}; it does not run or does not answer")]
    now_ms = Clock().now_ms()
    return [
        Check("cluster", "ok", f"{found}; it runs and takes it"),
        *(check_shard(facts, now_ms) for facts in shards),
    ]


def check_shard(facts: Mapping[str, Any], now_ms: int) -> Check:
    """What a running shard says of itself. Args: facts: its part of `Cluster.status()`."""
    name, state, cause = f"shard {facts.get('shard')}", facts.get("state"), facts.get("error")
    if state != "RUNNING":
        found = f"{state}: {cause or 'no cause is known'}"
        return Check(name, "fail", found, 'see docs/operating.md, "When something is wrong"')
    if cause or facts.get("writable") is False:
        advice = "it is tried again by itself; look at what is named, and at this machine's limits and disk"
        return Check(name, "warn", f"RUNNING, but {cause}", advice)
    idle = [
        role
        for role, lease in facts.get("roles", {}).get("roles", {}).items()
        if not lease["granted"]
    ]
    if idle:
        return Check(
            name,
            "warn",
            f"RUNNING without {', '.join(idle)}",
            "Ray restarts it; where that takes longer than seconds, look at Ray's logs of it",
        )
    last = facts.get("last_end")
    if last and now_ms - last["time_ms"] < _LAST_END_MS:
        minutes = (now_ms - last["time_ms"]) // 60_000
        found = f"RUNNING; its process gave up {minutes} minutes ago: {last['reason']}"
        return Check(name, "warn", found, "it was started again by itself; look at what is named")
    return Check(name, "ok", "RUNNING")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _java(environment: dict[str, str]) -> tuple[str | None, str]:
    path = find_java(environment)
    if path is None:
        return None, ""
    try:
        done = subprocess.run(
            [path, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_JAVA_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return path, ""
    return path, done.stderr + done.stdout


def _room_of(path: str) -> tuple[int | None, int | None]:
    """Its size and what is free, bytes."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None, None
    return usage.total, usage.free


def _free_bytes(place: str, files: Files) -> int | None:
    path = Path(place).expanduser().absolute()
    while not files.exists(path) and path != path.parent:
        path = path.parent
    try:
        return files.free_bytes(path)
    except OSError:
        return None
