"""Spark on Ray writes to a topic and reads it back: exactly once, whatever happens to its tasks."""

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import pyarrow as pa
import pytest

import raymq
from raymq.client.messages.json_rows import decode_rows, encode_rows
from raymq.cluster.bench.dataset_load import DatasetPlan, run
from raymq.cluster.bench.spark_engine import SparkEngine
from raymq.errors import Corrupt, OffsetOutOfRange, Rejected, Unavailable
from raymq.spark import (
    from_value,
    java,
    options,
    raydp_session,
    read,
    stream,
    stream_sink,
    to_value,
    use_format,
    use_java,
    write,
)
from raymq.spark import session as spark_session
from raymq.spark.offsets import TopicQueue
from raymq.spark.query_checkpoint import QueryCheckpoint
from tests.support.docstrings import examples
from tests.support.leftovers import disk_root
from tests.support.quick_java import QUICK_JAVA
from tests.support.ray_environment import ray_environment
from tests.support.typed_frames import (
    SCHEMA,
    check_names,
    check_round_trip,
    check_value_types,
    typed_frame,
)

# pyspark leaves the sockets of its collect() calls to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


CONFIGS = {"spark.default.parallelism": "4", "spark.sql.shuffle.partitions": "2"}


@pytest.fixture(scope="module")
def place():
    """One cluster and one Spark session: both take long to start."""
    import ray
    import raydp

    # Not pytest's directory: it is under /tmp, which a cluster that is meant to last refuses.
    directory = Path(tempfile.mkdtemp(prefix=".raymq-test-", dir=disk_root()))
    try:
        with ray_environment(directory):
            os.environ.update(QUICK_JAVA)
            use_java()
            cluster = raymq.start(directory / "data", name="spark-io", shards=2)
            ray.init(address=cluster.ray_address, namespace="test", log_to_driver=False)
            try:
                session = raydp_session("raymq-test", configs=CONFIGS)
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


def test_a_read_with_a_filter_gets_only_what_it_wants(place):
    from pyspark.sql import functions as f

    cluster, spark = place
    cluster.create_topic("filtered", queues=4)
    frame = numbers(spark, 2_000).withColumn(
        "tag", f.when(f.col("value").cast("int") % 10 == 0, "tens").otherwise("others")
    )
    write(frame, cluster, topic="filtered")
    tens = [number for number in range(2_000) if number % 10 == 0]
    assert values(read(spark, cluster, "filtered", tags="tens || hundreds")) == tens
    assert values(read(spark, cluster, "filtered", sql="TAGS = 'tens'")) == tens
    assert values(read(spark, cluster, "filtered", tags="hundreds")) == []
    with pytest.raises(Rejected, match="column|position|character"):
        read(spark, cluster, "filtered", sql="TAGS = ")


def test_the_same_write_again_stores_nothing(place):
    cluster, spark = place
    cluster.create_topic("again", queues=4)
    frame = numbers(spark, 5_000)
    write(frame, cluster, topic="again", writeId="once")
    again = write(frame, cluster, topic="again", writeId="once")
    assert (again.rows, again.duplicates) == (5_000, 5_000)
    assert cluster.describe_topic("again")["messages"] == 5_000


def test_the_same_write_with_another_number_of_partitions_is_refused(place):
    cluster, spark = place
    cluster.create_topic("split", queues=2)
    write(numbers(spark, 100, 4), cluster, topic="split", writeId="once")
    for parts in (3, 5):
        with pytest.raises(Rejected, match=f"had 4 partitions at its first run, and has {parts}"):
            write(numbers(spark, 100, parts), cluster, topic="split", writeId="once", verify=False)
    assert cluster.describe_topic("split")["messages"] == 100
    # Spark chooses the number of partitions while it runs a plan with a shuffle.
    for _ in range(2):
        shuffled = numbers(spark, 100).groupBy("value").count().select("value")
        last = write(shuffled, cluster, topic="split", writeId="by-value", sort_by=["value"])
    assert (last.rows, last.duplicates) == (100, 100)


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


