"""A program of its own process that uses a FakeCluster of the test's process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.support.fake_backend import FakeCluster

_HEAD = """
import asyncio, os, sys
from raymq.cluster.cluster import Cluster

cluster = Cluster(
    name="fake", cluster_id={cluster_id!r}, shards=1, token={token!r}, endpoints={endpoints!r}
)
"""


def run_program(fake: FakeCluster, program: str) -> tuple[int, str]:
    """Run a program that has `cluster`, a handle of the fake one. Returns: its exit code and stderr."""
    head = _HEAD.format(cluster_id=fake.cluster_id, token=fake.token, endpoints=fake.endpoints)
    code = head + textwrap.dedent(program)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    return ended.returncode, ended.stderr
