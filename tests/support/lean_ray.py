"""Ray without the servers that a test does not look at, so that it starts in less time."""

from __future__ import annotations

from typing import Any

#: A Ray whose test is over waits for nothing.
AT_ONCE = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
#: `ray start` calls the function that the first variable names
LEAN = {"RAY_START_HOOK": f"{__name__}.leave_out", **AT_ONCE}
#: the same, with the server of Ray Client
LEAN_WITH_CLIENT = {"RAY_START_HOOK": f"{__name__}.leave_out_all_but_client", **AT_ONCE}


def leave_out(parameters: Any, head: bool) -> None:
    """Callers: `ray start`. Args: `parameters`: its RayParams."""
    parameters.ray_client_server_port = None
    leave_out_all_but_client(parameters, head)


def leave_out_all_but_client(parameters: Any, head: bool) -> None:
    """Callers: `ray start`. Args: `parameters`: its RayParams."""
    from ray._private.node import Node

    # A Ray that does not grow; output of workers, which no test reads; drivers of other machines.
    parameters.no_monitor = True
    parameters.include_log_monitor = False
    # Ray's state over HTTP: without a dashboard, too, this server starts, and its imports take two seconds.
    Node.start_api_server = lambda self, **options: None