@pytest.mark.thorough
def test_a_direct_write_takes_plans_whose_order_is_fixed_and_no_others(place):
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    cluster, spark = place
    cluster.create_topic("plans", queues=1)
    rows = spark.range(0, 20, 1, 2).selectExpr("cast(id as string) as value", "id % 3 as c")
    other = rows.selectExpr("value", "c as d")
    window = Window.partitionBy("c").orderBy("c")

    def passed_on(batches):
        yield from batches

    fixed = {
        "narrow": rows.where("c > 0").selectExpr("explode(array(value, value)) as value"),
        "broadcast join": rows.join(f.broadcast(other), "value"),
        "union": rows.union(rows).coalesce(1).limit(5),
        "python": rows.mapInArrow(passed_on, "value string, c long"),
        "cached": rows.where("c < 2").cache(),
        "checkpoint": rows.repartition(3).localCheckpoint(),
        "list": spark.createDataFrame([("x",), ("y",)], "value string"),
    }
    for name, frame in fixed.items():
        sent = frame.select("value")
        assert write(sent, cluster, topic="plans").rows == sent.count(), name

    in_any_order = [
        ("SortMergeJoin", rows.hint("merge").join(other, "value")),
        ("Window", rows.select(f.concat("value", f.row_number().over(window)))),
        ("Sort", rows.orderBy("c")),
        ("TakeOrderedAndProject", rows.orderBy("c").limit(5)),
        ("ShuffleExchange", rows.limit(5)),
        ("ShuffleExchange", rows.repartition(2).union(rows)),
        ("ShuffleExchange", rows.orderBy("c").union(rows.repartition(2))),
        ("ShuffleExchange", rows.repartition(2, "c").cache()),
        ("ShuffleExchange", rows.join(f.broadcast(other.repartition(2)), "value")),
        ("RDDScan", spark.createDataFrame(rows.rdd.map(tuple).repartition(2), rows.schema)),
    ]
    for kind, frame in in_any_order:
        with pytest.raises(Rejected, match="sort_by=.*delivery='staged'") as caught:
            write(frame.toDF("value", *frame.columns[1:]).select("value"), cluster, topic="plans")
        assert (caught.value.field, caught.value.found) == ("plan", kind)
    frame = rows.orderBy("c").select("value")
    assert write(frame, cluster, topic="plans", sort_by=["value"]).rows == 20


@pytest.mark.thorough
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
    result = write(frame, cluster, topic="staged", writeId="s1", delivery="staged")
    assert Path(flag).exists()
    assert (result.rows, result.duplicates) == (20_000, 0)
    again = write(shuffled, cluster, topic="staged", writeId="s1", delivery="staged")
    assert (again.rows, again.duplicates) == (20_000, 20_000)
    assert values(read(spark, cluster, "staged")) == list(range(20_000))
    with pytest.raises(Rejected, match="was committed before with 20000 other rows"):
        write(numbers(spark, 5), cluster, topic="staged", writeId="s1", delivery="staged")


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
        (spark.range(1), "id"),
        (spark.sql("select 1 as value"), "value"),
        (spark.sql("select 'x' as value, 1 as colour"), "colour"),
    ):
        with pytest.raises(Rejected) as caught:
            write(frame, cluster, topic="named")
        assert caught.value.field == field
    with pytest.raises(Rejected, match="create it"):
        write(spark.sql("select 'x' as value"), cluster, topic="nowhere")
    with pytest.raises(OffsetOutOfRange):
        read(spark, cluster, "named", startingOffsets={"named": {"0": 5}})
    with pytest.raises(Rejected, match="startingOffsets"):
        read(spark, cluster, "named", startingOffsets="yesterday")


