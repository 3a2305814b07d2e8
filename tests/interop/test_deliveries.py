"""Messages for later: what each side delivers, and that what one side left waiting the other delivers once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from raymq.store.config.store_config import StoreConfig
from raymq.store.delay.delay_service import ScheduleMessageService
from raymq.store.delay.timer_store import TimerMessageStore
from raymq.store.engine.message_store import MessageStore
from tests.support import message_kinds as kinds
from tests.support.confirming import confirm_with_index
from tests.support.message_kinds import Kind
from tests.support.oracle import Line, RocketMQ
from tests.support.put_kinds import put_all
from tests.support.store_facts import assert_same, read_copy
from tests.support.waiting import until

QUEUE = 1
#: what the clock decides
TIMES = ("TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_OUT_MS", "TIMER_DELIVER_MS")
#: how long a second delivery would have come in: RocketMQ begins after one second
SETTLE_MS = 2_000
#: how long timers wait of which one is cancelled before RocketMQ opens the store
CANCEL_MS = 6_000


def soon(name: str) -> list[Kind]:
    """One message of the shortest level and one timer, both due a second after each is put, however late that is."""
    at = {"KEYS": f"timer-{name}"}
    level = {"DELAY": "1", "TAGS": "TagA", "KEYS": f"level-{name}"}
    return [
        kinds.kind(f"level {name}".encode(), queue=QUEUE, properties=level, flag=3),
        kinds.kind(f"timer {name}".encode(), queue=QUEUE, properties=at, flag=3, dueInMs=1_000),
    ]


def deliver(count: int, settle_ms: int = 0) -> Kind:
    return {
        "action": "deliver",
        "topic": kinds.TOPIC,
        "queueId": QUEUE,
        "count": count,
        "settleMs": settle_ms,
    }


def delivered(lines: list[Line]) -> list[Line]:
    """The messages of the topic by key, without the fields that the clock decides."""
    found = []
    for line in lines:
        if line["kind"] == "record" and line["topic"] == kinds.TOPIC:
            properties = {k: "" if k in TIMES else v for k, v in line["properties"].items()}
            names = (
                "queueId",
                "flag",
                "sysFlag",
                "reconsume",
                "prepared",
                "born",
                "tags",
                "bodyCRC",
            )
            found.append({"properties": properties, **{name: line[name] for name in names}})
    return sorted(found, key=lambda line: line["properties"]["KEYS"])


def deliver_ours(root: Path, config: StoreConfig, *, put: list[Kind], count: int) -> None:
    """Open, put, deliver until the queue has `count` messages, close. By the real clock: RocketMQ's comes after it."""
    store = MessageStore.open(root, config=config)
    if kinds.TOPIC not in store.state.topics:
        store.topics.create(kinds.TOPIC, 4, [0])
    put_all(store, put)
    confirm_with_index(store)
    levels, timers = ScheduleMessageService(store), TimerMessageStore(store)
    pause = threading.Event()

    def step() -> None:
        now_ms = int(time.time() * 1000)
        levels.deliver_due(now_ms, limit=100)
        timers.run(now_ms, limit=100)
        confirm_with_index(store)
        pause.wait(0.01)

    until(lambda: store.queue_range(kinds.TOPIC, QUEUE)[1] >= count, step)
    timers.close(int(time.time() * 1000))
    confirm_with_index(store)
    store.close()


def deliver_the_same(rocketmq: RocketMQ, config: StoreConfig, place: Path) -> None:
    rocketmq.write_and_halt(place / "theirs", [*soon("a"), deliver(2)], timers=True)
    theirs = delivered(rocketmq.read(place / "theirs"))
    deliver_ours(place / "ours", config, put=soon("a"), count=2)
    lines = rocketmq.read(place / "ours")
    assert_same(read_copy(place / "ours", config), lines)
    assert delivered(lines) == theirs
    assert len(theirs) == 2


def take_over_after_a_halt(rocketmq: RocketMQ, config: StoreConfig, place: Path) -> None:
    take_over(rocketmq, config, place / "store", rocketmq.write_and_halt)


def take_over_after_a_stop(rocketmq: RocketMQ, config: StoreConfig, place: Path) -> None:
    take_over(rocketmq, config, place / "store", rocketmq.write)


