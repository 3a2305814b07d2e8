"""The tags code of a record in its consume queue unit."""

from __future__ import annotations

import numpy as np
import pytest

from raymq.store.base import format as fmt
from raymq.store.records import record, rows

STORED_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("topic", "properties", "code"),
    [
        ("t", b"TAGS\x01TagA\x02", fmt.tags_code("TagA")),
        ("t", b"TAGS\x01in\x02a\x01b\x02TAGS\x01out\x02", fmt.tags_code("out")),
        ("t", b"TAGS\x01in\x02TAGS\x01\x02", fmt.tags_code("in")),
        ("t", b"ATAGS\x01in\x02", 0),
        ("t", b"DELAY\x013\x02", 0),
        ("SCHEDULE_TOPIC_XXXX", b"TAGS\x01TagA\x02DELAY\x013\x02", STORED_MS + 10_000),
        ("SCHEDULE_TOPIC_XXXX", b"DELAY\x0199\x02", STORED_MS + 7_200_000),
        # Not delayed by any level: then it is an ordinary record, whatever its topic.
        ("SCHEDULE_TOPIC_XXXX", b"TAGS\x01TagA\x02DELAY\x010\x02", fmt.tags_code("TagA")),
        ("SCHEDULE_TOPIC_XXXX", b"TAGS\x01TagA\x02", fmt.tags_code("TagA")),
    ],
)
def test_the_tags_code_is_the_tags_hash_or_the_time_of_delivery(topic, properties, code):
    raw = record.encode_record(
        topic=topic, body=b"", properties=properties, store_time_ms=STORED_MS
    )
    batch = record.decode(raw, np.array([0]), np.array([len(raw)]))
    assert rows.tags_codes(topic, batch).tolist() == [code]
    assert rows.tags_code_of(topic, properties, STORED_MS) == code
