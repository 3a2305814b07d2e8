"""A copy asks for a log range by range, from the place up to which both logs are equal."""

from __future__ import annotations

import pytest

from raymq.replication.log_copy import LogCopy, LogRange
from raymq.replication.wire import AppendEntries, Probe
from raymq.store.log.mending.fitting import SoundBytes
from tests.support.mirror_world import SEGMENT_BYTES, MemoryLog

RANGE_BYTES = 100


def log_of(*sizes: int) -> MemoryLog:
    """A log of units of these sizes, each of another byte."""
    log = MemoryLog()
    for number, size in enumerate(sizes):
        log.append(bytes([number + 1]) * size)
    return log


def copy_of(own: MemoryLog, source_end: int, *, epoch: int = 0) -> LogCopy:
    return LogCopy(
        own,
        len(own.data),
        (epoch, source_end),
        log_start=own.start,
        segment_size_bytes=SEGMENT_BYTES,
        range_bytes=RANGE_BYTES,
    )


def given(source: MemoryLog, wanted: LogRange) -> SoundBytes:
    start, stop = wanted
    units = [unit for unit in source.units if unit.start < stop and start < unit.end]
    return SoundBytes(start, bytes(source.data[start:stop]), units)


def run(copy: LogCopy, source: MemoryLog) -> list[tuple[AppendEntries, bytes]]:
    """Answer all questions as that log does. Returns: what is to be stored."""
    taken = []
    while (question := copy.question) is not None:
        if isinstance(question, Probe):
            held = [
                index
                for index, (end, value) in enumerate(question.candidates)
                if source.chain_value_at(end) == value
            ]
            copy.take_match(max(held, default=-1), question.candidates[-1][0])
            continue
        assert question.start < question.stop <= question.start + RANGE_BYTES
        assert question.start // SEGMENT_BYTES == (question.stop - 1) // SEGMENT_BYTES
        units = copy.take_range(given(source, question))
        if units is not None:
            taken.append((units[0], bytes(units[1])))
    return taken


@pytest.mark.parametrize("held", [0, 1, 4])
def test_a_copy_begins_where_the_logs_are_equal_and_ends_where_the_source_does(held: int):
    sizes = [30, 50, 20, 60, 10, 40, 25]
    source, own = log_of(*sizes), log_of(*sizes[:held])
    taken = run(copy_of(own, len(source.data)), source)
    assert bytes(own.data) + b"".join(data for _, data in taken) == bytes(source.data)
    assert [unit for message, _ in taken for unit in message.units] == source.units[held:]
    ends = [len(own.data), *(message.end for message, _ in taken)]
    assert [message.prev_end for message, _ in taken] == ends[:-1]


def test_a_unit_that_is_larger_than_a_question_is_taken_whole():
    source, own = log_of(30, 350, 20), log_of(30)
    taken = run(copy_of(own, len(source.data)), source)
    assert [unit for message, _ in taken for unit in message.units] == source.units[1:]
    assert b"".join(data for _, data in taken) == bytes(source.data[30:])


def test_no_question_is_about_two_segments():
    source, own = MemoryLog(), MemoryLog()
    for _ in range(3):
        for size in (SEGMENT_BYTES - 130, 130):
            source.append(bytes([len(source.units) + 1]) * size)
    copy = copy_of(own, len(source.data))
    for _, data in run(copy, source):
        own.data += data
    assert own.data == source.data


def test_a_copy_begins_below_records_that_the_source_lacks():
    own, source = log_of(30, 50), log_of(30, 50)
    own.append(b"x" * 70)
    source.append(b"y" * 20)
    taken = run(copy_of(own, len(source.data)), source)
    assert [message.prev_end for message, _ in taken] == [80]


def test_logs_whose_common_part_is_deleted_are_not_copied():
    own, source = log_of(SEGMENT_BYTES, 40), log_of(SEGMENT_BYTES, 60, 80)
    own.delete_first_segment()
    own.units[0] = own.units[0]._replace(previous=7)
    own.start_value = 7
    copy = copy_of(own, len(source.data))
    assert run(copy, source) == []
    assert copy.failed


def test_bytes_of_another_chain_than_the_one_that_was_compared_end_a_copy():
    source, other, own = log_of(30, 50), log_of(20, 60), log_of(30)
    copy = copy_of(own, len(source.data))
    question = copy.question
    assert isinstance(question, Probe)
    copy.take_match(len(question.candidates) - 1, question.candidates[-1][0])
    wanted = copy.question
    assert isinstance(wanted, LogRange)
    assert copy.take_range(given(source, LogRange(0, 30))) is None
    assert copy.question == wanted
    assert copy.take_range(given(other, wanted)) is None
    assert copy.failed
    assert copy.question is None


def test_records_of_a_later_epoch_than_the_offered_one_are_not_taken():
    source = log_of(30)
    source.append(b"later", epoch=2)
    copy = copy_of(MemoryLog(), len(source.data), epoch=1)
    assert run(copy, source) == []
    assert copy.failed


def test_nothing_that_is_equal_here_would_be_cut():
    source, own = log_of(30, 50, 20), log_of(30)
    ((message, _),) = run(copy_of(own, len(source.data)), source)
    assert message.confirmed == message.end
