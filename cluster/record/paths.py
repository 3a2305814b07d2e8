"""Paths of a cluster: data directory, run directory.

    <data_dir>/                 0700
      token                     0600, 64 hex characters, needed for every call of a shard
      cluster.json              options of the cluster (cluster_record.py)
      ray.json, ray.log         the Ray that `start` owns, while there is one (ray_host.py)
      ray-token                 Ray's token, if the user has no home for it (owned_ray.py)
      ca.pem                    with TLS: the authority that signed the shards' certificates
      endpoints.json            over nodes: where the leaders listened at the last start
      start.lock                held while a command or the controller works on the directory
      shard-<i>/replica-<r>/    one store each (RocketMQ's tree plus raymq/)

Sockets and Ray's session are in /tmp/raymq-<uid>. A socket's path has at most 107 bytes, so the path of the data
directory is not limited by it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files

#: how long a command waits for a data directory: the controller keeps it for a moment
LOCK_WAIT_MS = 10_000
_LOCK_STEP_MS = 50

#: file systems that lose everything at a reboot
_VOLATILE_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_VOLATILE_ROOT = "/tmp"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SHARD = re.compile(r"shard-\d+")


class ClusterPaths:
    """Every path under one data directory. Makes and reads nothing."""

    def __init__(self, data_dir: str | os.PathLike[str]) -> None:
        #: absolute
        self.root = Path(os.path.abspath(os.path.expanduser(data_dir)))
        self.token = self.root / "token"
        self.cluster = self.root / "cluster.json"
        self.ray = self.root / "ray.json"
        self.ray_log = self.root / "ray.log"
        self.ray_token = self.root / "ray-token"
        self.ca = self.root / "ca.pem"
        self.endpoints = self.root / "endpoints.json"
        self.start_lock = self.root / "start.lock"

    @property
    def data_dir(self) -> str:
        """The directory, for messages and records."""
        return str(self.root)

    def replica(self, shard: int, replica: int) -> Path:
        """The store root of one replica."""
        return self.root / f"shard-{shard}" / f"replica-{replica}"

    def shards(self, files: Files) -> list[int]:
        """The shards that have a directory here, in order."""
        entries = files.list(self.root) if files.exists(self.root) else []
        return sorted(int(entry[6:]) for entry in entries if _SHARD.fullmatch(entry))


def check_name(name: str) -> None:
    """Raises: Rejected for a cluster's name that cannot be part of the names of actors and files."""
    if not _NAME.fullmatch(name):
        message = (
            f"cluster name {name!r}: use 1 to 63 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
        raise Rejected(message, field="name", limit=63)


class Mount(NamedTuple):
    """A mounted file system."""

    #: "ext4", "tmpfs"; "unknown" when the kernel does not say
    kind: str
    #: "/dev/sda1"
    device: str


def mount_of(path: str | os.PathLike[str], files: Files | None = None) -> Mount:
    """The file system that holds `path`, which need not exist yet."""
    files = files or Files()
    unknown = Mount("unknown", "an unknown device")
    resolved = os.path.realpath(path)
    try:
        mounts = files.read_file(Path("/proc/self/mounts")).decode("utf-8", "surrogateescape")
    except OSError:
        return unknown

    found, length = unknown, 0
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue

        # The kernel writes spaces in a mount point as octal escapes.
        mount = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), fields[1])
        prefix = mount.rstrip("/") + "/"
        # >=: a later mount on the same point hides the earlier one.
        if (resolved + "/").startswith(prefix) and len(prefix) >= length:
            found, length = Mount(fields[2], fields[0]), len(prefix)

    return found


def volatile_reason(path: str | os.PathLike[str], files: Files | None = None) -> str | None:
    """Why files under `path` do not survive a reboot, or None when they do."""
    resolved = os.path.realpath(path)
    if resolved == _VOLATILE_ROOT or resolved.startswith(_VOLATILE_ROOT + "/"):
        return f"{resolved} is under {_VOLATILE_ROOT}, which systems empty at boot and by age"
    kind = mount_of(resolved, files).kind
    if kind in _VOLATILE_FILE_SYSTEMS:
        return f"{resolved} is on {kind}, which lives in memory and is gone after a reboot"
    return None


def prepare_data_dir(
    data_dir: str, *, ephemeral: bool, files: Files, member: bool = False
) -> ClusterPaths:
    """Make the data directory (0700), or take an existing one that is empty or a cluster's.

    Raises: as `check_data_dir`.
    """
    paths = check_data_dir(data_dir, ephemeral=ephemeral, files=files, member=member)
    root = paths.root
    if not files.exists(root):
        try:
            files.make_dirs(root, 0o700)
        except (OSError, Unavailable) as error:
            raise _data_dir_refused(paths, _not_made(root, str(error))) from error
    elif stat.S_IMODE(os.stat(root).st_mode) != 0o700:
        # The token and every message are below: other users may not even list it.
        os.chmod(root, 0o700)
    return paths


