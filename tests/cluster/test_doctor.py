"""`raymq doctor`: every verdict, on machines that are only described."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from raymq.cluster import doctor, paths
from raymq.cluster.doctor import GIB, MIB, Check
from raymq.store.files import Files


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (doctor.check_python((3, 9, 18)), "fail"),
        (doctor.check_python((3, 10, 0)), "ok"),
        (doctor.check_machine("Linux", "x86_64"), "ok"),
        (doctor.check_machine("Linux", "riscv64"), "warn"),
        (doctor.check_machine("Darwin", "arm64"), "fail"),
        (doctor.check_package("ray", None, "2.60"), "fail"),
        (doctor.check_package("ray", "2.60.1", "2.60"), "ok"),
        (doctor.check_package("ray", "2.6.0", "2.60"), "warn"),
        (doctor.check_package("pyarrow", "26.0.1", ""), "ok"),
        (doctor.check_crc(True, True), "ok"),
        (doctor.check_crc(True, False), "ok"),
        (doctor.check_crc(False, True), "warn"),
        (doctor.check_java(None, ""), "warn"),
        (doctor.check_java("/usr/bin/java", 'openjdk version "17.0.15"'), "ok"),
        (doctor.check_java("/usr/bin/java", 'openjdk version "21.0.2"'), "warn"),
        (doctor.check_java("/usr/bin/java", ""), "warn"),
        (doctor.check_open_files((512, 4096)), "fail"),
        (doctor.check_open_files((1024, 4096)), "warn"),
        (doctor.check_open_files((65_536, 65_536)), "ok"),
        (doctor.check_open_files((resource.RLIM_INFINITY, resource.RLIM_INFINITY)), "ok"),
        (doctor.check_shared_memory(None, None), "fail"),
        (doctor.check_shared_memory(8 * GIB, 4096), "fail"),
        (doctor.check_shared_memory(64 * MIB, 64 * MIB), "warn"),
        (doctor.check_shared_memory(8 * GIB, 1 * GIB), "ok"),
        (doctor.check_auth({}), "ok"),
        (doctor.check_auth({"RAY_AUTH_MODE": "token"}), "ok"),
        (doctor.check_auth({"RAY_AUTH_MODE": "disabled"}), "warn"),
        (doctor.check_auth({"RAY_AUTH_MODE": "maybe"}), "fail"),
        (doctor.check_disk("/data", None), "fail"),
        (doctor.check_disk("/data", 1 * GIB), "fail"),
        (doctor.check_disk("/data", 10 * GIB), "warn"),
        (doctor.check_disk("/data", 100 * GIB), "ok"),
    ],
)
def test_each_fact_has_its_verdict_and_a_bad_one_says_what_to_do(
    check: Check, verdict: str
) -> None:
    assert check.verdict == verdict
    assert check.found
    assert bool(check.advice) == (verdict != "ok")


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
    assert doctor.java_major(text) == major


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
    ("kind", "verdict"), [("ext4", "ok"), ("tmpfs", "warn"), ("nfs4", "warn"), ("overlay", "warn")]
)
def test_the_data_directorys_file_system_is_judged(
    kind: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_VOLATILE_ROOT", "/nowhere")
    files = MountedFiles(f"/dev/x / {kind} rw 0 0\n")
    first = doctor.check_data_dir(str(tmp_path / "data"), files)[0]
    assert (first.name, first.verdict) == ("data dir", verdict)


def test_a_directory_that_others_may_list_is_pointed_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    checks = {check.name: check for check in doctor.check_data_dir(str(tmp_path), Files())}
    assert checks["writable"].verdict == "warn"
    assert "chmod 700" in checks["writable"].advice


def test_a_damaged_cluster_record_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{")
    checks = {check.name: check for check in doctor.check_data_dir(str(tmp_path), Files())}
    assert checks["cluster"].verdict == "fail"


def test_this_machine_can_be_examined(tmp_path: Path) -> None:
    names = [check.name for check in doctor.examine(str(tmp_path))]
    for expected in ("python", "ray", "java", "disk room", "/dev/shm", "ray token", "data dir"):
        assert expected in names
    assert len(names) == len(set(names))
