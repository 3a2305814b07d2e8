"""Spark 4 finds format("raymq") in every thread, and in an environment that is not activated."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.errors import Unavailable
from raymq.spark import options, use_format
from tests.support.quick_java import QUICK_JAVA
from tests.support.served_shard import ROOT, ServedShard

# pyspark leaves the sockets of its collect() calls to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(120)


def test_a_thread_that_asked_for_the_options_writes_and_starts_streams(
    spark: Any, shard: ServedShard, tmp_path: Path
) -> None:
    shard.cluster.create_topic("from-thread", queues=1)
    frame = spark.range(3).selectExpr("cast(id as string) as value")

    def work() -> None:
        given = options(shard.cluster)
        writer = frame.write.format("raymq").mode("append")
        writer.options(**given, topic="from-thread").save()
        reader = spark.readStream.format("raymq").options(**given, subscribe="from-thread")
        rows = reader.option("startingOffsets", "earliest").load().selectExpr("value")
        copy = rows.writeStream.format("raymq").options(**given, topic="from-thread")
        copy = copy.option("checkpointLocation", str(tmp_path))
        copy.trigger(availableNow=True).start().awaitTermination(60)

    in_thread(work)
    assert shard.cluster.describe_topic("from-thread")["messages"] == 6


def test_the_example_of_a_thread_runs(
    spark: Any, shard: ServedShard, options: dict[str, str]
) -> None:
    shard.cluster.create_topic("example", queues=1)
    (code,) = re.findall(r"```python\n(.*?)```", inspect.getdoc(use_format), re.DOTALL)
    exec(textwrap.dedent(code), {"spark": spark, "given": {**options, "topic": "example"}})
    assert shard.cluster.describe_topic("example")["messages"] == 1


PROGRAM = """
import sys
import threading
from pyspark.sql import SparkSession
import raymq
from raymq.spark import options

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
with raymq.connect(sys.argv[1], token=sys.argv[2]) as cluster:
    given = options(cluster)
    rows = spark.range(3).selectExpr("cast(id as string) as value")
    rows.write.format("raymq").mode("append").options(**given, topic="elsewhere").save()
    found = spark.read.format("raymq").options(**given, subscribe="elsewhere").load()

    def copy(frame, batch_id):
        # Batches have a session of their own.
        given = options(cluster)
        frame.write.format("raymq").mode("append").options(**given, topic="copied").save()

    lines = spark.readStream.schema("value string").text(sys.argv[3])
    query = lines.writeStream.foreachBatch(copy).trigger(availableNow=True)
    query.option("checkpointLocation", sys.argv[4]).start().awaitTermination(60)
    threads = [threading.Thread(target=options, args=(cluster,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("found", found.count(), "with", spark.sparkContext.pythonExec)
spark.stop()
"""


def test_the_first_python_on_path_need_not_have_raymq(shard: ServedShard, tmp_path: Path) -> None:
    shard.cluster.create_topic("elsewhere", queues=1)
    other = tmp_path / "bin" / "python3"
    other.parent.mkdir()
    # One without the packages of this environment.
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    other.chmod(0o755)
    environment = {**os.environ, **QUICK_JAVA}
    environment.pop("PYSPARK_PYTHON", None)
    environment["PATH"] = f"{other.parent}{os.pathsep}{environment['PATH']}"
    paths = (str(ROOT), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    place = (f"raymq://{shard.endpoints[0]}", shard.cluster.token)
    shard.cluster.create_topic("copied", queues=1)
    source = tmp_path / "source"
    source.mkdir()
    (source / "0.txt").write_text("line")
    words = (sys.executable, "-c", PROGRAM, *place, str(source), str(tmp_path / "checkpoint"))
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr[-3000:]
    # Other tasks of the session keep their Python.
    assert "found 3 with python3" in ended.stdout
    assert shard.cluster.describe_topic("copied")["messages"] == 1


def test_a_session_whose_workers_are_elsewhere_says_which_python_lacks_the_format(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = SimpleNamespace(dataSourceExists=lambda name: False)
    state = SimpleNamespace(dataSourceManager=lambda: manager)
    monkeypatch.setattr(spark, "_jsparkSession", SimpleNamespace(sessionState=lambda: state))
    monkeypatch.setattr(spark.sparkContext, "master", "spark://there:7077")
    with pytest.raises(Unavailable, match="Python of Spark's workers, .*set PYSPARK_PYTHON"):
        use_format(spark)
