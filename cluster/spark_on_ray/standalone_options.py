"""Spark's options for the Master, the Workers and the driver of a standalone cluster of one session."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import NamedTuple


class Secrets(NamedTuple):
    """What the processes of one session share, and no other process knows."""

    #: each process of Spark shows its peers that it has it, and derives the keys of their connections from it
    rpc: str
    #: for the web pages of the daemons, which cannot be turned off: no request is signed with it
    pages: str

    @classmethod
    def new(cls) -> Secrets:
        return cls(secrets.token_hex(32), secrets.token_hex(32))


def connection_options(shared: Secrets) -> dict[str, str]:
    """Every connection is authenticated and encrypted."""
    return {
        "spark.authenticate": "true",
        "spark.authenticate.secret": shared.rpc,
        "spark.network.crypto.enabled": "true",
    }


def daemon_options(shared: Secrets, directory: Path) -> dict[str, str]:
    """Of a Master and of a Worker, each in a private directory of its own."""
    return {
        **connection_options(shared),
        "spark.ui.filters": "org.apache.spark.ui.JWSFilter",
        "spark.org.apache.spark.ui.JWSFilter.param.secretKey": shared.pages,
        "spark.master.ui.port": "0",
        "spark.worker.ui.port": "0",
        "spark.master.rest.enabled": "false",
        # No Worker would find a Master at another port.
        "spark.port.maxRetries": "0",
        # So that a Master that is started again knows its Workers and the application.
        "spark.deploy.recoveryMode": "FILESYSTEM",
        "spark.deploy.recoveryDirectory": str(directory / "recovery"),
        "spark.local.dir": str(directory / "local"),
        # A Master that is started again waits so long for a Worker that ended meanwhile. Spark has 60.
        "spark.worker.timeout": "20",
    }


def driver_options(
    host: str, master_url: str, *, executors: int, cores: int, memory: str
) -> dict[str, str]:
    """Of the driver, without the secret: these are shown in its command line."""
    return {
        "spark.master": master_url,
        "spark.driver.host": host,
        "spark.driver.bindAddress": host,
        "spark.ui.enabled": "false",
        "spark.executor.cores": str(cores),
        "spark.executor.memory": memory,
        "spark.cores.max": str(executors * cores),
        "spark.sql.session.timeZone": "UTC",
        "spark.pyspark.python": sys.executable,
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