def test_options_and_columns_of_a_read_are_those_of_the_format_of_spark_4(place):
    cluster, spark = place
    cluster.create_topic("options", queues=2)
    frame = spark.sql(
        "select cast(id as string) as value, id % 2 as half from range(10)"
    ).selectExpr("value", "cast(half as int) as partition", "map('n', value) as properties")
    write(frame, cluster, topic="options", writeId="o", delivery="staged")
    part = {"options": {"0": 1, "1": -2}}
    for starting in (part, json.dumps(part)):
        back = read(spark, cluster, subscribePattern="opt.*", startingOffsets=starting)
        assert back.count() == 9
    back = read(spark, cluster, assign={"options": [1]}, includeHeaders=True, readFrom="nearest")
    assert back.columns == [
        *("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"),
        *("tag", "properties", "index_keys", "deliver_at", "shard"),
    ]
    row = back.orderBy("offset").first()
    assert (row["properties"], row["headers"][0]["key"]) == ({"n": "1"}, "n")
    few = read(spark, cluster, "options", schema="offset bigint, value binary", minPartitions=4)
    assert (few.columns, few.count()) == (["offset", "value"], 10)
    for given, field in (
        ({"failOnDataloss": "maybe"}, "failOnDataLoss"),
        ({"read_from": "leader"}, "read_from"),
        ({"raymq.token": "x"}, "raymq.token"),
        ({"subscribe": "options"}, "subscribe"),
        ({"startingOffsets": {"options": {"0": 1}}}, "startingOffsets"),
        ({"schema": "colour string"}, "colour"),
    ):
        with pytest.raises(Rejected) as caught:
            read(spark, cluster, "options", **given)
        assert caught.value.field == field


def test_rows_that_name_their_topics_are_staged(place):
    cluster, spark = place
    for topic in ("red", "blue"):
        cluster.create_topic(topic, queues=1)
    frame = spark.sql("select 'x' as value, 'red' as topic union all select 'y', 'blue'")
    with pytest.raises(Rejected, match="delivery='staged'"):
        write(frame, cluster)
    assert write(frame, cluster, delivery="staged").rows == 2
    assert [cluster.describe_topic(each)["messages"] for each in ("red", "blue")] == [1, 1]


def test_rows_of_a_schema_round_trip(place):
    cluster, spark = place
    cluster.create_topic("typed", queues=2, schema=SCHEMA)
    frame = typed_frame(spark)
    for delivery in ("direct", "staged"):
        result = write(frame, cluster, topic="typed", writeId=delivery, delivery=delivery)
        assert result.rows == 3
    back = read(spark, cluster, "typed")
    assert "value" not in back.columns
    check_round_trip(frame, back.select(*frame.columns).dropDuplicates(["id"]))

    # On both shards, one after the other.
    assert cluster.add_column("typed", pa.field("extra", pa.string()))
    known = [cluster.call(shard, "topics", {})["typed"]["schema"] for shard in range(2)]
    assert [columns[-1]["name"] for columns in known] == ["extra", "extra"]
    write(spark.sql("select 9L as id, 'new' as extra"), cluster, topic="typed")
    assert read(spark, cluster, "typed").filter("extra = 'new'").first()["id"] == 9
    for sql, field in (
        ("select 1L as id, 'red' as colour", "colour"),
        ("select 1 as id", "id"),
        ("select true as flag", "id"),
        ("select 1L as id, named_struct('a', 1) as inner", "inner"),
    ):
        with pytest.raises(Rejected) as caught:
            write(spark.sql(sql), cluster, topic="typed")
        assert caught.value.field == field


@pytest.mark.parametrize("codec", ["json", "arrow-ipc"])
def test_columns_become_one_value_and_come_back(place, codec):
    check_value_types(place[1], codec)


@pytest.mark.parametrize("codec", ["json", "arrow-ipc"])
def test_columns_with_names_that_spark_parses_become_a_value_and_come_back(place, codec):
    check_names(place[1], codec)


def test_columns_of_a_schema_may_have_names_that_spark_parses(place):
    cluster, spark = place
    columns = pa.schema([("a.b", pa.int64()), ("c`d", pa.string())])
    cluster.create_topic("parsed", queues=1, schema=columns)
    frame = spark.sql("select 1L as `a.b`, 'x' as `c``d` from range(0, 4, 1, 2)")
    for delivery in ("direct", "staged"):
        assert write(frame, cluster, topic="parsed", delivery=delivery).rows == 4
    found = read(spark, cluster, "parsed").select("`a.b`", "`c``d`").collect()
    assert [tuple(row) for row in found] == [(1, "x")] * 8


