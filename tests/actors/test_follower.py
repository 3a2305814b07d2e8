"""FollowerSession: streams, their order, and refusals."""

from __future__ import annotations

import operator
import queue
import threading
from unittest.mock import MagicMock, Mock

import pytest

from raymq.actors.follower import follower as follower_module
from raymq.actors.follower import session as session_module
from raymq.actors.follower.follower import Follower
from raymq.actors.follower.log_port import FollowerLogPort
from raymq.actors.follower.session import FollowerSession
from raymq.replication.election_events import LeaderHeard, Received
from raymq.replication.wire import (
    Ack,
    AppendEntries,
    BeginLog,
    Conflict,
    FrameHeader,
    Hello,
    HelloReply,
    Reason,
    Refusal,
    ReplicaProcess,
    RequestVote,
    cluster_key,
    decode,
    encode,
)
from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Rejected
from raymq.store.log.chain import ChainUnit
from tests.support.clock import ManualClock
from tests.support.replica_pair import CommitLogPort, new_session, wait_until

IDENTITY = {"cluster_id": "c", "shard": 0, "replica": 1, "incarnation": 5}


class Line:
    """A leader's stream, whose frames the test writes."""

    def __init__(self, session: FollowerSession, *, incarnation: int, epoch: int = 0) -> None:
        self.incarnation = incarnation
        self.epoch = epoch
        self._frames: queue.Queue = queue.Queue()
        self._answers: queue.Queue = queue.Queue()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(session,), daemon=True)
        self.thread.start()

    def _run(self, session: FollowerSession) -> None:
        try:
            session.run(iter(self._frames.get, None), lambda f, _: self._answers.put(decode(f)[1]))
        except Rejected as error:
            self.error = error

    def say(self, message, body=None, *, to: int = 5) -> None:
        header = FrameHeader(
            cluster_key("c"),
            0,
            ReplicaProcess(0, self.incarnation),
            ReplicaProcess(1, to),
            self.epoch,
            1,
        )
        self._frames.put((encode(header, message), body))

    def hear(self):
        return self._answers.get(timeout=10)

    def hang_up(self) -> None:
        self._frames.put(None)
        self.thread.join(10)
        assert not self.thread.is_alive()

    @property
    def silent(self) -> bool:
        return self._answers.empty()


@pytest.fixture(autouse=True)
def acknowledged_appends(monkeypatch):
    """Small appends are acknowledged as large ones are: at once."""
    monkeypatch.setattr(session_module, "UNACKNOWLEDGED_BYTES_MAX", 0)


@pytest.fixture
def port(tmp_path):
    port = CommitLogPort(tmp_path / "replica", segment_size_bytes=65536)
    yield port
    port.close()


@pytest.fixture
def session(port):
    return new_session(port, IDENTITY)


def unit_of(data: bytes, start: int = 0, previous: int = 0) -> ChainUnit:
    return ChainUnit(start, start + len(data), 0, crc32c(data), previous)


def test_appended_is_acknowledged_at_once_and_synced_when_the_flusher_publishes(port, session):
    line = Line(session, incarnation=1)
    line.say(Hello(3, 0), to=0)
    assert line.hear() == HelloReply(0, 0, 0, 0, 0)
    line.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abc")
    assert line.hear() == Ack(3, 3, 0)
    port.sync()
    assert line.hear() == Ack(3, 3, 3)
    line.hang_up()


def test_few_bytes_are_acknowledged_when_they_are_synced(port, session, monkeypatch):
    monkeypatch.setattr(session_module, "UNACKNOWLEDGED_BYTES_MAX", 3)
    line = Line(session, incarnation=1)
    line.say(Hello(3, 0), to=0)
    line.hear()
    unit = unit_of(b"abc")
    line.say(AppendEntries(0, 0, 0, (unit,)), b"abc")
    # A heartbeat is answered all the same: the follower is not silent while its disk is slow.
    line.say(AppendEntries(3, unit.value, 0, ()))
    assert line.hear() == Ack(3, 3, 0)
    port.sync()
    assert line.hear() == Ack(3, 3, 3)
    line.hang_up()


def test_the_ack_loop_acknowledges_a_sync_itself(port, session):
    line = Line(session, incarnation=1)
    assert not session.acknowledge_synced()
    line.say(Hello(3, 0), to=0)
    line.hear()
    # The logs are not compared yet.
    assert not session.acknowledge_synced()
    line.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abc")
    assert line.hear() == Ack(3, 3, 0)
    # Its thread sleeps on: no wakeup comes.
    port.log.sync()
    assert session.acknowledge_synced()
    assert line.hear() == Ack(3, 3, 3)
    line.hang_up()
    assert line.silent


