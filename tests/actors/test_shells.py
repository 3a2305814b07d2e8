"""What a CommitLog's process does before it opens anything."""

import os
import subprocess
import sys

PROGRAM = """
import sys
from raymq.actors.shells import _keep_pandas_out
_keep_pandas_out()
import pyarrow
assert pyarrow.array([b"x"]).to_pylist() == [b"x"]
assert "pandas" not in sys.modules
import pandas
assert pandas.__file__.startswith(sys.argv[1])
"""


def test_arrow_does_not_bring_pandas_in_and_others_still_can(tmp_path):
    (tmp_path / "pandas.py").write_text("__version__ = '9.0'", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
