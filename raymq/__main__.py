"""`python -m raymq`: the command line (cluster/cli/main.py)."""

from __future__ import annotations

import sys

from raymq.cluster.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
