"""A test run that was stopped leaves nothing for longer than until the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.leftovers import VAR_TMP, claim, disk_root, sweep

ROOT = Path(__file__).resolve().parents[1]
STOPPED = """
import os, sys
from pathlib import Path
from tests.support.leftovers import claim
claim(Path(sys.argv[1]))
os.kill(os.getpid(), 9)
"""


def _claim_and_die(place: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", STOPPED, str(place)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_directories_of_runs_that_are_gone_are_removed_and_no_others(tmp_path: Path) -> None:
    gone, own, foreign = (tmp_path / name for name in ("gone", "own", "foreign"))
    for place in (gone, own, foreign):
        place.mkdir()
    claim(own)
    (gone / "big").write_bytes(b"x" * 4096)
    _claim_and_die(gone)
    assert sweep([tmp_path]) == [gone]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "own"]


def test_a_directory_that_goes_while_the_sweep_runs_does_not_end_it(tmp_path: Path) -> None:
    gone, last = tmp_path / "gone", tmp_path / "last"
    inner = gone / "inner"
    for place in (inner, last):
        place.mkdir(parents=True)
    for place in (gone, inner, last):
        _claim_and_die(place)
    # The marker of `inner` is listed, and goes with `gone`.
    assert set(sweep([tmp_path, gone])) == {gone, last}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "12", "12 34", "a run of tomorrow"])
def test_a_marker_that_cannot_be_read_protects_its_directory(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".raymq-owner").write_text(text)
    assert sweep([tmp_path]) == []
    assert (tmp_path / "run").exists()


def test_a_marker_is_never_seen_half_written(tmp_path: Path) -> None:
    claim(tmp_path)
    marker, earlier = tmp_path / ".raymq-owner", tmp_path / "earlier"
    earlier.hardlink_to(marker)
    claim(tmp_path)
    # Another file took its place: a reader has the whole of the one or of the other.
    assert not earlier.samefile(marker)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".raymq-owner", "earlier"]


def test_a_run_in_another_pid_namespace_is_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    _claim_and_die(place)
    marker = place / ".raymq-owner"
    own = os.readlink("/proc/self/ns/pid")
    text = marker.read_text()
    assert own in text
    marker.write_text(text.replace(own, "pid:[1]"))
    assert sweep([tmp_path]) == []
    marker.write_text(text)
    assert sweep([tmp_path]) == [place]


def test_this_run_is_one_that_the_next_would_find(tmp_path_factory: object) -> None:
    base = tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    assert (base / ".raymq-owner").exists()


# Under /proc not even root can make a directory. A lone "~" is the answer of a system that knows no home.
@pytest.mark.parametrize("home", ["/proc/nonexistent", "/dev/null", "~"])
def test_without_a_home_the_directories_of_tests_are_in_var_tmp(
    monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda _: home)
    assert disk_root() == VAR_TMP


def test_the_directories_of_tests_are_in_the_home_that_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk_root() == tmp_path