def take_over(
    rocketmq: RocketMQ, config: StoreConfig, root: Path, write: Callable[..., list[Line]]
) -> None:
    # Two are delivered there, which it notes within a second; two are stored and wait.
    write(root, [*soon("a"), deliver(2, SETTLE_MS), *soon("b")], timers=True)
    deliver_ours(root, config, put=[], count=4)
    wanted = ["level-a", "level-b", "timer-a", "timer-b"]
    lines = delivered(rocketmq.read(root))
    assert [line["properties"]["KEYS"] for line in lines] == wanted
    rocketmq.write_and_halt(root, [deliver(4, SETTLE_MS)], timers=True)
    again = delivered(rocketmq.read(root))
    assert [line["properties"]["KEYS"] for line in again] == wanted


def hand_over(rocketmq: RocketMQ, config: StoreConfig, place: Path) -> None:
    root = place / "store"
    deliver_ours(root, config, put=soon("a"), count=2)
    deliver_ours(root, config, put=soon("b"), count=2)
    rocketmq.write_and_halt(root, [deliver(4, SETTLE_MS)], timers=True)
    lines = delivered(rocketmq.read(root))
    wanted = ["level-a", "level-b", "timer-a", "timer-b"]
    assert [line["properties"]["KEYS"] for line in lines] == wanted


def deliver_in_turn(rocketmq: RocketMQ, config: StoreConfig, place: Path) -> None:
    root = place / "store"
    deliver_ours(root, config, put=soon("a"), count=2)
    rocketmq.write_and_halt(root, [*soon("b"), deliver(4, SETTLE_MS), *soon("c")], timers=True)
    deliver_ours(root, config, put=[], count=6)
    lines = delivered(rocketmq.read(root))
    wanted = [f"{kind}-{name}" for kind in ("level", "timer") for name in "abc"]
    assert [line["properties"]["KEYS"] for line in lines] == wanted


def hand_over_cancelled(rocketmq: RocketMQ, config: StoreConfig, place: Path) -> None:
    """Of two timers that wait one is cancelled here, and RocketMQ is there when they are due."""
    root = place / "store"
    store = MessageStore.open(root, config=config)
    store.topics.create(kinds.TOPIC, 4, [0])
    timers = TimerMessageStore(store)
    names = ("cancelled", "comes")
    due = [
        kinds.kind(
            name.encode(),
            queue=QUEUE,
            properties={"KEYS": name, "UNIQ_KEY": f"7F0000010001{number:020X}"},
            dueInMs=CANCEL_MS,
        )
        for number, name in enumerate(names)
    ]
    put_all(store, due)
    confirm_with_index(store)
    outcome = timers.cancel(0, int(time.time() * 1000))
    assert outcome is not None
    assert outcome.appended is not None
    confirm_with_index(store)
    timers.close(int(time.time() * 1000))
    confirm_with_index(store)
    store.close()

    rocketmq.write_and_halt(root, [deliver(1, CANCEL_MS)], timers=True)
    lines = delivered(rocketmq.read(root))
    assert [line["properties"]["KEYS"] for line in lines] == ["comes"]


Story = Callable[[RocketMQ, StoreConfig, Path], None]
STORIES = (
    deliver_the_same,
    take_over_after_a_halt,
    take_over_after_a_stop,
    hand_over,
    hand_over_cancelled,
    deliver_in_turn,
)


@pytest.fixture(scope="module")
def stories(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Story, Future[None]]]:
    """All at the same time, each on stores of its own: they wait for messages to be due."""
    with ThreadPoolExecutor(len(STORIES)) as threads:
        yield {
            story: threads.submit(story, rocketmq, config, tmp_path_factory.mktemp(story.__name__))
            for story in STORIES
        }


def test_what_is_delivered_is_the_same(stories: dict[Story, Future[None]]) -> None:
    stories[deliver_the_same].result()


@pytest.mark.parametrize(
    "story", [take_over_after_a_halt, take_over_after_a_stop], ids=["halted", "shut down"]
)
def test_we_deliver_what_rocketmq_left_waiting_and_it_delivers_nothing_again(
    stories: dict[Story, Future[None]], story: Story
) -> None:
    stories[story].result()


def test_rocketmq_delivers_what_we_left_waiting_once(stories: dict[Story, Future[None]]) -> None:
    stories[hand_over].result()


def test_rocketmq_does_not_deliver_a_timer_that_we_cancelled(
    stories: dict[Story, Future[None]],
) -> None:
    stories[hand_over_cancelled].result()


def test_messages_that_rocketmq_added_and_delivered_between_two_of_our_runs_come_once(
    stories: dict[Story, Future[None]],
) -> None:
    stories[deliver_in_turn].result()
