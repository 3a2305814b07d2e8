from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymq.store.base.errors import Bug, Rejected
from raymq.store.base.format import QUEUE_UNIT_DTYPE, pack_host, tags_code
from raymq.store.records import record
from raymq.store.records.producer_stamp import STAMP_BYTES, Stamp, read_column
from raymq.store.records.properties import encode
from raymq.store.records.record import WalkStop
from raymq.store.records.small_batch import row_lists
from tests.support.reference_decoder import decode_all, decode_record

V4, V6 = ("10.0.0.1", 10911), ("2001:db8::2", 54321)
LONG_TOPIC = "%RETRY%" + "g" * 150
MIB = 1 << 20

BODY = st.binary(max_size=40)
TAG = st.none() | st.sampled_from(["", "TagA", "标签"])
PROPERTIES = st.none() | st.sampled_from([b"", encode({"KEYS": "k1 k2"}), encode({"a": "ä" * 9})])
ROW = st.tuples(BODY, TAG, PROPERTIES, st.integers(-5, 1 << 60))
HOSTS = st.none() | st.sampled_from([V4, V6, ("1.2.3.4", 5)])
#: values of MORE_SCHEMA, of which a batch has some: the host as address and port
MORE = st.tuples(
    st.none() | st.integers(-(1 << 31), (1 << 31) - 1),
    st.none() | st.sampled_from([0, 1, 2, 0x101, 0x301, 0x303]),
    HOSTS,
)
MORE_NAMES = st.lists(st.sampled_from(record.MORE_SCHEMA.names), unique=True)
RECORD = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(["t", "TopicTest", "T" * 127, LONG_TOPIC]),
        "body": BODY,
        "properties": st.binary(max_size=40),
        "queue_id": st.integers(0, 9),
        "flag": st.integers(-(1 << 31), (1 << 31) - 1),
        "sys_flag": st.sampled_from([0, 1, 2, 4, 8, 12, 0x300]),
        "born_host": st.sampled_from([V4, V6, ("1.2.3.4", 5)]),
        "store_host": st.sampled_from([V4, V6]),
        "queue_offset": st.integers(0, 1 << 62),
        "store_time_ms": st.integers(0, 1 << 50),
        "reconsume_times": st.integers(0, 16),
        "prepared_transaction_offset": st.integers(0, 1 << 50),
    }
)


