"""`python -m tests`: pytest, without the teardown of the interpreter, with the same arguments and exit code.

Threads of gRPC, which Arrow Flight and Ray bring along, run until the process ends. The end of a whole run once crashed
in them, after all tests had passed.
"""

from __future__ import annotations

import os
import sys

import pytest

code = pytest.main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
