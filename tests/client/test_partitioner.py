"""Kafka's partitioner, scalar and vectorised."""

from __future__ import annotations

import pyarrow as pa
import pytest

from raymq.client.messages.partitioner import murmur2, murmur2_column, queue_of, queues_of

# Source: org.apache.kafka.common.utils.UtilsTest#testMurmur2.
KAFKA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("key", KAFKA, ids=repr)
def test_murmur2_gives_kafkas_numbers(key: bytes) -> None:
    assert murmur2(key) == KAFKA[key] & 0xFFFFFFFF


def test_the_column_form_gives_the_same_as_the_scalar_form() -> None:
    keys = [*KAFKA, b"", b"a", b"\xff" * 7, bytes(range(256)), b"x" * 5]
    column = pa.array([b"skipped", *keys], pa.binary()).slice(1)
    assert murmur2_column(column).tolist() == [murmur2(key) for key in keys]
    assert queues_of(column, 7).tolist() == [queue_of(key, 7) for key in keys]


def test_a_null_key_counts_as_empty() -> None:
    assert murmur2_column(pa.array([None, b"a"], pa.binary())).tolist() == [
        murmur2(b""),
        murmur2(b"a"),
    ]


def test_an_empty_column_has_no_queues() -> None:
    assert queues_of(pa.array([], pa.binary()), 3).tolist() == []