def batch_of(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [[], [], [], []]
    return pa.record_batch(
        [pa.array(c, f.type) for c, f in zip(columns, record.PUT_SCHEMA, strict=True)],
        schema=record.PUT_SCHEMA,
    )


def with_more(batch: pa.RecordBatch, more: list[tuple[Any, ...]], names: Any) -> pa.RecordBatch:
    """A batch and those of its columns of MORE_SCHEMA that are named."""
    rows = [(flag, bits, host and pack_host(*host)) for flag, bits, host in more]
    for at, field in enumerate(record.MORE_SCHEMA):
        if field.name in names:
            values = pa.array([row[at] for row in rows], field.type)
            batch = batch.append_column(field, values)
    return batch


def one(body: Any = b"x", tag: Any = None, properties: Any = None, born: Any = 1) -> pa.RecordBatch:
    return batch_of([(b"ok", None, None, 1), (body, tag, properties, born)])


def check(batch: pa.RecordBatch, topic: str = "t") -> None:
    record.check_put(topic, batch, max_message_bytes=MIB)


def log_of(records: list[dict[str, Any]], base: int = 0) -> bytes:
    data = b""
    for fields in records:
        data += record.encode_record(physical_offset=base + len(data), **fields)
    return data


# --- encode ---------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(ROW, MORE), min_size=1, max_size=8),
    MORE_NAMES,
    st.sampled_from(["t", "T" * 127, LONG_TOPIC]),
    st.none() | st.just(Stamp(1 << 63, 70_000, 1 << 35)),
    st.sampled_from([V4, V6]),
    st.sampled_from([V4, V6]),
    st.integers(0, 7),
    st.integers(0, 3),
)
def test_encoded_rows_are_the_records_that_the_slow_encoder_writes(
    given_rows, names, topic, stamp, born, store, cut, skip
):
    rows, more = [row for row, _ in given_rows], [each for _, each in given_rows]
    whole = batch_of([(b"skipped", "x", None, 0)] * skip + rows)
    whole = with_more(whole, [(7, 1, V6)] * skip + more, names)
    batch = whole.slice(skip)
    check(batch, topic)
    encoded = record.encode_batch(topic, 3, batch, stamp=stamp, store_host=store, born_host=born)
    assert encoded.count == len(rows)
    cut = min(cut, len(rows))
    first = encoded.records(0, cut, queue_offset=9, physical_offset=1000, store_time_ms=77)
    second = encoded.records(
        cut,
        len(rows),
        queue_offset=9 + cut,
        physical_offset=1000 + len(bytes(first)),
        store_time_ms=77,
    )
    found = bytes(first) + bytes(second)

    expected, stamps = b"", []
    for (body, tag, properties, born_ms), (flag, bits, host) in zip(rows, more, strict=True):
        head = b""
        if stamp is not None:
            at = len(stamps)
            head = decode_record(found, len(expected))["properties"][:STAMP_BYTES]
            stamps.append(head)
            _, producer, epoch, sequence = read_column(np.frombuffer(head, np.uint8)[None, :])
            assert Stamp(producer[0], epoch[0], sequence[0] - at) == stamp
        expected += record.encode_record(
            topic=topic,
            body=body,
            properties=head + (encode({"TAGS": tag}) if tag else b"") + (properties or b""),
            queue_id=3,
            queue_offset=9 + len(decode_all(expected)),
            physical_offset=1000 + len(expected),
            flag=(flag or 0) if "flag" in names else 0,
            sys_flag=(bits or 0) if "sys_flag" in names else 0,
            born_time_ms=born_ms,
            born_host=(host or born) if "born_host" in names else born,
            store_time_ms=77,
            store_host=store,
        )
    assert found == expected
    assert encoded.sizes.tolist() == [row["size"] for row in decode_all(expected)]
    units = np.frombuffer(encoded.queue_units(0, len(rows), 1000), QUEUE_UNIT_DTYPE)
    assert units["tags_code"].tolist() == [tags_code(tag) for _, tag, _, _ in rows]


@given(
    st.lists(st.tuples(ROW, MORE), min_size=1, max_size=5),
    MORE_NAMES,
    st.sampled_from(["t", "T" * 127, LONG_TOPIC]),
    st.none() | st.just(Stamp((1 << 64) - 1, 70_000, 1 << 35)),
    st.integers(0, 4),
    st.sampled_from([None, V4, V6]),
    st.sampled_from([V4, V6]),
)
def test_a_small_batch_gets_the_bytes_that_its_columns_get(
    given_rows, names, topic, stamp, start, born, store
):
    rows, more = [row for row, _ in given_rows], [each for _, each in given_rows]
    batch = with_more(batch_of(rows), more, names)
    small = record.check_put(topic, batch, max_message_bytes=MIB)
    assert small is not None
    assert small.to_batch().equals(batch)
    values, columns = (
        record.encode_batch(
            topic, 3, batch, stamp=stamp, store_host=store, born_host=born, small=given
        )
        for given in (small, None)
    )
    widths = {len(pack_host(*(host or born or store))) for _, _, host in more}
    is_mixed = "born_host" in names and len(widths) > 1
    assert (type(values) is type(columns)) is is_mixed
    start, stop = min(start, len(rows)), len(rows)
    assert bytes(
        values.records(start, stop, queue_offset=9, physical_offset=1000, store_time_ms=77)
    ) == bytes(columns.records(start, stop, queue_offset=9, physical_offset=1000, store_time_ms=77))
    assert values.sizes.tolist() == columns.sizes.tolist()
    assert values.queue_units(start, stop, 1000) == columns.queue_units(start, stop, 1000)
    assert (values.largest, values.bytes_from(start)) == (
        columns.largest,
        columns.bytes_from(start),
    )
    if columns.keyed is not None:
        assert values.keyed.data == columns.keyed.data
        assert values.keyed.offsets.tolist() == columns.keyed.offsets.tolist()
    else:
        assert values.keyed is None


