"""The Ray under a cluster: which one it is, and this process's way into it.

`<data_dir>/ray.json` says in which Ray the cluster runs and, for one that `start` owns (owned_ray.py), which process it
is. The authentication mode of an owned Ray is recorded, and a driver with another mode is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from raymq.client.transport.actor_names import NAMESPACE
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected, Unavailable
from raymq.store.base.files import Files

from . import ray_release
from .process_tree import Family, leader_alive

Progress = Callable[[str], None]

#: the node label by which all roles of a replica stay on the machine that has its disk
HOST_LABEL = "raymq-host"
#: 127.0.0.1 in a form that Ray does not change: `ray.init` would replace 127.0.0.1 by the machine's own address
LOOPBACK = "::ffff:127.0.0.1"
_LOCAL_HOSTS = ("localhost", "127.0.0.1", LOOPBACK)
#: the errors of a `ray.init` that cannot connect
CONNECT_ERRORS = (ConnectionError, RuntimeError, TimeoutError, ValueError, OSError)
#: held while a session connects or disconnects
_connecting = threading.Lock()
#: sessions that use a connection which a session made
_own_sessions = 0
#: variable -> value that this process adopted from the Ray of a cluster
_adopted: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class OwnedRay:
    """The Ray that `start` started for one data directory."""

    #: host:port of its GCS, as `ray.init(address=...)` takes it
    address: str
    pid: int
    start_time: int
    boot_id: int
    mark: str
    temp_dir: str
    #: "token" or "disabled"
    auth_mode: str
    #: RAY_AUTH_TOKEN_PATH at start, if it was set
    auth_token_path: str | None
    #: of Ray; None: not known
    version: str | None = None

    @property
    def family(self) -> Family:
        """The processes of this Ray."""
        return Family(self.pid, self.start_time, self.boot_id, self.mark)


@dataclass(frozen=True, kw_only=True)
class RayTarget:
    """The Ray to use, and whether `stop` ends it too.

    Kept in `ray.json` while the cluster runs.
    """

    address: str
    owned: OwnedRay | None = None


def load_target(paths: ClusterPaths, files: Files) -> RayTarget | None:
    """The recorded Ray, alive or not, or None when there is none (or its record is unreadable)."""
    try:
        body = json.loads(files.read_file(paths.ray))
        owned = body["owned"]
        return RayTarget(
            address=body["address"], owned=None if owned is None else OwnedRay(**owned)
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def save_target(paths: ClusterPaths, target: RayTarget, files: Files) -> None:
    """Save in which Ray the cluster runs. Durable: at return, so that a later `stop` finds the Ray."""
    files.write_file_atomic(paths.ray, (json.dumps(asdict(target), indent=2) + "\n").encode())


def load_owned(paths: ClusterPaths, files: Files) -> OwnedRay | None:
    """The recorded owned Ray, alive or not."""
    target = load_target(paths, files)
    return None if target is None else target.owned


def running_target(paths: ClusterPaths, files: Files) -> RayTarget | None:
    """The recorded Ray if it runs: an owned one by its process, another one by its open port."""
    target = load_target(paths, files)
    if target is None:
        return None
    if target.owned is not None:
        return target if leader_alive(target.owned.family, files) else None
    return target if _listens(target.address) else None


def running_target_of(data_dir: str | None) -> RayTarget | None:
    """`running_target` of a cluster's data directory; None, too, if the cluster has none on this machine."""
    return None if data_dir is None else running_target(ClusterPaths(data_dir), Files())


def find_ray(paths: ClusterPaths, address: str | None, files: Files) -> RayTarget | None:
    """The running Ray that belongs to this start; None: there is none, start one.

    In this order: `address`, the one this process is connected to, the one recorded for the directory, RAY_ADDRESS.

    Raises: Rejected when `address` contradicts an owned Ray that still runs this directory, or is ray://.
    """
    recorded = running_target(paths, files)
    wanted = address or connected_address()
    if recorded is not None:
        if wanted is None or _same_address(wanted, recorded.address):
            return recorded
        if recorded.owned is not None:
            message = (
                f"{paths.data_dir} already runs in its own Ray at {recorded.address}, not in {wanted}. Stop it first: "
                f"raymq stop {shlex.quote(str(paths.data_dir))}"
            )
            raise Rejected(message, field="address", limit=recorded.address)

    wanted = wanted or os.environ.get("RAY_ADDRESS") or None
    if wanted is None:
        return None
    if wanted.startswith("ray://"):
        raise Rejected(
            f"{wanted} is a Ray Client address: the data directory must be on a machine of the cluster. Run start "
            "there, with the cluster's own address (host:6379 or auto)",
            field="address",
        )

    return RayTarget(address=wanted)


