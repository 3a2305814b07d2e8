"""A test run that was stopped leaves nothing for longer than until the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.leftovers import claim, sweep

ROOT = Path(__file__).resolve().parents[1]
STOPPED = """
import os, sys
from pathlib import Path
from tests.support.leftovers import claim
claim(Path(sys.argv[1]))
os.kill(os.getpid(), 9)
"""


def test_directories_of_runs_that_are_gone_are_removed_and_no_others(tmp_path: Path) -> None:
    gone, own, foreign = (tmp_path / name for name in ("gone", "own", "foreign"))
    for place in (gone, own, foreign):
        place.mkdir()
    claim(own)
    (gone / "big").write_bytes(b"x" * 4096)
    subprocess.run(
        [sys.executable, "-c", STOPPED, str(gone)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert sweep([tmp_path]) == [gone]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "own"]


def test_this_run_is_one_that_the_next_would_find(tmp_path_factory: object) -> None:
    base = tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    assert (base / ".raymq-run").exists()
