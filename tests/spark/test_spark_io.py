"""Spark on Ray writes to a topic and reads it back: exactly once, whatever happens to its tasks."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

import raymq
from raymq.cluster.bench.dataset_load import DatasetPlan, run
from raymq.errors import OffsetOutOfRange, Rejected, Unavailable
from raymq.spark import raydp_session, read, use_java, write
from raymq.spark import session as spark_session
from raymq.spark.load_test import SparkEngine
from tests.support.docstrings import examples
from tests.support.quick_java import QUICK_JAVA
from tests.support.ray_environment import ray_environment

# pyspark leaves the sockets of its collect() calls to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def place():
    """One cluster and one Spark session: both take long to start."""
    import ray
    import raydp

    # Not pytest's directory: it is under /tmp, which a cluster that is meant to last refuses.
    directory = Path(tempfile.mkdtemp(prefix=".raymq-test-", dir=Path.home()))
    try:
        with ray_environment(directory):
            os.environ.update(QUICK_JAVA)
            use_java()
            cluster = raymq.start(directory / "data", name="spark-io", shards=2)
            ray.init(address=cluster.ray_address, namespace="test", log_to_driver=False)
            try:
                session = raydp_session("raymq-test", configs={"spark.default.parallelism": "4"})
                yield cluster, session
            finally:
                raydp.stop_spark()
                ray.shutdown()
                cluster.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def numbers(spark, count, parts=4):
    from pyspark.sql import functions as f

    text = f.col("id").cast("string")
    return spark.range(0, count, 1, parts).select(
        f.concat(f.lit("k"), (f.col("id") % 97).cast("string")).alias("key"),
        text.alias("value"),
        f.lit("even").alias("tag"),
    )


def values(frame):
    return sorted(int(bytes(row["value"])) for row in frame.select("value").collect())


def test_a_frame_comes_back_with_keys_tags_and_offsets(place):
    cluster, spark = place
    cluster.create_topic("roundtrip", queues=4)
    result = write(numbers(spark, 20_000), cluster, topic="roundtrip")
    assert (result.rows, result.duplicates) == (20_000, 0)
    back = read(spark, cluster, "roundtrip", minPartitions=8)
    assert values(back) == list(range(20_000))
    row = back.filter("value = cast('5' as binary)").first()
    assert (bytes(row["key"]), row["tag"], row["topic"], row["timestampType"]) == (
        b"k5",
        "even",
        "roundtrip",
        1,
    )


def test_the_same_write_again_stores_nothing(place):
    cluster, spark = place
    cluster.create_topic("again", queues=4)
    frame = numbers(spark, 5_000)
    write(frame, cluster, topic="again", write_id="once")
    again = write(frame, cluster, topic="again", write_id="once")
    assert (again.rows, again.duplicates) == (5_000, 5_000)
    assert cluster.describe_topic("again")["messages"] == 5_000


def test_a_task_whose_worker_is_killed_in_the_middle_stores_every_row_once(place, tmp_path):
    cluster, spark = place
    cluster.create_topic("killed", queues=2)
    flag = str(tmp_path / "killed")

    def die_once(batches):
        # After the first batch of partition 0 went on to the sink, the worker of attempt 0 dies.
        from pyspark import TaskContext

        for number, batch in enumerate(batches):
            if number == 1 and TaskContext.get().partitionId() == 0 and not Path(flag).exists():
                Path(flag).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    frame = numbers(spark, 8_000, 2).mapInArrow(die_once, "key string, value string, tag string")
    result = write(frame, cluster, topic="killed")
    assert Path(flag).exists()
    assert result.rows == 8_000
    assert values(read(spark, cluster, "killed")) == list(range(8_000))


def test_a_plan_that_differs_between_attempts_is_refused(place):
    from pyspark.sql import functions as f

    cluster, spark = place
    cluster.create_topic("refused", queues=1)
    with pytest.raises(Rejected, match="not deterministic"):
        write(
            spark.range(3).select(f.rand().cast("string").alias("value")), cluster, topic="refused"
        )
    shuffled = numbers(spark, 10).groupBy("value").count().select("value")
    with pytest.raises(Rejected, match="sort_by"):
        write(shuffled, cluster, topic="refused")
    assert write(shuffled, cluster, topic="refused", sort_by=["value"]).rows == 10


def test_a_staged_write_of_a_shuffled_plan_with_rand_stores_every_row_once(place, tmp_path):
    from pyspark.sql import functions as f

    cluster, spark = place
    cluster.create_topic("staged", queues=4)
    flag = str(tmp_path / "killed")

    def die_once(batches):
        # The worker of one attempt dies when it has staged some of its rows.
        for number, batch in enumerate(batches):
            if number == 3 and not Path(flag).exists():
                Path(flag).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    shuffled = numbers(spark, 20_000).orderBy(f.rand()).repartition(3)
    frame = shuffled.mapInArrow(die_once, "key string, value string, tag string")
    result = write(frame, cluster, topic="staged", write_id="s1", delivery="staged")
    assert Path(flag).exists()
    assert (result.rows, result.duplicates) == (20_000, 0)
    again = write(shuffled, cluster, topic="staged", write_id="s1", delivery="staged")
    assert (again.rows, again.duplicates) == (20_000, 20_000)
    assert values(read(spark, cluster, "staged")) == list(range(20_000))
    with pytest.raises(Rejected, match="was committed before with 20000 other rows"):
        write(numbers(spark, 5), cluster, topic="staged", write_id="s1", delivery="staged")


@pytest.mark.parametrize("delivery", ["direct", "staged"])
def test_a_load_test_finds_each_row_once(place, delivery):
    cluster, spark = place
    plan = DatasetPlan(mode="spark", topic=f"load-{delivery}", messages=2000, delivery=delivery)
    result = run(cluster, plan, SparkEngine(spark, cluster), lambda _: None)
    assert result.sound
    assert cluster.describe_topic(f"load-{delivery}")["messages"] == 2000


def test_wrong_columns_and_offsets_are_named(place):
    cluster, spark = place
    cluster.create_topic("named", queues=1)
    for frame, field in (
        (spark.range(1), "value"),
        (spark.sql("select 1 as value"), "value"),
        (spark.sql("select 'x' as value, 1 as colour"), "colour"),
    ):
        with pytest.raises(Rejected) as caught:
            write(frame, cluster, topic="named")
        assert caught.value.field == field
    with pytest.raises(Rejected, match="create it"):
        write(spark.sql("select 'x' as value"), cluster, topic="nowhere")
    with pytest.raises(OffsetOutOfRange):
        read(spark, cluster, "named", startingOffsets={0: 5})
    with pytest.raises(Rejected, match="startingOffsets"):
        read(spark, cluster, "named", startingOffsets="yesterday")


@pytest.mark.parametrize(
    "example",
    [
        each
        for each in examples()
        # The options are those of Spark 4's format: tests/spark4/test_writes.py runs their example.
        if each.name.startswith("raymq.spark") and each.name != "raymq.spark.options"
    ],
    ids=lambda example: example.name,
)
def test_the_example_in_a_docstring_runs(place, example):
    cluster, spark = place
    exec(compile(example.code, example.name, "exec"), {"cluster": cluster, "spark": spark})


def test_without_java_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(spark_session, "_candidates", list)
    with pytest.raises(Unavailable, match="JDK 17"):
        spark_session.java_home()