def _listens(address: str) -> bool:
    host, port = _split(address)
    if not port.isdigit():
        return False
    try:
        # The mapped form needs IPv6, which this machine may not have.
        listener = "127.0.0.1" if host == LOOPBACK else host
        socket.create_connection((listener, int(port)), timeout=2.0).close()
    except OSError:
        return False
    return True


def _split(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def connected_address() -> str | None:
    """The address of the Ray this process is connected to. Does not import Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    address: str = ray.get_runtime_context().gcs_address
    return address


def _same_address(wanted: str, known: str) -> bool:
    """Whether both mean one Ray: equal, or "auto", or the same port by a local name."""
    if wanted in (known, "auto"):
        return True
    host, port = _split(wanted)
    return host in _LOCAL_HOSTS and port == _split(known)[1]


@contextlib.contextmanager
def session(
    target: RayTarget,
    timeout_s: float | None = None,
    *,
    why_unhealthy: Callable[[], str | None] = lambda: None,
) -> Iterator[Any]:
    """Connect this process to `target` and yield the `ray` module.

    Disconnects at the end only if it connected, and once no other thread is in a session of its own.

    Args: `timeout_s`: how long Ray may take to answer; None: Ray's own patience, which may be endless.
    `why_unhealthy`: as for `wait_for_answer`; only asked within `timeout_s`.
    Raises: Unavailable when Ray does not answer, AnotherRay when it has another version, Rejected when this process is
    connected to another Ray or runs with another authentication mode.
    """
    global _own_sessions
    # Ray's own connect and disconnect bear no other thread beside them.
    with _connecting:
        current = connected_address()
        if current is None:
            ray = attach(target, timeout_s, why_unhealthy=why_unhealthy)
            is_own = True
        elif _same_address(target.address, current):
            ray = sys.modules["ray"]
            is_own = _own_sessions > 0
        else:
            raise Rejected(
                f"this process is connected to the Ray at {current}, the cluster runs in the one at {target.address}: "
                "call ray.shutdown() first or work from another process",
                field="address",
                limit=target.address,
            )
        _own_sessions += is_own

    try:
        yield ray
    finally:
        if is_own:
            with _connecting:
                _own_sessions -= 1
                if not _own_sessions:
                    ray.shutdown()


def attach(
    target: RayTarget,
    timeout_s: float | None = None,
    *,
    why_unhealthy: Callable[[], str | None] = lambda: None,
) -> Any:
    """Connect this process, which is not connected to a Ray, until it calls `ray.shutdown()`.

    Returns: the `ray` module. Args and raises: as `session`.
    """
    if target.owned is not None:
        ray_release.check_same(target.owned.version, target.address)
        _adopt_authentication(target.owned)

    # Ray itself tries for minutes, and reports that on standard error.
    if ":" in target.address and not _listens(target.address):
        raise Unavailable(
            f"Ray at {target.address} does not answer: nothing listens there. Is it running, and is "
            "the address host:port of its GCS (6379 by default)?",
            address=target.address,
        )

    if timeout_s is not None:
        fault = wait_for_answer(
            target, timeout_s=timeout_s, clock=Clock(), why_unhealthy=why_unhealthy
        )
        if fault is not None:
            raise _no_answer(target.address, fault)

    ray_release.reload_authentication()
    try:
        return connect_driver(target.address)
    except CONNECT_ERRORS as error:
        raise _no_answer(target.address, str(error)) from error


def connect_driver(address: str) -> Any:
    """Connect this process as a driver, without Ray's own logging. Returns: the `ray` module.

    Raises: one of CONNECT_ERRORS.
    """
    import ray

    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )
    return ray


def wait_for_answer(
    target: RayTarget,
    *,
    timeout_s: float,
    clock: Clock,
    why_unhealthy: Callable[[], str | None] = lambda: None,
) -> str | None:
    """Wait until the Ray accepts a driver, which a separate process tries (ray_probe.py).

    Returns: None when it did, else why not: the answer of `why_unhealthy`, which is polled, or Ray's own message.
    Raises: Unavailable when Ray is silent for longer than `timeout_s`, AnotherRay for the versions of the two sides.
    """
    if target.owned is not None:
        ray_release.check_same(target.owned.version, target.address)
        _adopt_authentication(target.owned)
    deadline_ms = clock.monotonic_ms() + int(timeout_s * 1000)

    with tempfile.TemporaryFile() as printed:
        probe = subprocess.Popen(
            [sys.executable, "-m", "raymq.cluster.deploy.ray_probe", target.address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=printed,
            env=importable(dict(os.environ)),
        )

        try:
            while (code := probe.poll()) is None:
                fault = why_unhealthy()
                if fault is not None:
                    return fault
                if clock.monotonic_ms() > deadline_ms:
                    message = (
                        f"Ray at {target.address} does not answer within {round(timeout_s, 1):g} s, although its port "
                        "is open: its GCS or the raylet of this machine hangs or starts. End that Ray, or try again"
                    )
                    raise Unavailable(message, address=target.address)
                clock.sleep_ms(50)
        finally:
            probe.kill()
            probe.wait()

        if code == 0:
            return None
        printed.seek(0)
        lines = printed.read().decode("utf-8", "replace").strip().splitlines()

    why = lines[-1] if lines else f"a driver ended with {code}"
    refusal = ray_release.mismatch(why, target.address)
    if refusal is not None:
        raise refusal
    return why_unhealthy() or why


def importable(environment: dict[str, str]) -> dict[str, str]:
    """The environment with which another Python finds the same `raymq`, even one in a source tree."""
    import raymq

    root = os.path.dirname(os.path.dirname(os.path.abspath(raymq.__file__)))
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{inherited}" if inherited else root
    return environment


def _no_answer(address: str, why: str) -> RayMQError:
    return ray_release.mismatch(why, address) or Unavailable(
        f"Ray at {address} does not answer: {why or 'it gives no reason'}. Is it running, and "
        f"{ray_release.access_question(ray_release.installed())}",
        address=address,
    )


def leave(owned: OwnedRay) -> None:
    """Disconnect this process from a Ray that is about to end, if it is connected to it.

    Otherwise this process would wait a minute for that Ray at its own end, and longer in a call.
    """
    current = connected_address()
    if current is not None and _same_address(owned.address, current):
        sys.modules["ray"].shutdown()


def let_join(owned: OwnedRay) -> None:
    """Make `ray.init(owned.address)` work in this process, which knows neither the mode nor the token of that Ray.

    Does nothing in a process that is connected to a Ray, has another version of it, or whose environment names another
    Ray or mode.
    """
    named = os.environ.get("RAY_ADDRESS")
    if connected_address() is not None or (named and not _same_address(named, owned.address)):
        return
    with contextlib.suppress(Rejected):
        ray_release.check_same(owned.version, owned.address)
        _adopt_authentication(owned)
        if "ray" in sys.modules:
            ray_release.reload_authentication()


def _adopt_authentication(owned: OwnedRay) -> None:
    """Set this process's Ray authentication to that of the owned Ray, and leave it set.

    `ray.init` with an explicit address never turns token mode on by itself. It stays set, as Ray
    itself leaves it after a local start: a later `ray.init(address=cluster.ray_address)` of this
    process needs it too. The setting replaces one adopted from another cluster's Ray, but never one made by the user.

    Raises: Rejected when the environment asks for another mode.
    """
    mode = _chosen("RAY_AUTH_MODE")
    if mode is not None and mode.lower() != owned.auth_mode:
        message = (
            f"the cluster's Ray was started with RAY_AUTH_MODE={owned.auth_mode}, this process has "
            f"RAY_AUTH_MODE={mode}: unset it or set it to {owned.auth_mode}"
        )
        raise Rejected(message, field="RAY_AUTH_MODE", limit=owned.auth_mode)
    if not (_chosen("RAY_AUTH_TOKEN") or _chosen("RAY_AUTH_TOKEN_PATH")):
        _adopt("RAY_AUTH_TOKEN_PATH", owned.auth_token_path)
    _adopt("RAY_AUTH_MODE", owned.auth_mode)


def _chosen(name: str) -> str | None:
    """A variable's value, unless it was adopted from a cluster's Ray."""
    value = os.environ.get(name)
    return None if value is not None and value == _adopted.get(name) else value


def _adopt(name: str, value: str | None) -> None:
    if value:
        os.environ[name] = _adopted[name] = value
    else:
        os.environ.pop(name, None)
        _adopted.pop(name, None)
