"""`python -m raymq.cluster.deploy.ray_head FD ARGS...`: becomes a detached `ray start ARGS...`.

Run by owned_ray.py. It forks, so that no process has to wait for it and it cannot stay a zombie. It opens a
session of its own, so that the shell's end (SIGHUP, Ctrl-C) does not reach it. It writes its pid to
FD.
"""

from __future__ import annotations

import os
import sys

#: optional commands of Ray's command line: with ray[serve] their import alone takes a second
UNUSED = ("ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")


def main() -> int:
    """Run `ray start`: in the detached process it returns when Ray ends."""
    pipe = int(sys.argv[1])
    if os.fork():
        # _exit: the interpreter's clean-up belongs to the detached process alone.
        os._exit(0)
    os.setsid()
    os.chdir("/")
    os.write(pipe, str(os.getpid()).encode())
    os.close(pipe)
    for name in UNUSED:
        sys.modules[name] = None  # type: ignore[assignment]
    # The import takes half a second, so only the process that needs it imports it.
    from ray.scripts.scripts import cli

    status: int | None = cli.main(args=sys.argv[2:], prog_name="ray", standalone_mode=False)
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
