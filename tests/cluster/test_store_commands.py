"""`raymq store ...`: what is printed, what is done, and the exit codes."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from raymq.cluster.cli.console import Console
from raymq.cluster.cli.main import main
from raymq.cluster.cli.store_progress import StoreProgress
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.chain import unpack_units
from raymq.store.put.inner_message import InnerMessage
from tests.support.damaged_store import CONFIG, FIRST_LOG, copy, flip, make_own, tree

QUEUE = "consumequeue/t/1/00000000000000000000"
CHAIN = "raymq/chain/00000000000000000000"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_own(tmp_path_factory.mktemp("own") / "store")


class Ran:
    """One run of `raymq store`."""

    def __init__(self, *words: object) -> None:
        out, err = io.BytesIO(), io.StringIO()
        console = Console(stdin=io.BytesIO(), stdout=out, stderr=err)
        self.code = main(["store", *map(str, words)], console=console)
        self.out, self.err = out.getvalue().decode(), err.getvalue()

    def json(self) -> Any:
        return json.loads(self.out)


def test_verify_names_file_offset_and_rule_and_exits_with_1(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    assert (Ran("verify", root).code, Ran("verify", root).out) == (0, f"{root}: sound\n")
    flip(root / QUEUE, 33 * 20 + 7)
    ran = Ran("verify", root)
    assert ran.code == 1
    assert ran.out.startswith(
        f"{root}/{QUEUE} at 660: a unit points at its record: queue offset 33"
    )
    ran = Ran("verify", root, "--json")
    assert ran.code == 1
    (fault,) = ran.json()["faults"]
    assert (fault["file"], fault["offset"]) == (QUEUE, 660)
    assert ran.json()["verdict"]["decision"] == "keep"


def test_repair_shows_its_plan_and_acts_only_with_yes(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    assert Ran("repair", root).out == f"{root}: nothing to repair\n"
    assert Ran("repair", root).code == 0

    flip(root / QUEUE, 33 * 20 + 7)
    before = tree(root)
    ran = Ran("repair", root)
    assert ran.code == 1
    assert "would make consume queues again from the log (consumequeue/t/1)" in ran.out
    assert "--yes" in ran.out
    assert Ran("repair", root, "--json").json()["plan"]["steps"][0]["part"] == "consumequeue"
    assert tree(root) == before

    ran = Ran("repair", root, "--yes", "--keep", tmp_path / "kept")
    assert ran.code == 0, ran.out
    assert ran.out.endswith(
        f"{root}: what was changed is kept in {tmp_path / 'kept'}\n{root}: sound\n"
    )
    assert (tmp_path / "kept" / QUEUE).read_bytes() == before[QUEUE]
    assert Ran("verify", root).code == 0


def test_a_damaged_log_is_cut_only_at_an_offset_that_is_named(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    start = unpack_units((root / CHAIN).read_bytes())[20].start
    flip(root / FIRST_LOG, start + 40)

    for words in ((), ("--yes",)):
        ran = Ran("repair", root, *words)
        assert ran.code == 1
        assert f"a cut at {start} loses" in ran.out
        assert f"--truncate-at {start}" in ran.out

    assert Ran("repair", root, "--truncate-at", start + 1).code == 2
    ran = Ran("repair", root, "--truncate-at", start)
    assert (ran.code, "would cut the log" in ran.out) == (1, True)
    ran = Ran("repair", root, "--truncate-at", start, "--yes", "--json")
    assert (ran.code, ran.json()["faults"]) == (0, [])
    assert Path(ran.json()["kept"]).parent == root / "raymq"
    assert Ran("verify", root).code == 0


def test_an_open_store_is_not_available_for_repair(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    store = EmbeddedStore(root, config=CONFIG)
    ran = Ran("repair", root, "--yes", "--rebuild", "chain")
    assert ran.code == 3
    assert "already open" in ran.err
    store.close()
    assert Ran("repair", root, "--yes", "--rebuild", "chain").code == 0


def test_scrub_reads_a_running_store_and_names_what_rots(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    store = EmbeddedStore(root, config=CONFIG)
    ran = Ran("scrub", root)
    store.close()
    assert ran.code == 0, ran.out
    assert ran.out.endswith(": sound\n")
    start = unpack_units((root / CHAIN).read_bytes())[20].start
    flip(root / FIRST_LOG, start + 40)
    ran = Ran("scrub", root, "--mib-per-s", 0)
    assert ran.code == 1
    assert f"{root}/{FIRST_LOG} at {start}: " in ran.out
    ran = Ran("scrub", root, "--json", "--again")
    assert ran.json()["found"][0]["offset"] == start
    assert Ran("scrub", tmp_path).code == 2


def test_export_writes_parquet(own: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    ran = Ran("export", own, target, "--topic", "t", "--queue-id", 0, "--from", 10, "--to", 20)
    assert ran.code == 0, ran.out
    assert ran.out.startswith("10 messages in 1 files, ")
    assert pq.read_table(target)["queue_offset"].to_pylist() == list(range(10, 20))
    assert Ran("export", own, target).code == 2
    assert Ran("export", own, tmp_path / "x", "--queue-id", 1).code == 2
    assert Ran("export", own, tmp_path / "all", "--json").json()["messages"] == 360


class FakeCluster:
    """Topics by their queues. Keeps what is sent."""

    def __init__(self, **queues: int) -> None:
        self.queues = queues
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def topics(self) -> dict[str, Any]:
        return {name: {"queues": count} for name, count in self.queues.items()}

    def producer(self) -> FakeCluster:
        return self

    def send(self, topic: str, **message: Any) -> None:
        self.sent.append((topic, message))

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def imported(cluster: FakeCluster, *words: object) -> tuple[int, str]:
    out, err = io.BytesIO(), io.StringIO()
    lifecycle = SimpleNamespace(connect=lambda target, token: cluster)
    console = Console(stdin=io.BytesIO(), stdout=out, stderr=err, lifecycle=lifecycle)
    code = main(["store", "import", *map(str, words)], console=console)
    return code, out.getvalue().decode() + err.getvalue()


def test_what_export_wrote_is_imported_as_it_was(tmp_path: Path) -> None:
    root, target = tmp_path / "store", tmp_path / "out"
    with contextlib.closing(EmbeddedStore(root, config=CONFIG)) as store:
        store.create_topic("t", 2)
        store.create_topic("u", 1)
        for topic, queue_id, body, properties in (
            ("t", 0, b"", {}),
            (
                "t",
                1,
                b"\xff\x00\n",
                {"__KEY_B64": "/g==", "TAGS": "T", "KEYS": "i j", "a": "\u00fc b"},
            ),
            ("t", 1, b"second", {"__SHARDINGKEY": "k"}),
            ("u", 0, b"other", {}),
        ):
            bits = {"flag": 7, "sys_flag": 0x301} if body == b"second" else {}
            store.put_message(InnerMessage(topic, queue_id, body, properties, **bits))

    assert Ran("export", root, target).code == 0
    code, said = imported(FakeCluster(t=1), target)
    assert code == 2
    assert "the cluster has no topic u; nothing was sent" in said
    assert "raymq topic create 'u' --queues 1" in said

    cluster = FakeCluster(t=2, u=1)
    assert imported(cluster, target) == (0, "4 messages stored in t, u\n")
    full = {"key": b"\xfe", "tag": "T", "index_keys": ("i", "j"), "properties": {"a": "\u00fc b"}}
    assert cluster.sent == [
        ("t", {"body": b"", "queue_id": 0}),
        ("t", {"body": b"\xff\x00\n", **full, "queue_id": 1}),
        ("t", {"body": b"second", "key": b"k", "flag": 7, "sys_flag": 0x301, "queue_id": 1}),
        ("u", {"body": b"other", "queue_id": 0}),
    ]

    smaller = FakeCluster(t=1)
    assert imported(smaller, target, "--topic", "t") == (0, "3 messages stored in t\n")
    assert [message.get("queue_id") for _, message in smaller.sent] == [0, None, None]
    assert imported(smaller, target, "--topic", "v")[0] == 2
    assert imported(smaller, tmp_path)[0] == 2


def test_what_the_system_refuses_is_one_line_too(own: Path, tmp_path: Path) -> None:
    ran = Ran(
        "repair", copy(own, tmp_path / "s"), "--yes", "--rebuild", "index", "--keep", "/proc/x"
    )
    assert (ran.code, ran.err) == (3, "raymq: /proc/x: No such file or directory\n")
    ran = Ran("export", own, tmp_path / "out", "--topic", "t", "--from", "5", "--to", "5")
    assert (ran.code, "--to is not included" in ran.err) == (2, True)


def test_export_of_a_damaged_log_says_what_is_not_in_it(own: Path, tmp_path: Path) -> None:
    root = copy(own, tmp_path / "s")
    flip(root / FIRST_LOG, 20_000)
    assert Ran("export", root, tmp_path / "out").code == 1
    ran = Ran("export", root, tmp_path / "out", "--after-damage")
    assert ran.code == 1
    assert "not readable: [" in ran.out


def test_a_data_directory_stands_for_all_its_stores(own: Path, tmp_path: Path) -> None:
    (tmp_path / "shard-0").mkdir()
    (tmp_path / "cluster.json").write_text("{}")
    for replica in ("replica-0", "replica-1"):
        copy(own, tmp_path / "shard-0" / replica)
    assert Ran("verify", tmp_path).out.count(": sound") == 2
    assert Ran("repair", tmp_path).out.count("nothing to repair") == 2
    assert Ran("repair", tmp_path, "--truncate-at", 0).code == 2
    assert Ran("export", tmp_path, tmp_path / "out").code == 2


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_a_short_walk_shows_no_progress_and_a_long_one_does(
    stream: io.StringIO,
) -> None:
    now = [0.0]
    with StoreProgress(stream, monotonic=lambda: now[0]) as progress:
        progress.report("commit log", 1, 10)
        assert stream.getvalue() == ""
        now[0] = 6.0
        progress.report("commit log", 5, 10)
        progress.report("index", 5, 10)
    assert "commit log" in stream.getvalue()


def test_an_index_that_a_crash_tore_is_not_a_fault_but_the_part_below_its_mark_is_compared(
    tmp_path: Path,
) -> None:
    root = tmp_path / "s"
    config = replace(CONFIG, max_hash_slot_num=7, max_index_num=40)
    store = MessageStore.open(root, config=config)
    store.topics.create("t", 1, [0])
    for number in range(100):
        store.put_inner([InnerMessage("t", 0, b"x", {"KEYS": f"k{number}"})])
        if number in (60, 99):
            store.log.sync()
            store.log.note_confirmed(store.log.end)
            while store.dispatched < store.log.end or store.reput.index_behind:
                store.dispatch(store.log.end)
        if number == 60:
            store.sync_queues()
    store.abandon()

    first, second, third = sorted((root / "index").iterdir())
    # Bytes after the mark reached the disk in part.
    data = bytearray(second.read_bytes())
    data[24:40] = bytes(16)
    slots = 40 + 4 * 7
    data[slots + 20 * 30 : slots + 20 * 35] = bytes(100)
    second.write_bytes(data)
    third.write_bytes(third.read_bytes()[:50])

    ran = Ran("verify", root)
    torn = [f"index/{path.name}" for path in (second, third)]
    assert ran.code == 0, ran.out
    assert ran.out.splitlines() == [
        *(f"{root}/{name}: no fault: a cache that the next start rebuilds" for name in torn),
        f"{root}: sound",
    ]
    assert Ran("verify", root, "--json").json()["rebuilt_at_start"] == torn

    # A start takes the rest as it is.
    flip(first, slots + 20 * 5 + 2)
    flip(second, slots + 20 * 5 + 2)
    ran = Ran("verify", root, "--json")
    assert ran.code == 1
    assert {fault["file"] for fault in ran.json()["faults"]} == {
        f"index/{path.name}" for path in (first, second)
    }