def test_the_ack_loop_acknowledges_on_the_stream_that_is_served(port, session):
    line = Line(session, incarnation=1, epoch=4)
    line.say(Hello(3, 0), to=0)
    line.hear()
    line.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abc")
    line.hear()
    # The leader of an earlier epoch comes back.
    late = Line(session, incarnation=9, epoch=3)
    late.say(Hello(3, 0), to=0)
    assert isinstance(late.hear(), Refusal)
    port.log.sync()
    assert session.acknowledge_synced()
    assert line.hear() == Ack(3, 3, 3)
    assert late.silent
    late.hang_up()
    line.hang_up()
    # No stream is served.
    assert not session.acknowledge_synced()


def test_frames_of_the_leader_that_is_followed_take_no_step_of_the_elections(
    port, session, monkeypatch
):
    step, heard = session._elections.step, []
    monkeypatch.setattr(
        session._elections, "step", lambda event: heard.append(event) or step(event)
    )
    line = Line(session, incarnation=1, epoch=4)
    line.say(Hello(3, 0), to=0)
    line.hear()
    line.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abc")
    line.hear()
    assert heard == [LeaderHeard(ReplicaProcess(0, 1), 4)]
    line.hang_up()


class Host(Mock):
    """A follower's host whose satellites the test plays."""

    def sync(self, end: int) -> None:
        self.supervisor.progress.return_value.ends.synced = end


@pytest.fixture
def host():
    guard = Mock(lock=threading.Lock())
    host = Host(log_guard=guard, clock=ManualClock(), log=Mock(synced=0, end=9))
    host.log.note_synced.side_effect = lambda end: setattr(host.log, "synced", end)
    host.config.flush = "sync"
    host.sync(0)
    return host


def test_a_sync_is_acknowledged_by_the_ack_loop_or_by_the_thread_that_it_wakes(host):
    port = FollowerLogPort(host)
    acknowledged = []
    port.acknowledge_synced = lambda: acknowledged.append(host.log.synced) or len(acknowledged) > 1
    woken: list[bool] = []
    port._changed = MagicMock(notify_all=lambda: woken.append(True))
    assert not port.note_progress()
    host.sync(3)
    assert port.note_progress()
    assert (acknowledged, woken) == ([3], [True])
    host.sync(9)
    assert port.note_progress()
    assert (acknowledged, woken) == ([3, 9], [True])


def test_a_follower_acknowledges_before_it_supervises_and_supervises_once_in_a_while(host):
    port = FollowerLogPort(host)
    port.acknowledge_synced = lambda: host.acknowledged() or True
    replica = Follower(host, port)
    for end in (1, 2, 3):
        host.sync(end)
        replica.step()
    assert host.acknowledged.call_count == 3
    assert host.supervisor.tick.call_count == 1
    names = [call[0] for call in host.mock_calls]
    assert names.index("acknowledged") < names.index("supervisor.tick")

    # A satellite that asks for its grant does not wait for that.
    replica.step()
    assert host.supervisor.tick.call_count == 2
    host.clock.advance(follower_module.TICK_MS)
    host.sync(9)
    replica.step()
    assert host.supervisor.tick.call_count == 3
    assert host.serving.check_poisoned.call_count == 5


def test_the_ack_loop_sends_no_more_than_a_leader_that_reads_nothing_can_take(
    port, session, monkeypatch
):
    monkeypatch.setattr(session_module, "UNREAD_ACKS_MAX", 2)
    line = Line(session, incarnation=1)
    line.say(Hello(3, 0), to=0)
    line.hear()
    line.say(AppendEntries(0, 0, 0, (unit := unit_of(b"abc"),)), b"abc")
    line.hear()
    assert [session.acknowledge_synced() for _ in range(3)] == [True, True, False]
    # A frame shows that the leader is alive.
    line.say(AppendEntries(3, unit.value, 0, ()))
    assert [line.hear() for _ in range(3)] == [Ack(3, 3, 0)] * 3
    assert session.acknowledge_synced()
    line.hang_up()


