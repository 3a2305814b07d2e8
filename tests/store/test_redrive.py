"""Dead letters that go back, in a store: with their settlement or not at all, whatever a crash leaves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.store import InnerMessage
from raymq.store.base.errors import Rejected
from raymq.store.engine.message_store import MessageStore
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.requests import offsets_of
from raymq.store.services.leases import LeaseService
from raymq.store.services.redrive import Redriven
from raymq.store.services.retry import put_retry
from raymq.store.services.stored_message import read
from raymq.store.state.topics import QueueKey, dlq_topic
from tests.store.test_leases import KEY, AfterReboot, Workers, log_records
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.engine import Engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    for number in range(6):
        made.store.put_inner(
            [InnerMessage("t", 0, b"work %d" % number, {"KEYS": "k", "WAIT": "true"}, flag=7)]
        )
    made.confirm()
    yield made
    made.store.close()


def bury(engine: Engine, *offsets: int) -> Workers:
    workers = Workers(engine.store)
    workers.lease(6)
    workers.settle(1, list(offsets), SettleOutcome.REJECTED)
    engine.confirm()
    return workers


def redrive(
    store: MessageStore, offsets: list[int], settle: int = 1, session: bytes = b"r", **more: object
) -> Redriven:
    service = LeaseService(store).redrives
    columns = {0: offsets_of(offsets)}
    return service.redrive("g", session, settle, columns, **more)  # type: ignore[arg-type]


def bodies(store: MessageStore, key: QueueKey = KEY, offset: int = 0) -> list[bytes]:
    found, _ = read(store, *key, offset, max_records=1_000)
    return [each.body for each in found]


def stays(done: Redriven) -> list[tuple[int, str]]:
    return [(each.offset, each.why) for each in done.stays]


def test_a_message_comes_back_as_it_was(engine: Engine) -> None:
    bury(engine, 3)
    done = redrive(engine.store, [0])
    assert (done.topics, done.stays) == ({"t": 1}, [])
    engine.confirm()
    (back,), _ = read(engine.store, *KEY, 6, max_records=10)
    (sent,), _ = read(engine.store, *KEY, 3, max_records=1)
    assert (back.body, back.flag, back.born_time_ms) == (sent.body, 7, sent.born_time_ms)
    assert back.reconsume_times == 0
    assert dict(back.properties) == {"KEYS": "k", "REDRIVES": "1"}


def test_each_dead_letter_goes_back_once(engine: Engine) -> None:
    bury(engine, 0, 1, 2, 3)
    done = redrive(engine.store, [1, 3])
    assert done.topics == {"t": 2}
    again = redrive(engine.store, [0, 1, 3, 4], session=b"other")
    assert again.topics == {"t": 1}
    assert stays(again) == [(1, "settled"), (3, "settled"), (4, "refused")]
    engine.confirm()
    assert bodies(engine.store, offset=6) == [b"work 1", b"work 3", b"work 0"]
    (queue,) = LeaseService(engine.store).redrives.queues("g")
    assert (queue.passed.tolist(), queue.first, queue.stop, queue.count) == ([2], 4, 4, 1)
    assert queue.oldest == queue.newest == 2


def test_a_repeated_call_gets_its_first_answer_also_from_another_leader(engine: Engine) -> None:
    bury(engine, 0, 1)
    first = redrive(engine.store, [0, 7])
    again = redrive(engine.store, [0, 7])
    assert (again.topics, again.stays) == (first.topics, first.stays) == ({"t": 1}, again.stays)
    engine.confirm()
    assert bodies(engine.store, offset=6) == [b"work 0"]
    redrive(engine.store, [1], settle=2)
    with pytest.raises(Rejected, match="newer request"):
        redrive(engine.store, [0])


def test_a_trial_changes_nothing(engine: Engine) -> None:
    bury(engine, 0, 1)
    redrive(engine.store, [0])
    end = engine.store.log.end
    done = redrive(engine.store, [0, 1], settle=9, is_trial=True)
    assert (done.topics, stays(done)) == ({"t": 1}, [(0, "settled")])
    assert engine.store.log.end == end


def test_what_cannot_go_back_stays_and_says_why(engine: Engine) -> None:
    put_retry(engine.store, "g", InnerMessage("", 0, b"of a client"), 0, is_ordered=True)
    gone = InnerMessage("", 0, b"x", {"RETRY_TOPIC": "gone"})
    put_retry(engine.store, "g", gone, 0, is_ordered=True)
    other = InnerMessage("", 0, b"y", {"RETRY_TOPIC": "t", "RETRY_QID": "9"})
    put_retry(engine.store, "g", other, 0, is_ordered=True)
    itself = InnerMessage("", 0, b"z", {"RETRY_TOPIC": dlq_topic("g")})
    put_retry(engine.store, "g", itself, 0, is_ordered=True)
    engine.confirm()
    done = redrive(engine.store, [0, 1, 2, 3])
    assert [(each.offset, each.why) for each in done.stays] == [
        (number, "refused") for number in range(4)
    ]
    for each, text in zip(
        done.stays,
        ["does not say", "gone does not exist", "no queue 9", "do not go to"],
        strict=True,
    ):
        assert text in each.text
    assert redrive(engine.store, [0, 1, 2, 3], settle=2, topic="t").topics == {"t": 4}


def test_one_call_takes_as_many_as_one_step_copies(engine: Engine) -> None:
    for number in range(70):
        message = InnerMessage("", 0, b"%d" % number, {"RETRY_TOPIC": "t", "RETRY_QID": "0"})
        put_retry(engine.store, "g", message, 0, is_ordered=True)
    engine.confirm()
    done = redrive(engine.store, list(range(70)))
    assert done.topics == {"t": 64}
    assert stays(done) == [(number, "later") for number in range(64, 70)]


def test_one_call_takes_as_many_bytes_as_one_append_may_have(engine: Engine) -> None:
    body = b"x" * (engine.store.config.bundle_bytes_max // 2)
    for _ in range(5):
        message = InnerMessage("", 0, body, {"RETRY_TOPIC": "t", "RETRY_QID": "0"})
        put_retry(engine.store, "g", message, 0, is_ordered=True)
        engine.confirm()
    left, settle = list(range(5)), 0
    while left:
        settle += 1
        done = redrive(engine.store, left, settle=settle)
        assert done.topics["t"] >= 1
        left = [offset for offset, why in stays(done) if why == "later"]
        engine.confirm()
    assert settle > 1
    assert engine.store.queue_range(*KEY)[1] == 11


def test_a_crash_leaves_the_copy_and_its_settlement_or_neither(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "store")
    for number in range(3):
        engine.store.put_inner([InnerMessage("t", 0, b"work %d" % number)])
    engine.confirm()
    bury(engine, 0, 1, 2)
    redrive(engine.store, [1])
    begin = engine.store.log.end
    redrive(engine.store, [0, 2], settle=2)
    end = engine.store.log.end
    engine.store.abandon()

    inside = [
        at for start, stop, _, _ in log_records_of(engine, tmp_path, begin) for at in (start, stop)
    ]
    for cut in sorted({begin, begin + 1, *inside, end - 1, end}):
        root = tmp_path / "crashed"
        shutil.copytree(tmp_path / "store", root)
        (file,) = (root / "commitlog").iterdir()
        with file.open("r+b") as opened:
            opened.seek(cut)
            opened.write(b"\0" * (engine.config.segment_size_bytes - cut))
        store = MessageStore.open(
            root, config=engine.config, files=AfterReboot(), clock=ManualClock()
        )
        confirm(store)
        (queue,) = LeaseService(store).redrives.queues("g")
        is_whole = cut == end
        assert bodies(store, offset=3) == [b"work 1", b"work 0", b"work 2"][: 3 if is_whole else 1]
        assert queue.count == (0 if is_whole else 2)
        # The call that got no answer is repeated.
        assert redrive(store, [0, 2], settle=2).topics == {"t": 2}
        confirm(store)
        assert sorted(bodies(store, offset=3)) == [b"work 0", b"work 1", b"work 2"]
        store.close()
        shutil.rmtree(root)


def log_records_of(engine: Engine, tmp_path: Path, start: int) -> list[tuple[int, int, str, bytes]]:
    """The records from a place on, of a copy of a store that is closed."""
    root = tmp_path / "looked-at"
    shutil.copytree(engine.root, root)
    store = MessageStore.open(root, config=engine.config, clock=ManualClock())
    confirm(store)
    found = log_records(store, start)
    store.close()
    return found


def test_workers_get_what_went_back(
    engine: Engine,
) -> None:
    workers = bury(engine, 2, 4)
    redrive(engine.store, [0, 1])
    engine.confirm()
    assert workers.offsets(10) == [6, 7]
