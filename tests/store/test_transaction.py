"""Transactions on the engine: seen when committed, once, whatever dies when."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.format import HALF_TOPIC, SYS_COMMITTED
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.put.inner_message import InnerMessage
from raymq.store.services.resolutions import Resolution
from raymq.store.services.stored_message import StoredMessage, read
from raymq.store.services.transaction import (
    DISCARD_TOPIC,
    GROUP,
    OP_TOPIC,
)
from raymq.store.tools.inspect import verify
from tests.support.engine import CONFIG, Engine

DAY_MS = 86_400_000


@pytest.fixture
def engine(tmp_path: Path):
    made = Engine(tmp_path)
    yield made
    made.confirm()
    made.store.close()
    assert verify(tmp_path) == []


def test_a_half_message_is_invisible_until_it_is_committed(engine: Engine) -> None:
    offset = engine.prepare(b"x", TAGS="tag", PGROUP="g")
    assert engine.bodies() == []
    (half,) = engine.read(HALF_TOPIC, 0)
    assert (half.properties["REAL_TOPIC"], half.properties["REAL_QID"]) == ("t", "1")
    assert half.properties["__transactionId__"] == half.properties["UNIQ_KEY"]
    engine.service.commit(offset, group="g")
    (message,) = engine.read()
    assert (message.body, message.flag, message.sys_flag) == (b"x", 3, 0x1 | SYS_COMMITTED)
    assert message.prepared_transaction_offset == half.physical_offset
    assert (message.properties["TAGS"], message.properties["TRAN_MSG"]) == ("tag", "true")
    assert message.born_time_ms == half.born_time_ms
    (op,) = engine.read(OP_TOPIC, 0)
    assert (op.body, op.properties["TAGS"]) == (b"0,", "d")


def test_a_rolled_back_message_never_comes(engine: Engine) -> None:
    offset = engine.prepare(b"x")
    engine.service.rollback(offset)
    assert engine.bodies() == []
    with pytest.raises(Rejected, match="ROLLBACK"):
        engine.service.commit(offset)


def test_a_commit_that_is_repeated_delivers_nothing_more(engine: Engine) -> None:
    offset = engine.prepare(b"x")
    first = engine.service.commit(offset)
    for _ in range(2):
        again = engine.service.commit(offset)
        assert again.duplicates == 1
        assert again.end_offset >= first.end_offset
        engine.crash()
    assert engine.bodies() == [b"x"]
    with pytest.raises(Rejected, match="COMMIT"):
        engine.service.rollback(offset)


def test_wrong_calls_are_refused(engine: Engine) -> None:
    with pytest.raises(Rejected, match="half message 0 does not exist"):
        engine.service.commit(0)
    with pytest.raises(Rejected, match="does not exist"):
        engine.service.prepare(InnerMessage("nope", 0, b""))
    with pytest.raises(Rejected, match="queue 2"):
        engine.service.prepare(InnerMessage("t", 2, b""))
    offset = engine.prepare(b"x", PGROUP="g")
    with pytest.raises(Rejected, match="group 'g', not 'h'"):
        engine.service.commit(offset, group="h")
    half = engine.service.prepare(InnerMessage("t", 0, b"later"))
    with pytest.raises(Unavailable, match="not confirmed"):
        engine.service.commit(half.offset)


def test_open_halves_are_asked_for_when_they_are_old_enough(engine: Engine) -> None:
    for body, wait in ((b"a", "0"), (b"b", "0"), (b"c", "0"), (b"d", "3600")):
        engine.prepare(body, CHECK_IMMUNITY_TIME_IN_SECONDS=wait)
    answers = {b"a": Resolution.COMMIT, b"b": Resolution.ROLLBACK, b"c": Resolution.OPEN}
    seen = []

    def ask(half: StoredMessage) -> Resolution:
        seen.append(half.body)
        return answers[half.body]

    found = engine.service.check(ask)
    assert (seen, found) == ([b"a", b"b", b"c"], (3, 1, 1, 0))
    assert engine.bodies() == [b"a"]
    engine.crash()
    seen.clear()
    answers[b"c"] = Resolution.COMMIT
    assert engine.service.check(ask) == (1, 1, 0, 0)
    assert engine.bodies() == [b"a", b"c"]
    assert engine.store.state.offsets[GROUP, HALF_TOPIC] == {0: 3}


def test_a_half_message_waits_for_the_timeout_before_it_is_asked_for(tmp_path: Path) -> None:
    engine = Engine(tmp_path, timeout_ms=6_000)
    engine.prepare(b"x")
    engine.clock.advance(5_999)
    assert engine.service.check(lambda half: Resolution.COMMIT).asked == 0
    engine.clock.advance(1)
    assert engine.service.check(lambda half: Resolution.COMMIT).committed == 1
    engine.store.close()


@pytest.mark.parametrize("crashes", [False, True])
def test_half_messages_are_asked_for_after_the_clock_was_set_back(
    tmp_path: Path, crashes: bool
) -> None:
    engine = Engine(tmp_path, timeout_ms=6_000)
    engine.clock.jump_wall(30 * DAY_MS)
    engine.prepare(b"from the future")
    engine.clock.jump_wall(-30 * DAY_MS)
    engine.prepare(b"after it")
    if crashes:
        engine.crash()
    assert engine.service.check(lambda half: Resolution.COMMIT).asked == 0

    # Store times that are ahead of the wall clock grow a sixteenth slower.
    engine.clock.advance(6_000 * 16 / 15 + 10)
    assert engine.service.check(lambda half: Resolution.COMMIT).committed == 2
    assert engine.bodies() == [b"from the future", b"after it"]
    engine.store.close()


def test_a_half_message_checked_too_often_is_discarded_for_good(tmp_path: Path) -> None:
    engine = Engine(tmp_path, timeout_ms=0, check_max=3)
    offset = engine.prepare(b"x")
    for _ in range(3):
        assert engine.service.check(lambda half: Resolution.OPEN).asked == 1
        engine.crash()
    assert engine.service.check(lambda half: Resolution.OPEN).discarded == 1
    assert [message.body for message in engine.read(DISCARD_TOPIC, 0)] == [b"x"]
    assert engine.service.check(lambda half: Resolution.OPEN) == (0, 0, 0, 0)
    with pytest.raises(Rejected, match="DISCARD"):
        engine.service.commit(offset)
    assert not [key for key in engine.store.state.progress["transaction"] if "checks" in key]
    engine.store.close()


def test_a_half_message_resolved_during_its_check_is_resolved_once(engine: Engine) -> None:
    offset = engine.prepare(b"x", CHECK_IMMUNITY_TIME_IN_SECONDS="0")

    def ask(half: StoredMessage) -> Resolution:
        engine.service.commit(offset)
        return Resolution.COMMIT

    assert engine.service.check(ask).committed == 0
    assert engine.bodies() == [b"x"]


def test_op_records_of_rocketmq_count(engine: Engine) -> None:
    offsets = [engine.prepare(body) for body in (b"a", b"b", b"c")]
    engine.store.put_inner([InnerMessage(OP_TOPIC, 0, b"0,2,", {"TAGS": "d"})])
    engine.confirm()
    engine.service.take_over()
    assert engine.store.state.offsets[GROUP, HALF_TOPIC] == {0: 1}
    with pytest.raises(Rejected, match="DISCARD"):
        engine.service.commit(offsets[2])
    engine.service.commit(offsets[1])
    assert engine.bodies() == [b"b"]


def test_what_is_prepared_can_be_committed_however_large(engine: Engine) -> None:
    with pytest.raises(Rejected, match="half message makes"):
        engine.prepare(b"x" * (CONFIG.record_bytes_max - 1000))
    offset = engine.prepare(b"x" * (CONFIG.record_bytes_max - 2000))
    engine.service.commit(offset)
    assert [len(body) for body in engine.bodies()] == [CONFIG.record_bytes_max - 2000]


def test_a_half_message_that_cannot_be_committed_holds_up_no_other(engine: Engine) -> None:
    engine.store.put_inner([InnerMessage(HALF_TOPIC, 0, b"foreign", born_time_ms=1)])
    engine.confirm()
    engine.prepare(b"x", CHECK_IMMUNITY_TIME_IN_SECONDS="0")
    engine.clock.advance(7000)
    assert engine.service.check(lambda half: Resolution.COMMIT).committed == 1
    assert engine.bodies() == [b"x"]


def test_an_embedded_store_keeps_the_promise_of_each_step(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path, config=CONFIG)
    store.create_topic("t", 1)
    kept = store.prepare(InnerMessage("t", 0, b"kept"))
    dropped = store.prepare(InnerMessage("t", 0, b"dropped"))
    assert store.fetch("t", 0, 0).max_offset == 0
    store.rollback(dropped.offset)
    assert store.commit(kept.offset).end_offset <= store.store.log.synced
    store.fetch("t", 0, 0)
    assert [message.body for message in read(store.store, "t", 0, 0, max_records=9)[0]] == [b"kept"]
    store.close()
