"""What the machine of leases decides, one rule at a time. The simulation has them all at once."""

from __future__ import annotations

import numpy as np
import pytest

from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.groups.leases import lease_machine, lease_table, lease_times, options
from raymq.store.groups.leases.entries import EndEntry, SettleOutcome, TimeEntry
from raymq.store.groups.leases.key_order import slots_of
from raymq.store.groups.leases.lease_machine import LeaseMachine, LeasePlan
from raymq.store.groups.leases.lease_table import LeaseTable
from raymq.store.groups.leases.options import LeaseOptions
from raymq.store.groups.leases.packing import pack
from raymq.store.groups.leases.pauses import DEAD_LETTERS, OPERATOR
from raymq.store.groups.leases.requests import (
    NO_SESSION,
    Destination,
    LeaseRequest,
    Offer,
    SettleItem,
    SettleRequest,
    offsets_of,
)

KEY = ("t", 0)
MINUTE = 60_000


class Group:
    """A group of workers with one queue, whose messages are all there."""

    def __init__(self, begin: int = 0, **changed: object) -> None:
        self.options = LeaseOptions(**changed)  # type: ignore[arg-type]
        self.table = LeaseTable()
        self.machine = LeaseMachine(self.table, "g", self.options, 0)
        self.now_ms = 0
        self.request = self.settled = 0
        self.stop = 1 << 30
        self.do(self.machine.begin(KEY, begin))

    def do(self, plan: LeasePlan) -> LeasePlan:
        """Append a plan's records."""
        for each in plan.groups:
            self.table.apply_packed(pack("g", [TimeEntry(self.machine.store_ms), *each.entries]))
        self.machine.note(plan, self.now_ms)
        return plan

    @property
    def columns(self):
        return self.table.groups["g"].queues[KEY]

    def lease(self, count: int, session: bytes = b"a", **offered: object) -> LeasePlan:
        """Lease messages."""
        self.request += 1
        due = self.machine.due(KEY, count, self.now_ms)
        first = self.columns.next
        looked = next((len(each) for each in offered.values()), 4 * count)  # type: ignore[arg-type]
        stop = min(self.stop, first + looked)
        offer = Offer(KEY, due, first, stop, **offered)  # type: ignore[arg-type]
        request = LeaseRequest(session, self.request, count)
        return self.do(self.machine.lease(request, [offer], self.now_ms))

    def offsets(self, count: int, session: bytes = b"a") -> list[int]:
        """Lease messages. Returns: their offsets."""
        parts = self.lease(count, session).answer.parts
        return [offset for part in parts for offset in part.offsets.tolist()]

    def settle(
        self,
        offsets: list[int],
        verdict: SettleOutcome = SettleOutcome.ACKED,
        delay_ms: int | None = None,
        number: int | None = None,
        session: bytes = b"a",
    ) -> LeasePlan:
        """Settle messages of the newest lease."""
        self.settled += 1
        number = self.table.number if number is None else number
        item = SettleItem(number, KEY, offsets_of(offsets), verdict, delay_ms)
        request = SettleRequest(session, self.settled, [item])
        return self.do(self.machine.settle(request, self.now_ms))

    def settle_all(self, *wanted: tuple) -> LeasePlan:
        """Settle messages of the newest lease with one request: offsets, verdict and delay of each item."""
        self.settled += 1
        items = [
            SettleItem(self.table.number, KEY, offsets_of(offsets), *verdict)
            for offsets, *verdict in wanted
        ]
        return self.do(self.machine.settle(SettleRequest(b"a", self.settled, items), self.now_ms))

    def refused(self, plan: LeasePlan) -> list[int]:
        return [offset for each in plan.answer.refused for offset in each.offsets.tolist()]

    def lead_again(self) -> None:
        """Another replica leads, with the same log."""
        table = LeaseTable()
        for _, body in self.table.packed_records():
            table.apply_packed(body)
        self.table = table
        self.machine = LeaseMachine(table, "g", self.options, self.now_ms)


