"""The dialect of RocketMQ's configuration files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymq.store.config_files.fastjson import dumps, loads

#: written by RocketMQ 5.3.3
WRITTEN = (
    '{\n\t"dataVersion":{\n\t\t"counter":0,\n\t\t"stateVersion":0,\n\t\t"timestamp":1795280506257\n\t},\n'
    '\t"groupTopicMap":{\n\t\t"g":["TopicTest"]\n\t},\n'
    '\t"offsetTable":{\n\t\t"TopicTest@g":{0:12,3:1\n\t\t}\n\t}\n}'
)
MEANT = {
    "dataVersion": {"counter": 0, "stateVersion": 0, "timestamp": 1795280506257},
    "groupTopicMap": {"g": ["TopicTest"]},
    "offsetTable": {"TopicTest@g": {0: 12, 3: 1}},
}


def test_what_rocketmq_wrote_is_read_and_written_byte_for_byte():
    assert loads(WRITTEN) == MEANT
    assert dumps(MEANT) == WRITTEN


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"0":12,"1":3}', {"0": 12, "1": 3}),
        ("{0:12,-1:3}", {0: 12, -1: 3}),
        ("{name:'it\\'s',other_1:null}", {"name": "it's", "other_1": None}),
        ("{,,a:[1,,2,],}", {"a": [1, 2]}),
        ('"\\u6807\\n\\t\\x41\\/\\"\\q"', '标\n\tA/"q'),
        ("[true,false,null,-1,1.5,1e3]", [True, False, None, -1, 1.5, 1000.0]),
        ("\ufeff{}", {}),
        ('"\\ud83d\\ude00"', "\U0001f600"),
        ("{123456789012345678901:1}", {"123456789012345678901": 1}),
    ],
)
def test_the_dialect_is_read(text, value):
    assert loads(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "{", "}", "{1}", '{"a"', '{"a":}', "[1", '"abc', "nul", "{} {}", "{[]:1}", "[" * 100],
)
def test_invalid_json_is_refused_with_the_place(text):
    with pytest.raises(ValueError, match="expected .* at character"):
        loads(text)


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(_values)
def test_what_is_written_is_json_and_is_read_again(value):
    assert loads(dumps(value)) == value
    assert json.loads(dumps(value)) == value


@given(st.dictionaries(st.integers(-(10**18), 10**18), _values, max_size=5))
def test_integer_keys_stay_integers(value):
    assert loads(dumps(value)) == value


@given(st.text(alphabet="{}[]:,\"'\\ab1-. \n", max_size=40))
def test_no_text_makes_the_reader_fail_otherwise(text):
    try:
        loads(text)
    except ValueError:
        pass
