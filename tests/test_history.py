"""The checker of the fault tests rejects bad histories, each for its reason, and takes good ones as they are."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.support.history import Committed, Read, SequenceKey, body, faults


class Case(NamedTuple):
    """A history: two producers, 0 and 1; two queues, 0 and 1."""

    name: str
    #: what the checker must say, in this order; empty: nothing
    verdicts: list[str]
    reads: list[Read]
    acked: dict[SequenceKey, dict[int, int]]
    sent: dict[SequenceKey, int]
    seen: tuple[list[Read], ...] = ()
    committed: tuple[list[Committed], ...] = ()


def log(*numbers: int, producer: int = 0, queue: int = 0, start: int = 0) -> list[Read]:
    """A producer's messages of these numbers, at consecutive offsets."""
    return [
        Read(queue, start + at, body(producer, queue, number)) for at, number in enumerate(numbers)
    ]


A: SequenceKey = (0, 0)
B: SequenceKey = (1, 0)
C: SequenceKey = (0, 1)
RECEIPTS = {A: {0: 0, 1: 1, 2: 2}}
SENT = {A: 3}

GOOD = [
    Case("nothing happened", [], [], {}, {}),
    Case("all is there", [], log(0, 1, 2), RECEIPTS, SENT),
    Case("no receipt, and it is there", [], log(0, 1, 2), {A: {0: 0}}, SENT),
    Case("no receipt, and it is not there", [], log(0), {A: {0: 0}}, SENT),
    Case("no receipt at all, some are there", [], log(0, 1), {}, SENT),
    Case(
        "its receipt came after its successor's",
        [],
        log(0, 1, 2),
        {A: {2: 2, 0: 0, 1: 1}},
        SENT,
    ),
    Case("a receipt without an offset", [], log(0, 1, 2), {A: {0: 0, 1: -1, 2: -1}}, SENT),
    Case("sent once more while it was read", [], log(0, 1), {A: {0: 0, 1: 1}}, {A: 9}),
    Case("given up, and the next one is there", [], log(0, 2), {A: {0: 0, 2: 1}}, SENT),
    Case(
        "two producers in one queue, one of them late",
        [],
        [*log(0), *log(0, 1, producer=1, start=1), *log(1, start=3)],
        {A: {0: 0, 1: 3}, B: {0: 1, 1: 2}},
        {A: 2, B: 2},
    ),
    Case(
        "two queues, read one after the other",
        [],
        [*log(0, 1), *log(0, queue=1)],
        {A: {0: 0, 1: 1}, C: {0: 0}},
        {A: 2, C: 1},
    ),
    Case(
        "one reader is behind another",
        [],
        log(0, 1, 2),
        RECEIPTS,
        SENT,
        seen=(log(0, 1, 2), log(0), []),
    ),
    Case(
        "a reader saw a message without a receipt",
        [],
        log(0, 1),
        {A: {0: 0}},
        SENT,
        seen=(log(0, 1),),
    ),
    Case(
        "two groups commit, each at its own pace in each queue",
        [],
        log(0, 1, 2),
        RECEIPTS,
        SENT,
        committed=(
            [Committed(0, 1), Committed(1, 0), Committed(0, 1), Committed(0, 3)],
            [Committed(0, 2), Committed(0, 2)],
            [],
        ),
    ),
]

