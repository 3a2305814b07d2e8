"""`raymq doctor`: every verdict, on machines that are only described."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.protocol import tls
from raymq.actors.shared import memory_order
from raymq.cluster import start as lifecycle
from raymq.cluster.cli import doctor
from raymq.cluster.cli.doctor import GIB, MIB, Check
from raymq.cluster.record import paths
from raymq.cluster.record.cluster_record import StartOptions, new_record, save_record
from raymq.cluster.record.disk_room import check_room, disks_of
from raymq.cluster.record.paths import ClusterPaths
from raymq.spark import java
from raymq.store.base.errors import (
    RayMQError,
    Rejected,
    StorageFull,
    Unavailable,
    UntrustedReplica,
    UntrustedServer,
)
from raymq.store.base.files import Files
from tests.support.certificates import Certificates, make_certificates
from tests.support.loop_disk import LoopDisk


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (doctor.check_python((3, 9, 18)), "fail"),
        (doctor.check_python((3, 10, 0)), "ok"),
        (doctor.check_machine("Linux", "x86_64"), "ok"),
        (doctor.check_machine("Linux", "riscv64"), "fail"),
        (doctor.check_machine("Darwin", "arm64"), "fail"),
        (doctor.check_ray(None), "fail"),
        (doctor.check_ray("2.6.0"), "fail"),
        (doctor.check_ray("2.49.0"), "ok"),
        (doctor.check_ray("2.60.1"), "ok"),
        (doctor.check_ray("2.61.0"), "warn"),
        (doctor.check_ray("3.0.0.dev0"), "warn"),
        (doctor.check_package("pyarrow", None, 19), "fail"),
        (doctor.check_package("pyarrow", "18.1.0", 19), "fail"),
        (doctor.check_package("pyarrow", "19.0.0", 19), "ok"),
        (doctor.check_crc(True, True), "ok"),
        (doctor.check_crc(True, False), "ok"),
        (doctor.check_crc(False, True), "warn"),
        (doctor.check_rocketmq("orjson 3.9.15 or newer"), "fail"),
        (doctor.check_rocketmq(None), "ok"),
        (doctor.check_java(None, 0, None), "warn"),
        (doctor.check_java("/usr/bin/java", 17, None), "ok"),
        (doctor.check_java("/usr/bin/java", 17, "/tmp/ray belongs to user 0"), "warn"),
        (doctor.check_java("/usr/bin/java", 21, None), "warn"),
        (doctor.check_java("/usr/bin/java", 0, None), "warn"),
        (doctor.check_open_files((512, 4096)), "warn"),
        (doctor.check_open_files((1024, 4096)), "warn"),
        (doctor.check_open_files((65_536, 65_536)), "ok"),
        (doctor.check_open_files((resource.RLIM_INFINITY, resource.RLIM_INFINITY)), "ok"),
        (doctor.check_shared_memory(None, None), "fail"),
        (doctor.check_shared_memory(8 * GIB, 4096), "warn"),
        (doctor.check_shared_memory(64 * MIB, 64 * MIB), "warn"),
        (doctor.check_shared_memory(8 * GIB, 1 * GIB), "ok"),
        (doctor.check_run_dir(None), "ok"),
        (doctor.check_run_dir("cannot make /tmp/raymq-1"), "fail"),
        (doctor.check_home([Path("/var/tmp/x"), Path("/tmp/x")], {}, Files()), "ok"),
        (doctor.check_auth({}, "2.52.0"), "ok"),
        (doctor.check_auth({"RAY_AUTH_MODE": "token"}, "2.60.0"), "ok"),
        (doctor.check_auth({"RAY_AUTH_MODE": "disabled"}, "2.60.0"), "warn"),
        (doctor.check_auth({"RAY_AUTH_MODE": "maybe"}, "2.60.0"), "fail"),
        (doctor.check_auth({}, "2.51.2"), "warn"),
        (doctor.check_auth({"RAY_AUTH_MODE": "token"}, "2.49.2"), "fail"),
        (doctor.check_proxy({"http_proxy": ""}), "ok"),
        (doctor.check_proxy({"https_proxy": "http://user:secret@proxy:3128"}), "ok"),
        (
            doctor.check_proxy({"grpc_proxy": "http://p:1", "RAY_grpc_enable_http_proxy": "1"}),
            "warn",
        ),
        (doctor.check_disk("/data", None, 0), "fail"),
        (doctor.check_disk("/data", 1 * GIB, 2 * GIB), "fail"),
        (doctor.check_disk("/data", 10 * GIB, GIB), "warn"),
        (doctor.check_disk("/data", 100 * GIB, GIB), "ok"),
    ],
)
def test_each_fact_has_its_verdict_and_a_bad_one_says_what_to_do(
    check: Check, verdict: str
) -> None:
    assert check.verdict == verdict
    assert check.found
    assert bool(check.advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("barriers", "verdict", "words"),
    [
        (6, "warn", "is experimental"),
        (0, "fail", "need membarrier"),
        (-1, "fail", "need membarrier"),
    ],
)
def test_aarch64_is_experimental_where_its_kernel_has_barriers(
    monkeypatch: pytest.MonkeyPatch, barriers: int, verdict: str, words: str
) -> None:
    monkeypatch.setattr(memory_order, "_syscall", lambda: lambda *args: barriers)
    check = doctor.check_machine("Linux", "aarch64")
    assert check.verdict == verdict
    assert words in f"{check.found} {check.advice}"


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ("bash: java: not found", 0),
    ],
)
def test_javas_version_is_read_as_java_prints_it(text: str, major: int) -> None:
    assert java.parse_major(text) == major


class MountedFiles(Files):
    """Real files, under a mount table of the test's choice."""

    def __init__(self, mounts: str) -> None:
        super().__init__()
        self.mounts = mounts

    def read_file(self, path: Path) -> bytes:
        if str(path) == "/proc/self/mounts":
            return self.mounts.encode()
        return super().read_file(path)