def test_what_spark_writes_as_a_value_is_a_row_of_a_schema_and_the_other_way_round(place):
    cluster, spark = place
    cluster.create_topic("by-columns", queues=1, schema=SCHEMA)
    frame = typed_frame(spark).drop("key")
    write(frame, cluster, topic="by-columns")
    bytes_of = read(spark, cluster, "by-columns", schema="value binary")
    check_round_trip(
        *(f.withColumn("key", f["note"]) for f in (frame, from_value(bytes_of, SCHEMA)))
    )

    bodies = [row["value"].encode() for row in to_value(frame).collect()]
    columns = decode_rows(pa.array(bodies), SCHEMA)
    ids = columns[0].to_pylist()
    assert ids == [1, 2, 3]
    ours = encode_rows(columns, SCHEMA)
    assert [json.loads(each) for each in ours.to_pylist()] == [json.loads(each) for each in bodies]


def test_null_values_round_trip_where_the_topic_allows_them(place):
    cluster, spark = place
    cluster.create_topic("nullable", queues=1, allow_null_values=True)
    cluster.create_topic("full", queues=1)
    frame = spark.sql("select 'a' as key, cast(null as string) as value union all select 'b', ''")
    write(frame, cluster, topic="nullable")
    rows = read(spark, cluster, "nullable").orderBy("key").collect()
    assert [(bytes(row["key"]), row["value"]) for row in rows] == [(b"a", None), (b"b", b"")]
    for delivery in ("direct", "staged"):
        with pytest.raises(Rejected, match="value is null, which topic full does not") as caught:
            write(frame, cluster, topic="full", delivery=delivery)
        # The error of RayMQ comes first, and Spark's with all its traces is the cause.
        assert "\n" not in str(caught.value)
        assert "Traceback" in str(caught.value.__cause__)


def test_a_query_of_spark_with_a_checkpoint_stores_each_row_once_when_a_batch_is_repeated(
    place, tmp_path
):
    cluster, spark = place
    cluster.create_topic("sunk", queues=2)
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()
    sink = stream_sink(cluster, topic="sunk")
    failures = ["after the write"]

    def fails_once(frame, batch_id):
        # Another order each time, as of a plan with rand().
        sink(frame.selectExpr("value", "rand() as r").orderBy("r").drop("r"), batch_id)
        if batch_id == 1 and failures:
            raise RuntimeError(failures.pop())

    def run():
        frame = spark.readStream.schema("value string").text(str(source))
        writer = frame.writeStream.foreachBatch(fails_once)
        query = writer.option("checkpointLocation", str(checkpoint))
        query = query.trigger(availableNow=True).start()
        try:
            query.awaitTermination(60)
        finally:
            query.stop()

    def add(first, last):
        text = "\n".join(map(str, range(first, last)))
        (source / f"{first}.txt").write_text(text + "\n")

    add(0, 100)
    run()
    add(100, 150)
    with pytest.raises(Exception, match="after the write"):
        run()
    assert not (checkpoint / "commits" / "1").exists()
    assert cluster.describe_topic("sunk")["messages"] == 150
    add(150, 200)
    run()
    run()
    assert values(read(spark, cluster, "sunk")) == list(range(200))


def test_a_second_sink_of_a_query_needs_a_name_of_its_own(place, tmp_path):
    cluster, spark = place
    for topic in ("evens", "odds"):
        cluster.create_topic(topic, queues=1)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "0.txt").write_text("\n".join(map(str, range(20))))

    def run(evens, odds):
        def split(frame, batch_id):
            evens(frame.where("value % 2 = 0"), batch_id)
            odds(frame.where("value % 2 = 1"), batch_id)

        frame = spark.readStream.schema("value string").text(str(tmp_path / "source"))
        writer = frame.writeStream.foreachBatch(split).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            query.awaitTermination(60)
        finally:
            query.stop()

    evens = stream_sink(cluster, topic="evens")
    with pytest.raises(Exception, match="by a sink to another topic"):
        run(evens, stream_sink(cluster, topic="odds"))
    run(evens, stream_sink(cluster, topic="odds", query="odds-1"))
    assert values(read(spark, cluster, "evens")) == list(range(0, 20, 2))
    assert values(read(spark, cluster, "odds")) == list(range(1, 20, 2))


@pytest.fixture
def run_batches(place, tmp_path):
    """Runs a query of one batch of twenty rows by a function for `foreachBatch`, from the checkpoint that is there."""
    _, spark = place
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "0.txt").write_text("\n".join(map(str, range(20))))

    def run(write_batch, checkpoint="checkpoint"):
        frame = spark.readStream.schema("value string").text(str(tmp_path / "source"))
        writer = frame.writeStream.foreachBatch(write_batch).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / checkpoint)).start()
        try:
            query.awaitTermination(60)
        finally:
            query.stop()

    return run


