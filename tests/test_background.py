"""A test in the background has the outcome that it has in a pytest of its own, whatever becomes of that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
from tests.support.background import is_background, replace_items
from tests.support.workers import Workers

def pytest_collection_finish(session):
    session.items.sort(key=is_background)
    if len(session.items) > {alone}:
        session.workers = Workers(1)
        session.items[:] = replace_items(session.items, session.workers)

def pytest_sessionfinish(session):
    if hasattr(session, "workers"):
        session.workers.close()
"""
PLAIN = """
import os
def test_in_the_foreground(): print("foreground", os.getppid())
"""
BACKGROUND = """
import os
import pytest
pytestmark = pytest.mark.background

@pytest.fixture
def broken():
    yield
    raise ValueError("cannot be torn down")

def test_passes(): pass
def test_fails():
    print("some output")
    assert 1 + 1 == 3
def test_skips(): pytest.skip("not here")
def test_is_not_torn_down(broken): pass
@pytest.mark.parametrize("name", ["[a]", "b c"])
def test_of_a_name(name): assert name == "b c"
"""
KILLED = """
import os
import pytest
pytestmark = pytest.mark.background
def test_passes(): pass
def test_ends_its_process(): os._exit(3)
"""
LONG = """
import pathlib
import threading
import pytest
pytestmark = pytest.mark.background

@pytest.fixture
def place():
    yield
    pathlib.Path("torn-down").touch()

def test_that_takes_too_long(place):
    # Not in the fixture: one that is interrupted before it yields is not torn down.
    pathlib.Path("begun").touch()
    threading.Event().wait(90)
"""
BREAKS_OFF = """
import pathlib
import threading
import time

def test_fails_once_the_other_has_begun():
    deadline = time.monotonic() + 60
    while not pathlib.Path("begun").exists() and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert False
"""


def run(place: Path, tests_of_module: int, text: str, *options: str, plain: str = PLAIN) -> str:
    """The output of a pytest with a module in the background."""
    (place / "pytest.ini").write_text("[pytest]\nmarkers = background: beside the others\n")
    (place / "conftest.py").write_text(CONFTEST.format(alone=tests_of_module))
    (place / "test_background.py").write_text(text)
    (place / "test_run.py").write_text(plain)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--no-header", *options],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return done.stdout + done.stderr


def test_each_test_reports_what_the_second_pytest_reports(tmp_path: Path) -> None:
    text = run(tmp_path, 6, BACKGROUND)
    outcomes = re.findall(
        r"^(PASSED|FAILED) (\S+::(?:test_of_a_name\[.*?\]+|\S+))", text, re.MULTILINE
    )
    module = "test_background.py::"
    assert sorted(outcomes) == [
        ("FAILED", f"{module}test_fails"),
        ("FAILED", f"{module}test_is_not_torn_down"),
        ("FAILED", f"{module}test_of_a_name[[a]]"),
        ("PASSED", f"{module}test_of_a_name[b c]"),
        ("PASSED", f"{module}test_passes"),
        ("PASSED", "test_run.py::test_in_the_foreground"),
    ]
    assert "3 failed, 3 passed, 1 skipped" in text
    for words in ("assert (1 + 1) == 3", "some output", "cannot be torn down", "not here"):
        assert words in text


def test_all_tests_of_a_module_whose_pytest_was_killed_fail(tmp_path: Path) -> None:
    text = run(tmp_path, 2, KILLED)
    assert "2 failed, 1 passed" in text
    assert "the second pytest ended with 3" in text


def test_the_time_limit_of_the_run_holds_for_the_second_pytest(tmp_path: Path) -> None:
    text = run(tmp_path, 1, LONG, "--timeout", "2")
    assert "1 failed, 1 passed" in text
    assert "Timeout" in text


def test_a_run_that_is_broken_off_has_the_second_pytest_tear_down(tmp_path: Path) -> None:
    text = run(tmp_path, 1, LONG, "-x", plain=BREAKS_OFF)
    assert "1 failed" in text
    assert (tmp_path / "torn-down").exists()
