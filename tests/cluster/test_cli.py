"""The command line: grammar, exit codes and output, over a cluster that is only pretended."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from raymq.cluster.cli.console import Console
from raymq.cluster.cli.grammar import RUNS, commands_of_grammar
from raymq.cluster.cli.main import build_parser, main
from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import Corrupt, DeliveryUnknown, Rejected, StorageFull, Unavailable


@dataclass
class FakeProducer:
    """Keeps what is sent. Ends with `failure` as a real one ends with its first failure."""

    sent: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    failure: Exception | None = None

    def send(self, topic: str, **message: Any) -> None:
        self.sent.append((topic, message))

    def __enter__(self) -> FakeProducer:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None and self.failure is not None:
            raise self.failure


class FakeConsumer:
    """Gives out its messages, a few at a time."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages = messages
        self.polls = 0
        self.positions: dict[int, int] = {}
        #: queue_id -> the offset up to which it has looked once no message is left, as with a filter
        self.looked: dict[int, int] = {}

    def poll(self, max_records: int, timeout: float) -> list[Any]:
        self.polls += 1
        found, self.messages = self.messages[:2], self.messages[2:]
        self.positions |= {each.queue_id: each.offset + 1 for each in found}
        if not self.messages:
            self.positions |= self.looked
        return found

    def position(self, queue_id: int) -> int:
        return self.positions.get(queue_id, 0)

    def __enter__(self) -> FakeConsumer:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def received(queue_id: int, offset: int, body: bytes, key: bytes | None = None) -> Any:
    return SimpleNamespace(
        queue_id=queue_id,
        offset=offset,
        body=body,
        is_null=False,
        key=key,
        topic="t",
        tag=None,
        index_keys=(),
        properties={"p": "q"},
        flag=0,
        sys_flag=0,
        born_host="192.0.2.1:5000",
        store_time_ms=2,
        born_time_ms=1,
        message_id="7F0000010000115C" + f"{offset:016X}",
    )


class FakeCluster:
    """Two queues of three messages each, unless a test changes them."""

    name = "orders"
    cluster_id = "ab" * 16
    shards = 1
    endpoints = {0: "127.0.0.1:7000"}
    data_dir = "/data"
    ray_address = None

    def __init__(self) -> None:
        self.state = "RUNNING"
        #: of topic t
        self.more_facts: dict[str, Any] = {}
        self.fake_producer = FakeProducer()
        #: see FakeConsumer
        self.looked: dict[int, int] = {}
        self.messages = [received(q, o, f"{q}-{o}".encode()) for o in range(3) for q in range(2)]
        self.ranges = {0: (0, 3), 1: (0, 3)}
        self.consumer_options: dict[str, Any] = {}
        self.topic_options: dict[str, Any] = {}
        self.closed = 0
        self.shard_facts: dict[str, Any] = {}

    def close(self) -> None:
        self.closed += 1

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def status(self) -> dict[str, Any]:
        shard = {"shard": 0, "state": self.state, "appended": 5, "endpoint": "127.0.0.1:7000"}
        shard |= self.shard_facts
        return {
            "name": self.name,
            "cluster_id": self.cluster_id,
            "state": self.state,
            "shards": [shard],
            "data_dir": "/data",
            "ray_address": "192.0.2.1:6379",
        }

    def topics(self) -> dict[str, Any]:
        return {"t": {"queues": 2, "shards": [0]}}

    def create_topic(self, name: str, *, queues: int, compacted: bool = False, **more: Any) -> bool:
        self.topic_options = more
        return name != "t" or compacted

    def add_column(self, topic: str, column: pa.Field) -> bool:
        self.topic_options = {topic: column}
        return topic == "t"

    def describe_topic(self, name: str) -> dict[str, Any]:
        if name != "t":
            raise Rejected(f"topic {name!r} does not exist", field="topic")
        queues = [
            {"queue_id": queue, "shard": 0, "min_offset": low, "max_offset": high}
            for queue, (low, high) in self.ranges.items()
        ]
        return {
            "topic": name,
            "queues": queues,
            "messages": sum(high - low for low, high in self.ranges.values()),
            **self.more_facts,
        }

    def producer(self) -> FakeProducer:
        return self.fake_producer

    def consumer(self, topic: str, **options: Any) -> FakeConsumer:
        self.consumer_options = {"topic": topic, **options}
        made = FakeConsumer(self.messages)
        made.looked = self.looked
        return made


@dataclass
class FakeReport:
    clean: bool = True
    actors: dict[str, str] = field(default_factory=dict)
    ray: str = "stopped"


