"""The rules of one shard's batches, without threads and sockets: as a table, and in random interleavings."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from raymq.client.produce.producer_config import ProducerConfig
from raymq.client.produce.queue_sequence import BatchReceipt, QueueSequence
from raymq.client.produce.send_future import BatchFuture
from raymq.client.produce.send_window import (
    STORAGE_FULL_MS,
    Complete,
    Effects,
    InFlightBatch,
    RowsRefused,
    SendWindow,
    WarnResend,
)
from raymq.client.transport.ask import SILENT_MS
from raymq.store.base.errors import (
    AnotherShard,
    Bug,
    DeliveryUnknown,
    Fenced,
    NotLeading,
    RayMQError,
    Rejected,
    SequenceGap,
    StorageFull,
    Unavailable,
    to_wire,
)
from tests.support.batches import batch

DELIVERY_MS = 10_000
SILENCE_MS = 3_000


def make_window(in_flight_bytes: int = 1000) -> SendWindow:
    """A window of shard 0 that is connected."""
    config = ProducerConfig(
        in_flight_bytes=in_flight_bytes,
        delivery_timeout_ms=DELIVERY_MS,
        request_timeout_ms=SILENCE_MS,
    )
    window = SendWindow(0, config)
    window.connected(None)
    return window


def make_queue(queue_id: int = 0, *, own_id: bool = True) -> QueueSequence:
    return QueueSequence("t", queue_id, 1000 + queue_id, 0, own_id)


def add(window: SendWindow, queue: QueueSequence, *, size: int = 1, rows: int = 1) -> None:
    window.add(InFlightBatch(queue, batch([b"x"] * rows), size, "quorum", BatchFuture()), 0)


def write_all(window: SendWindow, now_ms: int = 0) -> list[InFlightBatch]:
    written = []
    while each := window.next_writes(now_ms):
        written += each
    return written


def stored(number: int, rows: int = 1) -> dict[str, Any]:
    """The ack of a stored batch."""
    offsets = {"first_offset": 0, "last_offset": rows - 1}
    return {"id": number, "count": rows, "duplicates": 0, "store_time_ms": 0, **offsets}


def refused(number: int, error: RayMQError) -> dict[str, Any]:
    return {"id": number, "error": to_wire(error)}


def outcomes(effects: Effects) -> list[tuple[int, str]]:
    """(batch number, type of its outcome)."""
    return [
        (each.batch.number, type(each.outcome).__name__)
        for each in effects
        if isinstance(each, Complete)
    ]


def numbers(batches: list[InFlightBatch]) -> list[tuple[int, int]]:
    """(batch number, first sequence)."""
    return [(each.number, each.sequence) for each in batches]


def resume(window: SendWindow, now_ms: int = 0) -> Effects:
    effects: Effects = []
    reconnects(window, now_ms, effects)
    return effects


def reconnects(window: SendWindow, now_ms: int, effects: Effects) -> bool:
    """Resume. Returns: whether the shard is looked up again."""
    assert window.drained
    window.begin_resume()
    return window.resume(now_ms, effects)


# --- writing --------------------------------------------------------------------------------------


def test_batches_are_written_in_order_until_the_bytes_in_flight_are_used_up() -> None:
    window, queue = make_window(10), make_queue()
    for _ in range(3):
        add(window, queue, size=5, rows=2)
    assert numbers(write_all(window)) == [(1, 0), (2, 2)]
    assert window.stalled
    effects: Effects = []
    window.ack(stored(1, 2), 0, effects)
    assert outcomes(effects) == [(1, "BatchReceipt")]
    assert numbers(write_all(window)) == [(3, 4)]
    assert not window.stalled


def test_a_batch_larger_than_the_window_is_written_alone() -> None:
    window, queue = make_window(10), make_queue()
    for size in (50, 1):
        add(window, queue, size=size)
    assert numbers(write_all(window)) == [(1, 0)]


def test_the_shard_may_allow_fewer_bytes_until_the_stream_ends() -> None:
    window, queue = make_window(100), make_queue()
    window.connected(10)
    for _ in range(4):
        add(window, queue, size=5)
    assert len(write_all(window)) == 2
    window.received(0, 15)
    assert len(write_all(window)) == 1
    window.disconnected()
    window.connected(None)
    assert len(write_all(window)) == 1


def test_nothing_is_written_before_a_server_has_taken_the_stream() -> None:
    window, queue = make_window(), make_queue()
    window.disconnected()
    add(window, queue)
    assert write_all(window) == []


def test_an_ack_of_another_batch_breaks_the_stream() -> None:
    window, queue = make_window(), make_queue()
    add(window, queue)
    with pytest.raises(Unavailable, match="out of order"):
        window.ack(stored(1), 0, [])
    write_all(window)
    with pytest.raises(Unavailable, match="out of order"):
        window.ack(stored(2), 0, [])


# --- refusals -------------------------------------------------------------------------------------

GAP = SequenceGap("gap")

#: what the shard answers -> the outcome of a first try, and of a batch that an earlier stream carried; None: resent
REFUSALS: dict[str, tuple[RayMQError, str | None, str | None]] = {
    "away": (Unavailable("away"), None, None),
    "full disk": (StorageFull("full"), None, None),
    "late": (DeliveryUnknown("late", status="FLUSH_DISK_TIMEOUT"), None, None),
    "body": (Rejected("no", field="body"), "Rejected", "DeliveryUnknown"),
    "gap": (GAP, "Unavailable", "DeliveryUnknown"),
    "fenced": (Fenced("old", field="epoch", limit=1), "Fenced", "Fenced"),
    "bug": (Bug("?"), "DeliveryUnknown", "DeliveryUnknown"),
}


@pytest.mark.parametrize("broke", [False, True], ids=["first try", "resent"])
@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_refusal_makes_of_a_batch(name: str, broke: bool) -> None:
    error, first_try, resent = REFUSALS[name]
    window, queue = make_window(), make_queue()
    effects: Effects = []
    add(window, queue)
    write_all(window)

    if broke:
        window.broke(Unavailable("cut"), 0, effects)
        window.connected(None)
        write_all(window)

    window.ack(refused(1, error), 0, effects)
    assert reconnects(window, 0, effects) == isinstance(error, Unavailable)
    expected = resent if broke else first_try
    assert outcomes(effects) == ([] if expected is None else [(1, expected)])
    assert [each.number for each in window.waiting] == ([1] if expected is None else [])
    assert any(isinstance(each, WarnResend) for each in effects) == (name == "late")


def test_a_refusal_stops_writing_until_all_acks_are_in() -> None:
    window, queue = make_window(), make_queue()
    for _ in range(3):
        add(window, queue)
    effects: Effects = []
    write_all(window)
    window.ack(refused(1, StorageFull("full")), 0, effects)
    add(window, queue)
    assert write_all(window) == []
    for number in (2, 3):
        window.ack(refused(number, GAP), 0, effects)
    assert resume(window) == effects == []
    # In order, and with the same sequences.
    assert numbers(write_all(window)) == [(1, 0), (2, 1), (3, 2), (4, 3)]


def test_sequences_close_up_over_what_was_not_stored() -> None:
    window, queue = make_window(), make_queue()
    for _ in range(3):
        add(window, queue, rows=2)
    write_all(window)
    effects: Effects = []
    window.ack(stored(1, 2), 0, effects)
    window.ack(refused(2, Rejected("no", field="body")), 0, effects)
    window.ack(refused(3, GAP), 0, effects)
    resume(window)
    assert outcomes(effects) == [(1, "BatchReceipt"), (2, "Rejected")]
    add(window, queue)
    assert numbers(write_all(window)) == [(3, 2), (4, 4)]


def test_a_full_disk_fails_a_batch_after_its_time_and_not_before() -> None:
    window, queue = make_window(), make_queue()
    add(window, queue)
    for now_ms in (0, STORAGE_FULL_MS - 1, STORAGE_FULL_MS):
        write_all(window, now_ms)
        window.ack(refused(1, StorageFull("full")), now_ms, [])
        effects = resume(window, now_ms)
    assert outcomes(effects) == [(1, "StorageFull")]


def test_with_a_given_id_no_batch_follows_one_that_was_not_stored() -> None:
    window, queue = make_window(), make_queue(own_id=False)
    effects: Effects = []
    add(window, queue)
    window.broke(Unavailable("cut"), DELIVERY_MS, effects)
    assert outcomes(effects) == [(1, "Unavailable")]
    with pytest.raises(Unavailable):
        add(window, queue)


def test_a_batch_after_a_gap_is_certainly_not_stored_although_its_stream_broke() -> None:
    window, queue = make_window(), make_queue()
    for _ in range(2):
        add(window, queue)
    write_all(window)
    effects: Effects = []
    window.ack(refused(1, StorageFull("full")), 0, effects)
    window.broke(Unavailable("cut"), DELIVERY_MS, effects)
    assert outcomes(effects) == [(1, "StorageFull"), (2, "Unavailable")]


def test_a_resend_keeps_its_sequence_whatever_became_of_those_before() -> None:
    window = make_window()
    resends = QueueSequence("t", 0, 7, 0, False, resends=True)
    for sequence, error in ((5, GAP), (6, StorageFull("full")), (6, GAP)):
        if not window.waiting:
            again = InFlightBatch(resends, batch([b"x"]), 1, "quorum", BatchFuture())
            again.sequence, again.uncertain = sequence, True
            window.add(again, 0)
        (written,) = write_all(window)
        assert written.sequence == sequence
        effects: Effects = []
        window.ack(refused(written.number, error), 0, effects)
        effects += resume(window)

    assert outcomes(effects) == [(2, "DeliveryUnknown")]
    assert isinstance(effects[0], Complete)
    assert "resend the messages before it first" in str(effects[0].outcome)


# --- breaks, time and end -------------------------------------------------------------------------


def test_after_a_break_batches_are_written_again_with_their_sequences() -> None:
    window, queue = make_window(2), make_queue()
    for _ in range(3):
        add(window, queue)
    assert len(write_all(window)) == 2
    effects: Effects = []
    window.broke(Unavailable("cut"), 0, effects)
    assert effects == []
    assert write_all(window) == []
    window.connected(None)
    assert numbers(write_all(window)) == [(1, 0), (2, 1)]


def test_a_batch_that_may_be_stored_ends_the_use_of_its_producer_id() -> None:
    window, queue = make_window(), make_queue()
    producer_id = queue.producer_id
    add(window, queue)
    (lost,) = write_all(window)
    add(window, queue)
    effects: Effects = []
    window.broke(Unavailable("cut"), DELIVERY_MS, effects)

    # The second one was never written.
    assert outcomes(effects) == [(1, "DeliveryUnknown"), (2, "Unavailable")]
    assert lost.future.unknown_batch is not None
    assert (lost.future.unknown_batch.producer_id, lost.future.unknown_batch.sequence) == (
        producer_id,
        0,
    )

    add(window, queue)
    window.connected(None)
    assert numbers(write_all(window)) == [(3, 0)]
    assert queue.producer_id != producer_id


def test_a_refused_stream_fails_every_batch_at_once() -> None:
    window, queue = make_window(1), make_queue()
    for _ in range(2):
        add(window, queue)
    write_all(window)
    window.broke(Unavailable("cut"), 0, [])
    effects: Effects = []
    window.broke(Rejected("wrong", field="token"), 0, effects)
    assert outcomes(effects) == [(1, "DeliveryUnknown"), (2, "Rejected")]
    assert window.reconnect_pause_ms() == 0


def test_another_server_at_the_address_is_a_break_and_no_refusal() -> None:
    window, queue = make_window(), make_queue()
    add(window, queue)
    effects: Effects = []
    window.broke(AnotherShard("another"), 0, effects)
    assert effects == []
    assert [each.number for each in window.waiting] == [1]


def test_a_break_in_a_drain_ends_the_drain_and_its_reason_to_reconnect() -> None:
    window, queue = make_window(), make_queue()
    for _ in range(2):
        add(window, queue)
    write_all(window)
    window.ack(refused(1, Unavailable("away")), 0, [])
    window.broke(Unavailable("cut"), 0, [])
    window.connected(None)
    assert numbers(write_all(window)) == [(1, 0), (2, 1)]
    window.ack(refused(1, StorageFull("full")), 0, [])
    window.ack(refused(2, GAP), 0, [])
    effects: Effects = []
    assert not reconnects(window, 0, effects)
    assert effects == []


def test_the_pause_doubles_with_each_failure_and_ends_with_a_receipt() -> None:
    window, queue = make_window(), make_queue()
    add(window, queue)
    pauses = []
    for _ in range(9):
        window.broke(Unavailable("cut"), 0, [])
        pauses.append(window.reconnect_pause_ms())
    assert pauses == [20, 40, 80, 160, 320, 640, 1000, 1000, 1000]
    window.connected(None)
    write_all(window)
    window.ack(stored(1), 0, [])
    add(window, queue)
    assert window.reconnect_pause_ms() == 0


def test_the_pauses_are_short_if_another_replica_may_lead_soon() -> None:
    window, queue = SendWindow(0, ProducerConfig(), fails_over=True), make_queue()
    add(window, queue)
    pauses = []
    for _ in range(5):
        window.broke(Unavailable("cut"), 0, [])
        pauses.append(window.reconnect_pause_ms())
    assert pauses == [50, 100, 200, 400, 400]


def test_a_shard_without_an_answer_for_two_seconds_is_silent() -> None:
    window, queue = make_window(), make_queue()
    assert not window.is_silent(SILENT_MS)
    add(window, queue)
    write_all(window, 10)
    assert not window.is_silent(SILENT_MS + 9)
    assert window.is_silent(SILENT_MS + 10)
    window.received(SILENT_MS, None)
    assert not window.is_silent(SILENT_MS + 10)
    window.ack(stored(1), SILENT_MS, [])
    assert not window.is_silent(9 * SILENT_MS)


def test_of_several_refusals_the_one_that_says_who_leads_counts() -> None:
    window, queue = make_window(), make_queue()
    for _ in range(4):
        add(window, queue)
    write_all(window)
    leader = NotLeading("does not lead", endpoint="b", epoch=2)
    late = DeliveryUnknown("the epoch is over", status="SERVICE_NOT_AVAILABLE")
    for number, error in enumerate((late, Unavailable("away"), leader, Unavailable("away")), 1):
        window.ack(refused(number, error), 0, [])
    assert window.moved_refusal is not None
    assert window.moved_refusal.fields == leader.fields
    effects: Effects = []
    assert reconnects(window, 0, effects)
    assert window.moved_refusal is None
    # All go to the new leader, with the same sequences.
    window.connected(None)
    assert numbers(write_all(window)) == [(1, 0), (2, 1), (3, 2), (4, 3)]


@pytest.mark.parametrize(
    ("now_ms", "progress_ms", "expected"),
    [
        (SILENCE_MS - 1, 0, False),
        (SILENCE_MS, 0, True),
        (SILENCE_MS, 1, False),
        (DELIVERY_MS - 1, DELIVERY_MS - 1, False),
        (DELIVERY_MS, DELIVERY_MS, True),
    ],
)
def test_a_silent_shard_and_a_late_batch_end_the_stream(
    now_ms: int, progress_ms: int, expected: bool
) -> None:
    window, queue = make_window(), make_queue()
    assert not window.is_late(now_ms)
    add(window, queue)
    write_all(window)
    window.received(progress_ms, None)
    assert window.is_late(now_ms) == expected


def test_closing_tells_apart_what_may_be_stored() -> None:
    window, queue = make_window(1), make_queue()
    for _ in range(2):
        add(window, queue)
    write_all(window)
    effects: Effects = []
    window.close(effects)
    assert outcomes(effects) == [(1, "DeliveryUnknown"), (2, "Rejected")]
    with pytest.raises(Rejected, match="closed"):
        add(window, queue)


# --- refused rows ---------------------------------------------------------------------------------

ROW_1 = Rejected("row 1 is wrong", field="KEYS", limit="a key", row=1)


def add_rows(
    window: SendWindow, queue: QueueSequence, *bodies: bytes, is_separable: bool = True
) -> None:
    sent = InFlightBatch(queue, batch(list(bodies)), len(bodies), "quorum", BatchFuture())
    sent.is_separable = is_separable
    window.add(sent, 0)


def test_of_messages_sent_one_by_one_only_the_refused_one_fails() -> None:
    window, queue = make_window(), make_queue()
    add_rows(window, queue, b"a", b"bad", b"c")
    add_rows(window, queue, b"d")
    write_all(window)
    effects: Effects = []
    window.ack(refused(1, ROW_1), 0, effects)
    window.ack(refused(2, GAP), 0, effects)
    (rows_refused,) = [each for each in effects if isinstance(each, RowsRefused)]
    assert (rows_refused.rows, rows_refused.error.message) == ((1,), "the message is wrong")
    assert rows_refused.error.fields == {"field": "KEYS", "limit": "a key"}
    assert outcomes(effects) == []
    assert window.begin_resume() == 0, "no pause helps"
    assert not window.resume(0, effects)
    written = write_all(window)
    assert numbers(written) == [(1, 0), (2, 2)]
    assert [bodies_in(each) for each in written] == [(b"a", b"c"), (b"d",)]
    assert queue.next_sequence == 3

    # The shard counts from the rows that it got.
    window.ack(refused(1, ROW_1), 0, effects)
    assert [each.rows for each in effects if isinstance(each, RowsRefused)] == [(1,), (2,)]


def test_a_refusal_may_name_several_rows() -> None:
    window, queue = make_window(), make_queue()
    add_rows(window, queue, b"bad", b"b", b"bad", b"d", b"bad")
    write_all(window)
    effects: Effects = []
    window.ack(refused(1, Rejected("x", field="KEYS", row=0, rows=[0, 2, 4])), 0, effects)
    assert [each.rows for each in effects if isinstance(each, RowsRefused)] == [(0, 2, 4)]
    assert outcomes(resume(window)) == []
    (written,) = write_all(window)
    assert bodies_in(written) == (b"b", b"d")
    assert queue.next_sequence == 2


def test_columns_are_refused_together() -> None:
    window, queue = make_window(), make_queue()
    add_rows(window, queue, b"a", b"bad", is_separable=False)
    write_all(window)
    effects: Effects = []
    window.ack(refused(1, ROW_1), 0, effects)
    assert outcomes(effects) == [(1, "Rejected")]


def test_a_row_is_refused_for_certain_even_if_an_earlier_stream_carried_it() -> None:
    window, queue = make_window(), make_queue()
    add_rows(window, queue, b"a", b"bad", b"c")
    add_rows(window, queue, b"d")
    write_all(window)
    effects: Effects = []
    window.broke(Unavailable("cut"), 0, effects)
    window.connected(None)
    write_all(window)
    window.ack(refused(1, ROW_1), 0, effects)
    window.ack(refused(2, GAP), 0, effects)
    assert outcomes(resume(window)) == []
    assert numbers(write_all(window)) == [(1, 0), (2, 2)]
    # What the first stream may still deliver has another number.
    assert queue.producer_id != 1000


def break_after_refusal(own_id: bool, *, may_be_stored: bool) -> tuple[SendWindow, Effects]:
    """Three batches are written. The first one is stored or may be, the second one is refused. Then the stream
    breaks."""
    window, queue = make_window(), make_queue(own_id=own_id)
    for _ in range(3):
        add(window, queue, rows=2)
    write_all(window)
    effects: Effects = []
    late = DeliveryUnknown("late", status="FLUSH_DISK_TIMEOUT")
    window.ack(refused(1, late) if may_be_stored else stored(1, 2), 0, effects)
    window.ack(refused(2, Rejected("x", field="body")), 0, effects)
    window.broke(Unavailable("cut"), 0, effects)
    window.connected(None)
    return window, effects


def test_a_batch_that_a_broken_stream_may_deliver_later_goes_on_under_a_new_producer_id() -> None:
    window, effects = break_after_refusal(True, may_be_stored=False)
    assert outcomes(effects) == [(1, "BatchReceipt"), (2, "Rejected")]
    (written,) = write_all(window)
    assert (written.number, written.sequence) == (3, 0)
    assert written.queue.producer_id != 1000


@pytest.mark.parametrize(("own_id", "may_be_stored"), [(False, False), (True, True)])
def test_a_queue_that_cannot_go_on_under_a_new_producer_id_fails(
    own_id: bool, may_be_stored: bool
) -> None:
    window, effects = break_after_refusal(own_id, may_be_stored=may_be_stored)
    assert write_all(window) == []
    found = dict(outcomes(effects))
    assert found == {
        1: "DeliveryUnknown" if may_be_stored else "BatchReceipt",
        2: "Rejected",
        # The shard refuses it for ever, because rows before it are missing: it must not be sent again as it was.
        3: "Unavailable",
    }


def test_a_batch_after_a_refused_one_is_certainly_not_stored_even_if_its_time_is_up() -> None:
    window, queue = make_window(), make_queue()
    for _ in range(3):
        add(window, queue, rows=2)
    write_all(window)
    effects: Effects = []
    window.ack(stored(1, 2), 0, effects)
    window.ack(refused(2, Rejected("x", field="body")), 0, effects)
    window.broke(Unavailable("cut"), DELIVERY_MS, effects)
    assert dict(outcomes(effects))[3] == "Unavailable"


def test_a_batch_after_a_refused_one_is_certainly_not_stored_when_the_producer_closes() -> None:
    window, queue = make_window(), make_queue()
    for _ in range(2):
        add(window, queue)
    write_all(window)
    effects: Effects = []
    window.ack(refused(1, Rejected("x", field="body")), 0, effects)
    window.close(effects)
    assert dict(outcomes(effects)) == {1: "Rejected", 2: "Rejected"}


def test_the_sequence_of_a_resend_stays_when_one_before_it_is_refused() -> None:
    window = make_window()
    queue = QueueSequence("t", 0, 7, 0, False, resends=True)
    futures = []
    for sequence in (5, 6):
        sent = InFlightBatch(queue, batch([b"x"]), 1, "quorum", BatchFuture())
        sent.sequence, sent.uncertain = sequence, True
        window.add(sent, 0)
        futures.append(sent.future)
    write_all(window)
    effects: Effects = []
    window.ack(refused(1, Rejected("x", field="KEYS", row=0)), 0, effects)
    window.ack(refused(2, GAP), 0, effects)
    window.resume(0, effects)
    assert numbers(write_all(window)) == [(2, 6)]
    window.ack(refused(2, GAP), 0, effects)
    window.resume(0, effects)
    # The shard never gets the row before it, so that nothing of it is stored.
    assert dict(outcomes(effects)) == {1: "Rejected", 2: "Unavailable"}
    assert futures[1].unknown_batch is None


def test_a_resend_that_fails_says_nothing_of_one_with_an_earlier_sequence() -> None:
    window = make_window()
    queue = QueueSequence("t", 0, 7, 0, False, resends=True)
    queue.unstored.append((7, 1))
    for sequence in (8, 3):
        sent = InFlightBatch(queue, batch([b"x"]), 1, "quorum", BatchFuture())
        sent.sequence, sent.uncertain = sequence, True
        window.add(sent, 0)
    write_all(window)
    effects: Effects = []
    window.ack(refused(1, GAP), 0, effects)
    window.broke(Unavailable("cut"), 0, effects)
    assert dict(outcomes(effects)) == {1: "Unavailable", 2: "DeliveryUnknown"}


def test_a_batch_that_may_be_stored_stays_unknown_when_another_one_fences_its_queue() -> None:
    window, queue = make_window(), make_queue(own_id=False)
    for _ in range(3):
        add(window, queue)
    write_all(window)
    late = DeliveryUnknown("late", status="FLUSH_DISK_TIMEOUT")
    effects: Effects = []
    window.ack(refused(1, late), 0, effects)
    window.ack(refused(2, StorageFull("full")), 0, effects)
    window.broke(Unavailable("cut"), 0, effects)
    window.connected(None)
    write_all(window)
    window.ack(refused(1, late), STORAGE_FULL_MS, effects)
    window.ack(refused(2, StorageFull("full")), STORAGE_FULL_MS, effects)
    window.ack(refused(3, GAP), STORAGE_FULL_MS, effects)
    window.begin_resume()
    window.resume(STORAGE_FULL_MS, effects)
    assert dict(outcomes(effects))[1] == "DeliveryUnknown"


# --- random interleavings -------------------------------------------------------------------------

QUEUES = 3


#: ends of bodies: the shard refuses rows with the last one
GOOD, BAD = b"good", b"bad"
KINDS = (*[GOOD] * 30, BAD)


def bodies_in(each: InFlightBatch) -> tuple[bytes, ...]:
    assert isinstance(each.data, pa.RecordBatch)
    return tuple(each.data["body"].to_pylist())


def content_error(bodies: tuple[bytes, ...]) -> Rejected | None:
    """What the shard says of rows that it never stores."""
    wrong = [row for row, body in enumerate(bodies) if body.endswith(BAD)]
    if not wrong:
        return None
    named = {"rows": wrong} if len(bodies) % 2 else {}
    return Rejected("x", field="KEYS", row=wrong[0], **named)


@dataclass
class Stream:
    """A connection: what the shard has not read yet, and the acks that it has written."""

    requests: deque[tuple[int, int, int, int, tuple[bytes, ...]]] = field(default_factory=deque)
    acks: deque[dict[str, Any]] = field(default_factory=deque)


class World:
    """A window, a shard that recognises sequences, and streams that break between them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_ms = 0
        self.window = make_window(in_flight_bytes=self.random.choice([3, 8, 1000]))
        self.window.disconnected()
        own_id = self.random.random() < 0.7
        self.queues = [make_queue(number, own_id=own_id) for number in range(QUEUES)]
        self.stream: Stream | None = None

        #: streams that are broken for the window, whose requests the shard may read all the same
        self.broken: list[Stream] = []
        self.added = [0] * QUEUES
        self.bodies_of: dict[BatchFuture, tuple[int, tuple[bytes, ...]]] = {}
        self.outcome_of: dict[BatchFuture, BatchReceipt | RayMQError] = {}
        #: rows that failed alone
        self.refused: list[bytes] = []

        # The shard: rows of each queue, and which rows a sequence stands for.
        self.rows: list[list[bytes]] = [[] for _ in range(QUEUES)]
        self.sequences: dict[tuple[int, int], list[bytes]] = {}
        self.stored_as: dict[tuple[bytes, ...], tuple[int, int]] = {}
        self.faults = 1.0

    # --- the window's side ------------------------------------------------------------------------

    def add(self) -> None:
        number = self.random.randrange(QUEUES)
        count = self.random.randint(1, 3)
        bodies = tuple(
            b"%d/%d/%s" % (number, self.added[number] + row, self.random.choice(KINDS))
            for row in range(count)
        )
        future = BatchFuture()
        data = batch(list(bodies))
        try:
            sent = InFlightBatch(self.queues[number], data, count, "quorum", future)
            sent.is_separable = self.random.random() < 0.5
            self.window.add(sent, self.now_ms)
        except RayMQError:
            # The queue of a given producer id was fenced.
            assert not self.queues[number].own_id
            return
        self.added[number] += count
        self.bodies_of[future] = (number, bodies)

    def connect(self) -> None:
        if self.stream is None:
            self.window.progress_ms = self.now_ms
            self.window.connected(None)
            self.stream = Stream()

    def write(self) -> None:
        for each in self.window.next_writes(self.now_ms):
            if self.stream is not None:
                self.write_one(each)

    def write_one(self, each: InFlightBatch) -> None:
        assert self.stream is not None
        number, _ = self.bodies_of[each.future]
        bodies = bodies_in(each)
        queue = each.queue
        known = self.stored_as.get(bodies)
        assert known in (None, (queue.producer_id, each.sequence)), "stored, and a new sequence"
        if self.random.random() < 0.02 * self.faults:
            # The write fails: the shard does not get the batch.
            self.break_stream()
            return
        self.stream.requests.append((each.number, number, queue.producer_id, each.sequence, bodies))

    def read_ack(self) -> None:
        if self.stream is None or not self.stream.acks:
            return
        effects: Effects = []
        self.window.received(self.now_ms, self.random.choice([None, 2, 5]))
        self.window.ack(self.stream.acks.popleft(), self.now_ms, effects)
        self.carry_out(effects)
        if self.window.drained:
            self.now_ms += self.window.begin_resume()
            effects = []
            reconnect = self.window.resume(self.now_ms, effects)
            self.carry_out(effects)
            if reconnect:
                self.leave_stream()

    def tick(self) -> None:
        self.now_ms += self.random.choice([1, 10, 100, 1000])
        if self.window.is_late(self.now_ms) and self.stream is not None:
            self.break_stream()

    def break_stream(self) -> None:
        if self.stream is not None:
            self.leave_stream()
            effects: Effects = []
            self.window.broke(Unavailable("cut"), self.now_ms, effects)
            self.carry_out(effects)

    def leave_stream(self) -> None:
        assert self.stream is not None
        self.broken.append(self.stream)
        self.stream = None

    def carry_out(self, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, Complete):
                assert effect.batch.future not in self.outcome_of, "two outcomes"
                self.outcome_of[effect.batch.future] = effect.outcome
            elif isinstance(effect, RowsRefused):
                _, bodies = self.bodies_of[effect.batch.future]
                for row in effect.rows:
                    assert bodies[row].endswith(BAD), "another row was refused"
                    self.refused.append(bodies[row])

    # --- the shard's side -------------------------------------------------------------------------

    def serve(self) -> None:
        streams = [each for each in [self.stream, *self.broken] if each and each.requests]
        if not streams:
            return
        stream = self.random.choice(streams)
        number, queue_id, producer_id, sequence, bodies = stream.requests.popleft()
        if stream is not self.stream and self.random.random() < 0.5:
            # Lost on the way, with all that comes after it on this stream.
            stream.requests.clear()
            return
        stream.acks.append(self.answer(number, queue_id, producer_id, sequence, bodies))

    def answer(
        self, number: int, queue_id: int, producer_id: int, sequence: int, bodies: tuple[bytes, ...]
    ) -> dict[str, Any]:
        if self.random.random() < 0.1 * self.faults:
            kinds = [Unavailable("x"), StorageFull("x"), Rejected("x", field="body"), Bug("x")]
            return refused(number, self.random.choice(kinds))

        error = content_error(bodies)
        if error is not None:
            return refused(number, error)
        known = self.sequences.setdefault((producer_id, queue_id), [])
        if sequence > len(known):
            return refused(number, GAP)
        end = sequence + len(bodies)
        if sequence < len(known):
            assert tuple(known[sequence:end]) == bodies, "a sequence stands for two rows"
        else:
            known += bodies
            self.rows[queue_id] += bodies
            self.stored_as[bodies] = (producer_id, sequence)

        if self.random.random() < 0.05 * self.faults:
            return refused(number, DeliveryUnknown("late", status="FLUSH_DISK_TIMEOUT"))

        return stored(number, len(bodies))

    # --- a run ------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        actions = [self.add, self.connect, self.write, self.write, self.serve, self.serve]
        actions += [self.read_ack, self.read_ack, self.tick]
        for _ in range(steps):
            if self.random.random() < 0.02:
                self.break_stream()
            self.random.choice(actions)()
        self.finish()

    def finish(self) -> None:
        """No more faults: everything gets an outcome."""
        self.faults = 0.0
        self.broken = []
        for _ in range(10_000):
            if len(self.outcome_of) == len(self.bodies_of):
                return
            for action in (self.connect, self.write, self.serve, self.read_ack, self.tick):
                action()
        raise AssertionError("a batch has no outcome")

    def check(self) -> None:
        """Order kept, nothing stored twice, and every outcome is true."""
        for number, rows in enumerate(self.rows):
            added = [int(body.split(b"/")[1]) for body in rows]
            assert added == sorted(set(added)), f"queue {number}: {added}"
        self.check_outcomes()

    def check_outcomes(self) -> None:
        """Every outcome is true."""
        for future, (number, bodies) in self.bodies_of.items():
            outcome = self.outcome_of[future]
            found = [body for body in bodies if body in self.rows[number]]
            if isinstance(outcome, BatchReceipt):
                good = [body for body in bodies if body not in self.refused]
                assert found == good, "a receipt of what was not stored"
                assert outcome.count == len(good)
            elif not isinstance(outcome, DeliveryUnknown | Fenced):
                assert found == [], f"{outcome!r} of what was stored"


