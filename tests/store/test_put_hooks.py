"""Hooks see what is put in columns, too: before it is encoded, and when it is appended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
import pytest

from raymq.store.base.errors import Rejected
from raymq.store.base.status import PutStatus
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.put_errors import error_of
from raymq.store.put.put_hooks import PutHook
from raymq.store.records import record
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.services.stored_message import read
from tests.support.batches import request
from tests.support.engine import CONFIG
from tests.support.simulated_disk import SimulatedDisk


@pytest.fixture
def store() -> Iterator[MessageStore]:
    made = MessageStore.open(Path("/s"), config=CONFIG, files=SimulatedDisk(record=False))
    made.topics.create("t", 1, [0])
    yield made
    made.close()


class Columns(PutHook):
    """Sees columns and rows that go alone."""

    name = "columns"

    def __init__(self, *, refuses: bool = False, cuts: bool = False) -> None:
        self.refuses = refuses
        self.cuts = cuts
        self.reported: list[tuple[int, AppendedRows | None]] = []

    def before_batch(self, request: PutRequest) -> PutRequest:
        if self.refuses:
            raise error_of(PutStatus.MESSAGE_ILLEGAL, "no", field="body", limit=None)
        given = request.batch
        if isinstance(given, record.SmallBatch):
            return request._replace(
                batch=given._replace(bodies=[body.upper() for body in given.bodies])
            )
        bodies = pc.binary_join_element_wise(given.column("body"), b"!", b"")
        made = given.set_column(0, given.schema.field(0), bodies)
        return request._replace(batch=made.slice(1) if self.cuts else made)

    def after_batch(self, request: PutRequest, appended: AppendedRows | None) -> None:
        self.reported.append((request.batch.num_rows, appended))
        raise RuntimeError("advisory")


def test_hooks_see_columns_and_rows_that_go_alone(store: MessageStore) -> None:
    hook = Columns()
    store.hooks.append(hook)
    many = request([b"a", b"b"], producer_id=7)
    first = store.put(many)
    alone = store.put(
        many._replace(batch=record.SmallBatch([b"c"], [None], [b""], [5]), first_sequence=2)
    )
    again = store.put(many)
    assert hook.reported == [(2, first), (1, alone), (2, again)]
    assert (again.duplicates, again.first_offset) == (2, first.first_offset)
    store.log.sync()
    store.log.note_confirmed(store.log.end)
    while store.dispatched < store.log.confirmed:
        store.dispatch(store.log.confirmed)
    stored = read(store, "t", 0, 0, max_records=9)[0]
    assert [each.body for each in stored] == [b"a!", b"b!", b"C"]


@pytest.mark.parametrize("how", ["refuses", "cuts"])
def test_a_hook_refuses_columns_as_a_whole_and_may_not_change_their_number(
    store: MessageStore, how: str
) -> None:
    hook, later = Columns(**{how: True}), Columns()
    store.hooks += [hook, later]
    end = store.log.end
    with pytest.raises(Rejected):
        store.put(request([b"a", b"b"]))
    assert hook.reported == later.reported == [(2, None)]
    assert store.log.end == end
