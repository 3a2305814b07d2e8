from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raymq.store.base import format as fmt
from raymq.store.base.errors import Rejected
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.segments.segment_paths import file_name


def test_a_header_has_88_bytes_and_12_more_for_each_ipv6_host():
    assert fmt.HEADER_BYTES == 88
    assert fmt.header_dtype(True, False).itemsize == 100
    assert fmt.header_dtype(False, True).itemsize == 100
    assert fmt.header_dtype(True, True).itemsize == 112


@pytest.mark.parametrize(
    ("field", "offset"),
    [
        ("magic", 4),
        ("body_crc", 8),
        ("queue_id", 12),
        ("flag", 16),
        ("queue_offset", 20),
        ("physical_offset", 28),
        ("sys_flag", 36),
        ("born_time_ms", 40),
        ("born_ip", 48),
        ("store_time_ms", 56),
        ("store_ip", 64),
        ("reconsume_times", 72),
        ("prepared_transaction_offset", 76),
        ("body_length", 84),
    ],
)
def test_header_fields_are_where_rocketmq_reads_them(field, offset):
    assert fmt.HEADER_DTYPE.fields[field][1] == offset


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0),
        ("TagA", 2598919),
        ("TagB", 2598920),
        ("TopicTest#k1", 2746024),
        ("polygenelubricants", -2147483648),
        ("标签", 857175),
        ("😀", 1772899),
    ],
)
def test_java_hash_is_string_hash_code(text, value):
    assert fmt.java_hash(text) == value


def test_a_tags_code_is_the_hash_sign_extended_and_0_without_tags():
    assert fmt.tags_code("polygenelubricants") == -2147483648
    assert fmt.tags_code(None) == fmt.tags_code("") == 0


def test_a_file_name_has_20_digits():
    assert file_name(1 << 30) == "00000000001073741824"


@pytest.mark.parametrize("topic", ["t", "a-b_c%d|e", "T" * 127, "%RETRY%" + "g" * 248])
def test_rocketmq_topic_names_are_taken(topic):
    fmt.check_topic_name(topic)


@pytest.mark.parametrize(
    "topic",
    ["", "T" * 128, "%RETRY%" + "g" * 249, "a.b", "../x", "a/b", "a b", "ä", "a\x01", "a\n"],
)
def test_other_topic_names_are_rejected(topic):
    with pytest.raises(Rejected) as caught:
        fmt.check_topic_name(topic)
    assert caught.value.field == "topic"


def test_hosts_are_written_as_java_prints_them():
    assert fmt.format_host(fmt.pack_host("10.0.0.1", 10911)) == "10.0.0.1:10911"
    assert fmt.format_host(fmt.pack_host("2001:db8::1", 5)) == "[2001:db8:0:0:0:0:0:1]:5"


@pytest.mark.parametrize(("ip", "port"), [("localhost", 1), ("1.2.3", 1), ("1.2.3.4", 1 << 31)])
def test_a_text_that_is_not_an_address_is_rejected(ip, port):
    with pytest.raises(Rejected) as caught:
        fmt.pack_host(ip, port)
    assert caught.value.field == "host"


def test_a_message_id_is_store_host_and_offset_in_hex():
    assert fmt.offset_message_id("10.0.0.1", 10911, 0xF5) == "0A00000100002A9F00000000000000F5"
    assert (
        fmt.offset_message_id("2001:db8::2", 10911, 0x1E8)
        == "20010DB800000000000000000000000200002A9F00000000000001E8"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flush_interval_ms", -1),
        ("allocate_timeout_ms", "5"),
        ("delete_file_batch_max", True),
        ("scrub_bytes_per_s", 0.5),
        ("file_reserved_hours", float("nan")),
        ("transient_pool", "yes"),
    ],
)
def test_an_option_of_another_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(Rejected, match=f"{name} is {value!r}; it must be") as refused:
        StoreConfig(**{name: value})
    assert refused.value.field == name


@pytest.mark.parametrize("born_v6", [False, True])
@pytest.mark.parametrize("store_v6", [False, True])
def test_the_headers_two_layouts_agree(born_v6: bool, store_v6: bool) -> None:
    layout = fmt.header_struct(born_v6, store_v6)
    dtype = fmt.header_dtype(born_v6, store_v6)
    assert layout.size == dtype.itemsize
    written = bytes(range(1, layout.size + 1))
    fields = fmt.HeaderFields._make(layout.unpack(written))._asdict()
    born, store = fields.pop("born_host"), fields.pop("store_host")
    columns = np.frombuffer(written, dtype)[0]
    assert fields == {name: int(columns[name]) for name in fields}
    for name, host in (("born", born), ("store", store)):
        assert host[:-4] == bytes(columns[f"{name}_ip"])
        assert int.from_bytes(host[-4:], "big", signed=True) == columns[f"{name}_port"]