def check_data_dir(
    data_dir: str, *, ephemeral: bool, files: Files, member: bool = False
) -> ClusterPaths:
    """Check that a directory can be a data directory. Changes nothing.

    Args: `member`: this node only has shards of the cluster, which another machine's start made.
    Raises: Rejected (field "data_dir") if the directory would not survive a reboot and `ephemeral` is not set. Also if
    it holds other files, is a file, belongs to another user, or cannot be made or written.
    """
    paths = ClusterPaths(data_dir)
    fault = _data_dir_fault(paths, ephemeral=ephemeral, files=files, member=member)
    if fault is not None:
        raise _data_dir_refused(paths, fault)
    return paths


def _data_dir_refused(paths: ClusterPaths, fault: str) -> Rejected:
    return Rejected(fault, field="data_dir", path=paths.data_dir)


def _data_dir_fault(
    paths: ClusterPaths, *, ephemeral: bool, files: Files, member: bool
) -> str | None:
    """Why the directory cannot be a data directory, or None when it can."""
    root = paths.root
    reason = volatile_reason(root, files)
    if reason is not None and not ephemeral:
        return (
            f"{reason}. Choose a directory on a disk (for example ~/raymq-data), or, if losing every message at a "
            "reboot is fine, say so: ephemeral=True (command line: --ephemeral)"
        )

    if not files.exists(root):
        fault = why_not_writable(nearest_existing(root, files))
        return None if fault is None else _not_made(root, fault)

    facts = os.stat(root)
    if not stat.S_ISDIR(facts.st_mode):
        return f"{root} is not a directory"
    if facts.st_uid != os.geteuid() and os.geteuid() != 0:
        return (
            f"{root} belongs to user {facts.st_uid}, this process is user {os.geteuid()}: "
            "run as the owner or choose another directory"
        )

    foreign = _foreign_entries(root, files)
    if member:
        foreign = [entry for entry in foreign if not _SHARD.fullmatch(entry)]
    if not files.exists(paths.cluster) and foreign:
        return (
            f"{root} is not empty and not a RayMQ data directory (no cluster.json): "
            "choose an empty or new directory"
        )

    fault = why_not_writable(root)
    return None if fault is None else f"{fault}. Make it writable, or choose another directory"


def nearest_existing(path: Path, files: Files) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    while not files.exists(path) and path != path.parent:
        path = path.parent
    return path


def why_not_writable(directory: Path) -> str | None:
    """Why this user cannot write into an existing directory, or None when it can."""
    if not directory.is_dir():
        return f"{directory} is not a directory"
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        return (
            f"{directory} is on a file system that is mounted read-only (the kernel does that to a "
            "disk with errors: see dmesg)"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory} cannot be written by this user"
    return None


def _not_made(directory: Path, why: str) -> str:
    return f"cannot create the data directory {directory}: {why}. Choose a directory that this user may write"


def check_may_read(root: Path) -> None:
    """Raises: Rejected for a directory whose files this user cannot see. They would seem not to be there."""
    if not os.path.isdir(root) or os.access(root, os.X_OK):
        return
    owner = os.stat(root).st_uid
    if owner == os.geteuid():
        return
    raise Rejected(
        f"{root} belongs to user {owner}, and this process, of user {os.geteuid()}, may not read it: "
        "run as the owner, or connect by raymq://host:port with the cluster's token",
        field="data_dir",
        path=str(root),
    )


def _foreign_entries(directory: Path, files: Files) -> list[str]:
    """The entries that a first start, interrupted before cluster.json, cannot have left."""
    ours = {"token", "start.lock", "ray.json", "ray.log", "ray-token", "lost+found"}
    return [
        entry
        for entry in files.list(directory)
        if entry not in ours
        and ".tmp" not in entry
        and not _has_empty_places(directory / entry, files)
    ]


def _has_empty_places(directory: Path, files: Files) -> bool:
    """Whether it is a shard's directory without any store: disks were mounted where its replicas will be."""
    if not _SHARD.fullmatch(directory.name) or not directory.is_dir():
        return False
    places = [directory / entry for entry in files.list(directory) if entry != "lost+found"]
    return all(place.is_dir() and set(files.list(place)) <= {"lost+found"} for place in places)