@pytest.mark.parametrize("lock", ["_lock", "_stream.send_lock"])
def test_the_ack_loop_waits_for_no_other_thread(port, session, lock):
    line = Line(session, incarnation=1)
    line.say(Hello(3, 0), to=0)
    line.hear()
    line.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abc")
    line.hear()
    answers: queue.Queue = queue.Queue()
    with operator.attrgetter(lock)(session):
        asking = threading.Thread(target=lambda: answers.put(session.acknowledge_synced()))
        asking.start()
        assert answers.get(timeout=10) is False
        asking.join()
    assert session.acknowledge_synced()
    line.hang_up()


def test_a_broken_stream_does_not_end_the_ack_loop(port, session):
    line = Line(session, incarnation=1)
    line.say(Hello(3, 0), to=0)
    line.hear()
    line.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abc")
    line.hear()

    def send(frame: bytes, body: object) -> None:
        raise ConnectionError("reset")

    session._stream._send = send
    assert not session.acknowledge_synced()
    line.hang_up()


def test_a_bug_while_an_ack_is_made_ends_the_ack_loop_and_frees_its_locks(
    port, session, monkeypatch
):
    line = Line(session, incarnation=1)
    line.say(Hello(3, 0), to=0)
    line.hear()
    line.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abc")
    line.hear()
    with session._stream.send_lock:
        # The stream's thread has sent its ack, and is out.
        pass
    with monkeypatch.context() as patches:
        patches.setattr(session, "_make_ack", Mock(side_effect=AssertionError("a bug")))
        with pytest.raises(AssertionError, match="a bug"):
            session.acknowledge_synced()
    answers: queue.Queue = queue.Queue()
    asking = threading.Thread(target=lambda: answers.put(session.acknowledge_synced()))
    asking.start()
    assert answers.get(timeout=10)
    asking.join()
    line.hang_up()


def test_the_thread_of_acks_ends_with_its_stream_and_raises_a_bug(port, session, monkeypatch):
    stream = session_module._LeaderStream(Mock(side_effect=ConnectionError("reset")))
    monkeypatch.setattr(session, "_make_ack", lambda stream: b"ack")
    # It ends with the stream.
    session._acknowledge_syncs(stream)

    stream = session_module._LeaderStream(Mock())
    monkeypatch.setattr(session, "_make_ack", Mock(side_effect=AssertionError("a bug")))
    with pytest.raises(AssertionError, match="a bug"):
        session._acknowledge_syncs(stream)


def synced_line(port, session) -> Line:
    """A line on which three bytes were appended, synced and acknowledged."""
    line = Line(session, incarnation=1)
    line.say(Hello(3, 0), to=0)
    line.hear()
    line.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abc")
    wait_until(lambda: port.log.end == 3, "the append")
    port.sync()
    assert line.hear() == Ack(3, 3, 3)
    return line


def cut_and_append_others(line: Line) -> None:
    """Let the leader have other bytes in their place: what was acknowledged is cut."""
    unit = unit_of(b"xyz")
    line.say(AppendEntries(0, 0, 0, (unit,)), b"xyz")
    line.say(AppendEntries(3, unit.value, 0, ()))
    assert line.hear() == Ack(3, 3, 0)


def test_syncs_are_acknowledged_after_a_cut_as_before(port, session, monkeypatch):
    monkeypatch.setattr(session_module, "UNACKNOWLEDGED_BYTES_MAX", 3)
    line = synced_line(port, session)
    cut_and_append_others(line)
    port.sync()
    assert line.hear() == Ack(3, 3, 3)
    line.hang_up()


def test_a_cut_after_the_durable_end_was_read_hides_no_later_sync(port, session, monkeypatch):
    monkeypatch.setattr(session_module, "UNACKNOWLEDGED_BYTES_MAX", 3)
    wait_durable = port.wait_durable
    is_read, is_cut = threading.Event(), threading.Event()

    def read_before_the_cut(offset: int, timeout_ms: int) -> int:
        found = wait_durable(offset, timeout_ms)
        if offset == 4 and not is_read.is_set():
            is_read.set()
            is_cut.wait(10)
        return found

    monkeypatch.setattr(port, "wait_durable", read_before_the_cut)
    line = synced_line(port, session)
    assert is_read.wait(10)

    cut_and_append_others(line)
    is_cut.set()
    port.sync()
    assert line.hear() == Ack(3, 3, 3)
    line.hang_up()


