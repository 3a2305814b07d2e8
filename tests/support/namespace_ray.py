"""A node of Ray in a network namespace of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.waiting import until


@contextlib.contextmanager
def ray_node(
    node: str, host: str, name: str, place: Path, environment: dict[str, str], *words: str
) -> Iterator[None]:
    """`ray start --block` of a node with an address, in a namespace; yields when it says that it is up."""
    log = place / f"ray-{node}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                *("ip", "netns", "exec", name),
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                *(f"--node-ip-address={host}", f"--labels=raymq-node={node}"),
                *("--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"),
                *("--min-worker-port=0", "--max-worker-port=0", *words),
            ],
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )
    try:

        def wait() -> None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
                raise RuntimeError(f"Ray ended: {log.read_text()}")

        until(lambda: b"Ray runtime started." in log.read_bytes(), wait)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
