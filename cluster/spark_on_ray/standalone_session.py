"""A SparkSession of Spark 4 on Ray: Spark's own Master beside the driver, and its Workers in actors."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from raymq.client.arguments import check_number
from raymq.cluster.deploy import ray_client
from raymq.spark import java
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable

from .guarded_daemon import GuardedDaemon, memory_bytes, private_directory, spark_home
from .spark_worker import SparkWorker
from .standalone_options import Secrets, connection_options, daemon_options, driver_options

_MASTER = "org.apache.spark.deploy.master.Master"
#: Spark 4's oldest
_JAVA_MIN = 17


def standalone_session(
    app_name: str,
    *,
    executors: int = 1,
    cores: int = 2,
    memory: str = "1GB",
    configs: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> Any:
    """A SparkSession of Spark 4 on the Ray to which this process is connected. Its `stop` ends all that it started.

    Each executor is an actor of Ray, which reserves the executor's cores and memory and runs a Worker of Spark. The
    Master runs beside the driver. Processes listen on the node's address of Ray, 127.0.0.1 for a Ray that `start`
    started. Connections are authenticated and encrypted with a secret of this session.

    Example:
        In a process that is connected to Ray, with PySpark 4:

        ```py
        from raymq.spark import standalone_session

        with standalone_session("my-job", executors=2, cores=1, memory="1GB") as spark:
            orders = spark.read.format("raymq").options(**options).option("subscribe", "orders").load()
        ```

    Args:
        app_name: the name of the application.
        executors: how many; Ray chooses their nodes.
        cores: of each executor, reserved as CPUs of Ray.
        memory: of each executor, such as "512m" or "2GB", reserved as memory of Ray.
        configs: further options of Spark.
        timeout_s: seconds until all Workers run.

    Guarantees:
        A Worker or a Master that is killed is started again, and the job goes on. When the driver or an actor ends,
        also by SIGKILL, none of their processes is left.

    Raises:
        Rejected: a wrong value, Ray Client, PySpark 3, or a SparkSession that is active in this process.
        Unavailable: Ray is not connected or has too few CPUs, or Java 17 or newer is missing. Nothing is left running.
    """
    size_bytes = _check(executors, cores, memory)
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable

    cluster = _StandaloneCluster(executors, cores, size_bytes, timeout_s)
    try:
        options = driver_options(
            cluster.host,
            cluster.master_url,
            executors=executors,
            cores=cores,
            memory=_in_mebibytes(size_bytes),
        )
        options = {**options, **(configs or {}), "spark.app.name": app_name}
        _start_java(options)
        builder: Any = SparkSession.builder
        for name, value in {**options, **connection_options(cluster.secrets)}.items():
            builder = builder.config(name, value)
        session: Any = builder.getOrCreate()
    except BaseException:
        cluster.stop()
        raise

    def stop() -> None:
        # From now on `stop` is the session's own again.
        del session.stop
        try:
            session.stop()
        finally:
            cluster.stop()

    session.stop = stop
    return session


def _check(executors: int, cores: int, memory: str) -> int:
    """Refuse what cannot work. Returns: the memory in bytes."""
    check_number("executors", executors, 1)
    check_number("cores", cores, 1)
    try:
        size_bytes = memory_bytes(memory)
    except (ValueError, AttributeError):
        raise Rejected(
            f'memory is {memory!r}; give a size such as "512m" or "2GB"',
            field="memory",
            limit="size",
        ) from None
    spark_home()
    import pyspark

    if pyspark.__version__.startswith("3."):
        raise Rejected(
            f"PySpark {pyspark.__version__} runs on Ray by RayDP: use raydp_session",
            field="pyspark",
            limit="4.1 or newer",
        )
    if pyspark.SparkContext._active_spark_context is not None:
        raise Rejected(
            "a SparkSession is active in this process: stop it first", field="session", limit="1"
        )
    if not ray.is_initialized():
        raise Unavailable(
            "this process is not connected to Ray: call ray.init(cluster.ray_address)", field="ray"
        )
    if ray_client.is_connected():
        raise Rejected(
            "Spark's executors connect to the driver: run it on a node of Ray, not through Ray Client",
            field="ray",
            limit="a driver on a node of Ray",
        )
    found = java.find(os.environ)
    if found is None or java.major_version(found) < _JAVA_MIN:
        raise Unavailable(
            f"Spark 4 needs Java {_JAVA_MIN} or newer, and none was found: install a JDK and set JAVA_HOME",
            field="java",
            limit=f"Java {_JAVA_MIN} or newer",
        )
    return size_bytes


def _start_java(options: Mapping[str, str]) -> None:
    """Start the driver's JVM, if this process has none yet.

    PySpark puts the options that it has when the JVM starts into a command line, which every user sees. The secret is
    set when the JVM runs.
    """
    from pyspark import SparkConf, SparkContext

    public = SparkConf(loadDefaults=False).setAll(list(options.items()))
    SparkContext._ensure_initialized(conf=public)


def _in_mebibytes(size_bytes: int) -> str:
    return f"{size_bytes >> 20}m"


class _StandaloneCluster:
    """A Master beside this process, and Workers in actors."""

    def __init__(self, executors: int, cores: int, memory_bytes: int, timeout_s: float) -> None:
        """Returns when the Master knows all Workers. Raises: Unavailable; nothing is left then."""
        self.secrets = Secrets.new()
        self.host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self.master_url = f"spark://{self.host}:{_free_port(self.host)}"
        self._workers: list[Any] = []
        self._master = self._start_master()
        try:
            self._start_workers(executors, cores, memory_bytes, timeout_s)
        except BaseException:
            self.stop()
            raise

    def _start_master(self) -> GuardedDaemon:
        directory = private_directory()
        port = self.master_url.rpartition(":")[2]
        return GuardedDaemon(
            directory,
            daemon_options(self.secrets, directory),
            [_MASTER, "--host", self.host, "--port", port],
            clock=Clock(),
        )

    def _start_workers(
        self, executors: int, cores: int, memory_bytes: int, timeout_s: float
    ) -> None:
        clock = Clock()
        deadline_s = clock.monotonic() + timeout_s
        kind = ray.remote(SparkWorker).options(
            num_cpus=cores, memory=memory_bytes, max_restarts=-1, scheduling_strategy="SPREAD"
        )
        arguments = (self.master_url, self.secrets, cores, _in_mebibytes(memory_bytes))
        self._workers = [kind.remote(*arguments) for _ in range(executors)]

        self._master.wait_for("I have been elected leader", timeout_s)
        left_s = max(deadline_s - clock.monotonic(), 0.0)
        waits = [each.wait_until_registered.remote(left_s) for each in self._workers]
        try:
            # The Workers' own timeout comes first: it says what they logged.
            ray.get(waits, timeout=left_s + 5)
        except GetTimeoutError:
            free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
            raise Unavailable(
                f"Ray has no room for {executors} executors of {cores} CPUs and {memory_bytes >> 20} MiB: "
                f"{free.get('CPU', 0):g} CPUs and {int(free.get('memory', 0)) >> 20} MiB are free",
                field="executors",
                limit=f"{timeout_s:g} s",
            ) from None

    def stop(self) -> None:
        """End all processes. Returns when they are gone; those of a node that does not answer end with its actor."""
        with contextlib.suppress(ray.exceptions.RayError, GetTimeoutError):
            ray.get([each.stop.remote() for each in self._workers], timeout=30)
        for each in self._workers:
            ray.kill(each)
        self._workers = []
        self._master.stop()


def _free_port(host: str) -> int:
    """A port on which no process listens."""
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
    return port
