"""Arrow data from others is checked before anything follows its offsets: a wrong one ends the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import pyarrow as pa
import pytest

from raymq.client.messages.codecs import codec
from raymq.cluster.queue.durable_queue import Queue
from raymq.cluster.queue.queue_client import Items
from raymq.cluster.queue.taken_items import TakenItems
from raymq.store.base.errors import Rejected
from tests.support.hostile_arrow import arrays


def lines_of(kind: str) -> list[str]:
    """The output of the program, which a signal may have ended."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hostile_arrow", kind],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"ended with {done.returncode} after {done.stdout}{done.stderr}"
    return done.stdout.splitlines()


def test_a_hostile_body_of_codec_arrow_ipc_is_a_value_error() -> None:
    refused = [line.partition(":")[0] for line in lines_of("codec")]
    assert refused == [*arrays(), "half", "nothing", "something else", "rows without end"]


def test_a_hostile_batch_is_refused_before_its_bytes_are_counted_or_a_hook_sees_it() -> None:
    names = ["body", "properties", "tag", "rows without end"]
    assert lines_of("put") == [f"{name}: batch" for name in names] * 2


def test_a_hostile_frame_of_a_replica_is_a_value_error() -> None:
    refused = [line.partition(":")[0] for line in lines_of("frame")]
    assert refused == ["offsets", "two rows", "another column"]


@pytest.fixture
def handle() -> Queue:
    """A handle without a cluster, as far as decoding needs it."""
    made = object.__new__(Queue)
    made.name = "jobs"
    made._taken = TakenItems("jobs", codec("msgpack"), ("json",))
    made._lock, made._left = threading.Lock(), deque()
    return made


def test_a_queue_decodes_items_of_the_codecs_that_it_takes_and_plain_bytes(handle: Queue) -> None:
    items = Items(
        0, [codec("msgpack").encode(1), b"[2]", b"3", b"4"], ["msgpack", "json", None, "bytes"]
    )
    assert handle._taken.decode([items]) == [1, [2], b"3", b"4"]


def test_a_queue_refuses_an_item_that_names_another_codec(handle: Queue) -> None:
    body = codec("arrow-ipc").encode(pa.table({"a": [1]}))
    with pytest.raises(Rejected, match="takes msgpack, json, bytes") as refused:
        handle._returned(handle._taken.decode([Items(7, [body], ["arrow-ipc"])]))
    assert (refused.value.field, refused.value.fields["offset"]) == ("codec", 7)


def test_a_queue_does_not_accept_a_codec_that_there_is_not() -> None:
    with pytest.raises(Rejected, match="there is no codec 'pickle'"):
        Queue("jobs", accept=["pickle"])