def test_messages_go_out_once_in_the_order_of_offsets():
    group = Group(begin=7)
    assert group.offsets(3) == [7, 8, 9]
    assert group.offsets(2) == [10, 11]
    assert group.columns.low == 7
    group.settle([11])
    assert group.columns.low == 7
    group.settle([7, 8, 9], number=1)
    assert (group.columns.low, group.columns.next) == (10, 12)
    assert group.refused(group.settle([10], number=1)) == [10]


def test_a_lease_whose_time_is_over_goes_to_others_after_the_backoff():
    group = Group(backoff_ms=(1_000, 5_000))
    group.offsets(2)
    group.now_ms = MINUTE + 999
    assert group.offsets(2) == [2, 3]
    group.now_ms = MINUTE + 1_000
    answer = group.lease(2).answer
    assert answer.parts[0].offsets.tolist() == [0, 1]
    assert answer.parts[0].attempts.tolist() == [2, 2]
    assert group.machine.next_ms() == 2 * MINUTE + 999


def test_a_worker_that_is_late_settles_what_no_other_has():
    group = Group()
    group.offsets(2)
    group.now_ms = 2 * MINUTE
    assert group.refused(group.settle([1])) == []
    assert group.offsets(1) == [0]
    assert group.refused(group.settle([0], number=1)) == [0]


def test_a_repeated_request_gets_what_is_still_open():
    group = Group()
    group.lease(3)
    group.settle([1])
    group.now_ms = 50_000
    again = group.machine.lease(LeaseRequest(b"a", 1, 3), [], group.now_ms)
    assert again.groups == []
    assert again.answer.number == 1
    assert again.answer.parts[0].offsets.tolist() == [0, 2]
    group.now_ms = 50_000 + MINUTE - 1
    assert group.machine.due(KEY, 9, group.now_ms).tolist() == []
    assert group.machine.lease(LeaseRequest(b"a", 0, 3), [], group.now_ms).answer is None


def test_an_extension_moves_the_deadline_up_to_the_longest_time():
    group = Group(max_lease_ms=100_000)
    group.offsets(1)
    group.now_ms = 50_000
    assert group.machine.extend(b"a", group.now_ms).answer.granted_ms == {1: 50_000}
    assert group.machine.extend(b"b", group.now_ms).answer.granted_ms == {}
    group.now_ms = 99_999
    assert group.machine.extend(b"a", group.now_ms).answer.granted_ms == {1: 1}
    group.now_ms = 100_000
    assert group.machine.extend(b"a", group.now_ms).answer.granted_ms == {}
    assert group.machine.due(KEY, 9, 101_000).tolist() == [0]


def test_a_message_with_a_time_of_its_own_is_not_extended_with_its_lease():
    group = Group(backoff_ms=(0,))
    group.offsets(3)
    plan = group.machine.set_deadline(1, KEY, 0, 5_000, 0, gives_up=True)
    assert plan.groups == []
    group.machine.extend(b"a", 0)
    group.do(group.machine.set_deadline(1, KEY, 1, 2 * MINUTE, 0))
    assert group.machine.due(KEY, 9, 4_999).tolist() == []
    assert group.machine.due(KEY, 9, 5_000).tolist() == [0]
    assert group.machine.set_deadline(1, KEY, 0, 5_000, 5_000).answer.granted_ms == {}
    assert group.machine.due(KEY, 9, MINUTE).tolist() == [0, 2]
    assert group.machine.due(KEY, 9, 2 * MINUTE).tolist() == [0, 1, 2]
    # A new leader gives the whole lease the longest time that was granted.
    group.now_ms = MINUTE
    group.lead_again()
    assert group.machine.due(KEY, 9, 3 * MINUTE - 1).tolist() == []


