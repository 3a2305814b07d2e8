"""Transactions, send-back, messages for later: each side writes the same, and goes on where the other stopped."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import pytest

from raymq.store.base.errors import Rejected
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage
from raymq.store.services.retry import send_back
from raymq.store.services.transaction import TransactionService
from tests.support import message_kinds as kinds
from tests.support.confirming import confirm_with_index
from tests.support.message_kinds import Kind
from tests.support.oracle import Line, RocketMQ
from tests.support.put_kinds import put_all
from tests.support.store_facts import assert_same, read_copy

#: what must be equal; places, times and ids differ by nature
FIELDS = (
    *("topic", "queueId", "queueOffset", "flag", "sysFlag", "reconsume"),
    *("bodyLength", "bodyCRC", "properties", "tags", "keys"),
)


def shape(lines: list[Line], *topics: str) -> list[dict[str, Any]]:
    """The records of these topics, in the order of the log, without what differs by nature."""
    found = [line for line in lines if line["kind"] == "record" and line["topic"] in topics]
    return [{name: line[name] for name in FIELDS} for line in found]


class Ours:
    """A store of ours and its transactions."""

    def __init__(self, root: Path, config: StoreConfig) -> None:
        self.store = MessageStore.open(root, config=config)
        if kinds.TOPIC not in self.store.state.topics:
            self.store.topics.create(kinds.TOPIC, 4, [0])
        self.service = TransactionService(self.store)
        confirm_with_index(self.store)

    def prepare(self, half: Kind) -> int:
        body = base64.b64decode(half["body"])
        message = InnerMessage(
            half["topic"],
            half["queueId"],
            body,
            half["properties"],
            flag=half["flag"],
            born_time_ms=half["born"],
        )
        offset = self.service.prepare(message).offset
        confirm_with_index(self.store)
        return offset

    def close(self) -> None:
        confirm_with_index(self.store)
        self.store.close()


def halves() -> list[Kind]:
    # RocketMQ leaves half messages alone that are days old by its own clock.
    now_ms = int(time.time() * 1000)
    return [kinds.half(body, now_ms=now_ms) for body in (b"a", b"b", b"c")]


HALF, OP = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
FIRST_TWO: list[Kind] = [{"action": "commit", "half": 0}, {"action": "rollback", "half": 1}]


def test_half_and_committed_messages_are_the_same_and_rocketmq_asks_for_the_open_one(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    messages = halves()
    rocketmq.write_and_leave(tmp_path / "theirs", [*messages, *FIRST_TWO])
    theirs = rocketmq.read(tmp_path / "theirs")

    ours = Ours(tmp_path / "ours", config)
    offsets = [ours.prepare(half) for half in messages]
    ours.service.commit(offsets[0], group="g")
    ours.service.rollback(offsets[1], group="g")
    ours.close()
    mine = rocketmq.read(tmp_path / "ours")
    assert_same(read_copy(tmp_path / "ours", config), mine)

    assert shape(mine, HALF, kinds.TOPIC) == shape(theirs, HALF, kinds.TOPIC)
    assert len(shape(mine, HALF)) == 3
    for lines in (mine, theirs):
        (first, *_) = [line for line in lines if line.get("topic") == HALF and "phy" in line]
        (final,) = [line for line in lines if line.get("topic") == kinds.TOPIC and "phy" in line]
        assert final["prepared"] == first["phy"]
    *_, checked = rocketmq.write_and_leave(tmp_path / "ours", [{"action": "check"}])
    assert checked["asked"] == ["c"]


def test_we_go_on_with_the_transactions_that_rocketmq_left(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    rocketmq.write_and_leave(root, [*halves(), *FIRST_TWO])
    ours = Ours(root, config)
    ours.service.take_over()
    for offset in (0, 1):
        # Resolved there; whether by commit or rollback, an op record does not say.
        with pytest.raises(Rejected):
            ours.service.commit(offset)
    ours.service.commit(2)
    ours.close()
    lines = rocketmq.read(root)
    final = [line["properties"]["UNIQ_KEY"] for line in shape(lines, kinds.TOPIC)]
    assert final == ["IDa", "IDc"]
    *_, checked = rocketmq.write_and_leave(root, [{"action": "check"}])
    assert checked["asked"] == []


@pytest.mark.parametrize("level", [0, 5, -1])
def test_a_message_that_is_sent_back_is_the_same(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path, level: int
) -> None:
    first = kinds.kind(b"again", properties={"TAGS": "TagA", "KEYS": "k", "WAIT": "true"}, flag=3)
    back = {"action": "sendBack", "phy": 0, "group": "g", "topic": kinds.TOPIC, "delayLevel": level}
    rocketmq.write_and_leave(tmp_path / "theirs", [first, back])
    theirs = rocketmq.read(tmp_path / "theirs")

    ours = Ours(tmp_path / "ours", config)
    put_all(ours.store, [first])
    confirm_with_index(ours.store)
    send_back(ours.store, "g", kinds.TOPIC, 0, 0, delay_level=level)
    ours.close()
    mine = rocketmq.read(tmp_path / "ours")

    topics = ("SCHEDULE_TOPIC_XXXX", "%DLQ%g")
    found = [shape(mine, *topics), shape(theirs, *topics)]
    for lines, shapes in zip((mine, theirs), found, strict=True):
        (origin,) = [line for line in lines if line.get("topic") == kinds.TOPIC and "phy" in line]
        assert shapes[0]["properties"].pop("ORIGIN_MESSAGE_ID") == origin["msgId"]
    assert found[0] == found[1]
    assert len(found[0]) == 1


def test_messages_for_later_are_rewritten_alike(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    later = [*kinds.delayed(), *kinds.timed(int(time.time() * 1000))]
    rocketmq.write_and_leave(tmp_path / "theirs", later, timers=True)
    theirs = rocketmq.read(tmp_path / "theirs")
    ours = Ours(tmp_path / "ours", config)
    put_all(ours.store, later)
    ours.close()
    mine = rocketmq.read(tmp_path / "ours")
    topics = ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer", kinds.TOPIC)
    assert shape(mine, *topics) == shape(theirs, *topics)
    assert len(shape(mine, *topics[:2])) == len(later) - 1