def load_or_make_token(paths: ClusterPaths, files: Files) -> str:
    """The cluster's bearer token, made (0600) when missing.

    Raises: Rejected on an unusable file.
    """
    if not files.exists(paths.token):
        files.write_file_atomic(paths.token, secrets.token_hex(32).encode("ascii"))
        os.chmod(paths.token, 0o600)
    return load_token(paths, files)


def load_token(paths: ClusterPaths, files: Files) -> str:
    """The token of an existing cluster.

    Raises: Rejected when it is missing, damaged or readable by others.
    """
    try:
        mode = stat.S_IMODE(os.stat(paths.token).st_mode)
        token = files.read_file(paths.token).decode("ascii", "replace").strip()
    except FileNotFoundError as error:
        fault = f"is missing: {paths.data_dir} is not the data directory of a started cluster"
        raise _token_refused(paths, fault) from error
    except PermissionError as error:
        fault = "cannot be read by this user: run as the owner of the data directory"
        raise _token_refused(paths, fault) from error

    if mode & 0o077:
        again = f"chmod 600 {shlex.quote(str(paths.token))}"
        fault = f"has mode {mode:04o}: others can read the token. Run: {again}"
        raise _token_refused(paths, fault)
    if not re.fullmatch(r"[0-9a-f]{64}", token):
        raise _token_refused(
            paths,
            "does not hold 64 hexadecimal digits; stop the cluster, delete the file and start again: "
            "a new token is made",
        )

    return token


def _token_refused(paths: ClusterPaths, fault: str) -> Rejected:
    return Rejected(f"{paths.token} {fault}", field="token", path=str(paths.token))


@contextlib.contextmanager
def directory_lock(
    paths: ClusterPaths, files: Files, *, wait_ms: int = LOCK_WAIT_MS
) -> Iterator[None]:
    """Admit one command at a time to a data directory. Args: `wait_ms`: how long another process may keep it.

    Raises: Unavailable when another process is admitted, and stays longer.
    """
    clock = Clock()
    deadline_ms = clock.monotonic_ms() + wait_ms
    with files.opened(paths.start_lock, create=True) as fd:
        while True:
            try:
                files.lock(fd)
                break
            except Unavailable as error:
                if clock.monotonic_ms() >= deadline_ms:
                    message = (
                        f"another command, such as `raymq start`, is working on {paths.data_dir}: "
                        "wait for it to end"
                    )
                    raise Unavailable(message, path=paths.data_dir) from error
            clock.sleep_ms(_LOCK_STEP_MS)
        yield


def run_dir_path() -> Path:
    """The directory of this user's sockets and Ray sessions. `run_dir` makes it."""
    return Path(f"/tmp/raymq-{os.geteuid()}")


def run_dir(files: Files) -> Path:
    """/tmp/raymq-<uid>, made 0700: sockets and Ray sessions.

    Raises: Rejected when another user owns it, or it cannot be made.
    """
    directory = run_dir_path()
    fault = run_dir_fault(files)
    if fault is not None:
        raise Rejected(fault, field="run_dir", path=str(directory))
    files.make_dirs(directory, 0o700)
    if stat.S_IMODE(os.lstat(directory).st_mode) != 0o700:
        os.chmod(directory, 0o700)
    return directory


def run_dir_fault(files: Files) -> str | None:
    """Why `run_dir` cannot be had, and what to do; None: it can. Changes nothing."""
    directory = run_dir_path()
    if files.exists(directory):
        facts = os.lstat(directory)
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
            fault = why_not_writable(directory)
            return None if fault is None else f"{fault}. Sockets and Ray's session belong there"
        return f"{directory} belongs to another user, or is not a directory: remove it"
    fault = why_not_writable(directory.parent)
    if fault is None:
        return None
    return f"cannot make {directory} for sockets and Ray's session: {fault}. Mount a tmpfs on {directory.parent}"


def home_dirs() -> list[Path]:
    """Where the list of this user's clusters may be, in the order of preference.

    $RAYMQ_HOME alone, if it is set. Otherwise ~/.raymq, and the run directory for a user without a home. In /tmp any
    user could make a directory of that name. So it counts only if it is this user's, as `run_dir` makes it.
    """
    named = os.environ.get("RAYMQ_HOME")
    if named:
        return [Path(named)]
    try:
        facts = os.lstat(run_dir_path())
    except OSError:
        return in_home(".raymq")
    is_private = stat.S_ISDIR(facts.st_mode) and not facts.st_mode & 0o077
    own = [run_dir_path() / "home"] if is_private and facts.st_uid == os.geteuid() else []
    return [*in_home(".raymq"), *own]


def in_home(name: str) -> list[Path]:
    """A path in this user's home. None at all, if the system knows no home: no HOME, no entry in passwd."""
    home = os.path.expanduser("~")
    return [Path(home) / name] if os.path.isabs(home) else []
