from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymq.store.base.errors import Rejected
from raymq.store.records.properties import decode, encode

TEXT = st.text(
    st.characters(exclude_characters="\x01\x02", exclude_categories=("Cs",)), min_size=1, max_size=9
)


@given(st.dictionaries(TEXT, TEXT, max_size=5))
def test_what_is_encoded_is_decoded(properties):
    assert decode(encode(properties)) == properties


def test_pairs_end_with_a_separator():
    assert encode({"TAGS": "TagA", "KEYS": "k1 k2"}) == b"TAGS\x01TagA\x02KEYS\x01k1 k2\x02"


def test_the_last_separator_may_be_missing():
    assert decode(b"a\x011\x02b\x012") == {"a": "1", "b": "2"}


def test_incomplete_pairs_are_dropped_and_the_last_duplicate_wins():
    assert decode(b"a\x02\x01x\x02b\x01\x02c\x011\x02c\x012\x02") == {"c": "2"}


def test_a_value_may_hold_the_name_separator_when_read():
    assert decode(b"a\x01b\x01c\x02") == {"a": "b\x01c"}


def test_bytes_that_are_not_text_are_replaced():
    assert decode(b"a\x01\xff\x02") == {"a": "�"}


@pytest.mark.parametrize(
    "properties", [{"": "x"}, {"a": ""}, {"a\x01": "x"}, {"a": "x\x02"}, {"a\x02": "x"}]
)
def test_what_readers_would_misread_is_rejected(properties):
    with pytest.raises(Rejected) as caught:
        encode(properties)
    assert caught.value.field == "properties"
