"""Parquet files hold every field of every chosen message, and appear whole or not at all."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from raymq.store.base.errors import Corrupt, Rejected, StorageFull
from raymq.store.base.failpoints import FailPointReached, failpoint
from raymq.store.base.files import Files
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage
from raymq.store.tools.export import SCHEMA, ExportChoice, export
from tests.support.clock import ManualClock
from tests.support.damaged_store import CONFIG, FIRST_LOG, copy, flip

JSONL = Path(__file__).parent.parent / "golden" / "rocketmq-5.3.3-clean.jsonl"


def rows_of(target: Path) -> list[dict[str, Any]]:
    table = pq.read_table(target)
    assert table.schema.names == SCHEMA.names
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def test_each_field_is_what_rocketmq_reads(golden: Path, tmp_path: Path) -> None:
    done = export(golden, tmp_path / "out")
    lines = [json.loads(line) for line in JSONL.read_text().splitlines()]
    wanted = {line["phy"]: line for line in lines if line["kind"] == "msg"}
    rows = {row["physical_offset"]: row for row in rows_of(tmp_path / "out")}
    assert done.messages == len(rows)
    assert rows.keys() == wanted.keys()
    for position, row in rows.items():
        line = wanted[position]
        assert {
            "topic": row["topic"],
            "queueId": row["queue_id"],
            "queueOffset": row["queue_offset"],
            "size": row["record_bytes"],
            "sysFlag": row["sys_flag"],
            "flag": row["flag"],
            "bodyCRC": row["body_crc"],
            "born": int(row["born_time"].timestamp() * 1000 + 0.5),
            "stored": int(row["store_time"].timestamp() * 1000 + 0.5),
            "bornHost": "/" + row["born_host"],
            "storeHost": "/" + row["store_host"],
            "reconsume": row["reconsume_times"],
            "prepared": row["prepared_transaction_offset"],
            "msgId": row["message_id"],
            "tags": row["tag"],
            "bodyLen": len(row["body"]),
            "props": dict(row["properties"]),
        } == {
            name: line[name]
            for name in (
                "topic",
                "queueId",
                "queueOffset",
                "size",
                "sysFlag",
                "flag",
                "bodyCRC",
                "born",
                "stored",
                "bornHost",
                "storeHost",
                "reconsume",
                "prepared",
                "msgId",
                "tags",
                "bodyLen",
                "props",
            )
        }
        assert " ".join(row["index_keys"] or []) == (line["keys"] or "")
        assert row["unique_key"] == line["props"].get("UNIQ_KEY")


def test_a_choice_is_a_topic_a_queue_and_a_range(own: Path, tmp_path: Path) -> None:
    choice = ExportChoice(topic="t", queue_id=1, start=30, stop=35)
    assert export(own, tmp_path / "out", choice).messages == 5
    rows = rows_of(tmp_path / "out")
    assert [row["queue_offset"] for row in rows] == [30, 31, 32, 33, 34]
    assert {(row["topic"], row["queue_id"], row["tag"]) for row in rows} == {("t", 1, "TagA")}
    # Without a topic: all topics but RayMQ's own.
    assert export(own, tmp_path / "all").messages == 360
    assert {row["topic"] for row in rows_of(tmp_path / "all")} == {"t", "u"}
    assert export(own, tmp_path / "none", ExportChoice(topic="t", start=1000)).messages == 0
    assert rows_of(tmp_path / "none") == []


def test_a_topic_or_queue_of_which_there_is_nothing_is_refused(own: Path, tmp_path: Path) -> None:
    for choice in (ExportChoice(topic="T"), ExportChoice(topic="t", queue_id=2)):
        with pytest.raises(Rejected, match="it has rmq_sys_raymq, t, u"):
            export(own, tmp_path / "out", choice)
    assert not (tmp_path / "out").exists()
    # Without its consume queues the log still has the messages.
    root = copy(own, tmp_path / "s")
    shutil.rmtree(root / "consumequeue")
    assert export(root, tmp_path / "out", ExportChoice(topic="u")).messages == 120


def test_files_are_ended_by_size_and_keep_the_order(own: Path, tmp_path: Path) -> None:
    done = export(own, tmp_path / "out", file_bytes=4000)
    assert len(done.files) > 1
    assert done.bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    positions = [
        row["physical_offset"]
        for name in done.files
        for row in pq.read_table(tmp_path / "out" / name).to_pylist()
    ]
    assert positions == sorted(positions)
    assert len(positions) == 360


def test_binary_and_odd_properties_survive(tmp_path: Path) -> None:
    store = MessageStore.open(tmp_path / "s", config=CONFIG, clock=ManualClock())
    properties = {"KEYS": " a  b ", "note": "line\nnext", "é": "ü", "empty": "x"}
    store.put_inner([InnerMessage("x", 0, b"\0\xff", properties)])
    store.put_inner([InnerMessage("x", 0, b"", {})])
    store.log.sync()
    store.close()
    export(tmp_path / "s", tmp_path / "out")
    first, second = rows_of(tmp_path / "out")
    assert (first["body"], second["body"]) == (b"\0\xff", b"")
    assert dict(first["properties"]) == properties
    assert first["index_keys"] == ["a", "b"]
    assert (second["properties"], second["index_keys"], second["tag"]) == ([], None, None)


def test_a_damaged_log_is_exported_only_on_demand(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    flip(root / FIRST_LOG, 20_000)
    with pytest.raises(Corrupt, match="after-damage"):
        export(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = export(root, tmp_path / "out", ExportChoice(after_damage=True))
    assert done.damaged
    assert 340 <= done.messages < 360


class FullDisk(Files):
    """No write of a Parquet file finds room."""

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        if offset > 1000:
            raise StorageFull("the disk is full", field="disk", error=errno.ENOSPC)
        super().pwrite(fd, data, offset)


def test_a_target_is_there_whole_or_not_at_all(own: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageFull):
        export(own, tmp_path / "out", files=FullDisk(), file_bytes=2000)
    with failpoint("export.before_rename", "raise"), pytest.raises(FailPointReached):
        export(own, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "part-00000.parquet").write_text("of one that was killed")
    export(own, tmp_path / "out")
    assert len(rows_of(tmp_path / "out")) == 360
    with pytest.raises(Rejected, match="exists"):
        export(own, tmp_path / "out")