def test_the_newer_connection_is_served_and_the_older_one_ends(port, session):
    old, new = Line(session, incarnation=1), Line(session, incarnation=2)
    old.say(Hello(3, 0), to=0)
    old.hear()
    new.say(Hello(3, 0), to=0)
    new.hear()
    old.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abc")
    old.thread.join(10)
    assert not old.thread.is_alive()
    assert old.silent
    assert port.log.end == 0
    new.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abc")
    assert new.hear() == Ack(3, 3, 0)
    new.hang_up()


def test_a_lower_epoch_is_refused_without_harm_to_the_present_leader(port, session):
    line, stale = Line(session, incarnation=2, epoch=4), Line(session, incarnation=1, epoch=3)
    line.say(Hello(3, 0), to=0)
    line.hear()
    stale.say(Hello(3, 0), to=0)
    refused = stale.hear()
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.highest_epoch) == (Reason.EPOCH, 4)
    stale.hang_up()
    line.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abc")
    assert line.hear() == Ack(3, 3, 0)
    line.hang_up()


def test_the_refusal_of_a_leader_that_was_replaced_says_so(port):
    session = new_session(port, IDENTITY, generations=(1,))
    old, new = Line(session, incarnation=7, epoch=4), Line(session, incarnation=1 << 48, epoch=4)
    old.say(Hello(3, 0), to=0)
    refused = old.hear()
    assert isinstance(refused, Refusal)
    assert refused.text == "an operator has replaced replica 0, whose process this is"
    new.say(Hello(3, 0), to=0)
    assert new.hear() == HelloReply(0, 0, 0, 0, 0)
    old.hang_up()
    new.hang_up()


def test_an_empty_log_begins_where_its_leader_says_and_one_with_bytes_does_not(port, session):
    line = Line(session, incarnation=1)
    line.say(Hello(1 << 20, 0), to=0)
    assert line.hear() == HelloReply(0, 0, 0, 0, 0)
    line.say(BeginLog(65536, 9))
    unit = unit_of(b"abc", 65536, 9)
    line.say(AppendEntries(65536, 9, 0, (unit,)), b"abc")
    assert line.hear() == Ack(65539, 65539, 0)
    assert (port.log.start, port.log.end) == (65536, 65539)
    line.say(BeginLog(2 * 65536, 9))
    assert line.hear() == Conflict(0, 65539)
    assert port.log.start == 65536
    line.hang_up()


def test_an_empty_log_that_was_to_begin_later_follows_a_leader_that_begins_at_0(port, session):
    line = Line(session, incarnation=1)
    line.say(Hello(1 << 20, 0), to=0)
    line.hear()
    line.say(BeginLog(65536, 9))
    line.say(AppendEntries(65536, 9, 0, ()))
    line.hear()
    line.hang_up()

    for incarnation in (2, 3):
        line = Line(session, incarnation=incarnation)
        line.say(Hello(3, 0), to=0)
        assert line.hear() == HelloReply(0, 0, 0, 0, 0)
        line.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abc")
        assert line.hear() == (Conflict(0, 0) if incarnation == 2 else Ack(3, 3, 0))
        line.hang_up()
    assert (port.log.start, port.log.end) == (0, 3)


def test_only_a_leader_whose_frame_is_taken_says_how_far_readers_should_be(port, session):
    line = Line(session, incarnation=2, epoch=4)
    line.say(Hello(3, 0), to=0)
    line.hear()
    line.say(AppendEntries(7, 7, 9, ()))
    assert isinstance(line.hear(), Conflict)
    line.say(AppendEntries(0, 0, 3, (unit_of(b"abc"),)), b"abc")
    line.hear()
    assert port.heard == [(3, 4)]
    line.epoch = 3
    line.say(AppendEntries(3, unit_of(b"abc").value, 3, ()))
    assert isinstance(line.hear(), Refusal)
    assert port.heard == [(3, 4)]
    line.hang_up()


def test_an_end_that_a_leader_knew_before_its_epoch_is_not_noted(port, host):
    host.log = port.log
    heard = FollowerLogPort(host).heard
    unit = ChainUnit(0, 6, 3, crc32c(b"abcdef"), 0)
    port.append_units([unit], memoryview(b"abcdef"))
    # Epoch 4 has not begun here yet, so that this log may lack what was confirmed before it.
    for end in (0, 3, 6, 99):
        heard.note(end, 4, 0)
        assert heard.epoch_of(end, 0) is None

    port.append_units([ChainUnit(6, 9, 4, crc32c(b"ghi"), unit.value)], memoryview(b"ghi"))
    for end in (0, 3, 6):
        heard.note(end, 4, 0)
        assert heard.epoch_of(end, 0) is None
    heard.note(9, 4, 0)
    assert heard.epoch_of(9, 0) == 4
    # It lags: this end is still to come.
    heard.note(20, 4, 900)
    assert heard.epoch_of(20, 1_800) == 4