def test_encoding_a_row_again_gives_the_same_bytes():
    encoded = record.encode_batch("t", 0, one(), stamp=None, store_host=V4)
    offsets = {"queue_offset": 1, "physical_offset": 2, "store_time_ms": 3}
    encoded.records(0, 2, queue_offset=50, physical_offset=60, store_time_ms=70)
    assert encoded.records(1, 2, **offsets) == encoded.records(1, 2, **offsets)


def test_no_rows_are_no_bytes():
    batch = batch_of([])
    check(batch)
    encoded = record.encode_batch("t", 0, batch, stamp=Stamp(1, 2, 3), store_host=V4)
    data = encoded.records(0, 0, queue_offset=0, physical_offset=0, store_time_ms=0)
    assert (encoded.count, data.size) == (0, 0)


def test_null_slots_that_span_bytes_write_nothing():
    offsets = pa.py_buffer(np.array([0, 3, 6], dtype=np.int32))
    valid = pa.py_buffer(b"\x02")  # a bit a row, the lowest first: row 0 is null
    values = pa.py_buffer(b"\x01\x02zabc")
    tag = pa.StringArray.from_buffers(2, offsets, values, valid)
    names = pa.py_buffer(b"_P\x01a\x01\x02")
    properties = pa.BinaryArray.from_buffers(pa.binary(), 2, [valid, offsets, names])
    batch = pa.record_batch(
        [pa.array([b"1", b"2"]), tag, properties, pa.array([1, 2])], schema=record.PUT_SCHEMA
    )
    check(batch)
    encoded = record.encode_batch("t", 0, batch, stamp=None, store_host=V4)
    data = encoded.records(0, 2, queue_offset=0, physical_offset=0, store_time_ms=0)
    found = [row["properties"] for row in decode_all(data.to_pybytes())]
    assert found == [b"", b"TAGS\x01abc\x02a\x01\x02"]


def test_a_host_name_is_rejected():
    with pytest.raises(Rejected) as caught:
        record.encode_batch("t", 0, one(), stamp=None, store_host=("localhost", 1))
    assert caught.value.field == "host"


def test_a_blank_record_is_its_length_and_magic():
    assert record.blank(0x832).hex() == "00000832cbd43194"
    with pytest.raises(Bug):
        record.blank(7)


# --- check_put ------------------------------------------------------------------------------------


BAD_HEADS = [
    ("sys_flag", [None, 0x303, 0x4], 0x303, 0x4),
    ("sys_flag", [None, 0x303, 0x10], 0x303, 0x10),
    ("sys_flag", [None, 0x303, 0x80], 0x303, 0x80),
    ("sys_flag", [None, 0x303, 0x401], 0x303, 0x401),
    ("sys_flag", [None, 0x303, -1], 0x303, -1),
    ("born_host", [None, bytes(8), bytes(9)], "8 or 20 bytes", 9),
    ("born_host", [None, bytes(20), b""], "8 or 20 bytes", 0),
]


@pytest.mark.parametrize(("name", "values", "limit", "found"), BAD_HEADS)
@pytest.mark.parametrize("rows", [3, 300])
def test_a_value_that_no_sender_sets_is_refused_with_its_row(name, values, limit, found, rows):
    field = record.MORE_SCHEMA.field(name)
    padded = values[:2] + [None] * (rows - 3) + values[2:]
    batch = batch_of([(b"x", None, None, 1)] * rows)
    batch = batch.append_column(field, pa.array(padded, field.type))
    for given_batch in (batch, row_lists(batch)):
        with pytest.raises(Rejected) as caught:
            record.check_put("t", given_batch, max_message_bytes=MIB)
        fields = caught.value.fields
        assert (caught.value.field, caught.value.limit) == (name, limit)
        assert (fields["found"], caught.value.row) == (found, rows - 1)


def test_further_columns_come_in_their_order_and_with_their_types():
    flag, sys_flag = record.MORE_SCHEMA.field("flag"), record.MORE_SCHEMA.field("sys_flag")
    ones = pa.array([1], pa.int32())
    plain = batch_of([(b"x", None, None, 1)])
    check(plain.append_column(flag, ones).append_column(sys_flag, ones))
    with pytest.raises(Rejected) as order:
        check(plain.append_column(sys_flag, ones).append_column(flag, ones))
    with pytest.raises(Rejected) as kind:
        check(plain.append_column("flag", pa.array([1], pa.int64())))
    assert (order.value.field, kind.value.field) == ("columns", "flag")


