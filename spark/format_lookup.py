"""Lets Spark 4 find `format("raymq")` where it does not by itself: in other threads, with another Python on PATH."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from raymq.store.base.errors import Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: the oldest PySpark whose Python data sources have all that `format("raymq")` needs
OLDEST_PYSPARK = (4, 1)

_registering = threading.Lock()


def use_format(spark: Any) -> None:
    """Let this thread use `format("raymq")` of a session. `raymq.spark.options` does it for the session of the process.

    Spark looks for a format in the session of the thread, which another thread than that of the session does not have.
    It also looks in the Python of its workers: PYSPARK_PYTHON, or the first `python3` on PATH. If that one lacks
    `raymq`, tasks of the format on this machine run in the Python of this process.

    Example:
        With a SparkSession `spark` of Spark 4 and `given`, the options of a write:

        ```python
        import threading
        from raymq.spark import use_format

        frame = spark.sql("select 'espresso' as value")

        def save():
            use_format(spark)
            frame.write.format("raymq").mode("append").options(**given).save()

        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        ```

    Args:
        spark: the SparkSession, without Spark Connect.

    Raises:
        Unavailable: Spark is older than 4.1, or its workers are on other machines and their Python has no `raymq`.
    """
    version = version_of(spark)
    if version < OLDEST_PYSPARK:
        raise Unavailable(
            f'format("raymq") needs PySpark {_text(OLDEST_PYSPARK)} or later, and this is {spark.version}: install it, '
            "or use raymq.spark.read, write and stream_sink",
            field="pyspark",
            limit=_text(OLDEST_PYSPARK),
            found=spark.version,
        )

    java = spark._jsparkSession
    if type(spark).getActiveSession() is None:
        # Spark itself does so in createDataFrame.
        spark._get_j_spark_session_class(spark._jvm).setActiveSession(java)
    # Two threads would register it twice, and one would keep the Python that the other has set for that.
    with _registering:
        if not java.sessionState().dataSourceManager().dataSourceExists("raymq"):
            _register(spark)


def _register(spark: Any) -> None:
    """Register the format with the Python of this process, for its own tasks alone. Raises: Unavailable."""
    context = spark.sparkContext
    if not context.master.startswith("local"):
        raise Unavailable(
            f'the Python of Spark\'s workers, {context.pythonExec}, does not find format("raymq"): set PYSPARK_PYTHON '
            "to a Python that has raymq, on the driver and on all executors, before the session starts",
            field="PYSPARK_PYTHON",
            limit="a Python that has raymq",
            found=context.pythonExec,
        )

    from .data_source import RaymqDataSource

    before, context.pythonExec = context.pythonExec, sys.executable
    try:
        spark.dataSource.register(RaymqDataSource)
    finally:
        context.pythonExec = before


def session_of_process() -> object:
    """The SparkSession of this thread, else of this process; None without one, and for Spark 3.5 and Spark Connect."""
    # A program without Spark does not import it for this.
    kind: Any = getattr(sys.modules.get("pyspark.sql"), "SparkSession", None)
    # A package with nothing but Spark Connect has no such session.
    session = getattr(kind, "_instantiatedSession", None)
    if session is not None and session.sparkContext._jsc is not None:
        # `foreachBatch` has a session of its own, in which Spark looks.
        session = kind.getActiveSession() or session
    if session is None or session.sparkContext._jsc is None or version_of(session) < OLDEST_PYSPARK:
        return None
    return session


def version_of(spark: SparkSession) -> tuple[int, ...]:
    """The first two numbers of Spark's version."""
    return tuple(int(part) for part in spark.version.split(".")[:2])


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
