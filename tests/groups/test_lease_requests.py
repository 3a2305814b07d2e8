"""Requests that no worker should send: they are refused, or their records can be read. A log outlives its leader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymq.store.base.errors import Rejected
from raymq.store.groups.leases.entries import TO_BURY_MS, SettleOutcome
from raymq.store.groups.leases.lease_table import LeaseTable
from raymq.store.groups.leases.options import MS_MAX, LeaseOptions
from raymq.store.groups.leases.packing import pack, unpack
from raymq.store.groups.leases.request_checks import ITEMS_MAX
from raymq.store.groups.leases.requests import LeaseRequest, Offer, SettleItem, SettleRequest
from tests.groups.test_lease_machine import KEY, Group
from tests.groups.test_lease_packing import same

LARGE = [(1 << bits) + more for bits in (16, 31, 32, 62, 63, 64) for more in (-1, 0)]
#: numbers as a worker means them, and others
numbers = st.one_of(st.integers(-2, 9), st.integers(-2, 9), st.sampled_from(LARGE))
sessions = st.sampled_from([b"", b"a", b"b", b"x" * 64, b"x" * 65])
keys = st.sampled_from([KEY, KEY, ("t", 1), ("u", 0), ("t", -1), ("t", 1 << 32), ("\ud800", 0)])
lengths = st.one_of(st.none(), numbers)
items = st.builds(
    SettleItem,
    numbers,
    keys,
    st.lists(numbers, max_size=8).map(np.array),
    st.sampled_from(SettleOutcome),
    lengths,
)
requests = st.one_of(
    st.tuples(st.just("lease"), st.builds(LeaseRequest, sessions, numbers, numbers, lengths)),
    st.tuples(
        st.just("settle"), st.builds(SettleRequest, sessions, numbers, st.lists(items, max_size=5))
    ),
    st.tuples(st.just("extend"), sessions, lengths),
    st.tuples(st.just("own"), numbers, keys, numbers, numbers, st.booleans()),
    st.tuples(st.just("reset"), keys, numbers),
    st.tuples(st.just("time"), st.sampled_from([1, 1_000, 60_000, 86_400_000])),
)


def ask(group: Group, kind: str, *asked: Any) -> Any:
    machine, now_ms = group.machine, group.now_ms
    match kind:
        case "lease":
            queues = group.table.groups["g"].queues
            offers = [
                Offer(key, machine.due(key, 5, now_ms), each.next, each.next + 20)
                for key, each in queues.items()
                if each.next < 1_000
            ]
            return machine.lease(asked[0], [*offers, *offers], now_ms)
        case "settle":
            return machine.settle(asked[0], now_ms)
        case "extend":
            return machine.extend(asked[0], now_ms, lease_ms=asked[1])
        case "own":
            *own, gives_up = asked
            return machine.set_deadline(*own, now_ms, gives_up=gives_up)
        case _:
            return machine.reset(*asked)


@settings(max_examples=200)
@given(st.lists(requests, max_size=25), st.sampled_from([1, 3, 64]), st.sampled_from([None, 2]))
def test_each_record_can_be_read_whatever_is_asked(wanted, copies_max, max_attempts):
    group = Group(max_attempts=max_attempts, backoff_ms=(0, 1_000))
    group.machine.copies_max = copies_max
    for kind, *asked in wanted:
        if kind == "time":
            group.now_ms += asked[0]
            continue
        try:
            plan = ask(group, kind, *asked)
        except Rejected:
            continue
        for each in plan.groups:
            name, found = unpack(pack("g", each.entries))
            assert name == "g"
            assert len(each.copies) <= copies_max
            assert len(found) == len(each.entries)
            assert all(map(same, found, each.entries))
        group.do(plan)

    again = LeaseTable()
    for _, body in group.table.packed_records():
        again.apply_packed(body)
    assert list(again.packed_records()) == list(group.table.packed_records())


def settle(*wanted: SettleItem, session: bytes = b"a", number: int = 1) -> SettleRequest:
    return SettleRequest(session, number, wanted)


def item(*offsets: int, number: int = 1, **changed: Any) -> SettleItem:
    made = SettleItem(number, KEY, np.array(offsets, dtype=np.int64), SettleOutcome.ACKED)
    return made._replace(**changed)


def test_offsets_of_a_lost_lease_may_be_named_twice():
    group = Group()
    group.offsets(1)
    again = item(0, number=7, verdict=SettleOutcome.NACKED)
    plan = group.do(group.machine.settle(settle(item(3_000, 0, 0, number=7), again), 0))
    assert group.refused(plan) == [0, 3_000]


def test_offsets_may_come_in_any_order():
    group = Group()
    group.offsets(4)
    plan = group.do(group.machine.settle(settle(item(2, 0, 2, 1)), 0))
    assert group.refused(plan) == []
    assert group.columns.low == 3


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("offsets", settle(item(-1))),
        ("offsets", settle(item(1 << 62))),
        ("offsets", settle(item()._replace(offsets=np.array([1 << 64])))),
        ("offsets", settle(item()._replace(offsets=np.array([0.5])))),
        ("offsets", settle(*[item()._replace(offsets=np.arange(1 << 19))] * 3)),
        ("items", settle(*[item()] * (ITEMS_MAX + 1))),
        ("lease", settle(item(0, number=-1))),
        ("delay_ms", settle(item(0, delay_ms=-1))),
        ("delay_ms", settle(item(0, delay_ms=TO_BURY_MS))),
        ("verdict", settle(item(0, verdict=SettleOutcome.DEAD))),
        ("queue", settle(item(0, key=("t", -1)))),
        ("topic", settle(item(0, key=("\ud800", 1)))),
        ("topic_bytes", settle(item(0, key=("t" * 70_000, 1)))),
        ("session_bytes", settle(item(0), session=b"x" * 65)),
        ("settle", settle(item(0), number=-1)),
        ("session_bytes", LeaseRequest(b"x" * 65, 1, 1)),
        ("request", LeaseRequest(b"a", -1, 1)),
        ("max_records", LeaseRequest(b"a", 1, -1)),
        ("lease_ms", LeaseRequest(b"a", 1, 1, 1 << 32)),
    ],
)
def test_a_request_that_no_record_could_say_is_refused(field, request_):
    group = Group()
    group.offsets(1)
    kind = "lease" if isinstance(request_, LeaseRequest) else "settle"
    with pytest.raises(Rejected) as refused:
        ask(group, kind, request_)
    assert refused.value.fields["field"] == field


@pytest.mark.parametrize(
    "changed",
    [{"lease_ms": 0}, {"max_lease_ms": 1 << 32}, {"backoff_ms": ()}, {"backoff_ms": (-1,)}],
)
def test_options_that_no_record_could_say_are_refused(changed):
    with pytest.raises(Rejected):
        LeaseOptions(**changed)
    assert MS_MAX < TO_BURY_MS
