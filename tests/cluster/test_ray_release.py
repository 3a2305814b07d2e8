"""The releases of Ray: which are tested, what older ones lack, and drivers of another version."""

from __future__ import annotations

import importlib
import re
import tokenize
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from ray.data.block import BlockMetadata

from raymq.cluster import start as lifecycle
from raymq.cluster.deploy import owned_ray, ray_client, ray_host, ray_release
from raymq.cluster.deploy.ray_host import OwnedRay, RayTarget
from raymq.cluster.deploy.ray_release import NEWEST, OLDEST, Release
from raymq.cluster.deploy.start_checks import check_own_ray
from raymq.cluster.record.cluster_record import StartOptions, new_record
from raymq.cluster.stop import stop
from raymq.store.base.clock import Clock
from raymq.store.base.errors import AnotherRay, Rejected
from tests.support.fake_ray import FakeRay, install

ROOT = Path(__file__).resolve().parent.parent.parent
OWNED = OwnedRay(
    address="10.0.0.1:6379",
    pid=1,
    start_time=1,
    boot_id=1,
    mark="m",
    temp_dir="/x",
    auth_mode="disabled",
    auth_token_path=None,
)
#: as Ray writes it, on several lines
REFUSED = (
    "Version mismatch: The cluster was started with:\n    Ray: 2.49.2\n    Python: 3.10.13\n"
    "This process on node 127.0.0.1 was started with:\n    Ray: 2.60.0\n    Python: 3.13.0\n"
)
#: what asks which Ray there is, or uses what Ray keeps to itself
ASKS = re.compile(
    r"\bray\.__version__|version(_of)?\(.ray.\)|_raylet|\bray\._private|_conn_str|hasattr\(ray\b"
)


@pytest.mark.parametrize(
    ("version", "warns"),
    [
        (f"{OLDEST}.0", False),
        (f"{NEWEST}.9", False),
        (f"{NEWEST.major}.{NEWEST.minor + 1}.0", True),
        ("3.0.0.dev0", True),
        ("dev", True),
        (None, True),
    ],
)
def test_a_newer_ray_than_the_newest_tested_is_warned_of(version: str | None, warns: bool) -> None:
    warning = ray_release.untested(version)
    assert (warning is not None) is warns
    if warning is not None and version is not None:
        assert version in warning
        assert str(NEWEST) in warning


def test_a_ray_that_is_too_old_is_refused() -> None:
    with pytest.raises(Rejected, match=r"Ray 2\.48\.0 is too old: install Ray 2\.49 or newer"):
        ray_release.untested("2.48.0")


@pytest.mark.parametrize(
    ("version", "has_token"),
    [("2.49.2", False), ("2.51.2", False), ("2.52.0", True), ("2.60.0", True), (None, True)],
)
def test_an_own_ray_has_a_token_if_its_release_can(version: str | None, has_token: bool) -> None:
    assert ray_release.has_token(version) is has_token
    mode = ray_release.own_auth_mode({}, version)
    assert mode == ("token" if has_token else "disabled")
    assert ray_release.own_auth_mode({"RAY_AUTH_MODE": "Disabled"}, version) == "disabled"


def test_a_token_that_ray_cannot_demand_is_refused() -> None:
    with pytest.raises(Rejected, match=r"RAY_AUTH_MODE=token needs Ray 2\.52, and Ray 2\.49\.2"):
        ray_release.own_auth_mode({"RAY_AUTH_MODE": "token"}, "2.49.2")