class FakeLifecycle:
    """Stands in for module start. Notes how it was called."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.report = FakeReport()
        self.failure: Exception | None = None
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def _called(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.calls.append((name, args, options))
        if self.failure is not None:
            raise self.failure

    def start(self, *args: Any, **options: Any) -> FakeCluster:
        options["progress"]("starting")
        self._called("start", args, options)
        return self.cluster

    def connect(self, *args: Any, **options: Any) -> FakeCluster:
        self._called("connect", args, options)
        return self.cluster

    def stop(self, *args: Any, **options: Any) -> FakeReport:
        self._called("stop", args, options)
        return self.report


class Terminal:
    """Runs commands and keeps what they print."""

    def __init__(self) -> None:
        self.lifecycle = FakeLifecycle()
        self.out = b""
        self.err = ""

    @property
    def cluster(self) -> FakeCluster:
        return self.lifecycle.cluster

    def run(self, *words: str, stdin: bytes = b"") -> int:
        stdout, stderr = io.BytesIO(), io.StringIO()
        console = Console(
            stdin=io.BytesIO(stdin), stdout=stdout, stderr=stderr, lifecycle=self.lifecycle
        )
        code = main(words, console=console)
        self.out, self.err = stdout.getvalue(), stderr.getvalue()
        return code

    def json(self) -> Any:
        return json.loads(self.out)

    def lines(self) -> list[bytes]:
        return self.out.splitlines()


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


# --- usage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("fly",),
        ("start",),
        ("topic",),
        ("topic", "create"),
        ("consume",),
        ("store", "verify"),
        ("start", "/data", "--shards", "0"),
        ("start", "/data", "--shards", "two"),
        ("start", "/data", "--flush", "never"),
        ("consume", "t", "--from", "yesterday"),
        ("consume", "t", "--max", "0"),
        ("consume", "t", "--read-from", "afar"),
        ("status", "a", "b"),
    ],
)
def test_a_wrong_command_exits_2_and_points_to_the_help(
    words: tuple[str, ...], terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terminal.run(*words) == 2
    assert "--help" in capsys.readouterr().err
    assert terminal.lifecycle.calls == []


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("start", "/data", "--shard", "2"), "--shards"),
        (("topic", "create", "t", "--queue=2"), "--queues"),
        (("consume", "t", "--folow"), "--follow"),
        (("status", "--jsn"), "--json"),
    ],
)
def test_an_unknown_option_exits_2_and_suggests_the_nearest(
    words: tuple[str, ...], hint: str, terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terminal.run(*words) == 2
    error = capsys.readouterr().err
    assert "unknown option" in error
    assert f"did you mean {hint}?" in error


@pytest.mark.parametrize(
    "words",
    [
        ("start",),
        ("stop",),
        ("status",),
        ("topic", "list"),
        ("topic", "create"),
        ("topic", "describe"),
        ("produce",),
        ("consume",),
        ("store", "verify"),
        ("store", "dump"),
        ("store", "repair"),
        ("store", "export"),
        ("store", "scrub"),
        ("doctor",),
    ],
)
def test_every_command_has_help_and_json(
    words: tuple[str, ...], terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terminal.run(*words, "--help") == 0
    assert "--json" in capsys.readouterr().out


def _commands(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, Any]]:
    """(words, parser) of every command that does something."""
    verbs = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not verbs:
        yield words, parser
    for action in verbs:
        for name, inner in action.choices.items():
            yield from _commands(inner, f"{words} {name}")


@pytest.mark.parametrize(("words", "parser"), list(_commands(build_parser(), "raymq")))
def test_the_help_of_every_command_says_what_each_option_does_its_unit_and_default(
    words: str, parser: argparse.ArgumentParser
) -> None:
    shown = " ".join(parser.format_help().split())
    for action in parser._actions:
        name = (action.option_strings or [action.metavar])[-1]
        assert action.help, f"{words} {name} says nothing"
        assert " ".join(action.help.replace("%%", "%").split()) in shown
        # An argument that must be given has no default, and a switch is off.
        if action.nargs != 0 and not action.required:
            assert "default" in action.help, f"{words} {name} has no default in its help"
        if action.metavar == "N":
            assert _UNIT.search(f"{name} {action.help}"), f"{words} {name} has no unit"


@pytest.mark.parametrize(
    ("words", "method"),
    [
        ("shard add", "add_shards"),
        ("shard recover", "recover_shard"),
        ("topic create", "create_topic"),
    ],
)
def test_the_help_of_an_operation_is_the_docstring_of_its_method(
    words: str, method: str, terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    promise = " ".join((inspect.getdoc(getattr(Cluster, method)) or "").split())
    promise = re.split(" (?:Example|Args):", promise)[0]
    assert terminal.run(*words.split(), "--help") == 0
    assert promise in " ".join(capsys.readouterr().out.split())

    group, verb = words.split()
    assert terminal.run(group, "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    sentence = promise.partition(". ")[0].removesuffix(".")
    assert f"{verb} {sentence[0].lower()}{sentence[1:]}" in shown


def test_every_row_of_the_table_of_functions_is_a_command_of_the_grammar() -> None:
    found = [command.words for command in commands_of_grammar() if command.run is not None]
    assert found == list(RUNS)


#: what a number counts, in an option's name or its text
_UNIT = re.compile(
    "bytes|copies|MiB|-s |seconds|milliseconds|messages|queues|shards|rows|batches|workers|consumers"
    "|topics|offset|queue|port"
)


def test_the_version_is_the_packages(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    import raymq

    assert terminal.run("--version") == 0
    assert capsys.readouterr().out == f"raymq {raymq.__version__}\n"


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Corrupt("a segment is damaged", path="/x"), 1),
        (Rejected("no such cluster", field="target"), 2),
        (Unavailable("no process listens"), 3),
        (DeliveryUnknown("may be stored"), 3),
        (StorageFull("disk full"), 3),
    ],
)
def test_an_error_becomes_one_line_and_its_exit_code(
    error: Exception, code: int, terminal: Terminal
) -> None:
    terminal.lifecycle.failure = error
    assert terminal.run("topic", "list") == code
    assert terminal.err == f"raymq: {error}\n"
    assert terminal.out == b""


def test_an_error_with_json_keeps_its_kind_and_fields(terminal: Terminal) -> None:
    terminal.lifecycle.failure = Rejected("no such cluster", field="target", limit="a, b")
    assert terminal.run("topic", "list", "--json") == 2
    assert json.loads(terminal.err) == {
        "kind": "Rejected",
        "message": "no such cluster",
        "fields": {"field": "target", "limit": "a, b"},
    }


def test_an_interrupt_exits_130_without_a_traceback(terminal: Terminal) -> None:
    terminal.lifecycle.failure = KeyboardInterrupt()  # type: ignore[assignment]
    assert terminal.run("status") == 130
    assert terminal.err == ""


# --- start, stop, status --------------------------------------------------------------------------


def test_start_passes_what_was_given_and_leaves_the_rest_to_the_stored_cluster(
    terminal: Terminal,
) -> None:
    assert terminal.run("start", "/data", "--shards", "2", "--flush", "async", "--ephemeral") == 0
    name, args, options = terminal.lifecycle.calls[0]
    assert (name, args) == ("start", ("/data",))
    assert (options["shards"], options["flush"], options["ephemeral"]) == (2, "async", True)
    assert options["name"] is None
    assert options["replicas"] is None
    assert options["config"] is None
    assert terminal.out == b"orders: raymq://127.0.0.1:7000 (1 shard(s))\n"
    assert terminal.err == "starting\n"
    assert terminal.cluster.closed == 1


def test_start_takes_options_of_the_stores_by_name(terminal: Terminal) -> None:
    options = ("--config", "flush_interval_ms=200", "--config", "warm_mapped_file=true")
    assert terminal.run("start", "/data", *options) == 0
    _, _, given = terminal.lifecycle.calls[0]
    assert given["config"] == {"flush_interval_ms": 200, "warm_mapped_file": True}

    assert terminal.run("start", "/data", "--config", "flush_intervall_ms=200") == 2
    assert "did you mean flush_interval_ms?" in terminal.err
    assert len(terminal.lifecycle.calls) == 1


def test_start_with_json_prints_one_object_and_progress_stays_out_of_it(
    terminal: Terminal,
) -> None:
    assert terminal.run("start", "/data", "--json") == 0
    assert terminal.json()["endpoints"] == ["127.0.0.1:7000"]
    assert terminal.json()["cluster_id"] == "ab" * 16


def test_a_clean_stop_exits_0(terminal: Terminal) -> None:
    assert terminal.run("stop", "orders") == 0
    assert terminal.lifecycle.calls[0][1] == ("orders",)
    assert terminal.out == b"stopped; Ray: stopped\n"


def test_a_stop_without_a_target_passes_none_on(terminal: Terminal) -> None:
    assert terminal.run("stop") == 0
    assert terminal.lifecycle.calls[0][1] == (None,)


def test_a_stop_that_was_not_orderly_exits_1_and_names_the_actor(terminal: Terminal) -> None:
    terminal.lifecycle.report = FakeReport(clean=False, actors={"a": "was down: killed"})
    assert terminal.run("stop") == 1
    assert "a: was down: killed" in terminal.err
    assert terminal.run("stop", "--json") == 1
    assert terminal.json()["actors"] == {"a": "was down: killed"}


LEADER = {
    "mode": "leader",
    "replicas": 2,
    "flush": "sync",
    "appended": 9,
    "synced": 7,
    "confirmed": 5,
    "pid": 100,
    "supervisor": {
        "roles": {
            "group_commit": {
                "granted": True,
                "position": 7,
                "pid": 4711,
                "grants": 2,
                "last_stop_reason": None,
            },
            "replication": {"granted": False, "last_stop_reason": "killed by signal 9"},
        }
    },
    "metrics": {
        "topic_messages": {"t": 6},
        "consumer_lag_messages": {"t": {"billing": 4}},
        "consumer_lag_seconds": {"t": {"billing": 1200}},
        "group_members": {"billing": 2, "audit": 0},
        "replication_lag_bytes": 2048,
        "disk_used_bytes": 3 << 20,
        "disk_free_bytes": 5 << 30,
    },
}


@pytest.mark.parametrize(("state", "code"), [("RUNNING", 0), ("DEGRADED", 1), ("DOWN", 3)])
def test_status_exits_by_the_clusters_state(state: str, code: int, terminal: Terminal) -> None:
    terminal.cluster.state = state
    assert terminal.run("status") == code
    assert terminal.lines()[0] == f"cluster orders: {state}".encode()
    assert terminal.run("status", "--json") == code
    assert terminal.json()["state"] == state


def test_status_leads_with_health_and_what_an_operator_asks_first(terminal: Terminal) -> None:
    halves = {"open_half_messages": 3, "oldest_half_message_seconds": 1_200}
    terminal.cluster.shard_facts = {**LEADER, "metrics": {**LEADER["metrics"], **halves}}
    assert terminal.run("status") == 0
    assert terminal.out.decode().splitlines() == [
        "cluster orders: RUNNING",
        "  directory  /data",
        "  shards     1 of 1 RUNNING, replicas 2, flush sync",
        "  shard 0    RUNNING, GroupCommit runs",
        "             Replication does not run (its last stop: killed by signal 9)",
        "             2 replicas on one machine: confirmed messages outlive a process or a copy,"
        " not the disk",
        "  topics     1",
        "  messages   6",
        "  disk       3 MiB used, 5.0 GiB free",
        "  lag        topic t, group billing: 4 messages, 1,200 s; replication: 2.0 KiB",
        "  groups     1 with 2 members",
        "  halves     shard 0: 3 open, the oldest of 1,200 s ago",
    ]


def test_the_status_names_the_groups_whose_workers_are_paused(terminal: Terminal) -> None:
    paused = {"paused_workers": {"billing": 0, "mailers": 1, "printers": 2}}
    terminal.cluster.shard_facts = {**LEADER, "metrics": {**LEADER["metrics"], **paused}}
    terminal.run("status")
    assert terminal.out.decode().splitlines()[-1] == (
        "  workers    group mailers paused: dead letters on shard 0; group printers paused on shard 0"
    )


def test_bytes_and_pids_of_the_status_need_verbose(terminal: Terminal) -> None:
    terminal.cluster.shard_facts = LEADER
    terminal.run("status")
    assert b"4711" not in terminal.out
    terminal.run("status", "--verbose")
    assert b"appended 9, synced 7, confirmed 5 bytes; endpoint 127.0.0.1:7000, pid 100" in (
        terminal.out
    )
    assert b"GroupCommit: at 7 bytes, pid 4711, 2 starts" in terminal.out
    assert (
        b"Ray        192.0.2.1:6379, from Python: ray.init(raymq.connect('orders').ray_address)"
        in terminal.out
    )


def test_the_status_says_which_replica_leads_if_that_may_change(terminal: Terminal) -> None:
    terminal.cluster.shard_facts = {**LEADER, "replica": 1, "epoch": 5}
    terminal.run("status", "--verbose")
    assert b"leads" not in terminal.out
    terminal.cluster.shard_facts = {**LEADER, "replicas": 3, "replica": 1, "epoch": 5}
    terminal.run("status", "--verbose")
    assert b"replica 1 leads in epoch 5" in terminal.out


def test_status_of_a_shard_that_does_not_answer_says_why_and_asks_no_more(
    terminal: Terminal,
) -> None:
    terminal.cluster.state = "DOWN"
    terminal.cluster.shard_facts = {"error": "nothing listens at 127.0.0.1:7000"}
    assert terminal.run("status") == 3
    text = terminal.out.decode()
    assert "0 of 1 RUNNING" in text
    assert "DOWN (nothing listens at 127.0.0.1:7000)" in text
    assert "messages   unknown" in text


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"replicas": 2},
            b"2 replicas on one machine: confirmed messages outlive a process or a copy",
        ),
        (
            {"replicas": 2, "nodes": ["a", "b"], "endpoint": "tls://192.0.2.1:7"},
            b"replicas on the nodes a, b: confirmed messages outlive the loss of any 1 machine",
        ),
        (
            {"replicas": 5, "nodes": ["a", "b", "c", "d", "e"]},
            b"confirmed messages outlive the loss of any 2 machines",
        ),
        ({"replicas": 2, "endpoint": "192.0.2.1:7"}, b"replicas 2"),
    ],
)
def test_status_says_what_several_replicas_protect_against(
    facts: dict[str, Any], words: bytes, terminal: Terminal
) -> None:
    terminal.cluster.shard_facts = facts
    terminal.run("status")
    assert words in terminal.out


def test_a_cluster_elsewhere_is_reached_by_url_and_token_file(
    terminal: Terminal, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("c0ffee\n")
    words = ("-c", "raymq://h:1", "--token-file", str(tmp_path / "token"))
    assert terminal.run("topic", "list", *words) == 0
    assert terminal.lifecycle.calls[0][1:] == (("raymq://h:1",), {"token": "c0ffee"})
    assert terminal.run("topic", "list", "--token-file", str(tmp_path / "none")) == 2


# --- topics ---------------------------------------------------------------------------------------


def test_topics_are_listed_and_described(terminal: Terminal) -> None:
    assert terminal.run("topic", "list") == 0
    assert terminal.out == b"t\t2 queues\n"
    assert terminal.run("topic", "describe", "t") == 0
    assert terminal.lines() == [
        b"t: 6 messages",
        b"  queue 0 on shard 0: [0, 3)",
        b"  queue 1 on shard 0: [0, 3)",
    ]
    assert terminal.run("topic", "describe", "t", "--json") == 0
    assert terminal.json()["messages"] == 6
    assert terminal.run("topic", "describe", "nope") == 2


def test_a_topic_with_a_schema_is_described_also_with_one_of_a_later_version(
    terminal: Terminal,
) -> None:
    column = {"name": "id", "type": "int64", "nullable": False}
    terminal.cluster.more_facts = {"schema": [column]}
    assert terminal.run("topic", "describe", "t") == 0
    assert terminal.lines()[1] == b"  column id:bigint not null"
    terminal.cluster.more_facts = {"schema": [column | {"type": "int1024"}]}
    assert terminal.run("topic", "describe", "t") == 0
    shown = b'  schema of a later version: [{"name": "id", "type": "int1024", "nullable": false}]'
    assert terminal.lines()[1] == shown


def test_creating_a_topic_twice_is_not_a_fault_and_says_so(terminal: Terminal) -> None:
    assert terminal.run("topic", "create", "new", "--queues", "8") == 0
    assert terminal.out == b"new: created\n"
    assert terminal.run("topic", "create", "t", "--json") == 0
    assert terminal.json() == {"topic": "t", "queues": 4, "created": False}
    assert terminal.run("topic", "create", "t", "--compacted") == 0
    assert terminal.out == b"t: created\n"
    assert terminal.cluster.topic_options == {}


def test_a_topic_is_created_with_columns_and_gets_one_more(terminal: Terminal) -> None:
    words = ("--column", "id:bigint not null", "--column", "note:string", "--allow-null-values")
    assert terminal.run("topic", "create", "new", *words) == 0
    columns = [pa.field("id", pa.int64(), nullable=False), pa.field("note", pa.string())]
    given = {"schema": pa.schema(columns), "allow_null_values": True}
    assert terminal.cluster.topic_options == given
    assert terminal.run("topic", "add-column", "t", "seen:timestamp", "--json") == 0
    assert terminal.json() == {"topic": "t", "column": "seen:timestamp", "added": True}
    seen = pa.field("seen", pa.timestamp("us", tz="UTC"))
    assert terminal.cluster.topic_options == {"t": seen}
    assert terminal.run("topic", "create", "new", "--column", "id") == 2
    assert terminal.run("topic", "add-column", "t", "id:number") == 2


# --- produce --------------------------------------------------------------------------------------


def test_each_line_is_a_body_byte_for_byte(terminal: Terminal) -> None:
    assert terminal.run("produce", "t", stdin=b"one\n\n\xff two \r\nlast") == 0
    bodies = [message["body"] for _, message in terminal.cluster.fake_producer.sent]
    assert bodies == [b"one", b"", b"\xff two \r", b"last"]
    assert terminal.err == "4 messages stored in t\n"


def test_a_separator_divides_key_and_body_once(terminal: Terminal) -> None:
    assert terminal.run("produce", "t", "--key-separator", "::", stdin=b"k::v::w\n") == 0
    assert terminal.cluster.fake_producer.sent == [("t", {"key": b"k", "body": b"v::w"})]


def test_a_separator_may_be_bytes_that_are_not_text_but_not_empty(terminal: Terminal) -> None:
    # What Python makes of an argument that is the byte ff.
    separator = os.fsdecode(b"\xff")
    assert terminal.run("produce", "t", "--key-separator", separator, stdin=b"k\xffv\n") == 0
    assert terminal.cluster.fake_producer.sent == [("t", {"key": b"k", "body": b"v"})]
    assert terminal.run("produce", "t", "--key-separator", separator, stdin=b"plain\n") == 2
    assert "line 1 has no separator '\\udcff'" in terminal.err
    assert terminal.run("produce", "t", "--key-separator", "", stdin=b"k\n") == 2
    assert "--key-separator is empty" in terminal.err


def test_a_line_without_the_separator_is_named_and_refused(terminal: Terminal) -> None:
    assert terminal.run("produce", "t", "--key-separator", ":", stdin=b"a:b\nplain\n") == 2
    assert "line 2" in terminal.err


def test_json_lines_carry_all_that_a_message_has(terminal: Terminal) -> None:
    more = {"tag": "T", "properties": {"a": "b"}, "index_keys": ["i"], "deliver_at_ms": 7}
    line = {"body": "text", "key": "k", **more}
    other = {"body": {"n": 1}}
    stdin = b"\n".join(json.dumps(each).encode() for each in (line, other))
    assert terminal.run("produce", "t", "--input", "-", "--json", stdin=stdin) == 0
    assert [message for _, message in terminal.cluster.fake_producer.sent] == [
        {"body": b"text", "key": b"k", **more, "index_keys": ("i",)},
        {"body": b'{"n": 1}'},
    ]
    assert terminal.json() == {"sent": 2, "topics": {"t": 2}, "left_out": 0}


def test_what_consume_prints_as_json_is_sent_again_as_it_was(
    terminal: Terminal, tmp_path: Path
) -> None:
    odd = received(1, 1, b"\xff\x00", b"\xfe")
    odd.tag, odd.index_keys, odd.flag, odd.sys_flag = "T", ("i", "j"), -7, 0x301
    terminal.cluster.ranges = {0: (0, 1), 1: (1, 2)}
    terminal.cluster.messages = [received(0, 0, b'{"n": 1}', b"k"), odd]

    assert terminal.run("consume", "t", "-o", "json") == 0
    (tmp_path / "lines").write_bytes(terminal.out)
    assert terminal.run("produce", "--input", str(tmp_path / "lines")) == 0
    assert terminal.cluster.fake_producer.sent == [
        ("t", {"body": b'{"n": 1}', "key": b"k", "properties": {"p": "q"}, "queue_id": 0}),
        (
            "t",
            {
                "body": b"\xff\x00",
                "key": b"\xfe",
                "tag": "T",
                "index_keys": ("i", "j"),
                "properties": {"p": "q"},
                "flag": -7,
                "sys_flag": 0x301,
                "queue_id": 1,
            },
        ),
    ]
    assert terminal.err == "2 messages stored in t\n"


def test_a_queue_that_the_topic_does_not_have_is_replaced(terminal: Terminal) -> None:
    line = b'{"body": "x", "topic": "old", "queue_id": 2}'
    assert terminal.run("produce", "t", "--input", "-", stdin=line) == 0
    assert terminal.cluster.fake_producer.sent == [("t", {"body": b"x"})]


def test_lines_of_store_dump_are_sent_to_their_topics_and_the_rest_is_left_out(
    terminal: Terminal,
) -> None:
    def dumped(topic: str, **props: str) -> dict[str, Any]:
        return {"kind": "msg", "topic": topic, "queueId": 1, "body64": "/w==", "props": props}

    lines = [
        dumped("t", _P="stamp", KEYS="a b", TAGS="T", __SHARDINGKEY="k", UNIQ_KEY="u", p="q"),
        # Its born host is IPv6: only the sender's bits come back.
        {**dumped("t", __KEY_B64="/g=="), "flag": 7, "sysFlag": 0x311},
        {"kind": "queue", "topic": "t", "queueId": 1, "min": 0, "max": 2, "read": 2},
        dumped("rmq_sys_raymq"),
        dumped("SCHEDULE_TOPIC_XXXX"),
        {"kind": "end", "messages": 4, "errors": 0},
    ]
    stdin = b"\n".join(json.dumps(line).encode() for line in lines)
    assert terminal.run("produce", "--input", "-", stdin=stdin) == 0
    assert terminal.cluster.fake_producer.sent == [
        (
            "t",
            {
                "body": b"\xff",
                "key": b"k",
                "tag": "T",
                "index_keys": ("a", "b"),
                "properties": {"p": "q"},
                "queue_id": 1,
            },
        ),
        (
            "t",
            {"body": b"\xff", "key": b"\xfe", "flag": 7, "sys_flag": 0x301, "queue_id": 1},
        ),
    ]
    assert "2 records of internal topics left out" in terminal.err


def test_a_line_without_a_topic_needs_one_on_the_command_line(terminal: Terminal) -> None:
    assert terminal.run("produce", "--input", "-", stdin=b'{"body": "x"}') == 2
    assert "line 1 names no topic" in terminal.err
    assert terminal.run("produce", stdin=b"x\n") == 2
    assert "TOPIC" in terminal.err
    assert terminal.run("produce", "t", "--input", "-", "--key-separator", ":") == 2


def test_an_input_file_that_cannot_be_read_is_named(terminal: Terminal, tmp_path: Path) -> None:
    assert terminal.run("produce", "t", "--input", str(tmp_path / "none")) == 2
    assert "none" in terminal.err


@pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b'{"body": "x", "colour": "red"}', b"7"])
def test_a_json_line_that_is_not_a_message_is_refused(line: bytes, terminal: Terminal) -> None:
    assert terminal.run("produce", "t", "--input", "-", stdin=line) == 2
    assert "line 1 is not a message" in terminal.err


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("index_keys", "order-1", "a list of texts"),
        ("index_keys", [1], "a list of texts"),
        ("queue_id", "0", "a whole number"),
        ("queue_id", True, "a whole number"),
        ("queue_id", -1, "a whole number"),
        ("topic", 5, "a text"),
        ("key", ["k"], "a text or a number"),
        ("tag", 5, "a text"),
        ("properties", {"a": 1}, "an object of texts"),
        ("deliver_at_ms", "7", "a whole number"),
        ("delay_level", -1, "a whole number"),
        ("flag", "7", "a whole number"),
        ("sys_flag", True, "a whole number"),
        ("wait_store_ok", 1, "true or false"),
    ],
)
def test_a_json_line_with_a_field_of_another_type_is_refused_and_nothing_of_it_is_sent(
    terminal: Terminal, field: str, value: Any, wanted: str
) -> None:
    line = json.dumps({"body": "b", field: value}).encode()
    assert terminal.run("produce", "t", "--input", "-", stdin=b'{"body": "a"}\n' + line) == 2
    assert f"line 2 is not a message: {field} is {json.dumps(value)}" in terminal.err
    assert wanted in terminal.err
    assert terminal.cluster.fake_producer.sent == [("t", {"body": b"a"})]


@pytest.mark.parametrize("changed", [{"queueId": "1"}, {"topic": 5}, {"props": ["p"]}])
def test_a_line_of_store_dump_with_a_field_of_another_type_is_refused(
    terminal: Terminal, changed: dict[str, Any]
) -> None:
    line = {"kind": "msg", "topic": "t", "queueId": 1, "body64": "/w==", "props": {}, **changed}
    assert terminal.run("produce", "--input", "-", stdin=json.dumps(line).encode()) == 2
    assert "line 1 is not a message" in terminal.err
    assert terminal.cluster.fake_producer.sent == []


def test_a_field_that_is_null_counts_as_missing(terminal: Terminal) -> None:
    line = b'{"body": "x", "key": null, "index_keys": null, "queue_id": null, "tag": null}'
    assert terminal.run("produce", "t", "--input", "-", stdin=line) == 0
    assert terminal.cluster.fake_producer.sent == [("t", {"body": b"x"})]


def test_a_message_that_was_not_stored_is_not_reported_as_sent(terminal: Terminal) -> None:
    terminal.cluster.fake_producer.failure = Unavailable("shard 0 is down")
    assert terminal.run("produce", "t", "--json", stdin=b"x\n") == 3
    assert terminal.out == b""
    assert json.loads(terminal.err)["kind"] == "Unavailable"


# --- consume --------------------------------------------------------------------------------------


def test_what_is_there_now_is_printed_and_the_command_ends(terminal: Terminal) -> None:
    terminal.cluster.messages += [received(0, 3, b"later"), received(1, 3, b"later")]
    assert terminal.run("consume", "t") == 0
    assert terminal.cluster.consumer_options == {
        "topic": "t",
        "start": "earliest",
        "queues": [0, 1],
        "read_from": "leader",
        "tags": None,
        "sql": None,
    }
    assert sorted(terminal.lines()) == [b"0-0", b"0-1", b"0-2", b"1-0", b"1-1", b"1-2"]


def test_messages_are_read_from_the_replica_that_the_option_names(terminal: Terminal) -> None:
    assert terminal.run("consume", "t", "--read-from", "nearest") == 0
    assert terminal.cluster.consumer_options["read_from"] == "nearest"


@pytest.mark.parametrize(("option", "value"), [("tags", "new || paid"), ("sql", "price > 5")])
def test_a_filter_ends_at_the_end_whether_the_last_messages_are_wanted_or_not(
    terminal: Terminal, option: str, value: str
) -> None:
    terminal.cluster.messages = [received(0, 1, b"wanted")]
    terminal.cluster.looked = {0: 3, 1: 3}
    assert terminal.run("consume", "t", f"--{option}", value) == 0
    assert terminal.cluster.consumer_options[option] == value
    assert terminal.lines() == [b"wanted"]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--sql", "price >"), "the end at character 8"),
        (("--tags", "||"), "names no tag"),
        (("--tags", "a", "--sql", "b = 'c'"), "both given"),
    ],
)
def test_a_wrong_filter_is_refused_also_where_nothing_is_to_be_printed(
    terminal: Terminal, words: tuple[str, ...], fault: str
) -> None:
    terminal.cluster.ranges = {0: (0, 0)}
    assert terminal.run("consume", "t", *words) == 2
    assert fault in terminal.err


def test_a_range_of_offsets_ends_before_its_end(terminal: Terminal) -> None:
    terminal.cluster.messages = terminal.cluster.messages[2:]
    assert terminal.run("consume", "t", "--from", "1", "--to", "2") == 0
    assert terminal.cluster.consumer_options["start"] == 1
    assert sorted(terminal.lines()) == [b"0-1", b"1-1"]


@pytest.mark.parametrize("words", [(), ("--follow",)])
def test_a_first_offset_beyond_the_end_is_refused_with_the_ranges(
    words: tuple[str, ...], terminal: Terminal
) -> None:
    terminal.cluster.ranges = {0: (0, 3), 1: (2, 5)}
    assert terminal.run("consume", "t", "--from", "6", *words) == 2
    assert "--from 6 is beyond the end of every queue of t" in terminal.err
    assert "queue 0 holds [0, 3), queue 1 holds [2, 5)" in terminal.err
    assert terminal.run("consume", "t", "--from", "6", "--json") == 2
    assert json.loads(terminal.err)["fields"] == {"min": 0, "max": 5}


@pytest.mark.parametrize(
    "words", [("--from", "latest"), ("--from", "3"), ("--to", "0"), ("--from", "2", "--to", "1")]
)
def test_an_empty_range_ends_at_once(words: tuple[str, ...], terminal: Terminal) -> None:
    assert terminal.run("consume", "t", *words) == 0
    assert terminal.out == b""
    assert terminal.cluster.consumer_options == {}


def test_a_queue_that_ends_before_the_first_offset_is_left_out(terminal: Terminal) -> None:
    terminal.cluster.ranges = {0: (0, 3), 1: (0, 1)}
    terminal.cluster.messages = [received(0, 2, b"0-2")]
    assert terminal.run("consume", "t", "--from", "2") == 0
    assert terminal.cluster.consumer_options["queues"] == [0]
    assert terminal.lines() == [b"0-2"]


def test_max_ends_also_a_command_that_follows(terminal: Terminal) -> None:
    assert terminal.run("consume", "t", "--follow", "--max", "3") == 0
    assert len(terminal.lines()) == 3


def test_following_passes_the_end_that_was_there_at_the_start(terminal: Terminal) -> None:
    terminal.cluster.messages.append(received(0, 3, b"new"))
    assert terminal.run("consume", "t", "--follow", "--max", "7") == 0
    assert terminal.lines()[-1] == b"new"


def test_following_up_to_an_offset_waits_until_every_queue_has_reached_it(
    terminal: Terminal,
) -> None:
    new = [received(0, 3, b"0-3"), received(1, 3, b"1-3")]
    terminal.cluster.messages += [*new, received(0, 4, b"0-4"), received(1, 4, b"1-4")]
    assert terminal.run("consume", "t", "--follow", "--to", "4") == 0
    assert terminal.lines()[6:] == [b"0-3", b"1-3"]


@pytest.mark.parametrize("words", [("--to", "latest"), ("--to", "3")])
def test_following_up_to_the_present_end_prints_what_is_there(
    words: tuple[str, ...], terminal: Terminal
) -> None:
    terminal.cluster.messages.append(received(0, 3, b"new"))
    assert terminal.run("consume", "t", "--follow", *words) == 0
    assert sorted(terminal.lines()) == [b"0-0", b"0-1", b"0-2", b"1-0", b"1-1", b"1-2"]


def test_json_tells_text_from_bytes_and_hex_prints_hex(terminal: Terminal) -> None:
    terminal.cluster.ranges = {0: (0, 2)}
    terminal.cluster.messages = [received(0, 0, b"text", b"k"), received(0, 1, b"\xff")]
    assert terminal.run("consume", "t", "-o", "json") == 0
    first, second = (json.loads(line) for line in terminal.lines())
    assert (first["body"], first["key"], first["queue_id"], first["offset"]) == ("text", "k", 0, 0)
    assert second["body_base64"] == "/w=="
    assert "body" not in second
    assert second["key"] is None
    terminal.cluster.messages = [received(0, 0, b"text"), received(0, 1, b"\xff")]
    assert terminal.run("consume", "t", "-o", "hex") == 0
    assert terminal.lines() == [b"74657874", b"ff"]


# --- store and doctor -----------------------------------------------------------------------------


def test_verify_of_nothing_is_a_wrong_command(terminal: Terminal, tmp_path: Path) -> None:
    assert terminal.run("store", "verify", str(tmp_path / "none")) == 2
    assert terminal.run("store", "dump", str(tmp_path)) == 2
    assert "is not a store" in terminal.err


def test_doctor_prints_verdicts_as_json(terminal: Terminal) -> None:
    terminal.run("doctor", "--json")
    checks = terminal.json()
    assert {"name", "verdict", "found", "advice"} == set(checks[0])


# --- the real thing -------------------------------------------------------------------------------


def test_the_module_runs_and_loads_neither_ray_nor_arrow_for_a_usage_error() -> None:
    code = (
        "import sys; from raymq.cluster.cli.main import main; code = main(['flyy']);"
        "sys.exit(99 if {'ray', 'pyarrow', 'numpy'} & set(sys.modules) else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 2, done.stderr


def test_python_m_raymq_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "raymq", "--version"], capture_output=True, check=False
    )
    assert done.stdout.startswith(b"raymq ")


@pytest.mark.parametrize("closed", ["0<&-", "1>&-"])
def test_a_command_runs_with_a_standard_stream_that_its_caller_has_closed(closed: str) -> None:
    command = f'"$0" -m raymq grafana show {closed}'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) == (closed != "1>&-")


def test_an_error_does_not_go_to_standard_output_if_standard_error_is_closed() -> None:
    command = '"$0" -m raymq topic list -c raymq://127.0.0.1:1 2>&-'
    env = {name: value for name, value in os.environ.items() if name != "RAYMQ_TOKEN"}
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], capture_output=True, env=env, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")


def test_the_top_level_names_are_exactly_these_and_lazy() -> None:
    import raymq

    assert set(dir(raymq)) == {
        "start",
        "at_ms",
        "connect",
        "Cluster",
        "Message",
        "Receipt",
        "Producer",
        "Consumer",
        "AsyncProducer",
        "AsyncConsumer",
        "Workers",
        "AsyncWorkers",
        "Queue",
        "errors",
        "matching",
        "__version__",
    }
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = raymq.nothing