def test_a_new_leader_lets_leases_and_delays_begin_again():
    group = Group()
    group.offsets(3)
    group.settle([0], SettleOutcome.NACKED, 7_000)
    group.settle([1], SettleOutcome.RETURNED)
    group.now_ms = 6_999
    group.lead_again()
    assert group.machine.due(KEY, 9, group.now_ms).tolist() == [1]
    assert group.machine.due(KEY, 9, group.now_ms + 7_000).tolist() == [0, 1]
    assert group.columns.attempts[:2].tolist() == [1, 0]
    assert group.machine.due(KEY, 9, group.now_ms + MINUTE + 1_000).tolist() == [0, 1, 2]


def test_a_message_is_dead_after_its_last_attempt():
    group = Group(max_attempts=2, backoff_ms=(0,))
    group.offsets(2)
    group.settle([0], SettleOutcome.NACKED)
    group.now_ms = MINUTE
    assert group.offsets(2) == [0, 1]
    (last,) = group.settle([0], SettleOutcome.NACKED).groups
    (copy,) = last.copies
    assert (copy.offset, copy.attempts, copy.outcome, copy.holder) == (
        0,
        2,
        SettleOutcome.DEAD,
        b"a",
    )
    assert group.columns.low == 1
    # The other one kills its worker.
    group.now_ms = 3 * MINUTE
    dead, leased = group.lease(1).groups
    assert [copy.offset for copy in dead.copies] == [1]
    assert group.columns.low == 2
    assert group.table.groups["g"].counts[SettleOutcome.DEAD] == 2


def test_a_group_without_dead_letters_drops_them():
    group = Group(max_attempts=1, has_dead_letters=False)
    group.offsets(1)
    (plan,) = group.settle([0], SettleOutcome.REJECTED).groups
    assert list(plan.copies) == []
    assert group.columns.low == 1


def test_one_step_copies_so_many_messages_at_most():
    group = Group(max_attempts=1, backoff_ms=(0,))
    group.machine.copies_max = 3
    group.offsets(5)
    (plan,) = group.settle([0, 1, 2, 3, 4], SettleOutcome.NACKED).groups
    assert [copy.offset for copy in plan.copies] == [0, 1, 2]
    group.stop = 5
    (rest,) = group.lease(5).groups
    assert [copy.offset for copy in rest.copies] == [3, 4]
    assert group.columns.low == 5


@pytest.mark.parametrize("max_attempts", [None, 2])
def test_rejected_messages_that_cannot_be_copied_now_are_dead_later(max_attempts):
    group = Group(max_attempts=max_attempts, backoff_ms=(5_000,))
    group.machine.copies_max = 3
    group.offsets(9)
    # Those that are nacked come first, and take no copy from them.
    plan = group.settle_all(
        ([0], SettleOutcome.NACKED, 2 * MINUTE),
        ([1, 2, 3, 4, 5], SettleOutcome.REJECTED),
        ([6, 7, 8], SettleOutcome.ACKED),
    )
    assert plan.answer.refused == []
    assert [copy.offset for copy in plan.groups[0].copies] == [1, 2, 3]
    group.stop = 9
    group.lead_again()
    found = group.lease(5)
    assert found.answer.parts == []
    (rest,) = found.groups
    assert [(each.offset, each.reason, each.attempts) for each in rest.copies] == [
        (4, "rejected", 1),
        (5, "rejected", 1),
    ]
    assert (group.columns.low, group.columns.next) == (0, 9)
    group.now_ms = 2 * MINUTE
    assert group.offsets(9) == [0]


def test_rejected_messages_of_a_key_that_wait_block_the_later_ones():
    group = Group(order="queue", backoff_ms=(0,))
    group.machine.copies_max = 1
    group.offsets(3)
    plan = group.settle_all(([0, 1], SettleOutcome.REJECTED), ([2], SettleOutcome.ACKED))
    assert group.refused(plan) == [2]
    assert [copy.offset for copy in plan.groups[0].copies] == [0]
    group.stop = 3
    assert group.offsets(3) == [2]