def test_bytes_that_do_not_fit_their_units_end_the_stream(port, session):
    line = Line(session, incarnation=1)
    line.say(Hello(3, 0), to=0)
    line.hear()
    line.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"ab")
    line.thread.join(10)
    assert isinstance(line.error, Rejected)
    assert line.error.fields["field"] == "body"
    assert port.log.end == 0


def test_damaged_bytes_are_refused_and_not_acknowledged(port, session):
    line = Line(session, incarnation=1)
    line.say(Hello(3, 0), to=0)
    line.hear()
    line.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abX")
    refused = line.hear()
    assert isinstance(refused, Refusal)
    assert refused.reason == Reason.DAMAGED
    line.thread.join(10)
    assert not line.thread.is_alive()
    assert port.log.end == 0


def test_a_follower_that_was_restarted_still_refuses_the_epochs_before(port, session):
    line = Line(session, incarnation=1, epoch=4)
    line.say(Hello(3, 0), to=0)
    line.hear()
    line.hang_up()

    # Its log is empty: the epoch is on disk as its ballot.
    again = new_session(port, IDENTITY)
    stale = Line(again, incarnation=9, epoch=3)
    stale.say(Hello(3, 0), to=0)
    refused = stale.hear()
    assert (refused.reason, refused.highest_epoch) == (Reason.EPOCH, 4)
    stale.hang_up()


def test_an_epoch_is_on_disk_before_it_is_answered(port, session, monkeypatch):
    def fail(values):
        raise OSError(5, "the disk does not answer")

    monkeypatch.setattr(port.log.meta, "update", fail)
    line = Line(session, incarnation=1, epoch=4)
    line.say(Hello(3, 0), to=0)
    refused = line.hear()
    assert isinstance(refused, Refusal)
    assert refused.reason == Reason.UNAVAILABLE
    line.thread.join(10)
    assert not line.thread.is_alive()


def test_a_stranger_raises_no_epoch(port, session):
    line = Line(session, incarnation=1, epoch=4)
    line.say(Hello(3, 0), to=77)
    line.hang_up()
    assert line.silent
    assert port.log.meta.get("ballot") is None


def test_an_acknowledgement_that_a_vote_overtakes_is_not_sent(port, session, monkeypatch):
    line = Line(session, incarnation=1, epoch=4)
    line.say(Hello(3, 0), to=0)
    line.hear()
    durable = port.durable

    def vote_before_the_end_is_read() -> int:
        vote = RequestVote(9, 1000)
        session._elections.step(Received(ReplicaProcess(2, 1), ReplicaProcess(1, 5), 9, vote))
        return durable()

    monkeypatch.setattr(port, "durable", vote_before_the_end_is_read)
    line.say(AppendEntries(0, 0, 0, (unit_of(b"abc"),)), b"abc")
    line.hang_up()
    assert session._elections.epoch == 9
    assert port.log.end == 3
    assert line.silent


def test_a_match_counts_only_after_the_effects_of_its_frame(port, session, monkeypatch):
    seen = []
    append_units = port.append_units

    def append(units, data) -> None:
        seen.append(session.matched())
        append_units(units, data)

    monkeypatch.setattr(port, "append_units", append)
    line = Line(session, incarnation=1, epoch=4)
    line.say(Hello(3, 0), to=0)
    line.hear()
    line.say(AppendEntries(0, 0, 0, (first := unit_of(b"abc"),)), b"abc")
    assert line.hear() == Ack(3, 3, 0)
    value = port.chain_value_at(3)
    line.say(AppendEntries(3, value, 4, (unit_of(b"defg", 3, value),)), b"defg")
    assert line.hear() == Ack(7, 7, 0)
    assert first.end == 3
    assert seen == [(0, 4), (3, 4)]
    assert session.matched() == (7, 4)

    # What equals the log of one leader says nothing about that of the next one.
    other = Line(session, incarnation=2, epoch=5)
    other.say(Hello(9, 0), to=0)
    other.hear()
    assert session.matched() == (0, 5)
    other.hang_up()
    line.hang_up()