BAD = [
    Case("the last one is lost", ["lost"], log(0, 1), RECEIPTS, SENT),
    Case("the first one is lost", ["lost"], log(1, 2), {A: {0: -1, 1: 0, 2: 1}}, SENT),
    Case("one in the middle is lost", ["lost"], log(0, 2), {A: {0: 0, 1: -1, 2: 1}}, SENT),
    Case("all are lost", ["lost"] * 3, [], RECEIPTS, SENT),
    Case(
        "a whole queue is lost",
        ["lost"],
        log(0),
        {A: {0: 0}, C: {0: 0}},
        {A: 1, C: 1},
    ),
    Case(
        "one producer's is lost, its offset promised to the other",
        ["lost", "duplicate"],
        log(0, producer=1),
        {A: {0: 0}, B: {0: 0}},
        {A: 1, B: 1},
    ),
    Case("one that was never sent", ["phantom"], log(0, 1, 2, 3), RECEIPTS, SENT),
    Case("one of a producer that never was", ["phantom"], log(0, producer=7), {}, SENT),
    Case("bytes that no producer sent", ["phantom"], [Read(0, 0, b"?")], {}, SENT),
    Case("an empty message", ["phantom"], [Read(0, 0, b"")], {}, SENT),
    Case(
        "the last byte is missing",
        ["phantom"],
        [Read(0, 0, body(0, 0, 0)[:-1])],
        {},
        SENT,
    ),
    Case(
        "a byte inside is another",
        ["phantom"],
        [Read(0, 0, body(0, 0, 0)[:-9] + b"#" + body(0, 0, 0)[-8:])],
        {},
        SENT,
    ),
    Case("in the wrong queue", ["phantom"], [Read(1, 0, body(0, 0, 0))], {}, SENT),
    Case(
        "acknowledged, and altered",
        ["phantom", "lost"],
        [Read(0, 0, body(0, 0, 0) + b"!")],
        {A: {0: 0}},
        SENT,
    ),
    Case("twice, one after the other", ["duplicate"], log(0, 0), {A: {0: 0}}, SENT),
    Case("again after others", ["duplicate"], log(0, 1, 2, 1), RECEIPTS, SENT),
    Case("a whole batch again", ["duplicate"] * 2, log(0, 1, 0, 1), {A: {0: 0, 1: 1}}, SENT),
    Case("twice, without a receipt", ["duplicate"], log(0, 0), {}, SENT),
    Case(
        "one offset promised to two producers",
        ["misplaced", "duplicate"],
        [*log(0), *log(0, producer=1, start=1)],
        {A: {0: 0}, B: {0: 0}},
        {A: 1, B: 1},
    ),
    Case("two have changed places", ["reordered"], log(1, 0), {A: {0: 1, 1: 0}}, {A: 2}),
    Case("the first one came last", ["reordered"], log(1, 2, 0), {}, SENT),
    Case("backwards", ["reordered"] * 2, log(2, 1, 0), {}, SENT),
    Case(
        "one without a receipt came late",
        ["reordered"],
        log(0, 2, 1),
        {A: {0: 0, 2: 1}},
        SENT,
    ),
    Case(
        "a hole in the offsets",
        ["non-monotonic"],
        [*log(0, 1), *log(2, start=3)],
        {A: {0: 0, 1: 1, 2: 3}},
        SENT,
    ),
    Case("the log does not begin at 0", ["non-monotonic"], log(0, start=1), {A: {0: 1}}, SENT),
    Case("an offset twice", ["non-monotonic"], [*log(0, 1), *log(2, start=1)], {}, SENT),
    Case(
        "a reader was sent back",
        ["non-monotonic"],
        log(0, 1),
        {},
        SENT,
        seen=([*log(0, 1), *log(1, start=1)],),
    ),
    Case(
        "a reader was sent over a message",
        ["non-monotonic"],
        log(0, 1, 2),
        {},
        SENT,
        seen=([*log(0), *log(2, start=2)],),
    ),
    Case("a reader saw what is gone now", ["non-monotonic"], log(0), {}, SENT, seen=(log(0, 1),)),
    Case(
        "a reader saw another message there",
        ["non-monotonic"],
        log(0, 2),
        {},
        SENT,
        seen=(log(0), log(0, 1)),
    ),
    Case("not where its receipt says", ["misplaced"], log(0), {A: {0: 5}}, SENT),
    Case(
        "a group's acknowledged commit is gone",
        ["offset regress"],
        log(0, 1, 2),
        RECEIPTS,
        SENT,
        committed=([Committed(0, 1), Committed(0, 3), Committed(0, 1), Committed(0, 3)],),
    ),
    Case(
        "a group begins again at the start of one of its queues",
        ["offset regress"],
        [*log(0, 1), *log(0, queue=1)],
        {},
        {A: 2, C: 1},
        committed=([Committed(0, 2), Committed(1, 1), Committed(0, 2), Committed(1, 0)],),
    ),
]


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_a_good_history_is_taken(case: Case) -> None:
    assert faults(case.acked, case.reads, case.sent, case.seen, case.committed) == []


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_a_bad_history_is_rejected_for_its_reason(case: Case) -> None:
    found = faults(case.acked, case.reads, case.sent, case.seen, case.committed)
    assert [fault.verdict for fault in found] == case.verdicts, found


def test_there_are_bad_histories_of_every_kind() -> None:
    histories = {repr(case._replace(name="", verdicts=[])) for case in BAD}
    assert len(histories) == len(BAD) >= 20
    reported = {verdict for case in BAD for verdict in case.verdicts}
    assert reported == {
        *("lost", "phantom", "duplicate", "reordered", "non-monotonic", "misplaced"),
        "offset regress",
    }