BAD_ROWS = [
    (one(body=None), "body", "not null"),
    (one(born=None), "born_time_ms", "not null"),
    (one(body=b"x" * (MIB + 1)), "body", MIB),
    (one(tag="a\x01b"), "tag", "no \\x01, \\x02"),
    (one(tag="a\x02b"), "tag", "no \\x01, \\x02"),
    (one(tag="t" * 32_738), "properties", 32_767),
    (one(properties=b"a\x01" + b"b" * 32_741 + b"\x02"), "properties", 32_767),
    (one(properties=b"a\x01b"), "properties", "name \\x01 value \\x02 ..."),
    (one(properties=b"TAGS\x01b\x02"), "properties", "not TAGS"),
    (one(properties=b"a\x01b\x02TAGS\x01b\x02"), "properties", "not TAGS"),
    (one(properties=b"_P\x01b\x02"), "properties", "not _P"),
    (one(tag="\0" * 512), "tag", "less than 512 zero bytes in a row"),
    (
        one(properties=b"a\x01" + bytes(512) + b"\x02"),
        "properties",
        "less than 512 zero bytes in a row",
    ),
]


@pytest.mark.parametrize(("batch", "field", "limit"), BAD_ROWS)
@pytest.mark.parametrize("row", [1, 0])
def test_a_bad_row_is_rejected_with_field_limit_and_row(batch, field, limit, row):
    # As the second of two records, and alone, when the quick path encodes it.
    batch = batch.slice(1 - row)
    with pytest.raises(Rejected) as caught:
        check(batch)
    error = caught.value
    assert (error.field, error.limit, error.row) == (field, limit, row)
    assert f"row {row}" in error.message


@pytest.mark.parametrize(
    "batch",
    [
        one(body=b""),
        one(body=b"x" * MIB),
        one(tag="t" * (32_767 - 24 - 6)),
        one(properties=b"a\x01" + b"b" * 32_740 + b"\x02"),
        one(properties=b"MYTAGS\x01b\x02x_P\x01c\x02"),
        one(properties=b"a\x01" + bytes(511) + b"\x02", tag="\0" * 511),
        one(tag=""),
    ],
)
def test_a_row_at_its_limit_is_taken(batch):
    check(batch)
    check(batch.slice(1))
    record.encode_batch("t", 0, batch, stamp=Stamp(1, 1, 1), store_host=V4)


def test_wrong_columns_are_named():
    batch = one()
    with pytest.raises(Rejected) as caught:
        check(batch.rename_columns(["value", "tag", "properties", "born_time_ms"]))
    assert caught.value.field == "columns"
    wrong = batch.set_column(1, "tag", batch.column("tag").cast(pa.large_string()))
    with pytest.raises(Rejected) as caught:
        check(wrong)
    assert caught.value.field == "tag"
    assert "large_string" in caught.value.message


def test_arrow_data_with_bad_offsets_is_rejected():
    offsets = pa.py_buffer(np.array([0, 1 << 20, 2], dtype=np.int32))
    body = pa.BinaryArray.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"ab")])
    columns = [body, *one().columns[1:]]
    with pytest.raises(Rejected) as caught:
        check(pa.record_batch(columns, schema=record.PUT_SCHEMA))
    assert caught.value.field == "batch"


def test_a_bad_topic_is_rejected():
    with pytest.raises(Rejected) as caught:
        check(one(), topic="a/b")
    assert caught.value.field == "topic"


@pytest.mark.parametrize("fields", [{"properties": b"p" * 32_768}, {"topic": "ä" * 100}])
def test_the_slow_encoder_refuses_what_has_no_room_in_its_field(fields):
    with pytest.raises(Rejected):
        record.encode_record(**{"topic": "t", "body": b"", **fields})


# --- decode and select ----------------------------------------------------------------------------


