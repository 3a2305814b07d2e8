"""The Ray that `start` owns: started detached from the shell, ended with all its processes.

The Ray is `ray start --head --block` in a session of its own. It outlives the shell, and uses free ports and a private
session directory. It never touches another Ray of the machine: `ray stop`, which ends all of them, is not used, nor is
the machine-wide "current cluster" file. It runs with RAY_AUTH_MODE from the environment, else "token" if its release
has tokens (ray_release.py). In a Ray without a token, streaming calls of a driver that finds one in ~/.ray/auth_token
hang.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from raymq.cluster.record.paths import ClusterPaths, in_home, run_dir
from raymq.spark import java
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected, Unavailable
from raymq.store.base.files import Files

from . import process_tree, ray_host, ray_release
from .process_tree import MARK, end_family, leader_alive, running, start_time
from .ray_host import OwnedRay, Progress, RayTarget

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: the servers without which an owned Ray does not work, as the kernel names them
SERVERS = ("gcs_server", "raylet")
_START_TIMEOUT_S = 60.0
#: a try that ends within this time is a short one; so many may be
_SHORT_MS = 15_000
_SHORT_ATTEMPTS = 4
#: what a Ray gets beyond the timeout while its processes make progress
_OVERTIME_MS = 60_000
#: they do if they ran, or waited for a core, for a tenth of this time
_PROGRESS_MS = 2_000
_STOP_GRACE_MS = 20_000
#: for a Ray that lost a server: it cannot end in order
_DYING_GRACE_MS = 1_500
#: the range of ports from which the kernel takes those of connections
_CONNECTION_PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
#: above those of well-known servers
_PORT_MIN = 20_000
#: ports that are tried for each one that is wanted
_PORT_TRIES = 20
_PORT_OPTIONS = (
    "--port",
    "--node-manager-port",
    "--object-manager-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
)


def start_owned(
    paths: ClusterPaths,
    *,
    files: Files,
    clock: Clock,
    progress: Progress,
    loopback: bool = True,
    timeout_s: float = _START_TIMEOUT_S,
    meanwhile: Callable[[], object] = lambda: None,
) -> OwnedRay:
    """Start a Ray that outlives this process, and return when it accepts connections.

    Args: `loopback`: it listens on 127.0.0.1 only, else on all addresses of the machine. `meanwhile`: called while it
    starts.
    Raises: Unavailable with the end of its log when it does not come up within `timeout_s`. A Ray whose processes make
    progress at that time gets up to a minute more.
    """
    began_ms = clock.monotonic_ms()
    deadline_ms = began_ms + int(timeout_s * 1000)
    lost = ray_host.load_owned(paths, files)
    if lost is not None:
        # No `stop` ended that Ray: it crashed, the machine was rebooted, or it is dying.
        progress(f"Ray at {lost.address} is lost and is replaced: {why_unhealthy(lost, files)}")
        stop_owned(paths, files=files, clock=clock)

    progress("starting Ray")
    short_attempts = 0
    while True:
        attempt_ms = clock.monotonic_ms()
        try:
            owned = _start_once(paths, loopback, deadline_ms, meanwhile, files=files, clock=clock)
            progress(f"Ray runs at {owned.address}")
            return owned
        except Unavailable as error:
            # Another process may have taken a port before Ray bound it. On a busy machine Ray itself gives up after
            # 30 s. One that ends soon, and again, has another cause.
            now_ms = clock.monotonic_ms()
            short_attempts += now_ms - attempt_ms < _SHORT_MS
            if short_attempts >= _SHORT_ATTEMPTS or now_ms >= deadline_ms:
                message = (
                    f"Ray did not start in {(now_ms - began_ms) / 1000:.0f} s: {error.message}"
                )
                raise Unavailable(message) from error
            progress(f"starting Ray again: {error}")


def why_unhealthy(owned: OwnedRay, files: Files) -> str | None:
    """Why this Ray will not serve again, as its processes show; None: they run.

    Ray itself takes about a second to notice a killed server, and hangs with a stopped one (SIGSTOP).
    """
    if not leader_alive(owned.family, files):
        return f"its head process (pid {owned.pid}) has ended"
    if not owned.address:
        return "its start was not finished"
    processes = running(owned.family, files)
    for name in SERVERS:
        states = [state for command, state in processes if command == name]
        if not states:
            return f"its {name} has ended"
        if "T" in states:
            return f"its {name} is stopped (SIGSTOP)"
    return None


def stop_owned(paths: ClusterPaths, *, files: Files, clock: Clock) -> list[int]:
    """End the directory's own Ray, if any, and wait until all its processes have ended.

    Returns: the pids that had to be killed. Raises: Unavailable when a process cannot be ended.
    """
    owned = ray_host.load_owned(paths, files)
    if owned is None:
        return []
    grace_ms = _STOP_GRACE_MS if why_unhealthy(owned, files) is None else _DYING_GRACE_MS
    try:
        killed = end_family(owned.family, files=files, clock=clock, grace_ms=grace_ms)
    except TimeoutError as error:
        raise Unavailable(f"Ray of {paths.data_dir} could not be ended: {error}") from error
    path = Path(owned.temp_dir)
    # Ray's logs and sockets, if `start` named their directory.
    if path.parent == run_dir(files) and path.name.startswith("ray-") and files.exists(path):
        files.remove_tree(path)
    files.unlink(paths.ray)
    return killed


def _start_once(
    paths: ClusterPaths,
    loopback: bool,
    deadline_ms: int,
    meanwhile: Callable[[], object],
    *,
    files: Files,
    clock: Clock,
) -> OwnedRay:
    mark = secrets.token_hex(8)
    # Short: Ray puts sockets into it, and the path of a socket has at most 107 bytes.
    temp_dir = run_dir(files) / f"ray-{mark[:8]}"
    files.make_dirs(temp_dir, 0o700)

    environment = owned_environment(mark, paths, files)
    if loopback:
        # Otherwise `ray start` replaces 127.0.0.1 by the machine's own address, so that other machines could join.
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

    *ports, last = free_ports(len(_PORT_OPTIONS) + 1)
    client_port = last if importlib.util.find_spec("grpc") is not None else None
    arguments = _arguments(temp_dir, ports, client_port, loopback)
    if files.exists(paths.ray_log):
        files.unlink(paths.ray_log)
    with files.opened(paths.ray_log, create=True) as log:
        pid = _spawn(arguments, environment, log)

    owned = OwnedRay(
        address="",
        pid=pid,
        start_time=start_time(pid, files) or 0,
        boot_id=files.boot_id_hash(),
        mark=mark,
        temp_dir=str(temp_dir),
        auth_mode=environment["RAY_AUTH_MODE"].lower(),
        auth_token_path=environment.get("RAY_AUTH_TOKEN_PATH"),
        version=ray_release.installed(),
    )

    # Recorded before it is up, so that `stop` finds it if this start is interrupted now.
    ray_host.save_target(paths, RayTarget(address=owned.address, owned=owned), files)
    try:
        meanwhile()
        node = _wait_started(paths, owned, deadline_ms, files=files, clock=clock)
        if client_port is not None:
            _check_client_port(owned, client_port, files)
    except BaseException:
        stop_owned(paths, files=files, clock=clock)
        raise

    address = f"[{ray_host.LOOPBACK}]:{ports[0]}" if loopback else f"{node}:{ports[0]}"
    owned = replace(owned, address=address)
    ray_host.save_target(paths, RayTarget(address=owned.address, owned=owned), files)
    return owned


def _arguments(
    temp_dir: Path, ports: list[int], client_port: int | None, loopback: bool
) -> list[str]:
    """The command line of `ray`."""
    arguments = [
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        "--include-dashboard=false",
        f"--temp-dir={temp_dir}",
        f"--labels={ray_host.HOST_LABEL}={host_label()}",
        # 0: each worker takes a free port. Every Ray of the machine has the same default range.
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]

    arguments += [f"{option}={port}" for option, port in zip(_PORT_OPTIONS, ports, strict=True)]
    if loopback:
        # All of Ray's servers listen on 127.0.0.1 alone only when it is the node's own address.
        arguments.append("--node-ip-address=127.0.0.1")
    if client_port is not None:
        # With grpcio Ray serves Ray Client too, by default on port 10001, which another Ray may use.
        arguments.append(f"--ray-client-server-port={client_port}")

    return arguments


def _spawn(arguments: list[str], environment: dict[str, str], log: int) -> int:
    """Run ray_head.py. Returns: the pid of the detached process."""
    receive, send = os.pipe()
    with os.fdopen(receive, "rb") as printed:
        try:
            subprocess.run(
                [sys.executable, "-m", "raymq.cluster.deploy.ray_head", str(send), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(send,),
                check=True,
            )
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"Ray's head process could not be started: {error}") from error
        finally:
            os.close(send)
        pid = printed.read()

    if not pid:
        raise Unavailable("Ray's head process could not be started: it ended at once")
    return int(pid)


def node_address(log: str) -> str | None:
    """The node address that `ray start` printed. With ray[default] it is coloured and follows a log prefix."""
    for line in log.splitlines():
        _, found, node = _COLOUR.sub("", line).partition("Local node IP: ")
        if found:
            return node.strip()
    return None


def _wait_started(
    paths: ClusterPaths, owned: OwnedRay, deadline_ms: int, *, files: Files, clock: Clock
) -> str:
    """Wait until Ray reports that it is up. Returns: the address of its node."""
    patience = _Patience(owned, deadline_ms, files=files, clock=clock)
    while True:
        log = files.read_file(paths.ray_log).decode("utf-8", "replace")
        if "Ray runtime started." in log:
            node = node_address(log)
            if node is None:
                raise Unavailable(f"Ray started but did not print its address; see {paths.ray_log}")
            return node

        if not leader_alive(owned.family, files):
            tail = "\n".join(log.splitlines()[-15:])
            raise Unavailable(f"Ray ended while it started ({paths.ray_log}):\n{tail}")
        if patience.is_over():
            message = (
                f"its processes run, and it is not ready; is the machine busy? See {paths.ray_log}"
            )
            raise Unavailable(message)

        clock.sleep_ms(100)


class _Patience:
    """How long to wait for a Ray that starts: until the deadline, and then while its processes make progress."""

    def __init__(self, owned: OwnedRay, deadline_ms: int, *, files: Files, clock: Clock) -> None:
        self._owned = owned
        self._deadline_ms = deadline_ms
        self._files = files
        self._clock = clock
        #: when its processes were looked at, and the activity of each then
        self._look = (clock.monotonic_ms(), self._activity())

    def is_over(self) -> bool:
        """Whether the wait should end."""
        now_ms = self._clock.monotonic_ms()
        if now_ms <= self._deadline_ms - _PROGRESS_MS:
            return False
        looked_ms, before = self._look
        if now_ms - looked_ms < _PROGRESS_MS:
            return False
        found = self._activity()
        self._look = (now_ms, found)
        if now_ms <= self._deadline_ms:
            return False
        # A process that has ended takes nothing away.
        active_ms = sum(max(0.0, ms - before.get(pid, 0.0)) for pid, ms in found.items())
        is_active = active_ms > (now_ms - looked_ms) / 10
        return not is_active or now_ms > self._deadline_ms + _OVERTIME_MS

    def _activity(self) -> dict[int, float]:
        return process_tree.active_ms_of(self._owned.family, self._files)


def _check_client_port(owned: OwnedRay, port: int, files: Files) -> None:
    """Raises: Unavailable if another process listens at the port of Ray Client, which Ray binds last: Ray ends then.

    A process that connects to a Ray that ends is ended by Ray's native code, without an exception.
    """
    if process_tree.listener(owned.family, port, files) is False:
        raise Unavailable(f"another process has taken port {port}, which Ray was to serve")


def owned_environment(mark: str, paths: ClusterPaths, files: Files) -> dict[str, str]:
    """The environment of an owned Ray: the caller's, with authentication, java and raymq set."""
    environment = dict(os.environ)
    environment[MARK] = mark
    environment["RAY_AUTH_MODE"] = ray_release.own_auth_mode(environment, ray_release.installed())
    # Otherwise SIGTERM waits 30 s for detached actors, which do not end by themselves.
    environment.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "3")
    # An owned Ray is a cluster of its own, whatever the shell's RAY_ADDRESS says.
    environment.pop("RAY_ADDRESS", None)
    # Ray runs workers at nice 15: the shards would get only the CPU that local producers leave.
    environment.setdefault("RAY_worker_niceness", "0")
    # With several arenas the threads of gRPC return large buffers to the kernel and take them again, see
    # actors/ray/actor_classes.py.
    environment.setdefault("MALLOC_ARENA_MAX", "1")

    if environment["RAY_AUTH_MODE"] == "token":
        _ensure_ray_token(environment, paths, files)

    found = java.find(environment)
    if found is not None and shutil.which("java", path=environment.get("PATH")) is None:
        # RayDP and Ray look for a bare `java` on the PATH that Ray had at its start.
        environment["PATH"] = f"{os.path.dirname(found)}{os.pathsep}{environment.get('PATH', '')}"

    # The workers must find the same raymq.
    return ray_host.importable(environment)


