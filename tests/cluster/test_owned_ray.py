"""How a Ray is started that `start` owns: its ports, further tries, and how long each may take."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from raymq.cluster.deploy import owned_ray, process_tree
from raymq.cluster.deploy.owned_ray import free_ports
from raymq.cluster.deploy.ray_host import OwnedRay
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files
from tests.support.clock import ManualClock

OWNED = OwnedRay(
    address="127.0.0.1:1",
    pid=os.getpid(),
    start_time=1,
    boot_id=1,
    mark="mark",
    temp_dir="/nowhere",
    auth_mode="token",
    auth_token_path=None,
)


class Trying:
    """`start_owned`, whose tries take the given seconds, and fail until none is left."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seconds: list[float], *, fails: int
    ) -> None:
        self.clock, self.lines = ManualClock(), []
        self.tries = 0

        def once(*_: Any, **__: Any) -> OwnedRay:
            self.clock.advance(seconds[min(self.tries, len(seconds) - 1)] * 1000)
            self.tries += 1
            if self.tries <= fails:
                raise Unavailable("the raylet timed out")
            return OWNED

        monkeypatch.setattr(owned_ray, "_start_once", once)

    def start(self, root: Path, timeout_s: float = 180.0) -> OwnedRay:
        return owned_ray.start_owned(
            ClusterPaths(root),
            files=Files(),
            clock=self.clock,
            progress=self.lines.append,
            timeout_s=timeout_s,
        )


def test_a_ray_that_gives_up_on_a_busy_machine_is_started_again_until_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trying = Trying(monkeypatch, [33.0], fails=5)
    assert trying.start(tmp_path, timeout_s=200) == OWNED
    assert trying.tries == 6
    assert sum("starting Ray again: the raylet timed out" in line for line in trying.lines) == 5


def test_a_ray_that_ends_soon_again_and_again_is_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trying = Trying(monkeypatch, [2.0], fails=100)
    with pytest.raises(Unavailable, match="did not start in 8 s: the raylet timed out"):
        trying.start(tmp_path)
    assert trying.tries == 4


def test_the_error_has_the_time_of_all_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trying = Trying(monkeypatch, [60.0, 58.0, 7.0], fails=100)
    with pytest.raises(Unavailable, match="did not start in 125 s"):
        trying.start(tmp_path, timeout_s=120)


@pytest.mark.parametrize(("share", "extra_s"), [(0.0, 0), (0.5, 60)])
def test_a_ray_gets_more_time_while_its_processes_make_progress(
    monkeypatch: pytest.MonkeyPatch, share: float, extra_s: int
) -> None:
    clock = ManualClock()
    deadline_ms = clock.monotonic_ms() + 30_000
    monkeypatch.setattr(
        process_tree, "active_ms_of", lambda family, files: {1: clock.monotonic_ms() * share}
    )
    patience = owned_ray._Patience(OWNED, deadline_ms, files=Files(), clock=clock)
    while not patience.is_over():
        clock.advance(100)
    waited_ms = clock.monotonic_ms() - deadline_ms
    assert extra_s * 1000 <= waited_ms <= extra_s * 1000 + 2 * owned_ray._PROGRESS_MS


def test_ports_of_a_ray_are_not_those_that_the_kernel_gives_to_connections() -> None:
    first = int(Path(owned_ray._CONNECTION_PORTS).read_text().split()[0])
    ports = free_ports(8)
    assert len(set(ports)) == 8
    if first > owned_ray._PORT_MIN + 1_000:
        assert all(owned_ray._PORT_MIN <= port < first for port in ports)


def test_ports_are_found_although_connections_may_have_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(owned_ray, "_CONNECTION_PORTS", str(tmp_path / "range"))
    assert len(set(free_ports(8))) == 8


def test_a_port_that_another_process_has_taken_ends_the_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(process_tree, "members", lambda family, files: [])
        with pytest.raises(Unavailable, match=f"taken port {port}"):
            owned_ray._check_client_port(OWNED, port, Files())
        monkeypatch.setattr(process_tree, "members", lambda family, files: [os.getpid()])
        owned_ray._check_client_port(OWNED, port, Files())
    # Ray may have been asked not to serve it.
    monkeypatch.setattr(process_tree, "members", lambda family, files: [])
    owned_ray._check_client_port(OWNED, port, Files())


def ray_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, str]:
    """The environment of a Ray that is owned, with only these variables of Ray."""
    for name in [name for name in os.environ if name.startswith("RAY")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return owned_ray.owned_environment("mark", ClusterPaths(tmp_path), Files())


def test_the_token_of_ray_is_made_in_the_home_where_ray_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = ray_token(tmp_path, monkeypatch, HOME=str(tmp_path / "home"))
    assert (tmp_path / "home" / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    assert "RAY_AUTH_TOKEN_PATH" not in environment


def test_a_home_that_only_passwd_knows_is_named_to_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda name: str(name).replace("~", str(tmp_path)))
    environment = ray_token(tmp_path, monkeypatch)
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / ".ray" / "auth_token")
    assert (tmp_path / ".ray" / "auth_token").exists()


def test_the_token_of_ray_is_made_in_the_data_directory_for_a_user_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = ray_token(tmp_path, monkeypatch, HOME="/proc/nonexistent")
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "ray-token")
    made = (tmp_path / "ray-token").read_bytes()
    # the next start keeps it
    ray_token(tmp_path, monkeypatch, HOME="/proc/nonexistent")
    assert (tmp_path / "ray-token").read_bytes() == made


def test_a_home_that_may_not_be_written_is_none_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forbidden(Files):
        def make_dirs(self, path: Any, mode: int = 0o777) -> None:
            if Path(path).is_relative_to(tmp_path / "home"):
                raise Unavailable(f"{path} cannot be written: Permission denied")
            super().make_dirs(path, mode)

    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    environment = owned_ray.owned_environment("mark", ClusterPaths(tmp_path), Forbidden())
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "ray-token")


def test_a_named_token_that_cannot_be_made_is_refused_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Rejected, match="RAY_AUTH_TOKEN_PATH names /proc/none/token, which can be"):
        ray_token(tmp_path, monkeypatch, RAY_AUTH_TOKEN_PATH="/proc/none/token")
