"""`raymq topic query`, `tail`, `browse` and `delete`, at two real shards."""

from __future__ import annotations

import argparse
import io
import json
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

import raymq
from raymq.client.messages.received import ReceivedMessage
from raymq.cluster.cli.console import Console
from raymq.cluster.cli.main import main
from raymq.cluster.cli.time_text import shown_time, time_of
from raymq.cluster.cluster import Cluster
from tests.support.clock import ManualClock
from tests.support.served_shard import ServedCluster
from tests.support.waiting import until

MESSAGES = 12
NOW_MS = 1_790_000_000_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ServedCluster(tmp_path_factory.mktemp("commands")) as made:
        made.cluster.create_topic("t", queues=3)
        with made.cluster.producer() as producer:
            for number in range(MESSAGES):
                words = ("few",) if number % 4 == 0 else ("other",)
                body = b"%d" % number
                pending = producer.send("t", body, queue_id=number % 3, index_keys=words)
                # Messages of one millisecond, on two shards, have no order: the next one is sent in another.
                stored_ms = pending.result(30).store_time_ms
                while time.time_ns() // 1_000_000 <= stored_ms:
                    pass
        yield made.cluster


@pytest.fixture(scope="module")
def sent(cluster: Cluster) -> list[ReceivedMessage]:
    found = cluster.query("t", between=(None, None))
    assert [int(each.body) for each in found] == list(range(MESSAGES))
    return found


