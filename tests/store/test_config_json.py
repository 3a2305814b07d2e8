"""RocketMQ's configuration files: taken over once, written back from the state, whole after every crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raymq.store.base.errors import Corrupt
from raymq.store.base.failpoints import FailPointReached, failpoint
from raymq.store.config.store_config import StoreConfig
from raymq.store.config_files import fastjson
from raymq.store.config_files.config_json import import_changed, write_back
from raymq.store.engine.message_store import MessageStore
from raymq.store.groups.claims import ended_value
from raymq.store.groups.members import CLAIM, GROUP, GroupFacts, group_value
from raymq.store.put.inner_message import ServiceProgress
from raymq.store.put.inner_put import InnerPut
from raymq.store.state.features import GROUPS_LEVEL, feature_level
from raymq.store.state.shard_state import OFFSETS, TopicInfo, no_offsets_body
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.crash_states import disk_of
from tests.support.simulated_disk import SimulatedDisk

CONFIG = StoreConfig(segment_size_bytes=64 * 1024, consume_queue_file_size_bytes=2000)
VERSION = {"counter": 7, "stateVersion": 0, "timestamp": 1}


def topic(name: str, queues: int, **others: Any) -> dict[str, Any]:
    row = {"topicName": name, "readQueueNums": queues, "writeQueueNums": queues, "perm": 6}
    return {**row, "attributes": {}, "order": False, **others}


FOREIGN: dict[str, dict[str, Any]] = {
    "topics.json": {
        "dataVersion": VERSION,
        "topicConfigTable": {
            "T": topic("T", 4, attributes={"message.type": "NORMAL"}),
            "%RETRY%g": topic("%RETRY%g", 1),
            "TBW102": topic("TBW102", 8, perm=7),
            "DefaultCluster": topic("DefaultCluster", 16, perm=7),
            "rmq_sys_wheel_timer": topic("rmq_sys_wheel_timer", 1),
            "SCHEDULE_TOPIC_XXXX": topic("SCHEDULE_TOPIC_XXXX", 18),
        },
    },
    "consumerOffset.json": {
        "dataVersion": VERSION,
        "groupTopicMap": {"g": ["T"]},
        "offsetTable": {"T@g": {0: 12, 3: 1}, "%RETRY%g@g": {0: 2}},
    },
    "subscriptionGroup.json": {
        "dataVersion": VERSION,
        "subscriptionGroupTable": {"g": {"groupName": "g", "retryMaxTimes": 3}},
    },
    "delayOffset.json": {"dataVersion": VERSION, "offsetTable": {1: 5, 3: 2}},
}


def put_files(root: Path, files: dict[str, dict[str, Any]]) -> None:
    (root / "config").mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (root / "config" / name).write_text(fastjson.dumps(value), encoding="utf-8")


def load(root: Path, name: str) -> Any:
    return fastjson.loads((root / "config" / name).read_text(encoding="utf-8"))


def open_store(root: Path, **options: Any) -> MessageStore:
    return MessageStore.open(root, config=CONFIG, clock=ManualClock(), **options)


def close(store: MessageStore) -> None:
    store.log.sync()
    store.log.note_confirmed(store.log.end)
    store.close()


def test_topics_and_offsets_of_rocketmq_become_ours_once(tmp_path):
    put_files(tmp_path, FOREIGN)
    store = open_store(tmp_path, identity={"shard": 2})
    # The patterns for new topics, and what every broker makes itself, are none of ours.
    assert store.state.topics == {
        "T": TopicInfo("T", 4, (2,), (("message.type", "NORMAL"),)),
        "%RETRY%g": TopicInfo("%RETRY%g", 1, (2,)),
    }
    assert store.state.offsets == {("g", "T"): {0: 12, 3: 1}, ("g", "%RETRY%g"): {0: 2}}
    assert store.state.progress["delay"] == {"1": 5, "3": 2}
    end = store.log.end
    assert import_changed(store, store.inner_put) == []
    store.abandon()
    again = open_store(tmp_path)
    assert again.log.end == end
    assert again.state.offsets[("g", "T")] == {0: 12, 3: 1}
    close(again)


def test_a_compaction_topic_is_one_on_both_sides(tmp_path):
    compacted = topic("C", 1, attributes={"cleanup.policy": "COMPACTION"})
    batches = topic("B", 1, attributes={"queue.type": "BatchCQ"})
    put_files(tmp_path, {"topics.json": {"topicConfigTable": {"C": compacted, "B": batches}}})
    store = open_store(tmp_path)
    # RocketMQ would refuse a store that has queues of the plain form for the other topic.
    assert set(store.state.topics) == {"C"}
    assert store.state.topics["C"].compacted
    store.topics.create("D", 1, [0], {"cleanup.policy": "COMPACTION"})
    close(store)
    table = load(tmp_path, "topics.json")["topicConfigTable"]
    assert table["C"] == compacted
    assert table["B"] == batches
    assert table["D"]["attributes"] == {"cleanup.policy": "COMPACTION"}


def test_what_is_newer_in_the_log_is_not_set_back_by_an_old_file(tmp_path):
    put_files(tmp_path, FOREIGN)
    store = open_store(tmp_path)
    store.commit_offsets("g", "T", {0: 99})
    store.abandon()
    again = open_store(tmp_path)
    assert again.state.offsets[("g", "T")] == {0: 99, 3: 1}
    again.abandon()


def test_the_files_say_at_the_end_what_the_state_says_and_keep_what_is_not_ours(tmp_path):
    put_files(tmp_path, FOREIGN)
    store = open_store(tmp_path)
    store.topics.create("new", 3, [0])
    store.put(request([b"x"], topic="new", queue=2))
    store.commit_offsets("g", "T", {1: 8})
    store.commit_offsets("h", "new", {2: 1})
    store.put_inner([], progress=ServiceProgress("delay", {"3": 4, "18": 1}))
    close(store)
    topics = load(tmp_path, "topics.json")
    assert topics["dataVersion"]["counter"] == 8
    table = topics["topicConfigTable"]
    assert table["T"] == FOREIGN["topics.json"]["topicConfigTable"]["T"]
    assert table["TBW102"]["perm"] == 7
    assert (table["new"]["readQueueNums"], table["new"]["writeQueueNums"]) == (3, 3)
    assert (table["new"]["perm"], table["rmq_sys_raymq"]["perm"]) == (6, 0)
    assert load(tmp_path, "consumerOffset.json")["offsetTable"] == {
        "T@g": {0: 12, 1: 8, 3: 1},
        "%RETRY%g@g": {0: 2},
        "new@h": {2: 1},
    }
    groups = load(tmp_path, "subscriptionGroup.json")["subscriptionGroupTable"]
    assert groups["g"] == {"groupName": "g", "retryMaxTimes": 3}
    assert groups["h"]["retryMaxTimes"] == 16
    assert load(tmp_path, "delayOffset.json")["offsetTable"] == {1: 5, 3: 4, 18: 1}
    for name, value in FOREIGN.items():
        assert load(tmp_path, f"{name}.bak") == value


def test_a_deleted_topic_leaves_the_files_with_its_offsets(tmp_path):
    store = open_store(tmp_path)
    for name in ("gone", "again", "stays"):
        store.topics.create(name, 2, [0])
        store.put(request([b"x"], topic=name))
        store.commit_offsets("g", name, {0: 1, 1: 0})
    store.log.note_confirmed(store.log.end)
    store.dispatch(store.log.end)
    write_back(store)
    for name in ("gone", "again"):
        store.topics.delete(name)
    store.topics.create("again", 1, [0])
    store.commit_offsets("g", "again", {0: 1})
    write_back(store)

    directory = tmp_path / "config"
    topics = fastjson.loads((directory / "topics.json").read_text())["topicConfigTable"]
    assert {name for name in topics if not name.startswith("rmq_sys")} == {"again", "stays"}
    offsets = fastjson.loads((directory / "consumerOffset.json").read_text())["offsetTable"]
    assert offsets == {"again@g": {0: 1}, "stays@g": {0: 1, 1: 0}}
    close(store)
    # RocketMQ did not change them: nothing comes back.
    store = open_store(tmp_path)
    assert set(store.state.topics) == {"again", "stays"}
    close(store)


def test_a_topic_that_is_made_again_keeps_nothing_of_the_earlier_one_in_the_file(tmp_path):
    store = open_store(tmp_path)
    store.topics.create("t", 8, [0], {"cleanup.policy": "COMPACTION"})
    write_back(store)
    store.topics.delete("t")
    store.topics.create("t", 2, [0])
    write_back(store)
    row = load(tmp_path, "topics.json")["topicConfigTable"]["t"]
    assert (row["readQueueNums"], row["writeQueueNums"], row["attributes"]) == (2, 2, {})
    close(store)
    # The next start takes nothing over from it.
    store = open_store(tmp_path)
    assert store.state.topics["t"].queues == 2
    close(store)


def put_group(store: MessageStore, name: str, *, is_paused: bool) -> None:
    body = json.dumps(group_value(name, GroupFacts(is_paused=is_paused), 1)).encode()
    store.inner_put.put_state_record(GROUP, body)


def test_a_paused_group_is_one_on_both_sides(tmp_path):
    store = open_store(tmp_path)
    for name in ("held", "open"):
        put_group(store, name, is_paused=name == "held")
    close(store)
    groups = load(tmp_path, "subscriptionGroup.json")
    table = groups["subscriptionGroupTable"]
    assert {name: row["consumeEnable"] for name, row in table.items()} == {
        "held": False,
        "open": True,
    }

    # RocketMQ's command updateSubGroup.
    table["held"]["consumeEnable"], table["open"]["consumeEnable"] = True, False
    for name in ("theirs", "bad name"):
        table[name] = {"groupName": name, "consumeEnable": False}
    table["plain"] = {"groupName": "plain"}
    put_files(tmp_path, {"subscriptionGroup.json": groups})
    again = open_store(tmp_path)
    paused = {name: group.facts.is_paused for name, group in again.groups.groups.items()}
    assert paused == {"held": False, "open": True, "theirs": True}
    close(again)
    kept = load(tmp_path, "subscriptionGroup.json")["subscriptionGroupTable"]
    assert kept["bad name"] == {"groupName": "bad name", "consumeEnable": False}
    assert "consumeEnable" not in kept["plain"]


def test_the_level_of_groups_comes_before_an_imported_group(tmp_path):
    paused = {"groupName": "g", "consumeEnable": False}
    put_files(tmp_path, {"subscriptionGroup.json": {"subscriptionGroupTable": {"g": paused}}})
    kinds = []
    put = InnerPut.put_state_record

    def note_level(self: InnerPut, kind: str, body: bytes) -> Any:
        kinds.append((kind, feature_level(self._state.progress)))
        return put(self, kind, body)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(InnerPut, "put_state_record", note_level)
        store = open_store(tmp_path)
    assert store.groups.groups["g"].facts.is_paused
    assert (GROUP, GROUPS_LEVEL) in kinds
    close(store)


def test_an_old_file_does_not_resume_a_group(tmp_path):
    store = open_store(tmp_path)
    put_group(store, "g", is_paused=False)
    write_back(store)
    put_group(store, "g", is_paused=True)
    store.abandon()
    again = open_store(tmp_path)
    assert again.groups.groups["g"].facts.is_paused
    close(again)


def test_a_deleted_group_is_in_no_file(tmp_path):
    put_files(tmp_path, FOREIGN)
    store = open_store(tmp_path)
    store.commit_offsets("g", "T", {1: 8})
    store.commit_offsets("h", "T", {0: 1})
    write_back(store)
    for topic_name in ("T", "%RETRY%g"):
        store.inner_put.put_state_record(OFFSETS, no_offsets_body("g", topic_name))
    store.inner_put.put_state_record(CLAIM, json.dumps(ended_value("g", 5)).encode())
    store.commit_offsets("g", "%RETRY%g", {0: 1})
    close(store)
    assert load(tmp_path, "consumerOffset.json")["offsetTable"] == {
        "T@h": {0: 1},
        "%RETRY%g@g": {0: 1},
    }
    again = open_store(tmp_path)
    assert again.state.offsets == {("h", "T"): {0: 1}, ("g", "%RETRY%g"): {0: 1}}
    again.inner_put.put_state_record(OFFSETS, no_offsets_body("g", "%RETRY%g"))
    close(again)
    groups = load(tmp_path, "subscriptionGroup.json")["subscriptionGroupTable"]
    assert groups.keys() == {"h"}


def test_files_that_say_it_already_are_left_alone(tmp_path):
    store = open_store(tmp_path)
    assert write_back(store) == []
    assert not (tmp_path / "config").exists()
    store.topics.create("T", 2, [0])
    store.commit_offsets("g", "T", {0: 1})
    assert write_back(store) == ["topics.json", "consumerOffset.json", "subscriptionGroup.json"]
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "config").iterdir()}
    assert write_back(store) == []
    close(store)
    again = open_store(tmp_path)
    end = again.log.end
    close(again)
    assert again.log.end == end
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "config").iterdir()}
    assert after == before


@pytest.mark.parametrize("kept", [True, False])
def test_a_file_of_before_a_column_was_added_does_not_take_it_away(tmp_path, kept):
    one = '[{"name":"a","type":"int64","nullable":true}]'
    two = (
        '[{"name":"a","type":"int64","nullable":true},{"name":"b","type":"int64","nullable":true}]'
    )
    store = open_store(tmp_path)
    store.topics.create("T", 1, [0], {"raymq.schema": one})
    store.topics.set_schema("T", two)
    close(store)
    topics = load(tmp_path, "topics.json")
    table = topics["topicConfigTable"]
    if kept:
        table["T"]["attributes"]["raymq.schema"] = one
    else:
        del table["T"]["attributes"]
    table["T"]["readQueueNums"] = 3
    put_files(tmp_path, {"topics.json": topics})
    again = open_store(tmp_path)
    found = again.state.topics["T"]
    assert (found.queues, dict(found.attributes)) == (3, {"raymq.schema": two})
    close(again)


def test_what_rocketmq_changed_while_it_had_the_store_is_taken_over(tmp_path):
    store = open_store(tmp_path)
    store.topics.create("T", 2, [0])
    store.commit_offsets("g", "T", {0: 1, 1: 1})
    close(store)
    offsets, topics = load(tmp_path, "consumerOffset.json"), load(tmp_path, "topics.json")
    offsets["offsetTable"]["T@g"][0] = 5
    topics["topicConfigTable"]["T"]["writeQueueNums"] = 6
    topics["topicConfigTable"]["U"] = topic("U", 1)
    put_files(tmp_path, {"consumerOffset.json": offsets, "topics.json": topics})
    again = open_store(tmp_path)
    assert again.state.offsets[("g", "T")] == {0: 5, 1: 1}
    assert {info.name: info.queues for info in again.state.topics.values()} == {"T": 6, "U": 1}
    again.abandon()


@pytest.mark.parametrize("damaged", [b"", b'{"dataVersion":', b"[]", b"\xff\xfe"])
def test_the_backup_speaks_for_a_damaged_file(tmp_path, damaged):
    put_files(tmp_path, {f"{name}.bak": value for name, value in FOREIGN.items()})
    for name in FOREIGN:
        (tmp_path / "config" / name).write_bytes(damaged)
    store = open_store(tmp_path)
    assert set(store.state.topics) == {"T", "%RETRY%g"}
    assert store.state.offsets[("g", "T")] == {0: 12, 3: 1}
    close(store)
    assert load(tmp_path, "topics.json")["topicConfigTable"]["rmq_sys_raymq"]["perm"] == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("topics.json", "{"),
        ("topics.json", '{"topicConfigTable":{"T":5}}'),
        ("topics.json", '{"topicConfigTable":{"a b":{"readQueueNums":1}}}'),
        ("topics.json", '{"topicConfigTable":{"T":{"readQueueNums":"many"}}}'),
        ("consumerOffset.json", '{"offsetTable":{"T@g":[1,2]}}'),
        ("consumerOffset.json", '{"offsetTable":{"T@g":{zero:0}}}'),
        ("delayOffset.json", '{"offsetTable":5}'),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused_by_name(tmp_path, name, text):
    (tmp_path / "config").mkdir(parents=True)
    (tmp_path / "config" / name).write_text(text, encoding="utf-8")
    with pytest.raises(Corrupt, match=f"config/{name}"):
        open_store(tmp_path)
    (tmp_path / "config" / name).unlink()
    close(open_store(tmp_path))


def test_a_crash_between_taking_over_and_noting_it_takes_over_again(tmp_path):
    put_files(tmp_path, FOREIGN)
    with failpoint("config.imported", "raise"), pytest.raises(FailPointReached):
        open_store(tmp_path)
    store = open_store(tmp_path)
    assert set(store.state.topics) == {"T", "%RETRY%g"}
    assert store.state.offsets == {("g", "T"): {0: 12, 3: 1}, ("g", "%RETRY%g"): {0: 2}}
    assert store.state.progress["delay"] == {"1": 5, "3": 2}
    close(store)


def test_every_crash_while_a_file_is_written_leaves_a_whole_one_and_sets_nothing_back():
    root = Path("/s")
    first = SimulatedDisk()
    store = open_store(root, files=first)
    store.topics.create("T", 2, [0])
    store.commit_offsets("g", "T", {0: 1})
    write_back(store)
    store.commit_offsets("g", "T", {0: 2})
    store.log.sync()
    store.log.chain.sync()
    store.abandon()
    disk = disk_of(first.tree(), boot=0).recording()
    store = open_store(root, files=disk)
    assert write_back(store) == ["consumerOffset.json"]
    store.abandon()
    found = set()
    for state in (*disk.crash_states(limit_per_point=8), *disk.kill_states()):
        tree = state.tree()
        whole = [
            fastjson.loads(tree[path].decode())["offsetTable"]["T@g"][0]
            for path in ("/s/config/consumerOffset.json", "/s/config/consumerOffset.json.bak")
            if path in tree
        ]
        found.add(tuple(whole))
        again = open_store(root, files=state)
        assert again.state.offsets == {("g", "T"): {0: 2}}
        again.abandon()
    assert found == {(1,), (1, 1), (2, 1)}