def test_a_long_delay_moves_a_message_to_the_retry_topic():
    group = Group()
    group.offsets(2)
    (plan,) = group.settle([0], SettleOutcome.NACKED, options.DELAY_IN_PLACE_MS_MAX + 1).groups
    assert [(copy.outcome, copy.delay_ms) for copy in plan.copies] == [
        (SettleOutcome.MOVED, options.DELAY_IN_PLACE_MS_MAX + 1)
    ]
    assert group.columns.low == 1


def test_a_window_that_is_half_full_moves_every_message_that_is_returned():
    group = Group(window=8)
    group.offsets(5)
    (plan,) = group.settle([4], SettleOutcome.NACKED).groups
    assert [copy.offset for copy in plan.copies] == [4]
    ordered = Group(window=8, order="queue")
    ordered.offsets(5)
    (plan,) = ordered.settle([0], SettleOutcome.NACKED, MINUTE * 2).groups
    assert list(plan.copies) == []


def test_the_window_and_what_is_in_flight_have_bounds():
    group = Group(window=4, max_in_flight=100)
    assert group.offsets(9) == [0, 1, 2, 3]
    assert group.machine.room(KEY) == 0
    assert group.offsets(9) == []
    group.settle([0, 1], number=1)
    assert group.offsets(9) == [4, 5]

    group = Group(max_in_flight=3)
    assert group.offsets(9) == [0, 1, 2]
    group.settle([1])
    assert group.machine.room(KEY) == 1
    group.now_ms = 2 * MINUTE
    # What was leased before is delivered again at the bound.
    assert group.offsets(9) == [0, 2, 3]


def test_a_shard_that_has_too_many_leases_stops_its_largest_group(monkeypatch):
    group = Group()
    group.offsets(1_000)
    monkeypatch.setattr(lease_table, "LEASE_BYTES_MAX", 10_000)
    monkeypatch.setattr(lease_table, "LOOK_LEASES", 0)
    assert group.offsets(5) == []
    assert group.machine.room(KEY) == 0
    assert group.table.may_grow("another")
    group.now_ms = 2 * MINUTE
    assert group.offsets(2) == [0, 1]


def test_what_does_not_match_is_settled_in_the_record_of_the_lease():
    group = Group()
    matches = np.array([False, True, False, False, True, False, False, False])
    plan = group.lease(2, matches=matches)
    assert plan.answer.parts[0].offsets.tolist() == [1, 4]
    assert len(plan.entries) == 1
    assert (group.columns.low, group.columns.next) == (1, 8)
    group.settle([1, 4])
    assert group.columns.low == 8
    none = group.lease(1, matches=np.zeros(4, dtype=bool))
    assert (none.answer.number, group.columns.low) == (0, 12)


def test_attempts_of_a_retry_topic_go_on():
    group = Group(max_attempts=3)
    plan = group.lease(2, attempts=np.array([2, 1, 0, 0, 0, 0, 0, 0], dtype=np.uint16))
    assert plan.answer.parts[0].attempts.tolist() == [3, 2]
    (last,) = group.settle([0, 1], SettleOutcome.NACKED).groups
    assert [copy.offset for copy in last.copies] == [0]


def test_keys_go_out_in_their_order_and_do_not_wait_for_each_other():
    group = Group(order="key", backoff_ms=(0,))
    slots = slots_of([b"x", b"x", b"y", b"x"])
    first = group.lease(1, slots=slots)
    assert first.answer.parts[0].offsets.tolist() == [0]
    second = group.lease(9, slots=slots[1:])
    assert second.answer.parts[0].offsets.tolist() == [2]
    assert group.refused(group.settle([2])) == []
    group.settle([0], number=1)
    third = group.lease(9, slots=slots[3:])
    assert third.answer.parts[0].offsets.tolist() == [1, 3]
    assert group.refused(group.settle([3])) == [3]
    group.settle([1], SettleOutcome.NACKED, 0)
    # The later one of its key came back with it, and this attempt does not count.
    fourth = group.lease(9, slots=slots[4:])
    assert fourth.answer.parts[0].offsets.tolist() == [1, 3]
    assert fourth.answer.parts[0].attempts.tolist() == [2, 1]


