"""Staged writes through a real shard: nothing is seen before the commit, and everything once after it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raymq.client.messages.keys import key_properties
from raymq.client.staged import staged_writer
from raymq.client.staged.committer import Committer
from raymq.client.staged.staged_writer import StagedWriter
from raymq.client.staged.write_commit import StagedRows
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.records.record import PUT_SCHEMA
from tests.support.served_shard import ServedShard


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("staged") / "shard") as made:
        made.start_flusher()
        yield made


@pytest.fixture
def topic(shard: ServedShard, request: pytest.FixtureRequest) -> str:
    name = re.sub("[^a-z0-9]+", "-", request.node.name)[-100:]
    shard.cluster.create_topic(name, queues=3)
    return name


def columns(rows: list[int]) -> pa.RecordBatch:
    count = len(rows)
    return pa.record_batch(
        [
            pa.array([b"row-%d" % row for row in rows], pa.binary()),
            pa.array(["red" if row % 2 else None for row in rows], pa.string()),
            key_properties(pa.array([b"k%d" % row for row in rows], pa.binary())),
            pa.array([0] * count, pa.int64()),
        ],
        schema=PUT_SCHEMA,
    )


def stage(shard: ServedShard, topic: str, rows: range) -> StagedRows:
    """One attempt: row n goes to queue n % 3."""
    with StagedWriter(Routes.of(shard.cluster)) as writer:
        for queue in range(3):
            mine = [row for row in rows if row % 3 == queue]
            half = len(mine) // 2
            writer.write(topic, queue, columns(mine[:half]))
            writer.write(topic, queue, columns(mine[half:]))
        return writer.finish()


def found(shard: ServedShard, topic: str) -> list[Any]:
    """Every message of a topic."""
    with shard.cluster.consumer(topic, start="earliest") as consumer:
        messages: list[Any] = []
        ends = shard.cluster.describe_topic(topic)["queues"]
        total = sum(each["max_offset"] - each["min_offset"] for each in ends)
        while len(messages) < total:
            messages += consumer.poll(timeout=20)
        return messages


def check_rows(shard: ServedShard, topic: str, rows: range) -> None:
    messages = found(shard, topic)
    assert sorted(message.body for message in messages) == sorted(b"row-%d" % row for row in rows)
    for message in messages:
        row = int(message.body[4:])
        assert message.key == b"k%d" % row
        assert message.tag == ("red" if row % 2 else None)
        assert message.queue_id == row % 3


def test_rows_are_seen_once_they_are_committed_and_only_once(
    shard: ServedShard, topic: str
) -> None:
    staged = StagedRows.joined([stage(shard, topic, range(50)), stage(shard, topic, range(50, 90))])
    stage(shard, topic, range(50))
    assert found(shard, topic) == []
    committer = Committer(Routes.of(shard.cluster))
    done = committer.commit(f"{topic}/1", staged)
    assert (done.rows, done.is_repeated) == (90, False)
    check_rows(shard, topic, range(90))
    # A repetition stages the same rows once more, and in another order.
    again = StagedRows.joined([stage(shard, topic, range(50, 90)), stage(shard, topic, range(50))])
    assert committer.commit(f"{topic}/1", again).is_repeated
    check_rows(shard, topic, range(90))


def test_rows_of_many_queues_come_in_one_batch_and_each_queue_has_one_range(
    shard: ServedShard, topic: str
) -> None:
    shard.cluster.create_topic(f"{topic}-wide", queues=200)
    with StagedWriter(Routes.of(shard.cluster)) as writer:
        # As many small parts as 10 batches of a task make.
        for number in range(10):
            for queue in range(200):
                writer.write(f"{topic}-wide", queue, columns([200 * number + queue]))
        staged = writer.finish()
        assert len(writer._sent) < 5
    assert [len(part.ranges) for part in staged.parts] == [1] * 200

    assert Committer(Routes.of(shard.cluster)).commit(topic, staged).rows == 2000
    messages = found(shard, f"{topic}-wide")
    assert sorted(int(message.body[4:]) for message in messages) == list(range(2000))
    assert {(message.queue_id, int(message.body[4:]) % 200) for message in messages} == {
        (queue, queue) for queue in range(200)
    }


def test_a_batch_has_rows_of_a_queue_in_one_piece_only(
    shard: ServedShard, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_writer, "PIECE_BYTES", 4096)
    monkeypatch.setattr(staged_writer, "BATCH_BYTES", 2048)
    sizes = [10, 500, 5, 5, 500, 10]
    with StagedWriter(Routes.of(shard.cluster)) as writer:
        for queue in range(3):
            first = 10_000 * queue
            for size in sizes:
                writer.write(topic, queue, columns(list(range(first, first + size))))
                first += size
        staged = writer.finish()
        for batch in writer._sent:
            places = [(rows.topic, rows.queue_id) for rows in batch.rows]
            assert len(set(places)) == len(places)
    assert Committer(Routes.of(shard.cluster)).commit(topic, staged).rows == 3 * sum(sizes)


def test_attempts_that_stage_side_by_side_keep_their_rows_apart(
    shard: ServedShard, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each row is sent alone, so that those of the other attempt are between the rows.
    monkeypatch.setattr(staged_writer, "BUFFER_BYTES", 1)
    routes = Routes.of(shard.cluster)
    with StagedWriter(routes) as one, StagedWriter(routes) as other:
        for row in range(20):
            one.write(topic, row % 3, columns([row]))
            other.write(topic, row % 3, columns([1000 + row]))
        staged = one.finish()
        other.finish()
    assert staged.rows == 20
    assert Committer(routes).commit(topic, staged).rows == 20
    check_rows(shard, topic, range(20))


def test_other_rows_under_the_same_write_id_are_refused(shard: ServedShard, topic: str) -> None:
    committer = Committer(Routes.of(shard.cluster))
    committer.commit(f"{topic}/1", stage(shard, topic, range(10)))
    committer = Committer(Routes.of(shard.cluster))
    with pytest.raises(Rejected, match="was committed before with 10 other rows"):
        committer.commit(f"{topic}/1", stage(shard, topic, range(11)))
    check_rows(shard, topic, range(10))
    # Unless the caller knows that a repetition may have others: then those of the first commit count.
    staged = stage(shard, topic, range(11))
    assert (
        Committer(Routes.of(shard.cluster)).commit(f"{topic}/1", staged, takes_other_rows=True).rows
        == 10
    )
    assert committer.commit(f"{topic}/2", StagedRows.joined([])).rows == 0


def test_a_batch_that_a_sink_to_another_topic_has_written_is_refused(
    shard: ServedShard, topic: str
) -> None:
    shard.cluster.create_topic(f"{topic}-other", queues=3)

    def commit(name: str, sink_topic: str | None, rows: range, target: str = topic) -> int:
        committer = Committer(Routes.of(shard.cluster))
        staged = stage(shard, target, rows)
        return committer.commit(
            f"{topic}/{name}", staged, takes_other_rows=True, topic=sink_topic
        ).rows

    assert commit("0", topic, range(10)) == 10
    assert commit("0", topic, range(5)) == 10
    for given in (f"{topic}-other", ""):
        with pytest.raises(Rejected, match="by a sink to another topic: .* query=") as refused:
            commit("0", given, range(10, 20), f"{topic}-other")
        assert refused.value.field == "query"
    # A batch without rows names its topic, too.
    assert commit("1", topic, range(0)) == 0
    with pytest.raises(Rejected, match="by a sink to another topic"):
        commit("1", f"{topic}-other", range(10), f"{topic}-other")
    # The decision of an earlier version has no topic but those of its rows.
    assert commit("2", None, range(10, 20)) == 10
    assert commit("2", topic, range(5)) == 10
    assert commit("2", "", range(5)) == 10
    with pytest.raises(Rejected, match="by a sink to another topic"):
        commit("2", f"{topic}-other", range(5), f"{topic}-other")
    check_rows(shard, topic, range(20))
    assert found(shard, f"{topic}-other") == []


class EndingRoutes:
    """Routes whose process ends in the n-th call: before it is sent, or after it is answered."""

    def __init__(self, routes: Routes, calls: int, *, is_sent: bool) -> None:
        self._routes = routes
        self._calls = calls
        self._is_sent = is_sent
        self._lock = threading.Lock()

    def call(self, shard: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._calls -= 1
            ends = self._calls < 0
        if ends and not self._is_sent:
            raise KeyboardInterrupt
        answer = self._routes.call(shard, op, args)
        if ends:
            raise KeyboardInterrupt
        return answer


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_a_commit_that_ended_in_the_middle_is_completed_by_another_process(
    shard: ServedShard, topic: str, calls: int, is_sent: bool
) -> None:
    routes = Routes.of(shard.cluster)
    ending: Any = EndingRoutes(routes, calls, is_sent=is_sent)
    with pytest.raises(KeyboardInterrupt):
        Committer(ending).commit(f"{topic}/1", stage(shard, topic, range(10)))
    done = Committer(routes).commit(f"{topic}/1", stage(shard, topic, range(10)))
    # The first commit's decision counts if it was stored.
    assert done.is_repeated == (calls > 0 or is_sent)
    check_rows(shard, topic, range(10))


def test_committers_that_race_publish_the_rows_once(shard: ServedShard, topic: str) -> None:
    attempts = [stage(shard, topic, range(60)) for _ in range(4)]
    results = []

    def commit(staged: StagedRows) -> None:
        results.append(Committer(Routes.of(shard.cluster)).commit(f"{topic}/1", staged))

    threads = [threading.Thread(target=commit, args=(staged,)) for staged in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.is_repeated for result in results) == [False, True, True, True]
    check_rows(shard, topic, range(60))


def test_a_commit_goes_on_when_its_shard_is_back(tmp_path: Path) -> None:
    with ServedShard(tmp_path / "shard") as shard:
        shard.start_flusher()
        shard.cluster.create_topic("t", queues=3)
        staged = stage(shard, "t", range(40))
        shard.down()
        with pytest.raises(Unavailable):
            Committer(Routes.of(shard.cluster), timeout_s=0).commit("w", staged)
        shard.up()
        assert Committer(Routes.of(shard.cluster)).commit("w", staged).rows == 40
        check_rows(shard, "t", range(40))


def test_rows_that_a_topic_cannot_take_fail_the_attempt(shard: ServedShard, topic: str) -> None:
    with StagedWriter(Routes.of(shard.cluster)) as writer:
        with pytest.raises(Rejected, match="has the queues 0 to 2"):
            writer.write(topic, 3, columns([1]))
        with pytest.raises(Rejected, match="does not exist"):
            writer.write("missing", 0, columns([1]))
        large = columns([1]).set_column(0, "body", pa.array([b"x" * (5 << 20)]))
        writer.write(topic, 0, pa.record_batch(large.columns, schema=PUT_SCHEMA))
        with pytest.raises(Rejected, match="bytes of body, the limit is"):
            writer.finish()


def test_rows_are_not_committed_long_after_they_were_staged(shard: ServedShard, topic: str) -> None:
    staged = stage(shard, topic, range(3))
    old = staged._replace(staged_ms=staged.staged_ms - 25 * 3_600_000)
    with pytest.raises(Rejected, match="have expired after 24") as refused:
        Committer(Routes.of(shard.cluster)).commit(f"{topic}/1", old)
    assert refused.value.field == "write_id"
    assert found(shard, topic) == []


@pytest.mark.parametrize(
    ("op", "arguments", "field"),
    [
        ("decide_write", {"decision": 1}, "decision"),
        ("decide_write", {"decision": {"write_id": 1, "staged_ms": 1}}, "write_id"),
        ("decide_write", {"decision": {"write_id": "w", "staged_ms": "x"}}, "staged_ms"),
        ("publish_rows", {"queue_id": 7}, "queue_id"),
        ("publish_rows", {"ranges": [[1, 2, 3]]}, "ranges"),
        ("publish_rows", {"ranges": [[1, 3, 2, 1]]}, "ranges"),
        ("publish_rows", {"ranges": [[1, 0, 2, 4]]}, "ranges"),
        ("publish_rows", {"topic": "missing"}, "topic"),
        ("publish_rows", {"write_id": None}, "write_id"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    shard: ServedShard, topic: str, op: str, arguments: dict[str, Any], field: str
) -> None:
    if op == "publish_rows":
        arguments = {"write_id": "w", "topic": topic, "queue_id": 0, "ranges": [], **arguments}
    with pytest.raises(Rejected) as refused:
        Routes.of(shard.cluster).call(0, op, arguments)
    assert refused.value.field == field
