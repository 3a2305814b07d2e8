"""`python -m raymq.cluster.deploy.ray_probe ADDRESS`: ends with 0 when the Ray there takes a driver.

ray_host.py runs it before this process connects. `ray.init` in a dying Ray may hang or abort its process, and a thread
in it cannot be interrupted. A process can be ended.
"""

from __future__ import annotations

import sys

from .ray_host import CONNECT_ERRORS, connect_driver


def main() -> int:
    """Connect and disconnect. Returns: 0, or 1 with Ray's message as the last line of standard error."""
    try:
        connect_driver(sys.argv[1]).shutdown()
    except CONNECT_ERRORS as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