def test_a_message_that_came_too_early_is_returned_with_the_earlier_one():
    group = Group(order="key", backoff_ms=(0,))
    slots = slots_of([b"x", b"x"])
    group.lease(2, slots=slots)
    plan = group.settle_all(([0], SettleOutcome.NACKED, 0), ([1], SettleOutcome.ACKED))
    assert group.refused(plan) == [1]
    again = group.lease(9, slots=slots[:0])
    assert again.answer.parts[0].offsets.tolist() == [0, 1]
    assert again.answer.parts[0].attempts.tolist() == [2, 1]


def test_messages_of_a_key_that_waits_let_others_pass():
    group = Group(order="key")
    group.lease(1, slots=slots_of([b"x"] * 3))
    # The offer has nothing that may go out.
    passed = group.lease(5, slots=slots_of([b"x"] * 6))
    assert passed.answer.parts == []
    (entry,) = passed.entries
    assert (entry.number, entry.session) == (0, NO_SESSION)
    assert group.columns.next == 7
    third = group.lease(5, slots=slots_of([b"x", b"y"]))
    assert third.answer.parts[0].offsets.tolist() == [8]
    group.settle([0], number=1)
    last = group.lease(9, slots=slots_of([]))
    assert last.answer.parts[0].offsets.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert set(last.answer.parts[0].attempts.tolist()) == {1}


def test_nothing_is_passed_over_at_the_bound_of_what_is_in_flight():
    group = Group(order="key", max_in_flight=1)
    group.lease(1, slots=slots_of([b"x"]))
    assert group.lease(5, slots=slots_of([b"y", b"z"])).groups == []
    assert group.columns.next == 1


def test_a_new_leader_reads_the_keys_before_it_leases_in_their_order():
    group = Group(order="key")
    group.lease(2, slots=slots_of([b"x", b"x"] * 4))
    group.lead_again()
    assert group.offsets(2) == []
    with pytest.raises(Unavailable, match="keys"):
        group.settle([0])
    offsets = group.machine.without_keys(KEY)
    assert offsets.tolist() == [0, 1]
    group.machine.note_keys(KEY, offsets, slots_of([b"x", b"x"]))
    assert group.refused(group.settle([1])) == [1]
    assert group.refused(group.settle([0, 1])) == []


def test_retention_settles_what_it_deletes():
    group = Group()
    group.offsets(3)
    group.do(group.machine.trim(KEY, 2))
    assert group.columns.low == 2
    assert group.columns.expired_count == 2
    assert group.refused(group.settle([1, 2])) == [1]
    group.do(group.machine.trim(KEY, 50))
    assert (group.columns.low, group.columns.next) == (50, 50)
    assert group.table.groups["g"].leases == {}
    assert group.machine.trim(KEY, 50).groups == []


def test_a_reset_ends_all_leases_and_their_numbers():
    group = Group()
    group.offsets(3)
    group.do(group.machine.reset(KEY, 1))
    assert group.offsets(1) == [1]
    assert group.refused(group.settle([1], number=1)) == [1]
    assert group.refused(group.settle([1], number=2)) == []


def test_numbers_grow_also_over_the_deletion_of_a_group():
    group = Group()
    group.offsets(1)
    group.table.apply_packed(pack("g", [EndEntry()]))
    group.machine = LeaseMachine(group.table, "g", group.options, 0)
    group.do(group.machine.begin(KEY, 0))
    assert group.lease(1).answer.number == 2
    group.lead_again()
    assert group.table.number == 2


def test_a_deleted_group_does_not_come_back_without_a_record():
    group = Group()
    group.offsets(1)
    group.table.apply_packed(pack("g", [EndEntry()]))
    assert group.machine.is_stale
    group.machine = LeaseMachine(group.table, "g", group.options, 0)
    assert group.machine.forget_idle(0).groups == []
    assert "g" not in group.table.groups
    assert not group.machine.is_stale
    group.do(group.machine.begin(KEY, 5))
    assert not group.machine.is_stale
    assert group.offsets(1) == [5]


