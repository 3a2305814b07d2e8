"""`python -m raymq.cluster.deploy.ray_probe ADDRESS`: ends with 0 when the Ray there takes a driver.

ray_host.py runs it before this process connects. `ray.init` in a dying Ray may wait for ever or abort its process, and
a thread in it cannot be interrupted. A process can be ended.
"""

from __future__ import annotations

import logging
import sys

from raymq.cluster.paths import NAMESPACE


def main() -> int:
    """Connect and disconnect. Returns: 0, or 1 with Ray's message as the last line of standard error."""
    import ray

    try:
        ray.init(
            address=sys.argv[1],
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, TimeoutError, ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
