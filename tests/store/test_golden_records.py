"""Records and consume queues that RocketMQ 5.3.3 wrote, against what RocketMQ itself reads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from raymq.store.base import format as fmt
from raymq.store.base.files import Files
from raymq.store.log.segments.segment_paths import file_name
from raymq.store.queues.consume_queue import ConsumeQueue
from raymq.store.records import record
from raymq.store.records.properties import decode
from raymq.store.records.record import SmallBatch, WalkStop
from tests.support.consume_queue_units import check_units
from tests.support.golden import LINES, unpack_golden
from tests.support.reference_decoder import decode_all

SEGMENT = 65_536


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_golden(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    text = LINES.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def stored(root: Path) -> dict[int, dict[str, Any]]:
    """Every record of the log by its physical offset, `size` among its fields."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted((root / "commitlog").iterdir()):
        data, base = path.read_bytes(), int(path.name)
        walk = record.walk(data, base)
        batch = record.decode(data, walk.positions - base, walk.sizes)
        for row, size in zip(batch.to_pylist(), walk.sizes.tolist(), strict=True):
            found[row["physical_offset"]] = {**row, "size": size}
    return found


def test_every_message_is_what_rocketmq_reads(stored, lines):
    messages = [line for line in lines if line["kind"] == "msg"]
    assert len(messages) == 68
    for line in messages:
        row = stored[line["phy"]]
        properties = decode(row["properties"])
        host, _, port = row["store_host"].rpartition(":")
        expected = {
            "topic": row["topic"],
            "queueId": row["queue_id"],
            "queueOffset": row["queue_offset"],
            "size": row["size"],
            "sysFlag": row["sys_flag"],
            "flag": row["flag"],
            "bodyCRC": row["body_crc"],
            "born": row["born_time_ms"],
            "bornHost": "/" + row["born_host"],
            "stored": row["store_time_ms"],
            "storeHost": "/" + row["store_host"],
            "reconsume": row["reconsume_times"],
            "prepared": row["prepared_transaction_offset"],
            "msgId": fmt.offset_message_id(host.strip("[]"), int(port), line["phy"]),
            "tags": properties.get("TAGS"),
            "keys": properties.get("KEYS"),
            "bodyLen": len(row["body"]),
            "bodySha256": hashlib.sha256(row["body"]).hexdigest(),
            "props": properties,
        }
        assert {name: line[name] for name in expected} == expected


def test_the_walk_ends_each_file_with_its_blank_and_the_log_where_rocketmq_does(root, lines):
    ends = []
    for path in sorted((root / "commitlog").iterdir()):
        walk = record.walk(path.read_bytes(), int(path.name))
        ends.append((walk.end, walk.reason))
    assert [reason for _, reason in ends] == [WalkStop.BLANK] * 3 + [WalkStop.END_OF_DATA]
    assert ends[0][0] == 63_438
    assert ends[-1][0] == next(line["maxPhy"] for line in lines if line["kind"] == "end")


def test_the_blank_records_are_ours(root):
    data = (root / "commitlog" / file_name(0)).read_bytes()
    assert data[63_438:63_446] == record.blank(SEGMENT - 63_438)


def test_the_reference_decoder_agrees_and_the_slow_encoder_writes_the_same_bytes(root, stored):
    for path in sorted((root / "commitlog").iterdir()):
        data, base = path.read_bytes(), int(path.name)
        walk = record.walk(data, base)
        for row in decode_all(data[: walk.end - base]):
            assert stored[row["physical_offset"]] == row
            at = row["physical_offset"] - base
            fields = {key: value for key, value in row.items() if key not in ("size", "body_crc")}
            for host in ("born_host", "store_host"):
                ip, _, port = row[host].rpartition(":")
                fields[host] = (ip.strip("[]"), int(port))
            assert record.encode_record(**fields) == data[at : at + row["size"]]


@pytest.mark.parametrize("is_small", [False, True])
def test_a_put_with_the_fields_of_a_record_gives_the_bytes_that_rocketmq_wrote(root, is_small):
    with_fields = 0
    for path in sorted((root / "commitlog").iterdir()):
        data, base = path.read_bytes(), int(path.name)
        walk = record.walk(data, base)
        for row in decode_all(data[: walk.end - base]):
            bits = row["sys_flag"] & ~fmt.SYS_ANY_HOST_V6
            if bits & ~fmt.SYS_OF_SENDER or row["reconsume_times"]:
                # A transaction, or a message that was sent back: no put of a client.
                continue

            with_fields += bool(row["flag"] or bits)
            rows = SmallBatch(
                [row["body"]],
                [None],
                [row["properties"]],
                [row["born_time_ms"]],
                [row["flag"]],
                [bits],
                [fmt.parse_host(row["born_host"])],
            )
            ip, _, port = row["store_host"].rpartition(":")
            encoded = record.encode_batch(
                row["topic"],
                row["queue_id"],
                rows,
                stamp=None,
                store_host=(ip.strip("[]"), int(port)),
                small=rows if is_small else None,
            )
            places = {name: row[name] for name in ("queue_offset", "physical_offset")}
            found = encoded.records(0, 1, store_time_ms=row["store_time_ms"], **places)
            at = row["physical_offset"] - base
            assert bytes(found) == data[at : at + row["size"]]
    assert with_fields > 3


def test_every_consume_queue_unit_is_what_rocketmq_reads(root, lines):
    queues = {(line["topic"], line["queueId"]): line for line in lines if line["kind"] == "queue"}
    assert len(queues) == len(list(root.glob("consumequeue/*/*")))
    for (topic, queue_id), line in queues.items():
        directory = root / "consumequeue" / topic / str(queue_id)
        queue = ConsumeQueue(directory, 6_000_000, files=Files(), writable=False)
        queue.load()
        queue.recover(after_crash=False)
        try:
            check_units(queue)
            assert (queue.min_offset, queue.max_offset) == (line["min"], line["max"])
            expected = [
                (message["cqPos"], message["cqSize"], message["cqTags"])
                for message in lines
                if message["kind"] == "msg"
                and (message["topic"], message["queueId"]) == (topic, queue_id)
            ]
            units = queue.read(queue.min_offset, queue.max_offset - queue.min_offset)
            assert [tuple(unit) for unit in units.tolist()] == expected
            del units
        finally:
            queue.close()


def test_appending_the_same_units_makes_the_same_file(root, tmp_path):
    directory = root / "consumequeue" / "RollT" / "0"
    golden = (directory / file_name(0)).read_bytes()
    source = ConsumeQueue(directory, 6_000_000, files=Files(), writable=False)
    source.load()
    source.recover()
    units = source.read(0, source.max_offset).copy()
    source.close()
    target = ConsumeQueue(tmp_path / "RollT" / "0", 6_000_000, files=Files())
    columns = [units[name].astype("i8") for name in ("position", "size", "tags_code")]
    target.append(0, fmt.pack_queue_units(*columns))
    target.close()
    assert (tmp_path / "RollT" / "0" / file_name(0)).read_bytes() == golden