@given(st.lists(RECORD, max_size=8), st.integers(0, 1 << 40))
def test_every_kind_of_record_is_walked_and_decoded_as_the_reference_does(records, base):
    data = log_of(records, base)
    walk = record.walk(data, base)
    expected = decode_all(data)
    assert (walk.end, walk.reason) == (base + len(data), WalkStop.STOPPED)
    assert walk.sizes.tolist() == [row.pop("size") for row in expected]
    assert walk.positions.tolist() == [row["physical_offset"] for row in expected]
    batch = record.decode(data, walk.positions - base, walk.sizes)
    assert batch.schema == record.RECORD_SCHEMA
    batch.validate(full=True)
    assert batch.to_pylist() == [
        {name: row[name] for name in record.RECORD_SCHEMA.names} for row in expected
    ]


@given(st.lists(RECORD, min_size=1, max_size=8), st.data())
def test_selected_records_are_the_bytes_of_the_log(records, data):
    log = b"\0" * 7 + log_of(records)
    walk = record.walk(log[7:], 0)
    rows = data.draw(st.sets(st.integers(0, len(records) - 1)).map(sorted))
    starts, sizes = walk.positions[rows] + 7, walk.sizes[rows]
    column = record.select(log, starts, sizes)
    column.validate(full=True)
    assert column.to_pylist() == [log[a : a + n] for a, n in zip(starts, sizes, strict=True)]
    assert record.decode(log, starts, sizes).num_rows == len(rows)


def test_neighbours_are_selected_without_a_copy():
    log = log_of([{"topic": "t", "body": b"1"}, {"topic": "t", "body": b"2"}])
    walk = record.walk(log, 0)
    column = record.select(log, walk.positions, walk.sizes)
    assert column.buffers()[2].address == pa.py_buffer(log).address


def test_a_topic_that_is_not_text_is_replaced_as_java_does():
    log = log_of([{"topic": "tt", "body": b""}]).replace(b"\x02tt", b"\x02t\xff")
    assert record.decode(log, [0], [len(log)]).column("topic").to_pylist() == ["t�"]


@pytest.mark.parametrize(("starts", "sizes"), [([0], [500]), ([-1], [93]), ([9, 0], [93, 93])])
def test_boundaries_that_are_none_are_our_bug(starts, sizes):
    log = log_of([{"topic": "t", "body": b"x"}] * 3)
    with pytest.raises(Bug):
        record.select(log, starts, sizes)
    with pytest.raises(Bug):
        record.decode(log, starts, sizes)


# --- walk -----------------------------------------------------------------------------------------


def damaged(index: int, at: int, value: bytes, records: int = 40, body: int = 10) -> bytearray:
    """A log of equal records with some bytes of record `index` replaced."""
    log = bytearray(
        log_of([{"topic": "t", "body": bytes([n % 251]) * body} for n in range(records)])
    )
    size = len(log) // records
    log[index * size + at : index * size + at + len(value)] = value
    return log