def test_a_deleted_topic_takes_its_leases_along():
    group = Group()
    group.offsets(2)
    assert group.table.is_used("g", "t")
    group.table.drop_topic("t")
    assert not group.table.is_used("g", "t")
    assert group.table.groups["g"].leases == {}
    assert group.refused(group.settle([0])) == [0]


def test_sessions_that_hold_nothing_are_forgotten(monkeypatch):
    group = Group()
    group.offsets(1, b"holds")
    group.offsets(1, b"idle")
    group.settle([1], session=b"idle")
    assert group.machine.forget_idle(3_599_999).groups == []
    group.now_ms = 3_600_000
    group.do(group.machine.forget_idle(group.now_ms))
    assert list(group.table.groups["g"].sessions) == [b"holds"]

    monkeypatch.setattr(lease_machine, "SESSIONS_MAX", 1)
    with pytest.raises(Rejected, match="knows 1 sessions"):
        group.lease(1, b"new")
    assert group.lease(1, b"holds").answer.number == 3
    assert group.lease(1, NO_SESSION).answer.number == 4


def test_what_sessions_were_refused_has_a_bound_and_counts(monkeypatch):
    group = Group()
    group.offsets(1_000)
    leased = group.table.groups["g"].nbytes
    assert leased > group.columns.nbytes + 8 * 1_000
    group.settle(list(range(2_000, 4_000, 2)), session=b"b")
    refused = group.table.groups["g"].refused_bytes
    assert refused >= 8 * 1_000
    group.lead_again()
    assert group.table.groups["g"].refused_bytes == refused
    assert group.table.groups["g"].nbytes >= leased + refused

    monkeypatch.setattr(lease_machine, "REFUSED_BYTES_MAX", 10_000)
    with pytest.raises(Rejected, match="of refused messages; the limit is 10000"):
        group.settle(list(range(2_000, 4_000, 2)), session=b"c")
    # Its own former ones are forgotten with the next request.
    group.settle(list(range(4_000, 6_000, 2)), session=b"b")
    assert group.refused(group.settle([0], session=b"b")) == []
    assert group.table.groups["g"].refused_bytes == 0


def test_a_group_that_only_asks_gets_a_record_each_day():
    group = Group()
    group.stop = 0
    group.now_ms = lease_machine.MARK_EVERY_MS - 1
    assert group.lease(1).groups == []
    group.now_ms += 1
    (mark,) = group.lease(1).groups
    assert list(mark.entries) == []
    assert group.lease(1).groups == []


def test_times_of_settled_leases_are_dropped():
    group = Group()
    for _ in range(1_000):
        (offset,) = group.offsets(1)
        group.settle([offset])
    times = group.machine._times
    assert len(times._deadlines) < 200
    assert len(times._looks) < 200
    assert group.machine._group.nbytes < 100_000


def test_times_that_are_kept_end_as_before():
    group = Group(backoff_ms=(0,))
    group.offsets(2)
    group.do(group.machine.set_deadline(1, KEY, 0, 2 * MINUTE, 0))
    group.now_ms = 1_000
    group.machine.extend(b"a", group.now_ms, lease_ms=MINUTE)
    for _ in range(300):
        (offset,) = group.offsets(1, b"b")
        group.settle([offset], session=b"b")
    assert group.machine.due(KEY, 9, MINUTE + 999).tolist() == []
    assert group.machine.due(KEY, 9, MINUTE + 1_000).tolist() == [1]
    assert group.machine.due(KEY, 9, 2 * MINUTE).tolist() == [0, 1]