def split(evens, odds):
    """A function for `foreachBatch` that writes both halves of a batch, and tries the first one again."""

    def write_batch(frame, batch_id):
        context = frame.sparkSession.sparkContext
        # Programs use the job group, which Spark has set to the run of the query.
        context.setJobGroup("evens", "evens")
        evens(frame.where("value % 2 = 0"), batch_id)
        evens(frame.where("value % 2 = 0").orderBy("value"), batch_id)
        context.setJobGroup("odds", "odds")
        odds(frame.where("value % 2 = 1"), batch_id)

    return write_batch


@pytest.mark.parametrize("by", ["another sink", "this sink"])
def test_a_second_write_of_a_batch_to_its_topic_needs_a_name_of_its_own(place, run_batches, by):
    cluster, spark = place
    topic = f"both-of-{by.split()[0]}"
    cluster.create_topic(topic, queues=1)
    evens = stream_sink(cluster, topic=topic)
    odds = evens if by.startswith("this") else stream_sink(cluster, topic=topic)
    for _ in range(2):
        with pytest.raises(Exception, match=f"written before by {by}, with other rows"):
            run_batches(split(evens, odds))
    assert values(read(spark, cluster, topic)) == list(range(0, 20, 2))
    run_batches(split(evens, stream_sink(cluster, topic=topic, query=f"odds-of-{topic}")))
    assert values(read(spark, cluster, topic)) == list(range(20))


def test_two_queries_need_two_names(place, run_batches):
    cluster, spark = place
    cluster.create_topic("two-queries", queues=1)
    sink = stream_sink(cluster, topic="two-queries", query="the-same")
    run_batches(lambda frame, batch_id: sink(frame.where("value < 10"), batch_id), "first")
    with pytest.raises(Exception, match="written before by another query, with other rows"):
        run_batches(lambda frame, batch_id: sink(frame.where("value >= 10"), batch_id), "second")
    assert values(read(spark, cluster, "two-queries")) == list(range(10))


def test_a_function_that_makes_its_sink_may_be_tried_again_before_and_after_it_has_written(
    place, run_batches
):
    cluster, spark = place
    cluster.create_topic("tried-again", queues=1)
    topics = ["no-such-topic", "tried-again", "tried-again"]

    def write_batch(frame, batch_id):
        frame.sparkSession.sparkContext.setJobGroup("nightly", "nightly")
        for topic in topics:
            with contextlib.suppress(Rejected):
                stream_sink(cluster, topic=topic)(frame, batch_id)
        if len(topics) == 3:
            topics.pop(0)
            raise RuntimeError("the batch ends after its write")

    with pytest.raises(Exception, match="ends after its write"):
        run_batches(write_batch)
    # Spark repeats the batch in another run of the query.
    run_batches(write_batch)
    assert values(read(spark, cluster, "tried-again")) == list(range(20))


def test_a_stream_from_topic_to_topic_stores_each_row_once_when_a_batch_is_repeated(
    place, tmp_path
):
    cluster, spark = place
    cluster.create_topic("from", queues=2)
    cluster.create_topic("to", queues=3)
    sink = stream_sink(cluster, topic="to")
    failures = [1]
    numbers_of_batches = []

    def copy(frame, batch_id):
        numbers_of_batches.append(batch_id)
        sink(frame.select("key", "value"), batch_id)
        if batch_id in failures:
            failures.remove(batch_id)
            raise RuntimeError("after the write")

    def run(**given):
        given = {"availableNow": True, "maxOffsetsPerTrigger": 40, **given}
        where = {"checkpointLocation": str(tmp_path), "startingOffsets": "earliest"}
        return stream(spark, cluster, "from", foreachBatch=copy, **where, **given)

    write(numbers(spark, 100), cluster, topic="from", writeId="first")
    with pytest.raises(RuntimeError, match="after the write"):
        run()
    write(numbers(spark, 150), cluster, topic="from", writeId="second")
    assert run() == 6
    assert numbers_of_batches == [0, 1, 1, 2, 3, 4, 5, 6]
    assert run() == 0
    assert values(read(spark, cluster, "to")) == sorted([*range(100), *range(150)])

    # The files are those of Spark's structured streaming.
    assert "id" in json.loads((tmp_path / "metadata").read_text())
    version, facts, offsets = (tmp_path / "offsets" / "6").read_text().splitlines()
    assert (version, list(json.loads(facts))) == (
        "v1",
        ["batchWatermarkMs", "batchTimestampMs", "conf"],
    )
    ends = {str(q["queue_id"]): q["max_offset"] for q in cluster.describe_topic("from")["queues"]}
    assert json.loads(offsets) == {"from": ends}
    commit = (tmp_path / "commits" / "6").read_text().splitlines()
    assert commit == ["v1", '{"nextBatchWatermarkMs":0}']

    stop = threading.Event()
    stop.set()
    assert run(availableNow=False, stop=stop) == 0
    (tmp_path / "offsets" / "6").write_text("v1\n{}\nnot offsets")
    with pytest.raises(Corrupt, match="offsets/6 of the checkpoint"):
        run()


