"""Consumer groups on three replicas in bad cases: leaders that die between a record and its answer, answers that are
lost, clocks that are wrong, and what a group refuses.

Members that are killed and stopped under load are in test_groups.py, a leader that is cut off in test_partitions.py.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from raymq.client.consume.consumer import Consumer
from raymq.client.messages.received import ReceivedMessage
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Fenced, OffsetOutOfRange, RayMQError, Rejected
from raymq.store.groups.members import TopicSubscription
from tests.support import armed_failpoints
from tests.support.armed_failpoints import ArmedFailpoints
from tests.support.bad_network import FATES, AheadClock, BadNetwork
from tests.support.group_members import (
    Entry,
    MemberProcess,
    RawMember,
    check_histories,
    read_as_member,
)
from tests.support.lean_ray import LEAN_WITH_CLIENT
from tests.support.replicated_shard import (
    QUEUES,
    ROLES,
    TOPIC,
    ReplicatedShard,
    check_logs,
    pause,
    started_shard,
    wait_for_leader,
)
from tests.support.skewed_clock import SkewedClock
from tests.support.waiting import until

pytestmark = pytest.mark.faults

NAME = "groupfaults"
#: longer than a fail-over takes
SESSION_S = 10.0
HOUR_MS = 3_600_000
YEARS_MS = 10 * 365 * 24 * HOUR_MS
MESSAGES = 40


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as found:
        yield Path(found)


@pytest.fixture(scope="module")
def clocks(place: Path) -> SkewedClock:
    return SkewedClock(place / "clocks", armed_failpoints.__name__)


@pytest.fixture(scope="module")
def failpoints(place: Path) -> ArmedFailpoints:
    return ArmedFailpoints(place / "armed")


@pytest.fixture(scope="module")
def shard(clocks: SkewedClock, failpoints: ArmedFailpoints) -> Iterator[ReplicatedShard]:
    variables = {**clocks.variables(), **failpoints.variables(), **LEAN_WITH_CLIENT}
    with started_shard(3, NAME, variables) as world:
        yield world


def call(shard: ReplicatedShard, op: str, args: dict[str, Any]) -> dict[str, Any]:
    """Call the leader, and repeat a call whose outcome is unknown, as a client does."""
    answers: list[dict[str, Any]] = []

    def ask() -> None:
        try:
            answers.append(shard.cluster.call(0, op, args, timeout_s=10))
        except RayMQError as error:
            if not error.retriable:
                raise
            pause()

    until(lambda: bool(answers), ask)
    return answers[0]


def raw_member(shard: ReplicatedShard, group: str, **facts: Any) -> RawMember:
    """A member whose requests a test sends by hand."""
    facts = {"session_timeout_ms": 60_000, **facts}
    return RawMember(lambda op, args: call(shard, op, args), group, TOPIC, **facts)


def owners(shard: ReplicatedShard, group: str) -> dict[int, tuple[str, int]]:
    """Queue -> its member and the number of its grant, as the coordinator knows."""
    found = call(shard, "describe_group", {"group": group})
    return {each["queue_id"]: (each["member"], each["number"]) for each in found["queues"]}


def numbers(consumers: Sequence[Consumer]) -> dict[int, int]:
    """Queue -> number of its grant, as members believe. Raises: AssertionError when two believe to have a queue."""
    found: dict[int, int] = {}
    for consumer in consumers:
        for (_, queue), number in consumer.assignment().items():
            assert queue not in found, "a queue has two owners"
            found[queue] = number
    return found


def poll_each(consumers: Sequence[Consumer]) -> None:
    for consumer in consumers:
        consumer.poll(100, 0.05)


@contextlib.contextmanager
def sharing(shard: ReplicatedShard, group: str, count: int = QUEUES) -> Iterator[list[Consumer]]:
    """Members that share the queues: each has one, as a rule."""
    with contextlib.ExitStack() as stack:
        consumers = [
            stack.enter_context(
                shard.cluster.consumer(
                    TOPIC, group=group, start="earliest", session_timeout_s=SESSION_S
                )
            )
            for _ in range(count)
        ]
        until(
            lambda: (
                len(numbers(consumers)) == QUEUES
                and max(len(each.assignment()) for each in consumers) <= -(-QUEUES // count)
            ),
            lambda: poll_each(consumers),
        )
        yield consumers


def put(shard: ReplicatedShard, count: int) -> None:
    """Put so many messages into each queue."""
    with shard.cluster.producer(acks="quorum") as producer:
        for number in range(count):
            for queue in range(QUEUES):
                producer.send(TOPIC, b"%d" % number, queue_id=queue)


def ends(shard: ReplicatedShard) -> dict[int, int]:
    """Queue -> its end."""
    found = shard.cluster.describe_topic(TOPIC)["queues"]
    return {each["queue_id"]: each["max_offset"] for each in found}


def offsets(shard: ReplicatedShard, group: str) -> dict[int, int]:
    """Queue -> committed offset."""
    found = call(shard, "offsets", {"group": group, "topic": TOPIC})
    return {queue: int(found.get(str(queue), 0)) for queue in range(QUEUES)}


def processes(shard: ReplicatedShard, replica: int) -> list[int]:
    """The pids of a replica whose roles all work."""
    found: list[int] = []

    def look() -> None:
        leases = [shard.lease(replica, role) for role in ROLES]
        found[:] = [lease["pid"] for lease in leases if lease]
        pause()

    until(lambda: len(found) == len(ROLES), look)
    return found


# --- leaders that die between a record and its answer ---------------------------------------------


@pytest.mark.parametrize(
    "point",
    ["groups.appended", pytest.param("groups.confirmed", marks=pytest.mark.thorough)],
)
def test_a_coordinator_that_dies_before_its_answer_moves_no_queue(
    shard: ReplicatedShard, failpoints: ArmedFailpoints, point: str
) -> None:
    group = point.replace(".", "-")
    with sharing(shard, group) as consumers:
        before, owned = owners(shard, group), numbers(consumers)
        epoch = shard.status(wait_for_leader(shard))["epoch"]
        # It gets no queue: the others have one each.
        late = raw_member(shard, group)
        beat = late.next_beat()
        failpoints.arm(point)
        first = late.send(beat)
        assert not failpoints.is_armed(point)
        assert shard.status(wait_for_leader(shard))["epoch"] > epoch
        assert late.send(beat) == first, "a repeated request gets another answer"
        assert first["assignment"] == {}
        assert owners(shard, group) == before
        until(lambda: len(numbers(consumers)) == QUEUES, lambda: poll_each(consumers))
        assert numbers(consumers) == owned


def test_a_shard_that_dies_after_a_claim_gives_the_queue_to_the_member_that_claimed_it(
    shard: ReplicatedShard, failpoints: ArmedFailpoints
) -> None:
    put(shard, 3)
    member = raw_member(shard, "claims")
    member.beat()
    assert len(member.numbers) == QUEUES
    failpoints.arm("groups.claim_appended")
    first = member.claim()
    assert not failpoints.is_armed("groups.claim_appended")
    assert first == {"offsets": {}, "fenced": {}} == member.claim()
    assert member.commit({0: 2}) == {"fenced": {}}
    assert member.claim() == {"offsets": {"0": 2}, "fenced": {}}

    # Another one that names these numbers is no owner.
    other = raw_member(shard, "claims")
    other.numbers = dict(member.numbers)
    assert set(other.claim()["fenced"]) == set(map(str, range(QUEUES)))
    assert member.commit({0: 3}) == {"fenced": {}}


# --- answers that are lost ------------------------------------------------------------------------


def test_requests_and_answers_that_are_lost_doubled_and_30_s_late_break_no_promise(
    shard: ReplicatedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = BadNetwork(3)
    network.install(monkeypatch)
    is_over = threading.Event()
    histories: list[list[Entry]] = [[], []]
    failures: list[BaseException] = []

    def run(entries: list[Entry]) -> None:
        clock = AheadClock()
        try:
            with Consumer(
                shard.cluster, TOPIC, group="lost", start="earliest", clock=clock
            ) as consumer:
                network.late_for(consumer._routes, clock)
                read_as_member(consumer, entries, is_over)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(entries,)) for entries in histories]
    for thread in threads:
        thread.start()
    try:
        for _ in range(MESSAGES):
            put(shard, 1)
        wanted = ends(shard)
        until(lambda: offsets(shard, "lost") == wanted or bool(failures), pause)
        network.mend()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert network.fates.keys() == set(FATES), "not all faults happened"
    check_histories(histories, wanted, offsets(shard, "lost"))


# --- instances and refusals -----------------------------------------------------------------------


@pytest.mark.thorough
def test_the_older_of_two_processes_of_an_instance_is_fenced_for_good(
    shard: ReplicatedShard,
) -> None:
    def consumer(**options: Any) -> Consumer:
        made: Consumer = shard.cluster.consumer(TOPIC, group="static", start="earliest", **options)
        return made

    with consumer(instance_id="i") as older, consumer() as other:
        until(
            lambda: len(numbers([older, other])) == QUEUES and len(other.assignment()) == 1,
            lambda: poll_each([older, other]),
        )
        kept, others = set(older.assignment()), other.assignment()
        with consumer(instance_id="i") as newer:
            fenced: list[Fenced] = []

            def poll() -> None:
                try:
                    older.poll(1, 0.05)
                except Fenced as error:
                    fenced.append(error)

            until(lambda: bool(fenced), poll)
            with pytest.raises(Fenced, match="instance_id 'i'"):
                older.poll(1, 0.05)
            until(lambda: set(newer.assignment()) == kept, lambda: poll_each([newer, other]))
            assert other.assignment() == others, "a queue of another member has moved"


def test_a_group_refuses_what_would_break_it_and_says_why(shard: ReplicatedShard) -> None:
    put(shard, 2)
    with sharing(shard, "strict", 1) as (consumer,):
        manual = shard.cluster.consumer(TOPIC, group="strict", queues=[0], start="earliest")
        with manual, pytest.raises(Rejected, match="belongs to member") as refused:
            manual.commit({0: 1})
        assert refused.value.field == "offsets"

        with pytest.raises(Rejected, match="All members of a group have one filter") as refused:
            shard.cluster.consumer(TOPIC, group="strict", start="earliest", tags="a")
        assert refused.value.field == "filter"

        with pytest.raises(RayMQError, match="missing"):
            shard.cluster.consumer("missing", group="strict", start="earliest")

        with pytest.raises(OffsetOutOfRange):
            consumer.commit({0: ends(shard)[0] + 1})
        consumer.commit({0: 2})
        # The group goes on.
        assert offsets(shard, "strict")[0] == 2
        assert len(consumer.assignment()) == QUEUES


def test_a_member_after_the_last_one_of_a_group_is_refused(shard: ReplicatedShard) -> None:
    members = [raw_member(shard, "full") for _ in range(2_001)]
    beats = [each.next_beat() for each in members]
    answers = call(shard, "group_beat", {"beats": beats})["answers"]
    refused = [each["error"] for each in answers if "error" in each]
    assert len(refused) == 1
    assert refused[0]["kind"] == "Rejected"
    assert "the limit is 2000" in refused[0]["message"]


def test_a_topic_that_a_member_names_before_it_exists_is_read_when_it_does(
    shard: ReplicatedShard,
) -> None:
    early = raw_member(shard, "early", subscription=TopicSubscription((TOPIC, "later")))
    early.beat()
    assert len(early.numbers) == QUEUES
    shard.cluster.create_topic("later", queues=2)
    answer = early.send(early.next_beat())
    assert answer["assignment"]["later"][0] == [0, 1]


# --- clocks ---------------------------------------------------------------------------------------


def test_wall_clocks_that_are_wrong_by_an_hour_or_ten_years_move_no_queue(
    shard: ReplicatedShard, clocks: SkewedClock, place: Path
) -> None:
    """The clocks of the leader's processes and of one of two members, ahead and behind."""
    environment = {**os.environ, **clocks.variables()}
    url = str(shard.paths.data_dir)
    right, wrong = (
        MemberProcess(url, TOPIC, "clocks", place / name, environment)
        for name in ("right", "wrong")
    )
    try:
        until(
            lambda: (
                right.queues() | wrong.queues() == set(range(QUEUES))
                and not right.queues() & wrong.queues()
            ),
            pause,
        )
        before = owners(shard, "clocks")
        pids = [*processes(shard, wait_for_leader(shard)), wrong.process.pid]
        for ms in (HOUR_MS, -HOUR_MS, YEARS_MS, -YEARS_MS):
            clocks.set(pids, ms)
            put(shard, 2)
            wanted = ends(shard)
            until(lambda wanted=wanted: offsets(shard, "clocks") == wanted, pause)  # type: ignore[misc]
            assert owners(shard, "clocks") == before, ms
        clocks.set([], 0)
        # The leader's clock really was that wrong: store times never go back.
        newest = [message.store_time_ms for message in newest_messages(shard)]
        assert max(newest) > Clock().now_ms() + YEARS_MS - HOUR_MS
        committed = offsets(shard, "clocks")
        histories = [right.history(), wrong.history()]
        check_histories(histories, committed, offsets(shard, "clocks"))
        assert not any(line[0] == "fenced" for each in (right, wrong) for line in each.lines())
    finally:
        right.end()
        wrong.end()


def newest_messages(shard: ReplicatedShard) -> list[ReceivedMessage]:
    """The last message of each queue."""
    found = [
        shard.cluster.message(TOPIC, queue, offset - 1) for queue, offset in ends(shard).items()
    ]
    return [each for each in found if each is not None]


def test_the_logs_are_the_same_bytes_after_all_of_it(shard: ReplicatedShard) -> None:
    end = shard.status(wait_for_leader(shard))["appended"]
    until(
        lambda: shard.says(wait_for_leader(shard), lambda facts: facts["confirmed"] >= end), pause
    )
    assert check_logs(shard) >= end
