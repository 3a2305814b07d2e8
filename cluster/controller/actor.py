"""The Ray actor of a controller: a thread that makes its rounds. It imports neither Arrow nor numpy itself."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from raymq.actors.leader.metrics import ray_instrument
from raymq.actors.ray.actor_classes import EXIT_LOOP_DIED, start_thread

from .controller import Controller

logger = logging.getLogger("raymq.controller")


class ControllerActor:
    """One controller. Any number may run."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """Args: `spec`: {role: "controller", cluster_dir: the data directory}."""
        self._spec = spec
        self._controller: Controller | None = None
        start_thread(self._run)

    def _run(self) -> None:
        """Make rounds for ever. If that ends, the process does, and Ray starts another one."""
        try:
            import ray

            self._controller = Controller(
                ray, self._spec["cluster_dir"], make_instrument=ray_instrument
            )
            self._controller.run(threading.Event())
        finally:
            logger.exception("the controller's loop died")
            os._exit(EXIT_LOOP_DIED)

    def status(self) -> dict[str, Any]:
        """See `Controller.status`. Before its first round: `pid` and `rounds` only."""
        if self._controller is None:
            return {"pid": os.getpid(), "rounds": 0}
        return self._controller.status()