def test_a_ray_without_a_token_reads_no_token_again(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(ray_release, "installed", lambda: "2.51.2")
    monkeypatch.setattr(importlib, "import_module", imported.append)
    ray_release.reload_authentication()
    assert imported == []


def test_a_ray_without_a_token_stays_on_this_machine_unless_that_is_accepted() -> None:
    record = new_record(StartOptions(host="0.0.0.0", insecure=False), ephemeral=False)
    (warning,) = check_own_ray(record, "2.51.2", loopback=True)
    assert "Ray 2.51.2 has no token" in warning
    with pytest.raises(Rejected, match="insecure=True"):
        check_own_ray(record, "2.51.2", loopback=False)
    accepted = new_record(StartOptions(host="0.0.0.0", insecure=True), ephemeral=False)
    assert check_own_ray(accepted, "2.51.2", loopback=False) == [warning]
    assert check_own_ray(record, "2.52.0", loopback=False) == []


def test_a_start_of_a_ray_without_a_token_warns_and_with_tls_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(FakeRay(), monkeypatch, tmp_path / "home")
    monkeypatch.setattr(ray_release, "installed", lambda: "2.51.2")

    def begin(data_dir: Path) -> list[str]:
        lines: list[str] = []
        monkeypatch.setattr(owned_ray, "start_owned", refuse)
        with pytest.raises(RuntimeError, match="Version mismatch"):
            lifecycle.start(data_dir, ephemeral=True, progress=lines.append)
        return lines

    (warning,) = begin(tmp_path / "data")
    assert warning.startswith("WARNING: Ray 2.51.2 has no token")
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with pytest.raises(Rejected, match="insecure=True") as refusal:
        begin(tmp_path / "exposed")
    assert refusal.value.field == "host"
    assert not (tmp_path / "exposed" / "cluster.json").exists()


def test_a_start_warns_of_an_untested_ray_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(FakeRay({ray_host.HOST_LABEL: "here"}), monkeypatch, tmp_path / "home")
    monkeypatch.setattr(ray_release, "installed", lambda: "2.99.1")
    lines: list[str] = []
    lifecycle.start(tmp_path / "data", address="auto", ephemeral=True, progress=lines.append)
    (warning,) = [line for line in lines if "2.99.1" in line]
    assert str(NEWEST) in warning


@pytest.mark.parametrize("text", [REFUSED, " ".join(REFUSED.split())], ids=["lines", "one line"])
def test_a_driver_of_another_version_learns_both_and_what_to_do(text: str) -> None:
    refusal = ray_release.mismatch(text, "10.0.0.1:6379")
    assert refusal is not None
    for word in ("2.49.2", "3.10.13", "2.60.0", "3.13.0", "raymq://host:port", "raymq stop"):
        assert word in refusal.message
    assert ray_release.mismatch("Failed to connect to GCS", "10.0.0.1:6379") is None


def refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError(REFUSED)


def test_a_driver_that_knows_no_token_learns_that_ray_may_demand_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "RAY_AUTH_TOKEN_PATH" in ray_release.access_question("2.52.0")
    monkeypatch.setattr(ray_release, "installed", lambda: "2.49.2")
    why = ray_host._no_answer("10.0.0.1:6379", "").message
    assert "is it Ray 2.49.2, as this process has?" in why
    assert "From Ray 2.52 on it may demand a token" in why


def test_ray_client_of_another_version_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def init(address: str, **_: Any) -> None:
        tries.append(address)
        refuse()

    fake: Any = SimpleNamespace(init=init, exceptions=SimpleNamespace(RayError=OSError))
    with pytest.raises(AnotherRay, match=r"is Ray 2\.49\.2"):
        ray_client._init(fake, "ray://h:10001", Clock())
    assert tries == ["ray://h:10001"]


def test_a_session_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_host, "_listens", lambda address: True)
    monkeypatch.setattr(ray_host, "connected_address", lambda: None)
    monkeypatch.setattr(ray_host, "connect_driver", refuse)
    monkeypatch.setattr(ray_release, "reload_authentication", lambda: None)
    target = RayTarget(address="10.0.0.1:6379")
    with pytest.raises(AnotherRay), ray_host.session(target):
        pass


@pytest.mark.parametrize("waits", [False, True], ids=["connects", "waits"])
def test_an_own_ray_of_another_version_is_not_even_called(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(OWNED, version="2.49.2")
    monkeypatch.setattr(ray_host, "connected_address", lambda: None)
    monkeypatch.setattr(ray_release, "installed", lambda: "2.60.0")
    target = RayTarget(address=own.address, owned=own)
    call = (
        partial(ray_host.wait_for_answer, timeout_s=1, clock=Clock()) if waits else ray_host.attach
    )
    with pytest.raises(AnotherRay, match=r"is Ray 2\.49\.2, this process has Ray 2\.60\.0"):
        call(target)


def test_a_stop_with_another_ray_still_ends_the_own_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(FakeRay({ray_host.HOST_LABEL: "here"}), monkeypatch, tmp_path / "home")
    lifecycle.start(tmp_path / "data", address="auto", ephemeral=True)
    target = RayTarget(address=OWNED.address, owned=OWNED)
    ended: list[str] = []
    monkeypatch.setattr(ray_host, "load_target", lambda paths, files: target)
    monkeypatch.setattr(ray_host, "running_target", lambda paths, files: target)
    monkeypatch.setattr(ray_host, "session", refuse_session)
    monkeypatch.setattr(owned_ray, "why_unhealthy", lambda owned, files: None)
    monkeypatch.setattr(
        owned_ray, "stop_owned", lambda paths, files, clock: ended.append(str(paths.root))
    )
    report = stop(tmp_path / "data")
    assert ended == [str(tmp_path / "data")]
    assert not report.clean
    assert "2.49.2" in report.actors["ray"]


def refuse_session(target: RayTarget, *_: Any, **__: Any) -> None:
    refusal = ray_release.mismatch(REFUSED, target.address)
    assert refusal is not None
    raise refusal


def test_a_read_task_has_a_limit_only_if_ray_data_asks_for_one() -> None:
    metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
    schema = pa.schema([("value", pa.binary())])
    task = ray_release.read_task(list, metadata, schema=schema, row_limit=None)
    assert task.schema == schema


def test_releases_compare_by_number() -> None:
    assert ray_release.release_of("2.9.3") == Release(2, 9) < OLDEST < NEWEST
    assert f"{OLDEST}" == "2.49"


def test_only_one_module_asks_which_ray_it_is() -> None:
    found = []
    for part in ("store", "replication", "actors", "client", "cluster", "spark"):
        for path in sorted((ROOT / part).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name == "cluster/deploy/ray_release.py":
                continue
            with tokenize.open(path) as source:
                text = source.read()
            found += [f"{name}: {each.group()}" for each in ASKS.finditer(text)]
    # The doctor hands the version to that module.
    allowed = {'cluster/cli/doctor.py: version_of("ray")'}
    assert [each for each in found if each not in allowed] == []
