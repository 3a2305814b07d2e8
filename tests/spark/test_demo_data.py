"""The demo deletes its own data only, and none with --keep."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raymq.cluster.record.cluster_record import StartOptions, new_record, save_record
from raymq.cluster.record.paths import ClusterPaths, load_or_make_token, prepare_data_dir
from raymq.store.base.files import Files

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "flights.py"


@pytest.fixture(scope="module")
def flights() -> Any:
    spec = importlib.util.spec_from_file_location("raymq_flights_demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _make_cluster(data_dir: Path, name: str) -> None:
    """The directory of a stopped cluster of this name."""
    data_dir.mkdir(mode=0o700, exist_ok=True)
    paths, files = ClusterPaths(data_dir), Files()
    load_or_make_token(paths, files)
    save_record(paths, new_record(StartOptions(name=name)), files)
    (data_dir / "shard-0").mkdir()
    (data_dir / "shard-0" / "messages").write_bytes(b"x" * 4096)


def _run(flights: Any, monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["flights.py", *map(str, words)])
    code: int = flights.main()
    return code


def _content(place: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in [place, *place.rglob("*")]}


@pytest.mark.parametrize("options", [[], ["--clean"], ["--clean", "--keep"]])
@pytest.mark.parametrize("held", ["a_cluster", "a_cluster_where_a_demo_began", "a_token", "files"])
def test_other_data_than_a_demos_is_neither_stopped_nor_deleted(
    flights: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held: str, options: list[str]
) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o700)
    if held == "a_token":
        # A first start of any cluster that was interrupted.
        load_or_make_token(ClusterPaths(data_dir), Files())
    elif held == "files":
        (data_dir / "thesis.txt").write_text("years of work")
    else:
        _make_cluster(data_dir, "orders")
        if held == "a_cluster_where_a_demo_began":
            flights.mark_as_demo(data_dir)
    monkeypatch.setattr(flights.raymq.Cluster, "stop", lambda _: pytest.fail("it was stopped"))
    before = _content(data_dir)
    with pytest.raises(SystemExit, match="holds other data than a demo's"):
        _run(flights, monkeypatch, "--data-dir", data_dir, *options)
    assert _content(data_dir) == before


# /dev/null is the home of some service users. A lone "~" is the answer of a system that knows no home.
@pytest.mark.parametrize("home", ["/proc/nonexistent", "/dev/null", "~"])
def test_without_a_home_the_demos_data_are_in_the_checkout(
    flights: Any, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda _: home)
    assert flights.usual_data_dir() == SCRIPT.parents[1] / "build" / "flights-demo"


def test_without_a_home_that_may_be_looked_into_they_are_there_too(
    flights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert flights.usual_data_dir() == SCRIPT.parents[1] / "build" / "flights-demo"


def test_the_demos_data_are_in_the_home_that_can_be_written(
    flights: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert flights.usual_data_dir() == tmp_path / ".raymq" / "flights-demo"


def test_a_demos_cluster_is_deleted(
    flights: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _make_cluster(tmp_path / "data", flights.NAME)
    assert _run(flights, monkeypatch, "--data-dir", tmp_path / "data", "--clean") == 0
    assert not (tmp_path / "data").exists()


def test_a_demos_start_that_was_interrupted_is_deleted(
    flights: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data_dir = tmp_path / "new" / "data"
    flights.mark_as_demo(data_dir)
    # The start takes the marked directory for its own.
    paths = prepare_data_dir(str(data_dir), ephemeral=True, files=Files())
    load_or_make_token(paths, Files())
    paths.ray_log.write_text("Ray starts")
    assert _run(flights, monkeypatch, "--data-dir", data_dir, "--clean") == 0
    assert not data_dir.exists()


def test_keep_prevents_the_deletion_after_an_interruption_too(
    flights: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data_dir = tmp_path / "data"
    _make_cluster(data_dir, flights.NAME)
    assert _run(flights, monkeypatch, "--data-dir", data_dir, "--keep", "--clean") == 0
    assert (data_dir / "shard-0" / "messages").exists()
    assert (data_dir / "cluster.json").exists()
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("Stopped: ")
    assert f"stay in {data_dir}" in said


FOREIGN = """
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, "examples")
import flights
flights.keep_off_the_screen(Path(sys.argv[1]))
print("a library prints")
os.write(2, b"a JVM logs\\n")
subprocess.run(["sh", "-c", "echo a child prints; echo a child logs >&2"], check=True)
flights.console.print("the demo " + "speaks " * 30)
raise RuntimeError("traceback")
"""


def test_only_the_demo_writes_to_the_screen_and_within_80_columns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN, str(tmp_path / "log")],
        cwd=SCRIPT.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) > 1
    assert all(line.startswith(("the demo", "speaks")) for line in lines)
    assert max(map(len, lines)) <= 80
    log = (tmp_path / "log").read_text()
    for line in ("a library prints", "a JVM logs", "a child prints", "a child logs", "traceback"):
        assert line in log


@pytest.mark.parametrize("deleted", [None, "4.0 GiB"])
def test_the_end_says_what_is_left_on_the_disk(
    deleted: str | None, flights: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _make_cluster(tmp_path / "data", flights.NAME)
    flights.say_what_is_left(tmp_path / "data", True, deleted)
    said = capsys.readouterr().out
    assert f"{tmp_path / 'data'}.log" in said
    assert sys.prefix in said
    assert ("raymq status" in said) == (deleted is None)
    assert ("--keep" in said) == (deleted is not None)
