"""The half messages of a store that leads: prepared once, ended once, handed to one asker at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.store.base.errors import Rejected, TopicMissing, Unavailable
from raymq.store.base.format import HALF_TOPIC
from raymq.store.put.inner_message import InnerMessage
from raymq.store.services import half_messages
from raymq.store.services.half_messages import (
    CHECK_PAUSE_MS,
    HalfEnd,
    HalfMessages,
    HandedHalves,
    PreparedHalf,
)
from raymq.store.services.resolutions import Resolution
from raymq.store.services.transaction import DISCARD_TOPIC, GROUP
from raymq.store.tools.inspect import verify
from tests.support.engine import Engine

AGE_MS = 6_000
HOUR_MS = 3_600_000


class Shop:
    """A store with its half messages. All that is put is confirmed."""

    def __init__(self, root: Path) -> None:
        self.engine = Engine(root)
        self.lead()

    def lead(self) -> None:
        """Lead as a replica that has just got the log."""
        self.halves = HalfMessages(self.engine.store)
        self.halves.load()

    def prepare(self, body: bytes = b"x", group: str = "g", **properties: str) -> PreparedHalf:
        now_ms = self.engine.clock.now_ms()
        message = InnerMessage("t", 1, body, properties, born_time_ms=now_ms)
        half = self.halves.prepare(message, group)
        self.engine.confirm()
        return half

    def end(self, offset: int, decision: str, group: str = "g", at: int | None = None) -> str:
        ended = self.halves.end(offset, group, HalfEnd(decision), physical_offset=at)
        return ended.resolution.name + (" again" if ended.is_repeated else "")

    def hand_out(self, *groups: str, most: int = 100) -> HandedHalves:
        found = self.halves.hand_out(groups or ("g",), most)
        self.engine.confirm()
        return found

    def handed(self, *groups: str) -> list[tuple[int, int]]:
        """Offset and number of checks of each that is handed out."""
        return [(half.offset, half.checks) for half in self.hand_out(*groups).halves]

    def wait(self, ms: float) -> None:
        self.engine.clock.advance(ms)

    def lose_leader(self) -> None:
        """The leader is gone, and another one has its log."""
        self.engine.crash()
        self.lead()

    @property
    def discarded(self) -> list[bytes]:
        return [message.body for message in self.engine.read(DISCARD_TOPIC, 0)]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.engine.confirm()
    made.engine.store.close()
    assert verify(tmp_path) == []


# --- prepare --------------------------------------------------------------------------------------


def test_a_request_whose_answer_was_lost_prepares_once(shop: Shop) -> None:
    first = shop.prepare(UNIQ_KEY="u")
    assert not first.is_repeated
    for _ in range(2):
        assert shop.prepare(UNIQ_KEY="u")._replace(end_offset=0) == first._replace(
            end_offset=0, is_repeated=True
        )
        shop.lose_leader()
    assert len(shop.engine.read(HALF_TOPIC, 0)) == 1
    assert shop.prepare(UNIQ_KEY="u", group="h").offset == 1
    assert shop.prepare(UNIQ_KEY="v").offset == 2


def test_a_message_that_is_sent_again_after_its_end_is_a_new_half_message(shop: Shop) -> None:
    first = shop.prepare(UNIQ_KEY="u")
    shop.end(first.offset, "commit")
    assert shop.prepare(UNIQ_KEY="u").offset == 1


def test_how_old_the_oldest_open_one_is_is_known(shop: Shop) -> None:
    assert shop.halves.oldest_ms == 0
    first = shop.prepare()
    shop.wait(5_000)
    shop.prepare()
    shop.wait(2_000)
    assert shop.halves.oldest_ms == 7_000
    shop.lose_leader()
    assert shop.halves.oldest_ms == 7_000
    shop.end(first.offset, "rollback")
    assert shop.halves.oldest_ms == 2_000


def test_messages_without_a_key_are_never_the_same(shop: Shop) -> None:
    assert shop.prepare().transaction_id != shop.prepare().transaction_id
    assert shop.halves.open_count == 2


# --- end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decision", "other"), [("commit", "rollback"), ("rollback", "commit")])
@pytest.mark.parametrize("is_lost", [False, True])
def test_the_first_decision_counts(shop: Shop, decision: str, other: str, is_lost: bool) -> None:
    offset = shop.prepare().offset
    assert shop.end(offset, decision) == decision.upper()
    if is_lost:
        shop.lose_leader()
    assert shop.end(offset, decision) == f"{decision.upper()} again"
    with pytest.raises(Rejected, match=f"resolved as {decision.upper()}"):
        shop.end(offset, other)
    assert shop.engine.bodies() == ([b"x"] if decision == "commit" else [])
    assert shop.halves.open_count == 0


def test_only_the_group_that_has_prepared_it_ends_a_half_message(shop: Shop) -> None:
    offset = shop.prepare().offset
    for decision in HalfEnd:
        with pytest.raises(Rejected, match="prepared by producer group 'g', not 'h'"):
            shop.end(offset, decision.value, group="h")
    assert shop.end(offset, "commit") == "COMMIT"


def test_another_half_message_at_the_offset_is_not_ended(shop: Shop) -> None:
    half = shop.prepare()
    with pytest.raises(Rejected, match="another one is meant"):
        shop.end(half.offset, "commit", at=half.physical_offset + 1)
    assert shop.end(half.offset, "commit", at=half.physical_offset) == "COMMIT"


def test_a_half_message_of_which_the_producer_knows_nothing_stays_open(shop: Shop) -> None:
    offset = shop.prepare().offset
    end = shop.engine.store.log.end
    assert shop.end(offset, "unknown") == "OPEN"
    assert shop.engine.store.log.end == end
    shop.wait(AGE_MS)
    assert shop.handed() == [(offset, 1)]
    assert shop.end(offset, "unknown") == "OPEN"
    assert shop.end(offset, "commit") == "COMMIT"
    assert shop.end(offset, "unknown") == "COMMIT"


def test_a_half_message_that_does_not_exist_cannot_be_ended(shop: Shop) -> None:
    for decision in HalfEnd:
        with pytest.raises(Rejected, match="does not exist"):
            shop.end(7, decision.value)


def test_a_half_message_whose_topic_is_gone_cannot_be_committed(shop: Shop) -> None:
    offset = shop.prepare().offset
    del shop.engine.store.state.topics["t"]
    with pytest.raises(TopicMissing):
        shop.end(offset, "commit")
    assert shop.end(offset, "rollback") == "ROLLBACK"
    shop.engine.store.topics.create("t", 2, [0])


def test_a_half_message_that_is_not_confirmed_is_ended_later(shop: Shop) -> None:
    message = InnerMessage("t", 1, b"x", {}, born_time_ms=1)
    offset = shop.halves.prepare(message, "g").offset
    with pytest.raises(Unavailable, match="not confirmed yet"):
        shop.end(offset, "commit")
    assert shop.handed() == []
    shop.engine.confirm()
    assert shop.end(offset, "commit") == "COMMIT"


# --- checks ---------------------------------------------------------------------------------------


def test_a_half_message_is_handed_to_one_asker_at_a_time(shop: Shop) -> None:
    offset = shop.prepare().offset
    shop.wait(AGE_MS - 1)
    assert shop.hand_out() == HandedHalves([], 1, has_put=False)
    shop.wait(1)
    found = shop.hand_out()
    assert [(half.offset, half.checks) for half in found.halves] == [(offset, 1)]
    assert (found.next_ms, found.has_put) == (CHECK_PAUSE_MS, True)
    assert b"x" in found.halves[0].record
    shop.wait(CHECK_PAUSE_MS - 1)
    assert shop.handed() == []
    shop.wait(1)
    assert shop.handed() == [(offset, 2)]


def test_an_asker_gets_half_messages_of_its_groups_alone(shop: Shop) -> None:
    offsets = {group: shop.prepare(group=group).offset for group in ("a", "b", "c")}
    shop.wait(AGE_MS)
    assert shop.handed("a", "c", "a") == [(offsets["a"], 1), (offsets["c"], 1)]
    assert shop.handed("d") == []
    assert shop.hand_out("d").next_ms is None
    assert shop.handed("a", "b") == [(offsets["b"], 1)]


def test_a_half_message_may_wait_longer_or_less_for_its_first_check(shop: Shop) -> None:
    shop.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS="60")
    soon = shop.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS="0").offset
    assert shop.handed() == [(soon, 1)]
    shop.wait(60_000)
    assert sorted(shop.handed()) == [(0, 1), (soon, 2)]


def test_a_time_of_any_number_of_digits_is_stored_checked_and_loaded_again(shop: Shop) -> None:
    for digits in (10, 400, 5_000):
        shop.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS="9" * digits)
    shop.lose_leader()
    assert shop.halves.open_count == 3
    shop.wait(max(AGE_MS, CHECK_PAUSE_MS))
    assert sorted(offset for offset, _ in shop.handed()) == [0, 1, 2]


def test_an_answer_has_few_half_messages_and_the_next_one_has_the_others(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(6):
        shop.prepare(b"x" * 1000)
    shop.wait(AGE_MS)
    assert [half.offset for half in shop.hand_out(most=2).halves] == [0, 1]
    monkeypatch.setattr(half_messages, "ANSWER_BYTES", 2000)
    assert [half.offset for half in shop.hand_out().halves] == [2, 3]
    monkeypatch.setattr(half_messages, "ANSWER_BYTES", 1)
    found = shop.hand_out()
    assert [half.offset for half in found.halves] == [4]
    assert found.next_ms == 0


def test_a_half_message_that_no_producer_can_explain_is_discarded_after_15_checks(
    shop: Shop,
) -> None:
    offset = shop.prepare().offset
    shop.wait(AGE_MS)
    for checks in range(1, 16):
        assert shop.handed() == [(offset, checks)]
        # The next leader has the same counts, and waits because one may have been asked just now.
        shop.lose_leader()
        assert shop.handed() == []
        shop.wait(CHECK_PAUSE_MS)
    assert shop.handed() == []
    assert shop.discarded == [b"x"]
    assert shop.halves.open_count == 0
    with pytest.raises(Rejected, match="resolved as DISCARD"):
        shop.end(offset, "commit")
    assert shop.engine.bodies() == []


def test_a_half_message_that_was_ended_is_handed_out_no_more(shop: Shop) -> None:
    offsets = [shop.prepare().offset for _ in range(3)]
    shop.end(offsets[0], "commit")
    shop.wait(AGE_MS)
    assert shop.handed() == [(offsets[1], 1), (offsets[2], 1)]
    shop.end(offsets[1], "rollback")
    shop.wait(CHECK_PAUSE_MS)
    assert shop.handed() == [(offsets[2], 2)]


# --- leaders, upkeep ------------------------------------------------------------------------------


def test_the_next_leader_knows_what_is_open(shop: Shop) -> None:
    offsets = [shop.prepare(b"%d" % number).offset for number in range(1200)]
    for offset in offsets:
        if offset not in (3, 700, 1199):
            shop.end(offset, "rollback")
    shop.lose_leader()
    assert shop.halves.open_count == 3
    shop.wait(AGE_MS)
    assert shop.handed() == [(3, 1), (700, 1), (1199, 1)]
    assert shop.end(700, "commit") == "COMMIT"
    assert shop.engine.bodies() == [b"700"]


def test_half_messages_are_loaded_when_their_queue_is_whole(shop: Shop) -> None:
    shop.halves.prepare(InnerMessage("t", 1, b"x", {}, born_time_ms=1), "g")
    halves = HalfMessages(shop.engine.store)
    with pytest.raises(Unavailable, match="being loaded"):
        halves.load()
    assert halves.sweep() == (False, False)
    shop.engine.confirm()
    halves.load()
    assert halves.open_count == 1


def test_what_no_client_asks_about_is_given_up_when_its_retention_is_over(shop: Shop) -> None:
    hours = shop.engine.store.config.file_reserved_hours
    shop.prepare(b"old")
    shop.wait(HOUR_MS)
    shop.prepare(b"newer")
    assert shop.halves.sweep() == (False, False)
    shop.wait((hours - 1) * HOUR_MS + 1)
    assert shop.halves.sweep() == (False, True)
    assert shop.discarded == [b"old"]
    assert shop.halves.open_count == 1
    shop.engine.confirm()
    assert shop.halves.sweep() == (False, True)
    assert shop.engine.store.state.offsets[GROUP, HALF_TOPIC] == {0: 1}
    assert shop.halves.sweep() == (False, False)


def test_a_half_message_that_millions_have_followed_is_given_up(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_messages, "WINDOW", 3)
    for number in range(5):
        shop.prepare(b"%d" % number)
    assert shop.halves.sweep() == (False, True)
    assert shop.discarded == [b"0", b"1"]
    assert shop.halves.open_count == 3


def test_one_sweep_gives_up_a_limited_number(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_messages, "WINDOW", 0)
    monkeypatch.setattr(half_messages, "SWEEP_MAX", 2)
    for _ in range(3):
        shop.prepare()
    assert shop.halves.sweep() == (True, True)
    assert shop.halves.open_count == 1
    assert shop.halves.sweep() == (False, True)
    assert len(shop.discarded) == 3


def test_what_was_ended_takes_no_memory_though_its_group_never_asks(shop: Shop) -> None:
    for group in ("g", "h"):
        for _ in range(3):
            shop.end(shop.prepare(group=group).offset, "rollback", group=group)
    last = shop.prepare(group="h").offset
    shop.halves.sweep()
    assert [(group, [at for _, at in heap]) for group, heap in shop.halves._due.items()] == [
        ("h", [last])
    ]
    shop.wait(AGE_MS)
    assert shop.handed("g", "h") == [(last, 1)]


def test_too_many_open_half_messages_are_refused(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_messages, "OPEN_MAX", 2)
    first = shop.prepare(UNIQ_KEY="u").offset
    shop.prepare()
    with pytest.raises(Unavailable, match="2 half messages are open"):
        shop.prepare()
    assert shop.prepare(UNIQ_KEY="u").offset == first
    shop.end(first, "commit")
    shop.prepare()


def test_a_half_message_of_another_engine_is_never_handed_out_and_holds_up_none(
    shop: Shop,
) -> None:
    shop.engine.store.put_inner([InnerMessage(HALF_TOPIC, 0, b"foreign", born_time_ms=1)])
    shop.engine.confirm()
    shop.lead()
    own = shop.prepare().offset
    shop.wait(AGE_MS)
    assert shop.handed() == [(own, 1)]
    with pytest.raises(Rejected):
        shop.end(0, "commit")


def test_a_resolution_of_a_half_message_is_final_for_both_kinds_of_callers(shop: Shop) -> None:
    offset = shop.prepare().offset
    shop.engine.service.commit(offset)
    shop.wait(AGE_MS)
    assert shop.handed() == []
    assert shop.end(offset, "commit") == "COMMIT again"
    assert shop.engine.service.outcome(offset) is Resolution.COMMIT
