"""Records against the reference decoder: what is encoded, what is damaged, and bytes that are none."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from raymq.store.records import record
from raymq.store.records.properties import encode
from tests.support.reference_decoder import decode_all, decode_record

HOSTS = st.tuples(
    st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str),
    st.integers(-(1 << 31), (1 << 31) - 1),
)
TEXT = st.text(
    st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=12
)
TOPICS = st.one_of(
    st.from_regex(r"[a-zA-Z0-9_%|-]{1,127}", fullmatch=True),
    st.from_regex(r"%RETRY%[a-zA-Z0-9_-]{121,200}", fullmatch=True),
)
ROWS = st.lists(
    st.tuples(
        st.binary(max_size=200),
        st.none() | TEXT,
        st.none()
        | st.dictionaries(TEXT.filter(lambda name: name not in ("TAGS", "_P")), TEXT, max_size=4),
        st.integers(-(1 << 63), (1 << 63) - 1),
    ),
    min_size=1,
    max_size=6,
)


def batch_of(rows: list[tuple[Any, ...]]) -> Any:
    columns = list(zip(*rows, strict=True))
    return pa.record_batch(
        [pa.array(c, f.type) for c, f in zip(columns, record.PUT_SCHEMA, strict=True)],
        schema=record.PUT_SCHEMA,
    )


@given(TOPICS, ROWS, HOSTS, HOSTS, st.integers(0, 1 << 62), st.integers(0, 1 << 62))
def test_what_is_encoded_is_what_the_reference_reads(
    topic, rows, born, store, queue_offset, physical
):
    values = [(b, tag, None if p is None else encode(p), ms) for b, tag, p, ms in rows]
    batch = batch_of(values)
    record.check_put(topic, batch, max_message_bytes=1 << 20)
    encoded = record.encode_batch(topic, 5, batch, stamp=None, born_host=born, store_host=store)
    data = encoded.records(
        0, len(rows), queue_offset=queue_offset, physical_offset=physical, store_time_ms=77
    )
    found = decode_all(bytes(data))
    at = physical
    for number, (body, tag, properties, born_ms) in enumerate(rows):
        row = found[number]
        wanted = ({"TAGS": tag} if tag else {}) | (properties or {})
        assert row["properties"] == encode(wanted)
        assert (row["topic"], row["body"], row["born_time_ms"]) == (topic, body, born_ms)
        assert (row["queue_id"], row["queue_offset"]) == (5, queue_offset + number)
        assert (row["physical_offset"], row["store_time_ms"]) == (at, 77)
        at += row["size"]
    assert len(found) == len(rows)
    assert at == physical + len(data)


@st.composite
def damaged_logs(draw: st.DrawFn) -> tuple[bytes, int]:
    """Consecutive records with some bytes changed, and the start of their log."""
    base = draw(st.sampled_from([0, 4096, 1 << 40]))
    data = b""
    for _ in range(draw(st.integers(0, 9))):
        body = draw(st.sampled_from([b"", b"x" * 30, b"y" * 30]) | st.binary(max_size=40))
        fields = {
            "topic": draw(st.sampled_from(["t", "T" * 130])),
            "properties": draw(st.sampled_from([b"", b"a\x01b\x02"])),
            "born_host": draw(st.sampled_from([("10.0.0.1", 1), ("::1", 2)])),
            "sys_flag": draw(st.sampled_from([0, 4, 8])),
        }
        data += record.encode_record(body=body, physical_offset=base + len(data), **fields)
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        splash = draw(st.binary(min_size=1, max_size=9) | st.sampled_from(record.MAGICS))
        changed[at : at + len(splash)] = splash[: max(0, len(data) - at)]
    changed += draw(st.just(b"") | st.binary(max_size=120) | st.just(record.blank(99)))
    return bytes(
        changed[: draw(st.integers(0, len(changed)))] if draw(st.booleans()) else changed
    ), base


def reference_walk(data: bytes, base: int) -> list[dict[str, Any]]:
    """The records up to the first invalid one, or one with another physical offset."""
    rows: list[dict[str, Any]] = []
    at = 0
    while at < len(data):
        try:
            row = decode_record(data, at)
        except ValueError:
            break
        if row["physical_offset"] != base + at or not row["topic"]:
            break
        rows.append(row)
        at += row.pop("size")
    return rows


@given(damaged_logs())
def test_damaged_records_are_walked_and_decoded_as_the_reference_does(log):
    data, base = log
    walk = record.walk(data, base)
    expected = reference_walk(data, base)
    assert walk.positions.tolist() == [row["physical_offset"] for row in expected]
    batch = record.decode(data, walk.positions - base, walk.sizes)
    assert batch.to_pylist() == [
        {name: row[name] for name in record.RECORD_SCHEMA.names} for row in expected
    ]


@given(st.binary(max_size=400), st.integers(0, 400), st.integers(0, 1 << 62))
def test_no_bytes_make_a_walk_fail_or_look_past_its_stop(data, stop, base):
    """The records after the stop would be valid."""
    cut = data[:stop]
    behind = record.encode_record(topic="t", body=b"x", physical_offset=base + len(cut))
    walk = record.walk(cut + behind * 3, base, stop=len(cut))
    assert base <= walk.end <= base + len(cut)
    assert walk.positions.tolist() == record.walk(cut, base).positions.tolist()