@pytest.mark.parametrize("index", [0, 1, 3, 20, 39])
@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (0, b"\0" * 8, WalkStop.END_OF_DATA),
        (0, record.blank(500), WalkStop.BLANK),
        (4, b"\0\0\0\0", WalkStop.BAD_MAGIC),
        (4, b"\xda\xa3\x20\xa8", WalkStop.BAD_MAGIC),
        (0, b"\0\0\0\x5b", WalkStop.BAD_LENGTH),
        (0, b"\x80\0\0\0", WalkStop.BAD_LENGTH),
        (0, b"\0\0\0\x60", WalkStop.BAD_LENGTH),
        (0, b"\x7f\0\0\0", WalkStop.SHORT),
        (4, record.MAGICS[1], WalkStop.BAD_LENGTH),
        (84, b"\xff\xff\xff\xff", WalkStop.BAD_LENGTH),
        (84, b"\x7f\xff\xff\xff", WalkStop.BAD_LENGTH),
        (84, b"\0\0\0\x0b", WalkStop.BAD_LENGTH),
        (36, b"\0\0\0\x30", WalkStop.BAD_LENGTH),
        (98, b"\x00", WalkStop.BAD_LENGTH),
        (98, b"\xff", WalkStop.BAD_LENGTH),
        (100, b"\xff\xff", WalkStop.BAD_LENGTH),
        (28, b"\1", WalkStop.WRONG_POSITION),
        (8, b"\x7f\xff\xff\xff", WalkStop.BAD_CRC),
        (97, b"\xee", WalkStop.BAD_CRC),
    ],
)
def test_a_walk_stops_at_a_damaged_record_and_says_why(index, at, value, reason):
    log = damaged(index, at, value)
    walk = record.walk(log, 0)
    assert walk.reason is reason
    assert len(walk.positions) == index
    assert walk.end == index * (len(log) // 40)


@pytest.mark.parametrize("index", [0, 4, 5, 260, 261, 1284, 1285, 1499])
def test_a_damaged_record_of_a_long_run_is_found(index):
    for at, value, reason in [
        (4, record.MAGICS[1], WalkStop.BAD_LENGTH),
        (4, b"\0\0\0\0", WalkStop.BAD_MAGIC),
        (97, b"\xee", WalkStop.BAD_CRC),
    ]:
        walk = record.walk(damaged(index, at, value, records=1500), 0)
        assert (walk.reason, len(walk.positions)) == (reason, index)


def test_position_and_crc_are_checked_only_when_asked():
    assert record.walk(damaged(2, 28, b"\1"), 0, check_position=False).reason is WalkStop.STOPPED
    assert record.walk(damaged(2, 97, b"\xee"), 0, check_crc=False).reason is WalkStop.STOPPED


def test_the_crc_of_an_empty_body_is_not_compared():
    log = bytearray(log_of([{"topic": "t", "body": b""}]))
    log[8:12] = b"\x12\x34\x56\x78"
    assert record.walk(log, 0).reason is WalkStop.STOPPED


@pytest.mark.parametrize("stop", range(0, 307, 6))
def test_a_walk_never_goes_past_its_stop(stop):
    log = damaged(0, 0, b"", records=3)
    walk = record.walk(log, 0, stop=stop)
    assert walk.positions.tolist() == record.walk(log[:stop], 0).positions.tolist()
    assert walk.end == stop // 102 * 102
    assert walk.reason is (WalkStop.SHORT if stop % 102 else WalkStop.STOPPED)


@pytest.mark.parametrize("limit", [0, 1, 5, 6, 39, 40, 41])
def test_a_walk_ends_at_its_limit(limit):
    walk = record.walk(damaged(0, 0, b""), 0, limit=limit)
    assert len(walk.positions) == min(limit, 40)
    assert walk.reason is WalkStop.STOPPED


def test_long_runs_and_changes_of_size_are_walked_alike():
    bodies = [b"a" * 5] * 9_000 + [b"b" * 6] * 300 + [b"c"] * 2 + [b"d" * 7] * 9_000
    topics = ["t"] * 9_150 + [LONG_TOPIC] * 100 + ["t"] * 10_000
    pairs = zip(bodies, topics, strict=False)
    size = [0]
    for body, topic in pairs:
        size.append(size[-1] + len(body) + len(topic) + (92 if len(topic) > 127 else 91))
    log = b"".join(
        record.encode_record(topic=topic, body=body, physical_offset=at)
        for body, topic, at in zip(bodies, topics, size, strict=False)
    )
    walk = record.walk(log, 0)
    assert walk.positions.tolist() == size[:-1]
    assert walk.end == len(log)


@given(st.binary(max_size=300), st.integers(0, 300))
def test_any_bytes_can_be_walked(data, stop):
    record.walk(data, 5, stop=stop)
    record.walk(record.MAGICS[0].join([data[:4], data[4:]]), 5, stop=stop)


@given(st.lists(RECORD, min_size=1, max_size=6), st.data())
def test_a_walk_over_one_changed_byte_keeps_the_records_before_it(records, data):
    log = bytearray(log_of(records))
    ends = np.cumsum(record.walk(log, 0).sizes)
    at = data.draw(st.integers(0, len(log) - 1))
    log[at] ^= data.draw(st.integers(1, 255))
    assert record.walk(log, 0).end >= ends[np.searchsorted(ends, at, side="right") - 1] or (
        at < ends[0]
    )
