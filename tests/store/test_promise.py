"""The table of promises: every state of the four ends, against the rules in words, and against README's table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from raymq.store.base.status import PutStatus
from raymq.store.config.promise import (
    ACKS,
    FLUSHES,
    PROMISES,
    Acks,
    Ends,
    Flush,
    awaits_commit,
    own_durable,
    promises,
)

ROOT = Path(__file__).resolve().parents[2]
MODES = list(PROMISES)
HIGHEST = 4


def states() -> Iterator[Ends]:
    """Every legal state of the four ends up to HIGHEST."""
    for ends in product(range(HIGHEST + 1), repeat=4):
        state = Ends(*ends)
        if max(state.synced, state.replicated) <= state.committed <= state.appended:
            yield state


STATES = list(states())


def kept(flush: Flush, has_followers: bool, acks: Acks, state: Ends, end: int) -> bool:
    """The promise in words, put by put: without minima, without the table."""
    here = state.synced >= end if flush == "sync" else state.appended >= end
    if has_followers and acks == "quorum":
        return here and state.committed >= end and state.replicated >= end
    return here


def readable(flush: Flush, has_followers: bool, state: Ends, end: int) -> bool:
    here = state.synced >= end if flush == "sync" else state.committed >= end
    return here and (not has_followers or state.replicated >= end)


def test_there_is_a_row_for_every_mode() -> None:
    assert set(PROMISES) == set(product(FLUSHES, (False, True), ACKS))


@pytest.mark.parametrize(("flush", "has_followers", "acks"), MODES)
def test_receipts_and_readers_wait_for_what_the_rules_say_in_every_state(
    flush: Flush, has_followers: bool, acks: Acks
) -> None:
    promise = PROMISES[flush, has_followers, acks]
    for state in STATES:
        for end in range(1, HIGHEST + 1):
            receipted = promise.acknowledged_end(state) >= end
            assert receipted == kept(flush, has_followers, acks, state, end)
            assert receipted == (
                promise.flush_end(state) >= end and promise.replica_end(state) >= end
            )
            assert (promise.confirmed_end(state) >= end) == readable(
                flush, has_followers, state, end
            )


@pytest.mark.parametrize(("flush", "has_followers", "acks"), MODES)
def test_a_late_put_blames_the_replica_if_the_replica_is_late(
    flush: Flush, has_followers: bool, acks: Acks
) -> None:
    promise = PROMISES[flush, has_followers, acks]
    for state in STATES:
        for end in range(promise.acknowledged_end(state) + 1, state.appended + 1):
            replica_late = has_followers and acks == "quorum" and state.replicated < end
            assert promise.late_status(state, end) is (
                PutStatus.FLUSH_SLAVE_TIMEOUT if replica_late else PutStatus.FLUSH_DISK_TIMEOUT
            )


@pytest.mark.parametrize("flush", FLUSHES)
@pytest.mark.parametrize("has_followers", [False, True])
def test_the_ack_modes_of_a_shard_agree_on_what_readers_see(
    flush: Flush, has_followers: bool
) -> None:
    assert (
        len(
            {
                promise.readable_by
                for promise in promises(flush, has_followers=has_followers).values()
            }
        )
        == 1
    )


@pytest.mark.parametrize("flush", FLUSHES)
def test_what_a_quorum_of_replicas_acknowledged_may_be_read(flush: Flush) -> None:
    """Replication publishes one end for both."""
    row = PROMISES[flush, True, "quorum"]
    assert row.acknowledged_by == row.readable_by


@pytest.mark.parametrize("flush", FLUSHES)
def test_one_ack_mode_waits_for_replicas(flush: Flush) -> None:
    """Replication combines this one alone, and the ring that brings its puts carries no ack mode."""
    rows = promises(flush, has_followers=True)
    assert [acks for acks in ACKS if "replicated" in rows[acks].acknowledged_by] == ["quorum"]


def test_a_commit_is_urgent_unless_receipts_wait_for_memory_only() -> None:
    urgent = {
        (flush, has_followers): awaits_commit(flush, has_followers=has_followers)
        for flush, has_followers in product(FLUSHES, (False, True))
    }
    assert [mode for mode, awaited in urgent.items() if not awaited] == [("async", False)]


def test_a_replica_calls_durable_what_its_flush_mode_asks() -> None:
    state = Ends(appended=4, committed=3, synced=2, replicated=0)
    assert (own_durable("sync", state), own_durable("async", state)) == (2, 3)


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """(path, text) of every module."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_the_ack_modes_are_declared_once() -> None:
    folders = ("store", "replication", "actors", "client", "cluster", "spark")
    found = [
        path
        for path, text in sources(*folders)
        if re.search(r'Literal\["(quorum|leader)", "(quorum|leader)', text)
    ]
    assert found == ["store/config/promise.py"]