def host_label() -> str:
    """This machine's value of HOST_LABEL: its name, in the letters that Ray allows in a label."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())
    return safe.strip("-_.")[:63].strip("-_.") or "localhost"


def _ensure_ray_token(environment: dict[str, str], paths: ClusterPaths, files: Files) -> None:
    """Make Ray's token where Ray looks for it, as `ray get-auth-token --generate` does.

    For a user without a home it is made in the data directory, and the environment names it.
    Raises: Rejected if the file that RAY_AUTH_TOKEN_PATH names can be neither read nor made.
    """
    if environment.get("RAY_AUTH_TOKEN"):
        return

    named = environment.get("RAY_AUTH_TOKEN_PATH")
    if named:
        try:
            _make_ray_token(Path(named), files)
        except (OSError, RayMQError) as error:
            message = (
                f"RAY_AUTH_TOKEN_PATH names {named}, which can be neither read nor made "
                f"({error}): name a file that this user may write, or unset it"
            )
            raise Rejected(message, field="RAY_AUTH_TOKEN_PATH", path=named) from error
        return

    for path in in_home(".ray/auth_token"):
        with contextlib.suppress(OSError, RayMQError):
            _make_ray_token(path, files)
            if not environment.get("HOME"):
                # Ray does not ask passwd for the home.
                environment["RAY_AUTH_TOKEN_PATH"] = str(path)
            return

    _make_ray_token(paths.ray_token, files)
    environment["RAY_AUTH_TOKEN_PATH"] = str(paths.ray_token)


def _make_ray_token(path: Path, files: Files) -> None:
    if files.exists(path):
        # Raises PermissionError for another user's.
        files.read_file(path)
        return
    files.make_dirs(path.parent, 0o700)
    files.write_file_atomic(path, secrets.token_hex(32).encode("ascii"))
    os.chmod(path, 0o600)


def free_ports(count: int) -> list[int]:
    """Different ports that are free at this moment, at random.

    The kernel gives ports of its range for connections (32768 to 60999 by default) to any program that connects. So
    ports below are taken, as long as that range leaves some.
    """
    try:
        first = int(Files().read_file(Path(_CONNECTION_PORTS)).split()[0])
    except (OSError, ValueError, IndexError):
        first = 0
    below = list(range(_PORT_MIN, first))
    random.SystemRandom().shuffle(below)

    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in below[: _PORT_TRIES * count]:
            if len(found) == count:
                return found
            each = stack.enter_context(socket.socket())
            # Otherwise a port that another program has used lately seems taken.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                each.bind(("", port))
                found.append(port)

        while len(found) < count:
            each = stack.enter_context(socket.socket())
            each.bind(("", 0))
            found.append(each.getsockname()[1])
        return found