@pytest.mark.parametrize(
    ("kind", "verdict"), [("ext4", "ok"), ("tmpfs", "fail"), ("nfs4", "warn"), ("overlay", "warn")]
)
def test_the_data_directorys_file_system_is_judged(
    kind: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_VOLATILE_ROOT", "/nowhere")
    files = MountedFiles(f"/dev/x / {kind} rw 0 0\n")
    first = doctor.examine_data_dir(str(tmp_path / "data"), files)[0]
    assert (first.name, first.verdict) == ("data dir", verdict)


def judged(data_dir: Path, files: Files, **options: Any) -> Check:
    """The doctor's first finding about a directory."""
    return doctor.examine_data_dir(str(data_dir), files, **options)[0]


@pytest.mark.parametrize("case", ["volatile", "foreign", "file", "damaged", "newer", "token"])
def test_a_directory_is_refused_in_the_words_of_start(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_VOLATILE_ROOT", "/nowhere")
    monkeypatch.setattr(lifecycle, "Files", lambda: files)
    files = MountedFiles(f"/dev/x / {'tmpfs' if case == 'volatile' else 'ext4'} rw 0 0\n")
    data_dir = tmp_path / "data"
    if case == "file":
        data_dir.touch()
    elif case != "volatile":
        data_dir.mkdir()
    if case == "foreign":
        (data_dir / "thesis.tex").touch()
    elif case == "damaged":
        (data_dir / "cluster.json").write_text("{")
    elif case == "newer":
        (data_dir / "cluster.json").write_text('{"format": 2}')
    elif case == "token":
        (data_dir / "token").write_text("short")

    before = sorted(data_dir.iterdir()) if data_dir.is_dir() else None
    found = judged(data_dir, files)
    assert found.verdict == "fail"
    assert found.advice
    assert (sorted(data_dir.iterdir()) if data_dir.is_dir() else None) == before

    with pytest.raises(RayMQError) as refused:
        lifecycle.start(data_dir)
    assert found.found == str(refused.value)


def test_what_start_accepts_is_accepted_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_VOLATILE_ROOT", "/nowhere")
    disk, memory = (MountedFiles(f"/dev/x / {kind} rw 0 0\n") for kind in ("ext4", "tmpfs"))
    assert judged(tmp_path / "new", disk).verdict == "ok"
    assert not (tmp_path / "new").exists()
    (tmp_path / "open").mkdir(mode=0o755)
    found = judged(tmp_path / "open", disk)
    assert (found.verdict, "makes 0700" in found.found) == ("ok", True)
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o755
    assert judged(tmp_path / "new", memory, ephemeral=True).verdict == "warn"


def test_a_directory_that_cannot_be_written_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_VOLATILE_ROOT", "/nowhere")
    monkeypatch.setattr("os.access", lambda *args: False)
    disk = MountedFiles("/dev/x / ext4 rw 0 0\n")
    for data_dir in (tmp_path, tmp_path / "new"):
        assert f"{tmp_path} cannot be written by this user" in judged(data_dir, disk).found


class SmallDisk(MountedFiles):
    """A disk with so many free bytes."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__("/dev/x / ext4 rw 0 0\n")
        self._free_bytes = free_bytes

    def free_bytes(self, path: Any) -> int:
        return self._free_bytes


def test_a_disk_without_room_for_the_first_files_is_refused_as_start_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_VOLATILE_ROOT", "/nowhere")
    found = judged(tmp_path / "data", SmallDisk(GIB - 1))
    assert found.verdict == "fail"
    assert "has 1,023 MiB free, and the first files of 1 replica(s) take 1,024 MiB" in found.found
    assert "--segment-size-bytes" in found.found
    assert judged(tmp_path / "data", SmallDisk(GIB)).verdict == "ok"


def test_a_made_cluster_starts_on_a_full_disk_and_is_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_VOLATILE_ROOT", "/nowhere")
    wanted = StartOptions(shards=2, replicas=2, segment_size_bytes=64 * MIB)
    save_record(ClusterPaths(tmp_path), new_record(wanted), Files())
    checks = doctor.examine_data_dir(str(tmp_path), SmallDisk(MIB))
    assert [check.verdict for check in checks if check.name == "disk space"] == ["warn"]


@pytest.mark.loop_disk
def test_each_disk_of_the_replicas_is_judged_for_itself(tmp_path: Path) -> None:
    wanted = StartOptions(replicas=2, segment_size_bytes=4 * MIB)
    made = ClusterPaths(tmp_path)
    for replica in (0, 1):
        made.replica(0, replica).mkdir(parents=True)
    with LoopDisk(tmp_path / "image", made.replica(0, 1), mib=16):
        disks = disks_of(made, new_record(wanted), Files())
        assert [disk.place for disk in disks] == [made.replica(0, 0), made.replica(0, 1)]
        check_room(made, new_record(wanted), Files())
        larger = new_record(StartOptions(replicas=2, segment_size_bytes=64 * MIB))
        check_room(made, larger, Files(), before=larger)
        one = new_record(StartOptions(segment_size_bytes=64 * MIB))
        with pytest.raises(StorageFull, match="of 1 replica"):
            check_room(made, larger, Files(), before=one)
        with pytest.raises(StorageFull, match=r"replica-1 has \d+ MiB free, .* take 64 MiB"):
            check_room(made, larger, Files())


LEASES = {"roles": {"group_commit": {"granted": True}}}


@pytest.mark.parametrize(
    ("facts", "verdict", "words"),
    [
        (
            {"state": "RUNNING", "writable": True, "error": None, "supervisor": LEASES},
            "ok",
            "RUNNING",
        ),
        ({"state": "READ_ONLY", "error": "fdatasync: EIO"}, "fail", "READ_ONLY: fdatasync: EIO"),
        ({"state": "DOWN", "error": "no answer"}, "fail", "DOWN: no answer"),
        (
            {"state": "RUNNING", "writable": False, "error": "append: [Errno 24] Too many open"},
            "warn",
            "Too many open",
        ),
        (
            {"state": "RUNNING", "error": "replication: the follower stopped writing: EIO"},
            "warn",
            "the follower stopped writing",
        ),
        (
            {"state": "RUNNING", "supervisor": {"roles": {"group_commit": {"granted": False}}}},
            "warn",
            "without group_commit",
        ),
        (
            {"state": "RUNNING", "last_end": {"time_ms": 0, "reason": "a failed append"}},
            "warn",
            "ended itself 2 minutes ago: a failed append",
        ),
    ],
)
def test_a_shard_that_is_not_well_is_judged_with_its_cause(
    facts: Mapping[str, Any], verdict: str, words: str
) -> None:
    check = doctor.check_shard({"shard": 3, **facts}, 120_000)
    assert (check.name, check.verdict) == ("shard 3", verdict)
    assert words in check.found
    assert bool(check.advice) == (verdict != "ok")


def replica_row(**facts: Any) -> dict[str, Any]:
    return {
        "replica": 0,
        "state": "RUNNING",
        "is_complete": True,
        "unclean_recoveries": [],
        "error": None,
        **facts,
    }


@pytest.mark.parametrize(
    ("facts", "verdict", "words"),
    [
        ({}, "ok", "all 2 run and are complete"),
        ({"state": "DOWN", "error": "refused"}, "warn", "replica 1 is DOWN: refused"),
        ({"state": "READ_ONLY", "error": "poisoned"}, "warn", "replica 1 is READ_ONLY: poisoned"),
        ({"is_complete": False}, "warn", "replica 1 is not complete"),
        ({"unclean_recoveries": [{"at_ms": 1}]}, "warn", "DATA-LOSS-POSSIBLE"),
    ],
)
def test_replicas_that_are_not_well_are_named(
    facts: Mapping[str, Any], verdict: str, words: str
) -> None:
    check = doctor.check_replicas(2, [replica_row(), replica_row(replica=1, **facts)])
    assert (check.name, check.verdict) == ("shard 2 replicas", verdict)
    assert words in check.found
    assert bool(check.advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UntrustedServer("it is expired"), "certificate is refused"),
        (UntrustedReplica("it is expired"), "certificate is refused"),
        (Rejected("wrong token", field="token"), "refuses this token"),
        (Unavailable("nothing listens there"), "does not run"),
    ],
)
def test_a_cluster_whose_certificate_is_refused_is_not_one_that_does_not_run(
    error: RayMQError, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, record = ClusterPaths(tmp_path), new_record(StartOptions())

    def connect(target: str) -> None:
        raise error

    monkeypatch.setattr(doctor, "connect", connect)
    (check,) = doctor._check_cluster(made, record, Files())
    assert words in check.found
    assert (check.verdict == "ok") == (words == "does not run")
    assert ("security.md" in check.advice) == ("certificate" in words)


def test_a_shard_that_names_a_refused_certificate_says_where_to_mend_it() -> None:
    cause = "certificates: replica 2 cannot be called: its certificate is expired"
    facts = {"shard": 1, "state": "RUNNING", "error": cause, "failures": {"certificates": "..."}}
    check = doctor.check_shard(facts, 0)
    assert (check.verdict, check.found) == ("warn", f"RUNNING, but {cause}")
    assert "security.md" in check.advice


def test_this_machine_can_be_examined(tmp_path: Path) -> None:
    names = [check.name for check in doctor.examine(str(tmp_path), ephemeral=True)]
    for expected in ("python", "ray", "java", "disk space", "/dev/shm", "ray token", "data dir"):
        assert expected in names
    assert len(names) == len(set(names))


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("authority"))


def tls_check(environment: Mapping[str, str]) -> Check:
    return doctor.check_tls(environment, Files(), time.time())


def test_a_certificate_that_clients_accept_is_shown_with_its_names_and_days(
    certificates: Certificates,
) -> None:
    check = tls_check(certificates.environment())
    assert check.verdict == "ok"
    assert "IP Address:127.0.0.1, DNS:localhost, 89 days left" in check.found
    later = doctor.check_tls(certificates.environment(), Files(), time.time() + 80 * 86_400)
    assert (later.verdict, "renew" in later.advice) == ("warn", True)
    assert tls_check({}).verdict == "ok"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (tls.USE_TLS, "maybe", "use 1"),
        (tls.SERVER_CERT, "", "RAY_TLS_SERVER_CERT, which is not set"),
        (tls.SERVER_KEY, "/nowhere/key.pem", "RAY_TLS_SERVER_KEY=/nowhere/key.pem cannot be read"),
        (tls.CA_CERT, "", "RAY_TLS_CA_CERT is not set"),
        (tls.CA_CERT, "/nowhere/ca.pem", "RAY_TLS_CA_CERT=/nowhere/ca.pem cannot be read"),
    ],
)
def test_a_tls_variable_that_is_missing_or_names_nothing_is_a_failure(
    certificates: Certificates, name: str, value: str, words: str
) -> None:
    check = tls_check({**certificates.environment(), name: value})
    assert check.verdict == "fail"
    assert words in check.found
    assert "start" in check.advice


def test_a_certificate_that_is_expired_or_of_another_authority_is_a_failure(
    certificates: Certificates, tmp_path: Path
) -> None:
    past = datetime.now(timezone.utc) - timedelta(days=3)
    expired = make_certificates(tmp_path / "expired", end=past)
    check = tls_check(expired.environment())
    assert check.verdict == "fail"
    assert "has expired" in check.found
    check = tls_check({**expired.environment(), tls.CA_CERT: str(certificates.ca)})
    assert check.verdict == "fail"
    assert "refused by clients that trust" in check.found
    assert tls.SERVER_CERT in check.advice


def test_a_home_that_cannot_be_written_is_named_with_what_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    for homes in ([home], []):
        found = doctor.check_home(homes, {}, Files())
        assert found.verdict == "ok"
        assert f"{paths.run_dir_path()} has the list of clusters" in found.found
    named = doctor.check_home([home], {"RAYMQ_HOME": str(home)}, Files())
    assert named.verdict == "warn"
    assert "RAYMQ_HOME" in named.advice
