"""Timers: order, rolls, cancellations, clocks, the files that RocketMQ reads, and what is taken over from it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from raymq.store.base import format as fmt
from raymq.store.base.errors import StorageFull
from raymq.store.base.failpoints import FailPointReached, failpoint
from raymq.store.base.files import Files
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.delay.delay_service import DelayService
from raymq.store.delay.timer_cache import TimerCheckpoint, read_checkpoint, write_checkpoint
from raymq.store.delay.timer_log import TIMER_UNIT_BYTES, TIMER_UNIT_DTYPE
from raymq.store.delay.timer_rule import MAGIC_DEFAULT, MAGIC_DELETE, MAGIC_ROLL
from raymq.store.delay.timer_wheel import FILE_BYTES, SLOT
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records import record
from tests.support.delays import CONFIG, START_MS, DelayWorld

DAY_MS = 86_400_000


@pytest.fixture
def world(tmp_path: Path) -> Iterator[DelayWorld]:
    made = DelayWorld(tmp_path)
    yield made
    made.store.abandon()


def bodies(world: DelayWorld, queue: int = 0) -> list[bytes]:
    return [each.body for each in world.arrived() if each.queue == queue]


def units(root: Path) -> np.ndarray:
    data = (root / "timerlog" / "00000000000000000000").read_bytes()
    found = np.frombuffer(data, dtype=TIMER_UNIT_DTYPE, count=len(data) // TIMER_UNIT_BYTES)
    return found[: int((found["size"] == TIMER_UNIT_BYTES).argmin())]


def slot(root: Path, time_ms: int) -> tuple[int, ...]:
    index = time_ms // 1000 % 1_209_600
    with (root / "timerwheel").open("rb") as file:
        file.seek(index * 32)
        return SLOT.unpack(file.read(32))


def test_timers_come_in_the_order_of_their_seconds_then_as_they_were_sent(world):
    for body, delay in ((b"c", 5_000), (b"a", 2_000), (b"d", 4_500), (b"b", 1_500)):
        world.send(body, delay_ms=delay)
    world.confirm()
    world.run_out()
    assert bodies(world) == [b"a", b"b", b"c", b"d"]
    world.check({b"a", b"b", b"c", b"d"})


def test_nothing_is_delivered_before_the_end_of_its_second(world):
    world.clock.advance(400)
    world.send(b"x", delay_ms=1_000)
    world.confirm()
    assert world.run() == START_MS + 2_000
    world.clock.advance(1_599)
    world.step()
    assert not world.arrived()
    world.clock.advance(1)
    world.run()
    assert bodies(world) == [b"x"]


def test_what_is_not_confirmed_is_not_delivered(world):
    world.send(b"x", delay_ms=1_000)
    world.clock.advance(10_000)
    assert world.delays.run_once(world.clock.now_ms()) == (0, None)
    assert not world.delays.active
    world.confirm()
    assert world.delays.active
    world.run_out()
    world.check({b"x"})


def test_a_delivered_message_keeps_everything_but_the_queue_it_waited_in(world):
    world.put(
        InnerMessage(
            "t",
            2,
            b"x",
            {"TAGS": "red", "KEYS": "k", "TIMER_DELAY_SEC": "3", "note": "n"},
            flag=7,
            sys_flag=0x8,
            born_time_ms=5,
            born_host=("2001:db8::1", 99),
            reconsume_times=4,
        )
    )
    world.confirm()
    world.clock.advance(5_000)
    world.run()
    (raw,) = world.store.fetch("t", 2, 0, max_bytes=1 << 20, max_records=9).records.to_pylist()
    (arrived,) = world.arrived()
    (row,) = record.decode(raw, np.array([0]), np.array([len(raw)])).to_pylist()
    assert (row["flag"], row["sys_flag"], row["reconsume_times"]) == (7, 0x18, 4)
    assert (row["born_time_ms"], row["born_host"]) == (5, "[2001:db8:0:0:0:0:0:1]:99")
    assert arrived.properties == {
        "TAGS": "red",
        "KEYS": "k",
        "TIMER_DELAY_SEC": "3",
        "note": "n",
        "TIMER_OUT_MS": str(START_MS + 2_000),
        "REAL_TOPIC": "t",
        "REAL_QID": "2",
        "TIMER_ENQUEUE_MS": str(START_MS),
        "TIMER_DEQUEUE_MS": str(START_MS + 5_000),
    }
    unit = world.store.consume_queues.get("t", 2).read(0, 1)[0]
    assert unit["tags_code"] == fmt.java_hash("red")


def test_properties_without_room_for_more_are_delivered_as_they_are(world):
    text = {"TIMER_DELAY_SEC": "1", "pad": "p" * 3_000}
    long = {f"pad{number}": "p" * 2_900 for number in range(10)}
    big = DelayWorld(world.root / "big", config=type(CONFIG)())
    for properties in (text, {**text, **long}):
        big.put(InnerMessage("t", 0, b"", {**properties, "end": "e" * 32}))
    big.put(InnerMessage("t", 0, b"", {"TIMER_DELAY_SEC": "1", "pad": "p" * 32_660}))
    big.confirm()
    big.run_out()
    assert ["TIMER_DEQUEUE_MS" in each.properties for each in big.arrived()] == [True, True, False]


def test_a_timer_further_away_than_two_days_is_put_again_on_its_way(world):
    sent = world.send(b"far", delay_ms=3 * DAY_MS - 5_000)
    world.confirm()
    # Less than a third of the window would be left: half of it is waited for first.
    assert world.run() == START_MS + 2 * DAY_MS + 1_000
    world.clock.advance(2 * DAY_MS + 1_000)
    world.run()
    assert not world.arrived()
    assert world.store.queue_range(TIMER_TOPIC, 0) == (0, 2)
    world.run_out()
    (arrived,) = world.arrived()
    assert arrived.store_time_ms == sent.due_ms
    assert arrived.properties["TIMER_ROLL_TIMES"] == "1"
    assert arrived.properties["TIMER_ENQUEUE_MS"] == str(START_MS + 2 * DAY_MS + 1_000)
    world.check({b"far"})


def test_a_cancelled_timer_is_not_delivered(world):
    kept, dropped = world.send(b"kept", delay_ms=4_000), world.send(b"dropped", delay_ms=4_000)
    world.cancel(dropped)
    world.cancel(kept, shift_ms=1_000)
    world.confirm()
    world.run_out()
    world.check({b"kept"})


def test_a_cancellation_counts_until_the_second_is_over(world):
    sent = world.send(b"x", delay_ms=4_000)
    world.confirm()
    world.run()
    world.clock.advance(3_900)
    world.cancel(sent)
    world.clock.advance(60_000)
    # No delivery ran in between. The cancellation is confirmed, so it counts.
    world.confirm()
    world.run_out()
    assert not world.arrived()


def test_timer_and_cancellation_beyond_the_window_are_rolled_together(world):
    sent = world.send(b"x", delay_ms=3 * DAY_MS - 1_000)
    world.cancel(sent)
    world.confirm()
    world.run_out()
    assert not world.arrived()


def test_a_stop_longer_than_the_wheel_loses_nothing(world):
    for number in range(30):
        world.send(b"%d" % number, delay_ms=1_000 + 500 * number)
    world.confirm()
    world.run(limit=1)
    world.restart()
    world.clock.advance(40 * DAY_MS)
    world.send(b"after", delay_ms=3_000)
    world.confirm()
    world.run_out()
    assert bodies(world) == [*(b"%d" % number for number in range(30)), b"after"]


def test_seconds_that_share_a_slot_wait_for_each_other(world):
    world.send(b"first", delay_ms=5_000)
    world.confirm()
    world.restart()
    # Fourteen days later: the same slot of the wheel. Both are taken in by one run.
    world.clock.advance(14 * DAY_MS)
    world.send(b"second", delay_ms=5_000)
    world.confirm()
    world.run_out()
    assert bodies(world) == [b"first", b"second"]
    world.check({b"first", b"second"})


def test_after_the_clock_went_back_new_timers_wait_for_the_time_it_shows(world):
    world.send(b"a", delay_ms=1_000)
    world.confirm()
    world.run_out()
    world.clock.jump_wall(-3_600_000)
    sent = world.send(b"b", delay_ms=60_000)
    world.confirm()
    assert world.run() == sent.due_ms
    assert len(world.arrived()) == 1
    world.kill()
    world.clock.advance(60_000)
    world.run()
    assert sorted(bodies(world)) == [b"a", b"b"]
    world.clock.advance(7_200_000)
    world.run_out()
    world.restart()
    world.run_out()
    assert len(world.arrived()) == 2


def test_a_timer_larger_than_a_group_of_deliveries_blocks_no_other(world):
    # RayMQ's delay hook refuses such messages. RocketMQ's may be as large as half a file.
    size = CONFIG.bundle_bytes_max + 1000
    late, due = {"TIMER_OUT_MS": "1000"}, {"TIMER_OUT_MS": str(START_MS + 3_000)}
    for times in (late, due):
        for body in (b"a", b"l" * size, b"z"):
            real = {**times, "REAL_TOPIC": "t", "REAL_QID": "0"}
            world.store.put_inner([InnerMessage(TIMER_TOPIC, 0, body, real)])
    world.confirm()
    world.run_out()
    assert [len(body) for body in bodies(world)] == [1, size, 1] * 2


def test_what_names_no_queue_is_counted_and_left_out(world):
    out = {"TIMER_OUT_MS": str(START_MS)}
    for properties in (
        {},
        out,
        {**out, "REAL_TOPIC": "t"},
        {**out, "REAL_TOPIC": "a/b", "REAL_QID": "0"},
        {**out, "REAL_TOPIC": "rmq_sys_raymq", "REAL_QID": "0"},
        {**out, "REAL_TOPIC": "t", "REAL_QID": "1"},
    ):
        world.store.put_inner([InnerMessage(TIMER_TOPIC, 0, b"x", properties)])
    world.confirm()
    world.run_out()
    assert bodies(world, 1) == [b"x"]
    assert len(world.arrived()) == 1
    assert world.delays.timers.skipped == 5


@pytest.mark.parametrize("point", ["delay.bundle_appended", "timer.files_synced"])
def test_what_fails_in_the_middle_is_made_good_by_the_next_run(world, point):
    for number in range(30):
        world.send(b"%d" % number, delay_ms=2_000)
    world.confirm()
    world.clock.advance(4_000)

    def steps() -> None:
        for _ in range(9):
            world.step()
            world.clock.advance(2_000)

    with failpoint(point, "raise"), pytest.raises(FailPointReached):
        steps()
    world.confirm()
    world.run_out()
    world.check({b"%d" % number for number in range(30)})


def test_a_disk_without_room_for_the_timer_log_delays_and_loses_nothing(tmp_path):
    class Full(Files):
        full = False

        def allocate(self, fd: int, size: int) -> None:
            if self.full:
                raise StorageFull("no room", field="disk")
            super().allocate(fd, size)

    files = Full()
    world = DelayWorld(tmp_path, files)
    world.send(b"x", delay_ms=2_000)
    world.confirm()
    files.full = True
    with pytest.raises(StorageFull):
        world.delays.run_once(world.clock.now_ms())
    files.full = False
    world.run_out()
    world.check({b"x"})


# --- the files of RocketMQ ------------------------------------------------------------------------


def test_wheel_log_and_checkpoint_have_rocketmqs_bytes(world, tmp_path):
    world.clock.advance(250)
    sent = [world.send(b"%d" % number, delay_ms=10_000) for number in range(3)]
    world.cancel(sent[1])
    world.send(b"far", delay_ms=3 * DAY_MS - 250)
    world.confirm()
    world.run()
    world.clock.advance(1_500)
    world.run()
    found = units(tmp_path)
    queue = world.store.consume_queues.get(TIMER_TOPIC, 0).read(0, 9)
    assert found["previous"].tolist() == [-1, 0, 52, 104, -1]
    assert found["magic"].tolist() == [
        MAGIC_DEFAULT,
        MAGIC_DEFAULT,
        MAGIC_DEFAULT,
        MAGIC_DEFAULT | MAGIC_DELETE,
        MAGIC_DEFAULT | MAGIC_ROLL,
    ]
    assert found["enqueue_time_ms"].tolist() == [START_MS] * 5
    assert found["delay_ms"].tolist() == [10_000] * 4 + [2 * DAY_MS]
    assert found["position"].tolist() == queue["position"].tolist()
    assert found["record_size"].tolist() == queue["size"].tolist()
    assert found["topic_hash"].tolist() == [fmt.java_hash("t")] * 5
    assert not found["reserved"].any()
    assert (tmp_path / "timerwheel").stat().st_size == FILE_BYTES == 38_707_200
    assert slot(tmp_path, START_MS + 10_000) == ((START_MS + 10_000) // 1000, 0, 156, 2, 0)
    checkpoint = (tmp_path / "config" / "timercheck").read_bytes()
    assert len(checkpoint) == 4096
    assert struct.unpack(">7q", checkpoint[:56])[:4] == (START_MS, 260, 5, 5)
    assert not any(checkpoint[56:])


def test_a_file_of_the_timer_log_ends_with_a_blank(world, tmp_path):
    # 78 units of 52 bytes, then 40 bytes, of which the blank's 16 are written.
    for number in range(100):
        world.send(b"%d" % number, delay_ms=5_000)
    world.confirm()
    world.run()
    first = (tmp_path / "timerlog" / "00000000000000000000").read_bytes()
    assert len(first) == 4096
    assert struct.unpack(">iqI", first[78 * 52 : 78 * 52 + 16]) == (40, 0, 0xCBD43194)
    assert not any(first[78 * 52 + 16 :])
    second = (tmp_path / "timerlog" / "00000000000000004096").read_bytes()
    assert struct.unpack(">iq", second[:12]) == (52, 77 * 52)
    world.restart()
    world.run_out()
    world.check({b"%d" % number for number in range(100)})


def test_files_of_the_timer_log_go_when_nothing_in_them_can_wait_any_more(world, tmp_path):
    for turn in range(6):
        for number in range(100):
            world.send(b"%d-%d" % (turn, number), delay_ms=5_000)
        world.send(b"far%d" % turn, delay_ms=3 * DAY_MS - 250)
        world.confirm()
        world.run()
        world.clock.advance(DAY_MS)
        world.run()
        if turn == 4:
            world.kill()
    names = sorted(path.name for path in (tmp_path / "timerlog").iterdir())
    assert 2 < len(names) < 6
    assert int(names[0]) > 2 * 4096
    world.restart()
    world.run_out()
    world.check(set(world.sent))


@pytest.mark.parametrize("spoiled", ["timerwheel", "timerlog", "config/timercheck", "previous"])
def test_files_that_are_gone_or_wrong_are_made_again_from_the_timer_topic(world, tmp_path, spoiled):
    for number in range(5):
        world.send(b"%d" % number, delay_ms=5_000)
    world.confirm()
    world.run()
    world.close()
    log = tmp_path / "timerlog" / "00000000000000000000"
    before = log.read_bytes()
    if spoiled == "timerlog":
        log.unlink()
    elif spoiled == "previous":
        log.write_bytes(before[:56] + b"\0\0\0\0\0\0\0\x34" + before[64:])
    else:
        (tmp_path / spoiled).unlink()
    world.open()
    world.run(limit=1)
    world.run_out()
    world.check({b"%d" % number for number in range(5)})
    assert log.read_bytes() == before


def test_deliveries_of_rocketmq_between_two_starts_are_taken_over(world, tmp_path):
    due = world.send(b"due", delay_ms=20_000)
    world.send(b"early", delay_ms=4_000)
    world.send(b"mine", delay_ms=1_000)
    far = world.send(b"far", delay_ms=3 * DAY_MS - 1_000)
    world.put(InnerMessage("t", 0, b"bare", {"TIMER_DELAY_MS": str(3 * DAY_MS - 3_000)}))
    world.confirm()
    world.clock.advance(2_000)
    world.run()
    assert bodies(world) == [b"mine"]
    world.close()
    # RocketMQ reads what is there, gets more, and delivers all seconds up to the sixth after the start.
    world.open()
    theirs = world.send(b"theirs", delay_ms=20_000)
    world.send(b"done", delay_ms=3_000)
    unrolled = world.send(b"unrolled", delay_ms=3 * DAY_MS - 2_000)
    world.store.put_inner([InnerMessage("t", 1, b"delivered by RocketMQ")])
    late = world.send(b"late", delay_ms=1_000)
    world.confirm()
    world.close()
    write_checkpoint(
        tmp_path / "config" / "timercheck",
        TimerCheckpoint(START_MS + 6_000, 0, 8, 8),
        files=Files(),
    )
    for _ in range(2):
        world.open()
        world.run_out()
        left = {due.body, theirs.body, far.body, b"bare", unrolled.body, late.body}
        assert sorted(bodies(world)) == sorted({*left, b"mine"})
        world.close()
    # A checkpoint of before our own last deliveries brings none of them again.
    checkpoint = read_checkpoint(tmp_path / "config" / "timercheck", files=Files())
    assert checkpoint is not None
    assert not checkpoint.foreign
    write_checkpoint(
        tmp_path / "config" / "timercheck",
        checkpoint._replace(read_time_ms=START_MS, state_version=0),
        files=Files(),
    )
    world.open()
    world.run_out()
    assert len(bodies(world)) == 7


@pytest.mark.parametrize("days", [2.5, 3])
def test_a_roll_that_rocketmq_read_after_a_crash_of_ours_is_made_once(world, tmp_path, days):
    far = world.send(b"far", delay_ms=3 * DAY_MS - 1_000)
    world.confirm()
    world.run()
    world.store.abandon()
    # When RocketMQ came to it there were less than two days left: it waits there until it is due.
    end = START_MS + int(days * DAY_MS)
    world.clock.advance(end - START_MS)
    world.open()
    if days == 3:
        world.store.put_inner([InnerMessage("t", 0, far.body)])
        world.confirm()
    write_checkpoint(
        tmp_path / "config" / "timercheck", TimerCheckpoint(end, 0, 1, 1), files=Files()
    )
    world.run_out()
    assert bodies(world) == [far.body]


def test_nothing_is_taken_over_before_dispatch_has_come_as_far_as_rocketmq_read(
    tmp_path, monkeypatch
):
    files = Files()
    world = DelayWorld(tmp_path, files)
    for number in range(6):
        world.send(b"%d" % number, delay_ms=1_000)
    world.confirm()
    # RocketMQ delivers all of them. Then the machine stops.
    for number in range(6):
        world.store.put_inner([InnerMessage("t", 0, b"%d" % number)])
    world.store.log.sync()
    world.store.abandon()
    checkpoint = TimerCheckpoint(START_MS + 5_000, 52 * 6, 6, 6)
    write_checkpoint(tmp_path / "config" / "timercheck", checkpoint, files=files)
    world.clock.advance(10_000)
    monkeypatch.setattr(files, "boot_id", lambda: "another boot")
    world.store = MessageStore.open(tmp_path, config=CONFIG, files=files, clock=world.clock)
    world.delays = DelayService(world.store)
    log = world.store.log
    log.sync()
    log.note_confirmed(log.end)
    end = world.store.dispatched
    while world.store.queue_range(TIMER_TOPIC, 0)[1] < 2:
        end += 50
        world.store.dispatch(end)
    assert world.store.queue_range(TIMER_TOPIC, 0)[1] < 6
    world.delays.run_once(world.clock.now_ms())
    world.confirm()
    world.run_out()
    assert sorted(bodies(world)) == [b"%d" % number for number in range(6)]


def test_timers_that_rocketmq_left_are_taken_over_once(world, tmp_path):
    for number in range(3):
        world.send(b"done%d" % number, delay_ms=1_000)
    rolled = world.send(b"rolled", delay_ms=3 * DAY_MS - 1_000)
    due = world.send(b"due", delay_ms=20_000)
    world.send(b"late", delay_ms=2_000)
    again = {"TIMER_OUT_MS": str(rolled.due_ms - 1_000), "TIMER_ROLL_TIMES": "1"}
    real = {"REAL_TOPIC": "t", "REAL_QID": "0", "UNIQ_KEY": rolled.body.hex()}
    world.store.put_inner([InnerMessage(TIMER_TOPIC, 0, rolled.body, {**again, **real})])
    unrolled = world.send(b"unrolled", delay_ms=3 * DAY_MS - 2_000)
    world.confirm()
    world.close()
    # It had read seven records, and delivered all seconds up to the fifth after the start.
    checkpoint = TimerCheckpoint(START_MS + 5_000, 52 * 7, 7, 7)
    write_checkpoint(tmp_path / "config" / "timercheck", checkpoint, files=Files())
    (tmp_path / "timerlog").mkdir()
    (tmp_path / "timerlog" / "00000000000000000000").write_bytes(bytes(4096))
    world.open()
    world.run_out()
    assert sorted(bodies(world)) == [b"due", b"rolled", b"unrolled"]
    world.check({due.body, rolled.body, unrolled.body})
    after = read_checkpoint(tmp_path / "config" / "timercheck", files=Files())
    assert after is not None
    assert after.queue_offset == world.store.queue_range(TIMER_TOPIC, 0)[1]
    world.restart()
    world.run_out()
    assert len(world.arrived()) == 3