def test_one_step_ends_so_many_leases_at_most(monkeypatch):
    monkeypatch.setattr(lease_times, "LOOKS_MAX", 10)
    monkeypatch.setattr(lease_times, "WAITS_MAX", 7)
    group = Group(backoff_ms=(0,))
    for _ in range(30):
        group.offsets(1)
    joins = []
    monkeypatch.setattr(
        lease_times, "joined", lambda columns: joins.append(1) or np.unique(np.concatenate(columns))
    )
    group.now_ms = MINUTE
    # Its end was not looked at yet, and it gets no more time.
    assert group.machine.extend(b"a", group.now_ms, numbers=[30]).answer.granted_ms == {}
    own = group.machine.set_deadline(30, KEY, 29, MINUTE, group.now_ms)
    assert own.answer.granted_ms == {}
    joins.clear()
    assert len(group.machine.due(KEY, 99, group.now_ms)) < 30
    assert len(joins) <= 1
    while group.machine.next_ms() is not None and group.machine.next_ms() <= group.now_ms:
        group.machine.due(KEY, 99, group.now_ms)
    assert group.machine.due(KEY, 99, group.now_ms).tolist() == list(range(30))


def test_a_settlement_without_a_session_is_not_recognised_again():
    group = Group()
    group.offsets(2, NO_SESSION)
    assert group.refused(group.settle([0], session=NO_SESSION)) == []
    again = group.settle([0], session=NO_SESSION)
    assert group.refused(again) == [0]
    assert again.groups == []
    assert group.table.groups["g"].sessions == {}


def test_the_columns_grow_with_the_window_and_keep_what_they_have():
    group = Group(max_in_flight=1_000_000, window=100_000)
    group.offsets(63)
    group.settle(list(range(20)), number=1)
    group.settle([30], SettleOutcome.NACKED, 5_000, number=1)
    for _ in range(20):
        group.offsets(1_000)
    group.now_ms = 4_000
    group.lead_again()
    assert group.columns.low == 20
    assert group.machine.due(KEY, 9, 9_000).tolist() == [30]
    assert group.columns.open_count == 63 - 21 + 20_000
    assert group.refused(group.settle(list(range(20, 63)), number=1)) == [30]


def test_the_columns_shrink_with_the_window():
    group = Group(max_in_flight=1_000_000)
    for _ in range(20):
        group.offsets(1_000)
    large = group.columns.nbytes
    for number in range(1, 20):
        group.settle(list(range(1_000 * number - 1_000, 1_000 * number)), number=number)
    assert group.columns.nbytes <= large // 4
    group.settle([19_000], SettleOutcome.NACKED, 5_000, number=20)
    group.lead_again()
    assert group.machine.due(KEY, 9, 5_000).tolist() == [19_000]
    assert group.refused(group.settle(list(range(19_000, 20_000)), number=20)) == [19_000]
    assert (group.columns.low, group.columns.open_count) == (19_000, 0)


# --- too many dead letters ------------------------------------------------------------------------


def test_a_group_pauses_before_its_next_lease_when_too_many_of_its_messages_die():
    group = Group(dead_rate=2)
    group.offsets(6)
    group.settle([0, 1], SettleOutcome.REJECTED)
    assert group.offsets(1) == [6]
    plan = group.settle([2, 3], SettleOutcome.REJECTED, number=1)
    # What is dead is dead: nothing of it is lost, and nothing else is delivered.
    assert [each.offset for each in plan.groups[0].copies] == [2, 3]
    assert group.lease(1).answer.paused == DEAD_LETTERS
    assert group.refused(group.settle([4], number=1)) == []
    assert group.refused(group.settle([5], SettleOutcome.REJECTED, number=1)) == []
    assert group.columns.low == 6

    group.do(group.machine.pause(""))
    assert group.offsets(1) == [7]
    group.settle([6], SettleOutcome.REJECTED, number=2)
    assert group.offsets(1) == [8]


def test_dead_letters_count_for_a_minute_of_the_log():
    group = Group(dead_rate=2)
    group.offsets(6)
    for second, offset in ((10, 0), (69, 1), (70, 2), (129, 3)):
        group.machine.store_ms = second * 1_000
        group.settle([offset], SettleOutcome.REJECTED, number=1)
    assert group.offsets(1) == [6]
    group.settle([4], SettleOutcome.REJECTED, number=1)
    assert group.lease(1).answer.paused == DEAD_LETTERS