@pytest.mark.parametrize("block", range(10))
def test_in_any_interleaving_order_is_kept_and_nothing_is_lost_or_stored_twice(block: int) -> None:
    kinds: set[str] = set()
    for seed in range(block * 40, block * 40 + 40):
        world = World(seed)
        try:
            world.run(400)
            world.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        kinds |= {type(outcome).__name__ for outcome in world.outcome_of.values()}
    assert {"BatchReceipt", "DeliveryUnknown", "Rejected", "Unavailable"} <= kinds


# --- callers send again what is unknown -----------------------------------------------------------


class ResendingWorld(World):
    """Streams break often, and the shard reads what they carried much later. Callers resend what is unknown."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.resend_queues: dict[tuple[int, int], QueueSequence] = {}
        #: futures of batches that were sent again, or are resends
        self.resent: set[BatchFuture] = set()

    def resend(self) -> None:
        for future, outcome in list(self.outcome_of.items()):
            lost = future.unknown_batch
            if lost is None or not isinstance(outcome, DeliveryUnknown) or future in self.resent:
                continue
            queue = self.resend_queues.setdefault(
                (lost.queue_id, lost.producer_id),
                QueueSequence("t", lost.queue_id, lost.producer_id, 0, False, resends=True),
            )
            again = BatchFuture()
            sent = InFlightBatch(queue, lost.batch, lost.batch.num_rows, "quorum", again)
            sent.sequence, sent.uncertain = lost.sequence, True
            self.window.add(sent, self.now_ms)
            self.resent |= {future, again}
            self.bodies_of[again] = (lost.queue_id, bodies_in(sent))
            return

    def serve(self) -> None:
        streams = [each for each in [self.stream, *self.broken] if each and each.requests]
        if streams:
            # The newest one as a rule.
            late = self.random.random() < 0.1
            stream = self.random.choice(streams) if late else streams[0]
            stream.acks.append(self.answer(*stream.requests.popleft()))

    def answer(
        self, number: int, queue_id: int, producer_id: int, sequence: int, bodies: tuple[bytes, ...]
    ) -> dict[str, Any]:
        known = self.sequences.get((producer_id, queue_id), [])
        if content_error(bodies) is not None and sequence < len(known):
            # As `PutPath.check`: something is stored under its sequence.
            return refused(number, Rejected("x", field="KEYS"))
        return super().answer(number, queue_id, producer_id, sequence, bodies)

    def run(self, steps: int) -> None:
        actions = [self.add, self.connect, self.write, self.write, self.serve, self.serve]
        actions += [self.read_ack, self.read_ack, self.tick, self.resend]
        for _ in range(steps):
            if self.random.random() < 0.08:
                self.break_stream()
            self.random.choice(actions)()
        self.finish()

    def finish(self) -> None:
        broken = self.broken
        super().finish()
        self.stream, self.broken = None, broken
        while any(each.requests for each in broken):
            self.serve()

    def check(self) -> None:
        """Nothing is stored twice, and every outcome is true. A resend comes later than it was sent first."""
        for number, rows in enumerate(self.rows):
            assert len(set(rows)) == len(rows), f"queue {number}: stored twice"
        self.check_outcomes()


@pytest.mark.parametrize("block", range(5))
def test_what_is_sent_again_and_what_comes_late_is_stored_once(block: int) -> None:
    resent = 0
    for seed in range(block * 100, block * 100 + 100):
        world = ResendingWorld(seed)
        try:
            world.run(300)
            world.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        resent += len(world.resent)
    assert resent > 40


# --- the leader changes ---------------------------------------------------------------------------


@dataclass
class Answer:
    """A batch in the leader's log, whose ack is written when a majority has it. Or one that was refused."""

    stream: Stream
    number: int
    queue_id: int
    producer_id: int
    #: what is stored
    bodies: tuple[bytes, ...]
    error: Rejected | None = None