class Shell:
    """Runs commands on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._lifecycle = SimpleNamespace(connect=lambda *words, **options: cluster)
        self.err = ""
        self.stdout = io.BytesIO()

    def run(self, *words: str) -> int:
        stderr = io.StringIO()
        self.stdout = io.BytesIO()
        console = Console(stdout=self.stdout, stderr=stderr, lifecycle=self._lifecycle)
        code = main(words, console=console)
        self.err = stderr.getvalue()
        return code

    def bodies(self, *words: str) -> list[str]:
        """The bodies that a command prints."""
        assert self.run(*words, "-o", "raw") == 0, self.err
        return self.stdout.getvalue().decode().splitlines()


@pytest.fixture
def shell(cluster: Cluster) -> Shell:
    return Shell(cluster)


def test_a_query_prints_the_newest_messages_with_a_key(
    shell: Shell, sent: list[ReceivedMessage]
) -> None:
    assert shell.bodies("topic", "query", "t", "--key", "few") == ["0", "4", "8"]
    assert shell.bodies("topic", "query", "t", "--key", "few", "--max", "2") == ["4", "8"]
    assert shell.bodies("topic", "query", "t", "--unique-key", "few") == []
    times = [str(sent[number].store_time_ms) for number in (3, 6)]
    between = [
        each.body.decode()
        for each in sent
        if sent[3].store_time_ms <= each.store_time_ms <= sent[6].store_time_ms
    ]
    assert shell.bodies("topic", "query", "t", "--from", times[0], "--to", times[1]) == between
    assert shell.run("topic", "query", "t") == 2
    assert "give a key" in shell.err
    assert shell.run("topic", "query", "none", "--key", "a") == 2


def test_a_line_says_when_and_where_a_message_is(shell: Shell, sent: list[ReceivedMessage]) -> None:
    assert shell.run("topic", "query", "t", "--key", "few", "--max", "1") == 0
    last = sent[8]
    assert shell.stdout.getvalue().decode() == (
        f"{shown_time(last.store_time_ms)}  2/2  {last.message_id}  keys=few  8\n"
    )
    assert shell.run("topic", "query", "t", "--key", "few", "--max", "1", "--json") == 0
    shown = json.loads(shell.stdout.getvalue())
    assert shown["message_id"] == last.message_id
    assert (shown["queue_id"], shown["offset"], shown["body"]) == (2, 2, "8")


def test_bodies_of_any_bytes_take_one_line(shell: Shell, cluster: Cluster) -> None:
    cluster.create_topic("odd", queues=1)
    bodies = [b"a\nb\x1b[2J", b"\xff\xfe", "\N{EURO SIGN}".encode() * 200, b""]
    with cluster.producer() as producer:
        for body in bodies:
            producer.send("odd", body, key=b"k", tag="T").result(30)
    assert shell.run("topic", "tail", "odd") == 0
    lines = shell.stdout.getvalue().decode().splitlines()
    assert [line.partition("  key=k  tag=T  ")[2] for line in lines] == [
        r"a\nb\x1b[2J",
        r"b'\xff\xfe'",
        "\N{EURO SIGN}" * 80 + "...",
        "",
    ]


def test_tail_prints_the_last_messages_and_then_each_new_one_once(
    shell: Shell, cluster: Cluster, sent: list[ReceivedMessage]
) -> None:
    assert shell.bodies("topic", "tail", "t", "-n", "3") == ["9", "10", "11"]
    cluster.create_topic("followed", queues=3)

    class Interrupted(io.BytesIO):
        """Ends the command as Ctrl-C does, once everything came."""

        def flush(self) -> None:
            if len(self.getvalue().splitlines()) >= 6:
                raise KeyboardInterrupt

    with cluster.producer() as producer:
        for number in range(3):
            producer.send("followed", b"%d" % number, queue_id=number).result(30)
        out = Interrupted()
        lifecycle = SimpleNamespace(connect=lambda *words, **options: cluster)
        console = Console(stdout=out, stderr=io.StringIO(), lifecycle=lifecycle)
        words = ["topic", "tail", "followed", "-n", "2", "--follow", "-o", "raw"]
        codes: list[int] = []
        command = threading.Thread(target=lambda: codes.append(main(words, console=console)))
        command.start()
        pause = threading.Event()
        until(lambda: len(out.getvalue().splitlines()) == 2, lambda: pause.wait(0.01))
        for number in range(3, 7):
            producer.send("followed", b"%d" % number, queue_id=number % 3).result(30)
        command.join(30)
    assert codes == [130]
    assert sorted(out.getvalue().split()) == [b"%d" % number for number in range(1, 7)]


def test_browse_prints_the_messages_from_a_place_on(
    shell: Shell, sent: list[ReceivedMessage]
) -> None:
    browse = ("topic", "browse", "t")
    assert shell.bodies(*browse) == [str(number) for number in range(MESSAGES)]
    assert shell.bodies(*browse, "--max", "2") == ["0", "1"]
    assert shell.bodies(*browse, "--queue-id", "1") == ["1", "4", "7", "10"]
    assert shell.bodies(*browse, "--queue-id", "1", "--offset", "2") == ["7", "10"]
    assert shell.bodies(*browse, "--queue-id", "1", "--offset", "4") == []
    later = [each.body.decode() for each in sent if each.store_time_ms >= sent[5].store_time_ms]
    assert shell.bodies(*browse, "--from", str(sent[5].store_time_ms)) == later
    assert shell.bodies(*browse, "--from", "1d") == [str(number) for number in range(MESSAGES)]
    assert shell.bodies(*browse, "--id", sent[7].message_id) == ["7"]


def test_consume_begins_at_a_time(shell: Shell, sent: list[ReceivedMessage]) -> None:
    since = raymq.at_ms(sent[5].store_time_ms).isoformat()
    later = {each.body.decode() for each in sent if each.store_time_ms >= sent[5].store_time_ms}
    assert set(shell.bodies("consume", "t", "--from", since)) == later
    assert len(shell.bodies("consume", "t", "--from", "1d")) == MESSAGES
    assert shell.bodies("consume", "t", "--from", "9999-01-01") == []


@pytest.mark.parametrize(
    "words",
    [
        ("--id", "00" * 16),
        ("--id", "xyz"),
        ("--id", "00" * 16, "--queue-id", "0"),
        ("--offset", "1"),
        ("--queue-id", "0", "--offset", "1", "--from", "1d"),
        ("--queue-id", "3"),
        ("--queue-id", "0", "--offset", "5"),
        ("--from", "yesterday"),
    ],
)
def test_a_place_that_cannot_be_is_a_wrong_command(shell: Shell, words: tuple[str, ...]) -> None:
    assert shell.run("topic", "browse", "t", *words) == 2
    assert shell.stdout.getvalue() == b""


def test_an_id_of_another_topic_is_not_shown_as_one_of_this(
    shell: Shell, cluster: Cluster, sent: list[ReceivedMessage]
) -> None:
    cluster.create_topic("another", queues=1)
    assert shell.run("topic", "browse", "another", "--id", sent[0].message_id) == 2
    assert "is of topic t" in shell.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-29T14:30Z", datetime(2026, 11, 29, 14, 30, tzinfo=timezone.utc)),
        ("2026-11-29T14:30:00+09:00", datetime(2026, 11, 29, 5, 30, tzinfo=timezone.utc)),
        ("2026-11-29T14:30", datetime(2026, 11, 29, 14, 30).astimezone()),  # noqa: DTZ001
        ("2026-11-29", datetime(2026, 11, 29).astimezone()),  # noqa: DTZ001
        (str(NOW_MS), raymq.at_ms(NOW_MS)),
        ("90s", raymq.at_ms(NOW_MS - 90_000)),
        ("15m", raymq.at_ms(NOW_MS - 900_000)),
        ("2h", raymq.at_ms(NOW_MS) - timedelta(hours=2)),
        ("1d", raymq.at_ms(NOW_MS) - timedelta(days=1)),
    ],
)
def test_times_are_absolute_or_so_long_ago(text: str, expected: datetime) -> None:
    assert time_of(text, clock=ManualClock(NOW_MS)) == expected


@pytest.mark.parametrize(
    "text", ["", "now", "1790000000", "99999999d", "1999-01-01", "9" * 30, "2026-13-01", "5y"]
)
def test_other_texts_are_refused_as_times(text: Any) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a time"):
        time_of(text, clock=ManualClock(NOW_MS))


def test_a_topic_is_deleted_only_with_yes(shell: Shell, cluster: Cluster) -> None:
    cluster.create_topic("trial", queues=1)
    assert shell.run("topic", "delete", "trial") == 2
    assert "add --yes" in shell.err
    assert "trial" in cluster.topics()
    assert shell.run("topic", "delete", "trial", "--yes", "--json") == 0
    assert json.loads(shell.stdout.getvalue()) == {"topic": "trial", "deleted": True}
    assert shell.run("topic", "delete", "trial", "--yes") == 2
    assert "'trial' does not exist" in shell.err