def test_messages_whose_last_lease_has_ended_are_buried_before_the_pause():
    group = Group(dead_rate=1, max_attempts=1, backoff_ms=(0,))
    group.offsets(2)
    group.now_ms = MINUTE
    plan = group.lease(4)
    assert [each.offset for each in plan.groups[0].copies] == [0, 1]
    assert plan.answer.paused == DEAD_LETTERS
    assert group.columns.low == group.columns.next == 2


def test_a_pause_outlives_a_leader_and_keeps_its_first_reason():
    group = Group()
    group.offsets(1)
    group.do(group.machine.pause(OPERATOR))
    assert group.machine.pause(DEAD_LETTERS).groups == []
    group.lead_again()
    assert group.lease(1).answer.paused == OPERATOR
    group.do(group.machine.pause(""))
    group.lead_again()
    assert group.table.groups["g"].paused == ""
    assert group.offsets(1) == [1]


def test_a_group_without_a_limit_is_not_paused():
    group = Group(dead_rate=None)
    group.offsets(64)
    group.settle(list(range(64)), SettleOutcome.REJECTED)
    assert group.offsets(1) == [64]


def test_a_repeated_request_gets_its_lease_also_while_the_group_is_paused():
    group = Group()
    assert group.offsets(2) == [0, 1]
    group.do(group.machine.pause(OPERATOR))
    group.request -= 1
    assert group.offsets(2) == [0, 1]


def test_a_paused_group_without_queues_is_not_forgotten():
    group = Group()
    group.table.drop_topic(KEY[0])
    group.do(group.machine.pause(OPERATOR))
    assert group.machine.forget_idle(10 * MINUTE * 60).groups == []
    group.do(group.machine.pause(""))
    assert len(group.machine.forget_idle(20 * MINUTE * 60).groups) == 1


# --- dead letters that go back --------------------------------------------------------------------


def redrive(group: Group, offsets: list[int], settle: int, session: bytes = b"r") -> list[int]:
    """Put messages back. Returns: those that are refused."""
    item = SettleItem(0, KEY, offsets_of(offsets), SettleOutcome.ACKED)
    found = {(KEY, each): Destination(("back", 0), 0) for each in range(100)}
    request = SettleRequest(session, settle, [item])
    plan = group.do(group.machine.redrive(request, found, group.now_ms))
    copied = [each.offset for each in plan.groups[0].copies] if plan.groups else []
    refused = group.refused(plan)
    assert not plan.groups or sorted(copied + refused) == sorted(offsets)
    return refused


def test_messages_that_go_back_are_settled_and_the_others_wait():
    group = Group()
    assert redrive(group, [2, 4, 200], 1) == [200]
    assert (group.columns.low, group.columns.next) == (0, 5)
    assert group.columns.unsettled().tolist() == [0, 1, 3]
    assert redrive(group, [0, 2, 3], 2) == [2]
    # A repeated request gets its answer, and an old one none.
    assert redrive(group, [0, 2, 3], 2) == [2]
    assert redrive(group, [1], 1, session=b"other") == []
    assert group.columns.low == 5
    group.lead_again()
    assert redrive(group, [1, 5], 3) == [1]
    assert not group.table.groups["g"].leases


def test_what_a_worker_has_does_not_go_back():
    group = Group()
    group.offsets(2)
    assert redrive(group, [0, 1, 2], 1) == [0, 1]
    group.settle([0, 1], number=1)
    assert group.columns.low == 3


def test_messages_that_were_passed_over_go_to_workers_all_the_same():
    group = Group()
    redrive(group, [1, 65, 66], 1)
    # Those that went back are not waited for, wherever their places in the columns are.
    found = group.offsets(100)
    assert found[:64] == [0, *range(2, 65)]
    assert not {1, 65, 66} & set(found)
