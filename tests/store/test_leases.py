"""Leases in a store: their records, their copies, and what a crash leaves of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from raymq.client.messages.keys import BASE64_KEY, TEXT_KEY
from raymq.store import EmbeddedStore, InnerMessage, StoreConfig
from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files
from raymq.store.base.format import SCHEDULE_TOPIC
from raymq.store.engine.message_store import MessageStore
from raymq.store.groups.claims import Claim, claim_value
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.lease_table import LEASE, SETTLE, LeaseTable
from raymq.store.groups.leases.options import LeaseOptions
from raymq.store.groups.leases.requests import (
    LeaseAnswer,
    LeaseRequest,
    SettleAnswer,
    SettleItem,
    SettleRequest,
    offsets_of,
)
from raymq.store.records import properties, rows
from raymq.store.records.dead_letter import DEAD_HOLDER, DEAD_REASON
from raymq.store.services.lease_offers import KEY_PROPERTIES
from raymq.store.services.leases import LeaseService
from raymq.store.state.shard_state import INTERNAL_TOPIC, PROGRESS, bundle_range
from raymq.store.state.topics import dlq_topic, retry_topic
from tests.store.test_followed_log import confirm_upto, open_follower, open_leader, send, state_of
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.engine import Engine
from tests.support.simulated_disk import SimulatedDisk

KEY = ("t", 0)
MINUTE = 60_000


class Workers:
    """A session of a group on a store."""

    def __init__(self, store: MessageStore, group: str = "g", **changed: object) -> None:
        self.group = group
        self.service = LeaseService(store)
        self.service.configure(group, LeaseOptions(**changed))  # type: ignore[arg-type]
        self.requests = self.settled = 0

    def lease(self, count: int, *keys: tuple[str, int], start: str = "earliest") -> LeaseAnswer:
        self.requests += 1
        request = LeaseRequest(b"s", self.requests, count)
        found = self.service.lease(self.group, request, keys or (KEY,), start=start).plan.answer
        assert isinstance(found, LeaseAnswer)
        return found

    def offsets(self, count: int, *keys: tuple[str, int], start: str = "earliest") -> list[int]:
        parts = self.lease(count, *keys, start=start).parts
        return [offset for part in parts for offset in part.offsets.tolist()]

    def settle(
        self,
        number: int,
        offsets: list[int],
        verdict: SettleOutcome = SettleOutcome.ACKED,
        delay_ms: int | None = None,
        key: tuple[str, int] = KEY,
    ) -> list[int]:
        """Returns: the refused offsets."""
        self.settled += 1
        item = SettleItem(number, key, offsets_of(offsets), verdict, delay_ms)
        request = SettleRequest(b"s", self.settled, [item])
        found = self.service.settle(self.group, request).plan.answer
        assert isinstance(found, SettleAnswer)
        return [offset for each in found.refused for offset in each.offsets.tolist()]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    put(made, 10)
    yield made
    made.store.close()


def put(engine: Engine, count: int, queue_id: int = 0) -> None:
    for number in range(count):
        engine.store.put_inner([InnerMessage("t", queue_id, b"work %d" % number, {"KEYS": "k"})])
    engine.confirm()


def test_a_lease_and_its_settlement_are_records_and_the_low_mark_is_the_committed_offset(engine):
    workers = Workers(engine.store)
    assert workers.offsets(4) == [0, 1, 2, 3]
    assert engine.store.state.offsets["g", "t"] == {0: 0}
    assert workers.settle(1, [0, 1, 3]) == []
    assert engine.store.state.offsets["g", "t"] == {0: 2}
    assert workers.settle(1, [2, 3]) == [3]
    assert engine.store.state.offsets["g", "t"] == {0: 4}
    # Readers see it from its confirmation on.
    assert engine.store.state.confirmed_offsets("g", "t", engine.store.log.confirmed) == {}
    engine.confirm()
    assert engine.store.state.confirmed_offsets("g", "t", engine.store.log.confirmed) == {0: 4}


def test_leases_last_over_a_crash_and_over_the_end_of_a_file(engine):
    workers = Workers(engine.store)
    workers.offsets(4)
    workers.settle(1, [1])
    engine.store.begin_next_file()
    workers.settle(1, [2], SettleOutcome.NACKED, 5_000)
    engine.crash()

    again = Workers(engine.store)
    again.requests, again.settled = workers.requests, workers.settled
    assert again.offsets(2) == [4, 5]
    engine.clock.advance(5_000)
    assert again.offsets(2) == [2, 6]
    assert again.settle(1, [0, 2, 3]) == [2]
    engine.clock.advance(2 * MINUTE)
    assert again.offsets(9) == [2, 4, 5, 6, 7, 8, 9]


def test_a_dead_message_is_copied_with_what_is_known_of_it(engine):
    workers = Workers(engine.store, max_attempts=2)
    workers.offsets(3)
    assert workers.settle(1, [0], SettleOutcome.REJECTED) == []
    workers.settle(1, [1], SettleOutcome.NACKED, 0)
    workers.offsets(1)
    workers.settle(2, [1], SettleOutcome.NACKED)
    # The last one ends without a word of its worker, twice.
    engine.clock.advance(2 * MINUTE)
    assert workers.offsets(1) == [2]
    engine.clock.advance(2 * MINUTE)
    assert workers.offsets(1) == [3]

    found = engine.read(dlq_topic("g"), 0)
    assert [each.body for each in found] == [b"work 0", b"work 1", b"work 2"]
    assert [each.reconsume_times for each in found] == [1, 2, 2]
    assert [each.properties[DEAD_REASON] for each in found] == [
        "rejected",
        "its last attempt failed",
        "its last lease ended",
    ]
    assert {each.properties[DEAD_HOLDER] for each in found} == {b"s".hex()}
    assert found[0].properties["RETRY_TOPIC"] == "t"
    assert engine.store.state.offsets["g", "t"] == {0: 3}


def test_a_long_delay_moves_a_message_to_the_retry_topic_where_its_attempts_go_on(engine):
    workers = Workers(engine.store)
    workers.offsets(1)
    workers.settle(1, [0], SettleOutcome.NACKED, 2 * MINUTE)
    engine.confirm()
    # Level 6: 2 minutes.
    (waiting,) = engine.read(SCHEDULE_TOPIC, 5)
    assert waiting.properties["REAL_TOPIC"] == retry_topic("g")
    assert (waiting.reconsume_times, waiting.body) == (1, b"work 0")

    (delivered,) = engine.store.put_inner(
        [InnerMessage(retry_topic("g"), 0, b"work 0", reconsume_times=1)]
    )
    engine.confirm()
    answer = workers.lease(1, (retry_topic("g"), 0), KEY)
    (part,) = answer.parts
    assert part.offsets.tolist() == [delivered.first_offset]
    assert part.attempts.tolist() == [2]


def test_workers_begin_where_the_group_or_they_say(engine):
    engine.store.commit_offsets("g", "t", {0: 7})
    assert Workers(engine.store).offsets(2) == [7, 8]
    assert Workers(engine.store, "late").offsets(2, start="latest") == []
    put(engine, 2)
    assert Workers(engine.store, "late").offsets(2) == [10, 11]


def test_a_queue_that_a_member_has_is_not_leased(engine):
    engine.store.claims.apply("CLAIM", claim_value("g", "t", {0: Claim(3, "a" * 32)}))
    with pytest.raises(Rejected, match="stream: workers need another group"):
        Workers(engine.store).offsets(1)
    with pytest.raises(Rejected):
        Workers(engine.store).offsets(1, ("missing", 0))
    with pytest.raises(Rejected, match="the order 'name'"):
        Workers(engine.store, order="name")


def test_a_deleted_topic_takes_its_leases_along(engine):
    workers = Workers(engine.store)
    workers.offsets(2)
    engine.store.topics.delete("t")
    assert workers.settle(1, [0]) == [0]
    assert not engine.store.leases.is_used("g", "t")


def test_messages_of_one_key_go_out_in_their_order_also_with_a_new_leader(engine):
    for key in (b"x", b"x", b"y", b"x", b"y"):
        name = "__SHARDINGKEY" if key == b"x" else "__KEY_B64"
        engine.store.put_inner([InnerMessage("t", 1, key, {name: key.decode()})])
    engine.confirm()
    assert KEY_PROPERTIES == (TEXT_KEY, BASE64_KEY)
    queue = ("t", 1)
    workers = Workers(engine.store, order="key")
    assert workers.offsets(1, queue) == [0]
    assert workers.offsets(1, queue) == [2]
    engine.crash()

    again = Workers(engine.store, order="key")
    again.requests, again.settled = workers.requests, workers.settled
    assert again.settle(2, [2], key=queue) == []
    assert again.offsets(9, queue) == [4]
    assert again.settle(1, [0], key=queue) == []
    assert again.offsets(9, queue) == [1, 3]
    assert again.settle(4, [3], key=queue) == [3]
    assert again.settle(4, [1, 3], key=queue) == []
    assert again.settle(3, [4], key=queue) == []
    assert engine.store.state.offsets["g", "t"][1] == 5


def test_an_operator_sets_where_workers_go_on(engine):
    workers = Workers(engine.store)
    workers.offsets(5)
    workers.service.reset("g", KEY, 2)
    assert engine.store.state.offsets["g", "t"] == {0: 2}
    assert workers.settle(1, [2]) == [2]
    assert workers.offsets(1) == [2]


def test_copies_that_are_too_large_together_are_appended_in_several_steps(tmp_path):
    engine = Engine(tmp_path)
    body = b"x" * (engine.store.config.bundle_bytes_max // 3)
    for _ in range(5):
        engine.store.put_inner([InnerMessage("t", 0, body)])
    engine.confirm()
    workers = Workers(engine.store, max_attempts=1)
    workers.offsets(5)
    engine.clock.advance(2 * MINUTE)
    for _ in range(5):
        workers.offsets(1)
        engine.confirm()
    assert len(engine.read(dlq_topic("g"), 0)) == 5
    assert engine.store.state.offsets["g", "t"] == {0: 5}
    engine.store.close()


def test_an_embedded_store_answers_when_all_is_durable(tmp_path):
    with closing(EmbeddedStore(tmp_path, config=StoreConfig(segment_size_bytes=1 << 20))) as store:
        store.create_topic("t", 1)
        for _ in range(3):
            store.put_message(InnerMessage("t", 0, b"work"))
        request = LeaseRequest(b"s", 1, 2)
        leased = store.lease("g", request, [KEY])
        assert leased is not None
        assert leased.parts[0].offsets.tolist() == [0, 1]
        again = store.lease("g", request, [KEY])
        assert again is not None
        assert again.number == leased.number
        assert store.lease("g", LeaseRequest(b"s", 0, 2), [KEY]) is None
        item = SettleItem(leased.number, KEY, offsets_of([0, 1]), SettleOutcome.ACKED)
        settled = store.settle("g", SettleRequest(b"s", 1, [item]))
        assert settled == SettleAnswer(1, [])
        assert store.ends.synced == store.store.log.end


# --- a follower that leads ------------------------------------------------------------------------


def test_a_follower_that_leads_has_the_leases_and_gives_them_their_whole_time_again():
    leader, follower = open_leader(), open_follower(SimulatedDisk())
    for number in range(6):
        leader.put_inner([InnerMessage("t", 0, b"work %d" % number)])
    confirm(leader)
    workers = Workers(leader)
    workers.offsets(4)
    workers.settle(1, [0, 2])
    workers.settle(1, [1], SettleOutcome.REJECTED)
    confirm(leader)
    confirm_upto(follower, send(leader, follower))
    assert state_of(follower) == state_of(leader)
    # It is not confirmed yet, and comes with the log.
    workers.settle(1, [3])
    send(leader, follower)

    follower.lead(2)
    confirm(follower)
    again = Workers(follower)
    again.service.activate()
    again.requests, again.settled = workers.requests, workers.settled
    assert again.settle(1, [3]) == [3]
    assert again.offsets(9) == [4, 5]
    assert follower.state.offsets["g", "t"] == {0: 4}
    assert count(follower, dlq_topic("g")) == 1


def test_a_machine_of_an_earlier_leadership_is_not_used_again(engine):
    workers = Workers(engine.store, backoff_ms=(0,))
    workers.offsets(1)
    engine.clock.advance(MINUTE - 1)
    workers.service.activate()
    workers.offsets(1)
    engine.clock.advance(MINUTE - 1)
    # Its time began again with this leadership, the first request of which came a moment ago.
    assert workers.offsets(1) == [2]
    engine.clock.advance(1)
    assert workers.offsets(1) == [0]


# --- a crash at each record -----------------------------------------------------------------------


def work(workers: Workers, engine: Engine) -> None:
    """Leases, every verdict, copies, and another file."""
    workers.offsets(4)
    workers.settle(1, [0, 2])
    workers.settle(1, [1], SettleOutcome.NACKED, 0)
    workers.settle(1, [3], SettleOutcome.REJECTED)
    workers.offsets(2)
    workers.settle(2, [1], SettleOutcome.NACKED, 2 * MINUTE)
    workers.settle(2, [4], SettleOutcome.RETURNED)
    workers.settle(2, [4])
    workers.offsets(3)
    engine.clock.advance(2 * MINUTE)
    workers.offsets(2)
    engine.clock.advance(2 * MINUTE)
    workers.offsets(3)


def log_records(store: MessageStore, start: int) -> list[tuple[int, int, str, bytes]]:
    """Start, end, kind and body of each record from `start` on. Kind: empty unless it is a state record."""
    view, base, walk = store.log.reads.walk(
        start, store.log.end, check_crc=False, limit=rows.DECODED_ROWS_MAX
    )
    columns = (*rows.RUN_COLUMNS, "properties", "body")
    found = []
    for run in rows.runs(view, base, walk.positions, walk.sizes, columns=columns):
        texts = run.batch.column("properties").to_pylist()
        bodies = run.batch.column("body").to_pylist()
        for text, body, at, size in zip(
            texts, bodies, run.positions.tolist(), run.sizes.tolist(), strict=True
        ):
            is_state = run.topic == INTERNAL_TOPIC
            kind = properties.decode(text).get(properties.TAGS, "") if is_state else ""
            found.append((at, at + size, kind, body))
    return sorted(found)


def folded(records: list[tuple[int, int, str, bytes]], end: int) -> LeaseTable:
    """The leases of a log that ends there, without half a bundle."""
    table = LeaseTable()
    for at, _, kind, body in records:
        if at >= end or (kind == PROGRESS and bundle_range(at, body).is_cut_at(end)):
            break
        if kind in (LEASE, SETTLE):
            table.apply_packed(body)
    return table


class AfterReboot(Files):
    """Files after a power loss, which may have taken what was not synced."""

    def boot_id(self) -> str:
        return "after the power loss"


def count(store: MessageStore, topic: str) -> int:
    """How many messages the queues of a topic have."""
    keys = [key for key in store.queues() if key[0] == topic]
    ranges = [store.queue_range(*key) for key in keys]
    return sum(end - first for first, end in ranges)


def test_a_crash_at_each_record_leaves_the_fold_of_the_others(tmp_path):
    engine = Engine(tmp_path / "store")
    put(engine, 10)
    store = engine.store
    workers = Workers(store, max_attempts=2, backoff_ms=(0,))
    workers.offsets(0)
    engine.confirm()
    start = store.log.end
    work(workers, engine)

    records = log_records(store, store.log.start)
    assert records[-1][1] == store.log.end
    ends = [start, *(end for _, end, _, _ in records if end > start)]
    kinds = [kind for at, _, kind, _ in records if at >= start]
    assert kinds.count(PROGRESS) >= 3
    assert kinds.count(SETTLE) >= 7
    store.abandon()

    for end in ends:
        root = tmp_path / "crashed"
        shutil.copytree(tmp_path / "store", root)
        (file,) = (root / "commitlog").iterdir()
        with file.open("r+b") as opened:
            opened.seek(end)
            opened.write(b"\0" * (engine.config.segment_size_bytes - end))

        files = AfterReboot()
        again = MessageStore.open(root, config=engine.config, files=files, clock=ManualClock())
        confirm(again)
        wanted = folded(records, end)
        assert list(again.leases.packed_records()) == list(wanted.packed_records()), end
        # No copy without its settlement, and no settlement without its copy.
        counts = wanted.group("g").counts
        assert count(again, dlq_topic("g")) == counts.get(SettleOutcome.DEAD, 0)
        assert count(again, SCHEDULE_TOPIC) == counts.get(SettleOutcome.MOVED, 0)
        assert again.state.offsets["g", "t"] == {0: wanted.groups["g"].queues[KEY].low}
        again.close()
        shutil.rmtree(root)