class MovingWorld(World):
    """A shard of several replicas: a new leader has all confirmed batches, and some of the others."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        #: in the order of the log
        self.unconfirmed: list[Answer] = []
        self.moves = 0

    def answer_request(self, stream: Stream) -> None:
        number, queue_id, producer_id, sequence, bodies = stream.requests.popleft()
        known = self.sequences.setdefault((producer_id, queue_id), [])
        error = content_error(bodies) or (GAP if sequence > len(known) else None)
        if error is not None:
            # Answered in order: after the batches that were stored before it.
            self.unconfirmed.append(Answer(stream, number, queue_id, producer_id, (), error))
            return
        if sequence < len(known):
            assert tuple(known[sequence : sequence + len(bodies)]) == bodies, "two rows"
        else:
            known += bodies
            self.rows[queue_id] += bodies
            self.stored_as[bodies] = (producer_id, sequence)
        self.unconfirmed.append(Answer(stream, number, queue_id, producer_id, bodies))

    def serve(self) -> None:
        if self.stream is not None and self.stream.requests:
            self.answer_request(self.stream)

    def confirm(self) -> None:
        """A majority has the next batch."""
        if self.unconfirmed:
            each = self.unconfirmed.pop(0)
            ack = stored(each.number, len(each.bodies))
            each.stream.acks.append(ack if each.error is None else refused(each.number, each.error))

    def move(self) -> None:
        """Another replica leads: the old leader steps down, or is gone."""
        self.moves += 1
        kept = self.random.randint(0, len(self.unconfirmed))
        lost, self.unconfirmed = self.unconfirmed[kept:], []
        steps_down = self.stream is not None and self.random.random() < 0.5
        if steps_down:
            self.step_down()
        for each in reversed(lost):
            self.cut(each)
        if self.stream is not None and not steps_down:
            self.break_stream()

    def step_down(self) -> None:
        """Waiting puts are unknown, and those that come later are refused."""
        stream = self.stream
        assert stream is not None
        answered = {ack["id"] for ack in stream.acks}
        late = DeliveryUnknown("the epoch is over", status="SERVICE_NOT_AVAILABLE")
        leader = NotLeading("does not lead", endpoint="b", epoch=self.moves)
        requested = [request[0] for request in stream.requests]
        stream.requests.clear()
        for batch_under_way in list(self.window.unacked):
            number = batch_under_way.number
            if number not in answered:
                error = leader if number in requested else late
                stream.acks.append(refused(number, error))
        while self.stream is stream and stream.acks:
            self.read_ack()

    def cut(self, each: Answer) -> None:
        """The new leader does not have this batch."""
        if each.error is not None:
            return
        rows = self.rows[each.queue_id]
        if tuple(rows[len(rows) - len(each.bodies) :]) != each.bodies:
            # It was stored before, and is recognised again.
            return
        known = self.sequences[each.producer_id, each.queue_id]
        del rows[len(rows) - len(each.bodies) :]
        del known[len(known) - len(each.bodies) :]
        del self.stored_as[each.bodies]

    def run(self, steps: int) -> None:
        actions = [self.add, self.connect, self.write, self.write, self.serve, self.serve]
        actions += [self.confirm, self.confirm, self.read_ack, self.read_ack, self.tick]
        for _ in range(steps):
            if self.random.random() < 0.02:
                self.move()
            self.random.choice(actions)()
        self.finish()

    def finish(self) -> None:
        """No more faults: everything gets an outcome."""
        for _ in range(10_000):
            if len(self.outcome_of) == len(self.bodies_of):
                return
            for action in (self.connect, self.write, self.serve, self.confirm, self.read_ack):
                action()
        raise AssertionError("a batch has no outcome")


@pytest.mark.parametrize("block", range(5))
def test_whenever_the_leader_changes_every_batch_is_stored_once_and_in_order(block: int) -> None:
    moves = 0
    for seed in range(block * 40, block * 40 + 40):
        world = MovingWorld(seed)
        world.faults = 0.0
        try:
            world.run(400)
            world.check()
            kinds = {type(outcome).__name__ for outcome in world.outcome_of.values()}
            # Only its time, or its rows, may end the resends of a batch.
            assert kinds <= {"BatchReceipt", "DeliveryUnknown", "Unavailable", "Rejected"}, kinds
            assert not any("gap" in str(outcome) for outcome in world.outcome_of.values())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        moves += world.moves
    assert moves > 200