def test_a_stream_that_begins_at_the_end_keeps_its_beginning(place, tmp_path):
    cluster, spark = place
    cluster.create_topic("late", queues=1)
    write(numbers(spark, 5), cluster, topic="late", writeId="before")
    seen = []

    def keep(frame, batch_id):
        seen.append((batch_id, frame.count()))

    def run():
        return stream(
            *(spark, cluster, "late"),
            foreachBatch=keep,
            checkpointLocation=str(tmp_path / "checkpoint"),
            availableNow=True,
        )

    assert run() == 1
    write(numbers(spark, 3), cluster, topic="late", writeId="after")
    assert run() == 1
    assert seen == [(0, 0), (1, 3)]

    # Two drivers of one checkpoint: the second one that begins a batch is refused.
    first = QueryCheckpoint(spark, str(tmp_path / "checkpoint"))
    with pytest.raises(Rejected, match="another driver") as caught:
        first.begin(1, {TopicQueue("late", 0): 8})
    assert caught.value.field == "checkpointLocation"


@pytest.mark.parametrize(
    "example",
    [
        each
        for each in examples()
        # These are for Spark 4's format: tests/spark4 runs their examples.
        if each.name.startswith("raymq.spark")
        and each.name not in ("raymq.spark.options", "raymq.spark.use_format")
    ],
    ids=lambda example: example.name,
)
def test_the_example_in_a_docstring_runs(place, example):
    cluster, spark = place
    exec(compile(example.code, example.name, "exec"), {"cluster": cluster, "spark": spark})


def test_the_format_needs_a_later_spark(place):
    cluster, spark = place
    with pytest.raises(Unavailable, match="needs PySpark 4.1 or later, and this is 3.5"):
        use_format(spark)
    # A program of Spark 3.5 may hand them to another one.
    assert set(options(cluster)) == {"raymq.address", "raymq.token"}


@pytest.mark.parametrize("configs", [{}, {"spark.driver.host": "10.0.0.5"}])
def test_raydp_chooses_the_address_of_the_driver_unless_one_is_given(monkeypatch, configs):
    import raydp

    given = {}
    monkeypatch.setattr(raydp, "init_spark", lambda *_, configs: given.update(configs))
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        # raydp_session sets it: so it is restored after the test.
        monkeypatch.setenv(name, "python")
    monkeypatch.setattr(spark_session, "use_java", lambda: None)
    raydp_session("addressed", configs=configs)
    addresses = ("spark.driver.host", "spark.driver.bindAddress")
    assert {name: given[name] for name in addresses if name in given} == configs


def test_a_directory_of_another_user_in_the_way_of_rays_java_is_named_before_spark_starts(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(spark_session, "use_java", lambda: None)
    monkeypatch.setattr(java, "RAY_DIRECTORY", tmp_path)
    # For root it is never so.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(Unavailable, match=f"Let its owner remove {tmp_path} .*PrivateTmp"):
        raydp_session("refused")
    monkeypatch.setattr(java, "RAY_DIRECTORY", tmp_path / "none")
    assert java.ray_directory_fault() is None


def test_without_java_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(spark_session, "_candidates", list)
    with pytest.raises(Unavailable, match="JDK 17"):
        spark_session.java_home()
