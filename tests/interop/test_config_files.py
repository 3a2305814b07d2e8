"""Both sides read each other's configuration files, and the store with them."""

from __future__ import annotations

import json
from pathlib import Path

from raymq.store.config.store_config import StoreConfig
from raymq.store.config_files import fastjson
from raymq.store.engine.message_store import MessageStore
from raymq.store.groups.members import GROUP, GroupFacts, group_value
from raymq.store.put.inner_message import ServiceProgress
from raymq.store.state.shard_state import TopicInfo
from tests.support import message_kinds as kinds
from tests.support.confirming import confirm_with_index
from tests.support.oracle import RocketMQ
from tests.support.put_kinds import put_all

TOPICS = {"TopicTest": 4, "RollT": 2, kinds.LONG_TOPIC: 1}
TABLES = {
    "topics": TOPICS,
    "groups": ["g"],
    "offsets": [
        {"group": "g", "topic": "TopicTest", "queueId": 0, "offset": 12},
        {"group": "g", "topic": "TopicTest", "queueId": 3, "offset": 1},
        {
            "group": "CID_RMQ_SYS_TRANS",
            "topic": "RMQ_SYS_TRANS_HALF_TOPIC",
            "queueId": 0,
            "offset": 7,
        },
    ],
    "levels": {"1": 5, "3": 2},
}
OFFSETS = {
    ("g", "TopicTest"): {0: 12, 3: 1},
    ("CID_RMQ_SYS_TRANS", "RMQ_SYS_TRANS_HALF_TOPIC"): {0: 7},
}


def test_we_take_over_what_rocketmq_wrote(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    rocketmq.write_and_leave(root, kinds.ordinary())
    rocketmq.config(root, **TABLES)
    store = MessageStore.open(root, config=config)
    expected = {name: TopicInfo(name, queues, (0,)) for name, queues in TOPICS.items()}
    assert expected.items() <= store.state.topics.items()
    assert store.state.offsets == OFFSETS
    assert store.state.progress["delay"] == TABLES["levels"]
    # Its topics are topics: they can be put to at once.
    put_all(store, [kinds.kind(b"ours", topic="RollT", queue=1)])
    store.abandon()


def test_tables_of_numbers_are_written_as_rocketmq_writes_them(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    rocketmq.config(root, **{**TABLES, "offsets": TABLES["offsets"][:2]})
    for name in ("consumerOffset.json", "delayOffset.json"):
        text = (root / "config" / name).read_text(encoding="utf-8")
        assert fastjson.dumps(fastjson.loads(text)) == text


def test_rocketmq_finds_our_topics_groups_and_offsets(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    store = MessageStore.open(root, config=config)
    put_all(store, kinds.ordinary())
    store.commit_offsets("g", kinds.TOPIC, {0: 3, 2: 1})
    for name in ("open", "held"):
        facts = GroupFacts(is_paused=name == "held")
        body = json.dumps(group_value(name, facts, 0)).encode()
        store.inner_put.put_state_record(GROUP, body)
    schema = '[{"name":"id","type":"int64","nullable":true}]'
    attributes = {"raymq.schema": schema, "raymq.null.values": "true"}
    store.topics.create("typed", 2, (0,), attributes)
    store.put_inner([], progress=ServiceProgress("delay", {"2": 9}))
    confirm_with_index(store)
    store.close()
    (found,) = rocketmq.config(root)
    assert [found[f"{name}Loaded"] for name in ("topics", "offsets", "groups", "levels")] == [
        True
    ] * 4
    for name in (kinds.TOPIC, kinds.LONG_TOPIC):
        assert (found["topics"][name]["readQueueNums"], found["topics"][name]["perm"]) == (4, 6)
    assert found["topics"]["rmq_sys_raymq"]["perm"] == 0
    assert found["topics"]["typed"]["attributes"] == attributes
    assert found["offsets"] == {f"{kinds.TOPIC}@g": {"0": 3, "2": 1}}
    assert found["groups"]["g"]["retryMaxTimes"] == 16
    enabled = {name: found["groups"][name]["consumeEnable"] for name in ("g", "open", "held")}
    assert enabled == {"g": True, "open": True, "held": False}
    assert found["levels"] == {"2": 9}


def test_each_finds_what_the_other_changed(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    rocketmq.write_and_leave(root, [kinds.kind(b"x")])
    rocketmq.config(root, **TABLES)
    store = MessageStore.open(root, config=config)
    store.commit_offsets("g", "TopicTest", {0: 13})
    confirm_with_index(store)
    store.close()
    (found,) = rocketmq.config(root)
    assert found["offsets"]["TopicTest@g"] == {"0": 13, "3": 1}
    assert found["topics"]["TBW102"]["perm"] == 7
    rocketmq.config(root, **{**TABLES, "topics": {"madeLater": 3}})
    store = MessageStore.open(root, config=config)
    assert store.state.offsets[("g", "TopicTest")] == {0: 12, 3: 1}
    assert store.state.topics["madeLater"].queues == 3
    store.abandon()


def test_topics_and_offsets_outlive_the_files_that_rocketmq_deletes(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    store = MessageStore.open(root, config=config)
    put_all(store, kinds.ordinary())
    store.commit_offsets("g", kinds.TOPIC, {0: 3, 2: 1})
    store.put_inner([], progress=ServiceProgress("delay", {"2": 9}))
    confirm_with_index(store)
    topics, known = dict(store.state.topics), dict(store.state.next_offsets)
    store.close()
    # With the files go all our snapshots; what RocketMQ writes has none.
    rocketmq.write_and_leave(root, [*kinds.rolling(), {"action": "delete"}])
    store = MessageStore.open(root, config=config)
    assert store.log.start > 0
    assert topics.items() <= store.state.topics.items()
    assert store.state.offsets == {("g", kinds.TOPIC): {0: 3, 2: 1}}
    assert store.state.progress["delay"] == {"2": 9}
    # Nor is a queue offset given twice.
    counted = {key: count for key, count in known.items() if key[0] in topics}
    assert {key: store.state.next_offsets[key] for key in counted} == counted
    store.abandon()
