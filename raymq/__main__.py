"""`python -m raymq`: the command line (cluster/cli.py)."""

from __future__ import annotations

import sys

from raymq.cluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
