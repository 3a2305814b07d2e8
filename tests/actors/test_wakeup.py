"""Wakeups: immediate, never blocking, harmless without a receiver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raymq.actors.shared.wakeup import Wakeup, wakeup_directory
from raymq.store.base.errors import Unavailable
from raymq.store.base.files import Files

MakeBell = Callable[[str], Wakeup]


@pytest.fixture
def replica_dir(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path)
    yield path
    shutil.rmtree(wakeup_directory(path), ignore_errors=True)


@pytest.fixture
def make_wakeup(replica_dir: str) -> Iterator[MakeBell]:
    wakeups: list[Wakeup] = []

    def make(role: str) -> Wakeup:
        wakeups.append(Wakeup(replica_dir, role, files=Files()))
        return wakeups[-1]

    yield make
    for wakeup in wakeups:
        wakeup.close()


def test_a_wakeup_ends_the_wait_once(make_wakeup: MakeBell):
    ours, theirs = make_wakeup("commit_log"), make_wakeup("group_commit")
    assert not theirs.wait(0)
    ours.wake("group_commit")
    assert theirs.wait(10_000)
    assert not theirs.wait(0)


def test_the_end_of_a_watched_process_ends_each_wait_until_it_is_not_watched_any_more(
    make_wakeup: MakeBell,
):
    wakeup = make_wakeup("replication")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pidfd = os.pidfd_open(process.pid)
        wakeup.watch(pidfd)
        assert not wakeup.wait(0)
        wakeup.wake("replication")
        assert wakeup.wait(10_000)
        assert not wakeup.wait(0)
        process.communicate(b"\n")
        assert wakeup.wait(10_000)
        wakeup.wake("replication")
        assert wakeup.wait(10_000)
        wakeup.unwatch(pidfd)
        assert not wakeup.wait(0)
        os.close(pidfd)


def test_many_wakeups_end_one_wait(make_wakeup: MakeBell):
    ours, theirs = make_wakeup("commit_log"), make_wakeup("group_commit")
    for _ in range(5):
        ours.wake("group_commit")
    assert theirs.wait(10_000)
    assert not theirs.wait(0)


def test_a_wakeup_before_the_wait_is_remembered(make_wakeup: MakeBell):
    wakeup = make_wakeup("commit_log")
    wakeup.wake("commit_log")
    assert wakeup.wait(0)


def test_a_full_buffer_means_that_a_wakeup_is_pending(make_wakeup: MakeBell):
    ours, theirs = make_wakeup("commit_log"), make_wakeup("group_commit")
    # Linux queues 10 to some hundred datagrams per socket. None of these may block or fail.
    for _ in range(5_000):
        ours.wake("group_commit")
    assert theirs.wait(0)
    assert not theirs.wait(0)
    ours.wake("group_commit")
    assert theirs.wait(0)


def test_waking_a_role_without_a_process_is_harmless(make_wakeup: MakeBell):
    make_wakeup("commit_log").wake("group_commit")


def test_waking_a_closed_receiver_is_harmless(make_wakeup: MakeBell, replica_dir: str):
    ours, theirs = make_wakeup("commit_log"), make_wakeup("group_commit")
    theirs.close()
    assert os.listdir(wakeup_directory(replica_dir)) == ["commit_log"]
    ours.wake("group_commit")


def test_waking_a_receiver_that_died_without_closing_is_harmless(make_wakeup: MakeBell):
    ours, theirs = make_wakeup("commit_log"), make_wakeup("group_commit")
    theirs._close_sockets()
    ours.wake("group_commit")


def test_a_successor_takes_over_the_name_of_the_dead(make_wakeup: MakeBell):
    ours, dead = make_wakeup("commit_log"), make_wakeup("group_commit")
    successor = make_wakeup("group_commit")
    ours.wake("group_commit")
    assert successor.wait(10_000)
    assert not dead.wait(0)


def test_a_sender_connected_to_the_dead_wakes_its_successor(make_wakeup: MakeBell):
    ours, dead = make_wakeup("commit_log"), make_wakeup("group_commit")
    ours.wake("group_commit")
    dead._close_sockets()
    ours.wake("group_commit")
    successor = make_wakeup("group_commit")
    ours.wake("group_commit")
    assert successor.wait(10_000)
    assert not successor.wait(0)


def test_a_receiver_that_was_replaced_between_two_wakeups_gets_the_second(make_wakeup: MakeBell):
    ours, first = make_wakeup("commit_log"), make_wakeup("group_commit")
    ours.wake("group_commit")
    first.close()
    successor = make_wakeup("group_commit")
    ours.wake("group_commit")
    assert successor.wait(10_000)


def test_a_long_data_directory_has_a_short_socket_path(tmp_path: Path):
    deep = tmp_path / ("d" * 90) / ("e" * 90)
    deep.mkdir(parents=True)
    wakeup = Wakeup(str(deep), "flush_real_time", files=Files())
    wakeup.wake("flush_real_time")
    assert wakeup.wait(0)
    assert len(f"{wakeup_directory(str(deep))}/flush_real_time") < 100
    wakeup.close()
    shutil.rmtree(wakeup_directory(str(deep)))


def test_every_path_of_a_directory_leads_to_the_same_socket(tmp_path: Path):
    link = tmp_path / "link"
    (tmp_path / "real").mkdir()
    link.symlink_to(tmp_path / "real")
    assert wakeup_directory(str(link)) == wakeup_directory(str(tmp_path / "real"))
    assert wakeup_directory(f"{tmp_path}/./real/") == wakeup_directory(str(link))


def test_a_directory_that_others_may_enter_is_refused(replica_dir: str):
    Wakeup(replica_dir, "commit_log", files=Files()).close()
    os.chmod(wakeup_directory(replica_dir), 0o755)
    with pytest.raises(Unavailable) as caught:
        Wakeup(replica_dir, "commit_log", files=Files())
    assert "chmod 700" in caught.value.message
