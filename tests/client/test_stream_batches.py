"""Batches of a stream share producers: a few for each query, and each row is stored once, whatever ends where."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from raymq.client.staged import committer as committer_module
from raymq.client.staged.committer import Committer
from raymq.client.staged.write_commit import (
    CommitEffect,
    CommitEvent,
    Decide,
    Decided,
    NotDecided,
    PartPublished,
    StagedPart,
    StagedRows,
    WriteCommit,
    WriteDecision,
)
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import Rejected
from raymq.store.base.format import STAGED_TOPIC
from raymq.store.records.staged_range import StagedRange
from raymq.store.services import stream_batches
from raymq.store.services.stream_batches import BATCHES, StreamBatch
from tests.client.test_staged_write import EndingRoutes, found, stage
from tests.support.served_shard import ServedShard

# --- the machine ------------------------------------------------------------------------------------------------------

QUEUES = (0, 1)
ROWS = 2
#: the program goes on to the next batch after so many commits that ended in the middle
PASSES = 2


def decision_of(batch: int, attempt: int) -> WriteDecision:
    parts = tuple(
        StagedPart("t", queue, queue, (StagedRange(attempt, 10 * attempt, 10 * attempt + 1, ROWS),))
        for queue in QUEUES
    )
    return WriteDecision(f"q/{batch}", StagedRows(parts, 7, attempt), batch=("q", batch))


@dataclass
class Shards:
    """The decisions, and the rows in each queue: (batch, attempt that staged it)."""

    decisions: dict[int, WriteDecision] = field(default_factory=dict)
    rows: dict[int, list[tuple[int, int]]] = field(
        default_factory=lambda: {queue: [] for queue in QUEUES}
    )

    def perform(self, effect: CommitEffect) -> CommitEvent:
        """One call: a publication gets one row further."""
        if isinstance(effect, Decide):
            batch = effect.decision.batch
            assert batch is not None
            number = batch[1]
            # A batch that was passed over is not asked for here.
            earlier = [each for each in self.decisions if each < number]
            if number not in self.decisions and earlier and max(earlier) != effect.complete:
                return NotDecided(self.decisions[max(earlier)])
            is_published = any(each > number for each in self.decisions)
            return Decided(self.decisions.setdefault(number, effect.decision), is_published)

        part, batch = effect.part, effect.decision.batch
        assert batch is not None
        number, published = batch[1], self.rows[part.queue_id]
        own = sum(each == number for each, _ in published)
        if any(each > number for each, _ in published):
            # The sequences of a later batch hide how far this one is.
            own = part.rows
        elif own < part.rows:
            published.append((number, part.ranges[0].producer_id))
            own += 1
        return PartPublished(effect.decision, part, own, own == part.rows)

    def check(self) -> None:
        for published in self.rows.values():
            assert published == sorted(published)
            for number, attempt in published:
                assert self.decisions[number].staged.parts[0].ranges[0].producer_id == attempt

    def check_whole(self, number: int) -> None:
        """A batch that was committed, and all decided ones before, have every row once."""
        for published in self.rows.values():
            for each in self.decisions:
                if each <= number:
                    assert sum(found == each for found, _ in published) == ROWS


@dataclass
class Commit:
    batch: int
    machine: WriteCommit
    effects: list[CommitEffect]


def begun(batch: int, attempt: int, machine: type[WriteCommit]) -> Commit:
    made = machine(decision_of(batch, attempt))
    return Commit(batch, made, made.begin())


def explore(
    shards: Shards, commit: Commit, passes: int, machine: type[WriteCommit], seen: set[str]
) -> None:
    """Every order of the calls of a query, whose program may pass over a commit that ends."""
    state = repr((shards, commit.batch, sorted(map(repr, commit.effects)), passes))
    if state in seen:
        return
    seen.add(state)
    if not commit.effects:
        assert commit.machine.is_done
        shards.check_whole(commit.batch)
        if commit.batch < 2:
            following = begun(commit.batch + 1, commit.batch + 2, machine)
            explore(shards, following, passes, machine, seen)
        return

    for index in range(len(commit.effects)):
        world, current = copy.deepcopy((shards, commit))
        event = world.perform(current.effects.pop(index))
        world.check()
        if passes:
            # It ends before the answer. The query begins again, or its program goes on to the next batch.
            for batch in {current.batch, min(current.batch + 1, 2)}:
                again = begun(batch, 10 * passes + batch, machine)
                explore(copy.deepcopy(world), again, passes - 1, machine, seen)
        current.effects += current.machine.step(event)
        explore(world, current, passes, machine, seen)


def test_a_batch_is_complete_before_rows_of_the_next_one_come() -> None:
    seen: set[str] = set()
    explore(Shards(), begun(0, 1, WriteCommit), PASSES, WriteCommit, seen)
    assert len(seen) > 500


def test_a_commit_that_leaves_the_batch_before_incomplete_is_found() -> None:
    class Hasty(WriteCommit):
        def step(self, event: CommitEvent) -> list[CommitEffect]:
            if isinstance(event, NotDecided):
                assert event.previous.batch is not None
                return [Decide(self._own, event.previous.batch[1])]
            return super().step(event)

    with pytest.raises(AssertionError):
        explore(Shards(), begun(0, 1, Hasty), PASSES, Hasty, set())


# --- a shard ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("batches") / "shard") as made:
        made.start_flusher()
        yield made


@pytest.fixture
def topic(
    shard: ServedShard, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    # As a new process.
    monkeypatch.setattr(committer_module, "_complete", {})
    name = re.sub("[^a-z0-9]+", "-", request.node.name)[-100:]
    shard.cluster.create_topic(name, queues=3)
    return name


def commit(
    shard: ServedShard, topic: str, number: int, rows: range, routes: Any = None
) -> tuple[int, bool]:
    """Returns: rows of the decision that counts, and whether an earlier commit made it."""
    done = Committer(routes or Routes.of(shard.cluster)).commit(
        f"{topic}/{number}",
        stage(shard, topic, rows),
        takes_other_rows=True,
        batch=(topic, number),
    )
    return done.rows, done.is_repeated


def numbers(shard: ServedShard, topic: str) -> list[int]:
    return sorted(int(message.body[4:]) for message in found(shard, topic))


def test_batches_of_a_query_leave_a_few_producers(shard: ServedShard, topic: str) -> None:
    table = shard.host.store.state.producers

    def lasting() -> int:
        staged = [number for number, (name, _) in enumerate(table.queues) if name == STAGED_TOPIC]
        return sum(int((rows["queue"] != staged[0]).sum()) for rows in table.entries())

    first = BATCHES - 20
    commit(shard, topic, first, range(3))
    before = lasting()
    for number in range(1, 40):
        rows = range(3 * number, 3 * number + 3)
        assert commit(shard, topic, first + number, rows) == (3, False)
    assert numbers(shard, topic) == list(range(3 * 40))
    # A second producer of decisions, and one of the rows in each queue.
    assert lasting() == before + 4


def test_a_repeated_batch_stores_nothing_more(shard: ServedShard, topic: str) -> None:
    for number in (0, 1, 2):
        commit(shard, topic, number, range(9 * number, 9 * number + 9))
    assert commit(shard, topic, 2, range(18, 27)) == (9, True)
    # Of an old checkpoint, and of a plan with rand().
    assert commit(shard, topic, 0, range(5)) == (9, True)
    assert numbers(shard, topic) == list(range(27))


def test_batches_without_rows_and_with_rows_for_some_queues_alone_are_complete(
    shard: ServedShard, topic: str
) -> None:
    assert commit(shard, topic, 0, range(0)) == (0, False)
    assert commit(shard, topic, 1, range(1)) == (1, False)
    assert commit(shard, topic, 2, range(1, 3)) == (2, False)
    assert commit(shard, topic, 5, range(3, 6)) == (3, False)
    # Once more without rows, which are the same rows.
    assert commit(shard, topic, 0, range(0)) == (0, False)
    assert numbers(shard, topic) == list(range(6))


def test_a_batch_that_the_query_has_passed_over_is_refused(shard: ServedShard, topic: str) -> None:
    commit(shard, topic, 3, range(3))
    commit(shard, topic, 5, range(3, 6))
    with pytest.raises(Rejected, match=f"batch 4 of {topic} was passed over"):
        commit(shard, topic, 4, range(6, 9))
    assert numbers(shard, topic) == list(range(6))


def test_a_batch_that_was_decided_before_batches_shared_producers_is_stored_once(
    shard: ServedShard, topic: str
) -> None:
    routes = Routes.of(shard.cluster)
    Committer(routes).commit(f"{topic}/7", stage(shard, topic, range(6)), takes_other_rows=True)
    assert commit(shard, topic, 7, range(6)) == (6, True)
    assert commit(shard, topic, 8, range(6, 12)) == (6, False)
    assert numbers(shard, topic) == list(range(12))


def test_a_batch_with_too_many_rows_for_its_sequences_has_producers_of_its_own(
    shard: ServedShard, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(shard, topic, 0, range(6))
    monkeypatch.setattr(stream_batches, "ROWS_MAX", 4)
    assert commit(shard, topic, 1, range(6, 26)) == (20, False)
    # Repeated it has fewer rows, or the batch before has more.
    assert commit(shard, topic, 1, range(6, 12)) == (20, True)
    assert commit(shard, topic, 0, range(30)) == (6, True)
    assert commit(shard, topic, 2, range(26, 32)) == (6, False)
    assert numbers(shard, topic) == list(range(32))


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_a_batch_whose_commit_ended_in_the_middle_is_completed_with_the_next_one(
    shard: ServedShard, topic: str, calls: int, is_sent: bool
) -> None:
    commit(shard, topic, 0, range(9))
    routes = Routes.of(shard.cluster)
    ending: Any = EndingRoutes(routes, calls, is_sent=is_sent)
    ending.cluster_id = routes.cluster_id
    with pytest.raises(KeyboardInterrupt):
        commit(shard, topic, 1, range(9, 18), ending)
    # The program goes on, in another process.
    committer_module._complete.clear()
    commit(shard, topic, 2, range(18, 27))
    is_decided = calls > 0 or is_sent
    expected = list(range(27)) if is_decided else [*range(9), *range(18, 27)]
    assert numbers(shard, topic) == expected
    if is_decided:
        assert commit(shard, topic, 1, range(9, 18)) == (9, True)
    assert numbers(shard, topic) == expected


def test_decisions_and_rows_of_batches_are_known_after_a_restart(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer_module, "_complete", {})
    with ServedShard(tmp_path / "shard") as shard:
        shard.start_flusher()
        shard.cluster.create_topic("t", queues=3)
        for number in range(3):
            commit(shard, "t", number, range(9 * number, 9 * number + 9))
        shard.down()
        shard.up()
        assert commit(shard, "t", 2, range(18, 27)) == (9, True)
        assert commit(shard, "t", 1, range(9, 18)) == (9, True)
        assert commit(shard, "t", 3, range(27, 36)) == (9, False)
        assert numbers(shard, "t") == list(range(36))


def test_the_place_of_a_batch_and_its_producers_follow_from_its_query_and_number() -> None:
    first, last, next_ = (StreamBatch("q", number) for number in (0, BATCHES - 1, BATCHES))
    assert first.decisions_producer_id == last.decisions_producer_id
    assert first.rows_producer_id != first.decisions_producer_id
    assert last.rows_producer_id != next_.rows_producer_id
    assert (first.place, last.place, next_.place) == (0, BATCHES - 1, 0)
    assert last.first_sequence + stream_batches.ROWS_MAX == 1 << 36
    assert StreamBatch("q", 300).at(7) == StreamBatch("q", 263)


@pytest.mark.parametrize("batch", ["q/1", ["q"], ["q", -1], [1, 1], ["q", "1"]])
def test_a_batch_that_is_none_is_refused(shard: ServedShard, batch: Any) -> None:
    decision = {"write_id": "w", "staged_ms": 1, "batch": batch}
    with pytest.raises(Rejected, match="batch is"):
        Routes.of(shard.cluster).call(0, "decide_write", {"decision": decision})


def test_what_a_client_says_of_the_decision_before_does_not_count(
    shard: ServedShard, topic: str
) -> None:
    # The first one would lead to itself.
    staged = stage(shard, topic, range(3)).to_json()
    decision = {"write_id": f"{topic}/3", "batch": [topic, 3], "previous": 1 << 40, **staged}
    answer = Routes.of(shard.cluster).call(0, "decide_write", {"decision": decision})
    assert answer["decision"]["previous"] == -1
    with pytest.raises(Rejected, match=f"batch 1 of {topic} was passed over"):
        commit(shard, topic, 1, range(3))


def test_a_number_of_a_complete_batch_that_is_none_is_refused(shard: ServedShard) -> None:
    decision = {"write_id": "w", "staged_ms": 1, "batch": ["q", 1]}
    with pytest.raises(Rejected, match="complete is"):
        Routes.of(shard.cluster).call(0, "decide_write", {"decision": decision, "complete": "1"})