def test_no_process_decides_by_the_modes_names() -> None:
    compared = re.compile(r"""(flush|acks|"(flush|acks)"\]) (==|!=) ["']""")
    assert [path for path, text in sources("replication", "actors") if compared.search(text)] == []


def test_no_caller_counts_replicas() -> None:
    """A third replica changes which roles run and what status says, and no code that puts, acknowledges or reads."""

    def counts_replicas(text: str) -> bool:
        return any(
            isinstance(node, ast.Compare)
            and re.search(r"replicas|has_followers", ast.unparse(node))
            and any(isinstance(each, ast.Constant) for each in ast.walk(node))
            for node in ast.walk(ast.parse(text))
        )

    found = [
        path
        for path, text in sources("store", "replication", "actors", "client", "cluster", "spark")
        if counts_replicas(text)
    ]
    assert found == ["cluster/cli/status_text.py", "cluster/record/cluster_record.py"]


# --- README ---------------------------------------------------------------------------------------

#: the phrases of README's table, and the ends that they mean
RECEIPTS = {
    "fdatasync": ("synced",),
    "the write to the page cache": ("appended",),
    "fdatasync of a majority": ("synced", "replicated"),
    "the write to the page caches of a majority": ("committed", "replicated"),
    "fdatasync of the leader": ("synced",),
    "the write to the leader's page cache": ("appended",),
}
ROCKETMQ = {
    ("quorum", "sync"): "SYNC_FLUSH, SYNC_MASTER",
    ("quorum", "async"): "ASYNC_FLUSH, SYNC_MASTER",
    ("leader", "sync"): "SYNC_FLUSH, ASYNC_MASTER",
    ("leader", "async"): "ASYNC_FLUSH, ASYNC_MASTER",
}


def readme_rows() -> dict[tuple[str, str], tuple[str, str, str, str]]:
    """(acks, flush) -> the other cells of README's promise table."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    head = next(at for at, line in enumerate(lines) if line.startswith("| acks, flush |"))
    rows = {}
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        mode, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        acks, flush = mode.replace("(default)", "").replace("*", "").strip().split(", ")
        rows[acks, flush] = tuple(cells)
    return rows


def seen_at_once(flush: Flush, has_followers: bool, acks: Acks) -> bool:
    """Whether readers see whatever was receipted, without the transient pool."""
    promise = PROMISES[flush, has_followers, acks]
    return all(
        promise.acknowledged_end(state) <= promise.confirmed_end(state)
        for state in STATES
        if state.appended == state.committed
    )


def test_the_readme_promises_what_the_table_does() -> None:
    rows = readme_rows()
    assert set(rows) == set(product(ACKS, FLUSHES))
    for (acks, flush), (rocketmq, single, mirror, readers) in rows.items():
        assert rocketmq == ROCKETMQ[acks, flush]
        assert RECEIPTS[single] == PROMISES[flush, False, acks].acknowledged_by
        assert RECEIPTS[mirror] == PROMISES[flush, True, acks].acknowledged_by
        assert seen_at_once(flush, False, acks)
        at_once = (
            "at once"
            if seen_at_once(flush, True, acks)
            else ("with followers, when a majority has it")
        )
        assert readers == at_once
