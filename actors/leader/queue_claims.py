"""Claims on the queues of this shard, and the offsets that groups commit, for a leader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected
from raymq.store.base.failpoints import fail_point
from raymq.store.groups.claims import Claim, Commit, claim_value, ended_value, lock_member
from raymq.store.groups.leases.entries import EndEntry, Entry, ResetEntry, TimeEntry
from raymq.store.groups.leases.lease_table import SETTLE
from raymq.store.groups.leases.packing import pack_checked
from raymq.store.groups.members import CLAIM
from raymq.store.records.requests import AppendedRows
from raymq.store.state.shard_state import OFFSETS, no_offsets_body, offsets_body
from raymq.store.state.topics import REDRIVE_PREFIX, unknown_topic

from .group_records import GroupHost, encoded, note_level, record_time_ms
from .lock_times import LockTimes


class QueueClaims:
    """Decides by `ClaimTable`, appends the records, and lets answers wait for them. Threads: any may call."""

    def __init__(self, leader: GroupHost, clock: Clock) -> None:
        self._leader = leader
        self._store = leader.store
        self._locks = LockTimes(clock)
        self._store.claims.is_lock_over = self._is_lock_over

    # --- members ----------------------------------------------------------------------------------

    def claim(
        self, group: str, topic: str, member_id: str, wanted: Mapping[int, int]
    ) -> tuple[dict[int, int], dict[int, Claim]]:
        """Give queues to a member. Args: `wanted`: queue -> number of its grant.

        Returns: queue -> committed offset of the group, of those that have one; and the refused queues, each with the
        claim that stands.
        """
        claims, state = self._store.claims, self._store.state
        refused: dict[int, Claim] = {}
        offsets: dict[int, int] = {}
        note_level(self._leader)

        def decide() -> list[tuple[str, bytes]]:
            self._check_topic(topic)
            self._check_stream(group, topic)
            new, refusals = claims.plan(group, topic, member_id, wanted)
            refused.update(refusals)
            # Later commits of an earlier owner are refused by the new claims.
            offsets.update(state.offsets.get((group, topic), {}))
            return [self._record(group, topic, new)] if new else []

        appended = self._store.inner_put.put_decided(decide)
        fail_point("groups.claim_appended")
        self._await(appended)
        mine = wanted.keys() - refused.keys()
        return {each: offsets[each] for each in sorted(mine) if each in offsets}, refused

    def commit(self, group: str, topic: str, wanted: Mapping[int, Commit]) -> dict[int, Claim]:
        """Store offsets of a member. Returns: the refused queues, each with the claim that stands."""
        claims, state = self._store.claims, self._store.state
        refused: dict[int, Claim] = {}

        def decide() -> list[tuple[str, bytes]]:
            self._check_topic(topic)
            committed = state.offsets.get((group, topic), {})
            new, refusals = claims.plan_commit(group, topic, wanted, committed)
            refused.update(refusals)
            return (
                [(OFFSETS, offsets_body(group, topic, new, record_time_ms(self._store)))]
                if new
                else []
            )

        self._await(self._store.inner_put.put_decided(decide))
        return refused

    def commit_unclaimed(
        self,
        group: str,
        topic: str,
        offsets: Mapping[int, int],
        clients: Mapping[int, str | None] | None = None,
    ) -> dict[int, Claim]:
        """Store offsets of consumers that are not members.

        Args: `clients`: queue -> id of the client of RocketMQ that commits, and may have locked it; or None, of an
        operator, whom no lock keeps away. Without it no client commits.
        Returns: with `clients`, the refused queues, each with the claim that stands. The others are stored.
        Raises: Rejected without `clients` for a queue that a member or another client has. Nothing was stored.
        """
        refused: dict[int, Claim] = {}

        def decide() -> list[tuple[str, bytes]]:
            self._check_topic(topic)
            self._check_stream(group, topic)
            for queue_id, claim in self._store.claims.held(group, topic, offsets).items():
                client = "" if clients is None else clients.get(queue_id, "")
                is_own = claim.is_lock and client in (None, claim.client)
                if not is_own and self._is_held(group, topic, queue_id, claim):
                    refused[queue_id] = claim
            if clients is None:
                for queue_id, claim in refused.items():
                    raise _belongs(group, topic, queue_id, claim)
            new = {each: offset for each, offset in offsets.items() if each not in refused}
            if not new:
                return []
            return [(OFFSETS, offsets_body(group, topic, new, record_time_ms(self._store)))]

        self._await(self._store.inner_put.put_decided(decide))
        return refused

    def release(self, group: str, topic: str, member_id: str, numbers: Mapping[int, int]) -> None:
        """End claims of a member that leaves. Others of these queues stay as they are."""

        def decide() -> list[tuple[str, bytes]]:
            released = self._store.claims.plan_release(group, topic, member_id, numbers)
            return [self._record(group, topic, released)] if released else []

        self._await(self._store.inner_put.put_decided(decide))

    # --- clients of RocketMQ ----------------------------------------------------------------------

    def lock(
        self,
        group: str,
        topic: str,
        client: str,
        queues: Iterable[int],
        number: int | None = None,
    ) -> tuple[list[int], list[int]]:
        """Let a client of RocketMQ have queues alone, until it unlocks them or renews them for 60 s no more.

        Args: `number`: of the group's coordinator, under which free queues are locked; None: they are only named.
        Returns: the queues that the client has now, and the free ones. Those of other clients are neither.
        Raises: Rejected for a group whose workers have leased messages of the topic.
        """
        table, member_id = self._store.claims, lock_member(client)
        locked: list[int] = []
        free: list[int] = []
        if number is not None:
            note_level(self._leader)

        def decide() -> list[tuple[str, bytes]]:
            self._check_topic(topic)
            self._check_stream(group, topic)
            new: dict[int, Claim] = {}
            for queue_id in queues:
                claim = table.claim_of(group, topic, queue_id)
                if claim.member_id == member_id:
                    locked.append(queue_id)
                elif claim.is_lock and self._is_held(group, topic, queue_id, claim):
                    continue
                elif number is None:
                    free.append(queue_id)
                elif number > claim.number:
                    # Also that of a member: the coordinator gave the number because no member has the queue any more.
                    new[queue_id] = Claim(number, member_id)
                    locked.append(queue_id)
            # With the lock held, so that no other client finds a new claim that seems to be over.
            self._locks.renew(group, topic, locked)
            return [self._record(group, topic, new)] if new else []

        self._await(self._store.inner_put.put_decided(decide))
        return locked, free

    def unlock(self, group: str, topic: str, client: str, queues: Iterable[int]) -> None:
        """Let others have queues that a client of RocketMQ has locked. Others of these queues stay as they are."""
        table, member_id = self._store.claims, lock_member(client)

        def decide() -> list[tuple[str, bytes]]:
            claims = {each: table.claim_of(group, topic, each) for each in queues}
            released = {
                queue_id: Claim(claim.number, "")
                for queue_id, claim in claims.items()
                if claim.member_id == member_id
            }
            return [self._record(group, topic, released)] if released else []

        self._await(self._store.inner_put.put_decided(decide))

    def locked(self, group: str, topic: str) -> dict[int, tuple[str, int]]:
        """The queues that clients of RocketMQ have locked: queue -> client id, and how long ago it renewed, in ms."""
        found: dict[int, tuple[str, int]] = {}

        def decide() -> list[tuple[str, bytes]]:
            for queue_id, claim in self._store.claims.claims.get((group, topic), {}).items():
                if claim.is_lock and self._is_held(group, topic, queue_id, claim):
                    found[queue_id] = claim.client, self._locks.age_ms(group, topic, queue_id)
            return []

        # The times are those of the thread that has the put lock.
        self._await(self._store.inner_put.put_decided(decide))
        return found

    def has_locks(self, group: str) -> bool:
        """Whether clients of RocketMQ have locked queues of this shard for a group."""
        is_locked = False

        def decide() -> list[tuple[str, bytes]]:
            nonlocal is_locked
            claims = self._store.claims.of_group(group)
            is_locked = any(
                claim.is_lock and self._is_held(group, *key, claim) for key, claim in claims.items()
            )
            return []

        self._store.inner_put.put_decided(decide)
        return is_locked

    def _is_held(self, group: str, topic: str, queue_id: int, claim: Claim) -> bool:
        """Whether a claim keeps others from its queue: a lock that is not renewed does so for a while."""
        if claim.is_lock:
            return not self._is_lock_over(group, topic, queue_id)
        return bool(claim.member_id)

    def _is_lock_over(self, group: str, topic: str, queue_id: int) -> bool:
        return self._locks.is_over(group, topic, queue_id)

    # --- operators --------------------------------------------------------------------------------

    def reset(
        self, group: str, topic: str, offsets: Mapping[int, int], number: int
    ) -> dict[int, Claim]:
        """Set offsets of a group for an operator, and end the claims of its members there.

        Args: `number`: of `take_number`. Returns: the queues that a member has under a higher number, each with that
        claim. Of these nothing is stored.
        """
        refused: dict[int, Claim] = {}
        note_level(self._leader)

        def decide() -> list[tuple[str, bytes]]:
            self._check_topic(topic)
            new, refusals = self._store.claims.plan_reset(group, topic, offsets, number)
            refused.update(refusals)
            if not new:
                return []
            # The claims come first: after a crash between both, a member's commit must not be taken any more.
            moved = {queue_id: offsets[queue_id] for queue_id in new}

            leased = self._store.leases.group(group).queues
            resets: list[Entry] = [
                ResetEntry((topic, queue_id), offset)
                for queue_id, offset in moved.items()
                if (topic, queue_id) in leased
            ]
            if resets:
                resets.insert(0, TimeEntry(record_time_ms(self._store)))

            return [
                self._record(group, topic, new),
                *([(SETTLE, pack_checked(group, resets))] if resets else []),
                (OFFSETS, offsets_body(group, topic, moved, record_time_ms(self._store))),
            ]

        self._await(self._store.inner_put.put_decided(decide))
        return refused

    def forget_offsets(self, group: str, number: int) -> list[str]:
        """Delete the offsets and claims that this shard has of a group.

        Args: `number`: of `end`. Returns: the topics of which it had offsets.
        Raises: Rejected when a queue was claimed or reset since. Nothing was deleted.
        """
        topics: list[str] = []
        note_level(self._leader)

        def decide() -> list[tuple[str, bytes]]:
            claims = self._store.claims.of_group(group)
            topics.extend(topic for name, topic in self._store.state.offsets if name == group)
            for (topic, queue_id), claim in claims.items():
                if claim.number > number:
                    # Also without a member now: these are the offsets of another group of the name.
                    now = f"{claim.member_id} has" if claim.member_id else "one had"
                    raise Rejected(
                        f"group {group} has got a member again: {now} queue {queue_id} of {topic}. Its offsets stay on "
                        "this shard",
                        field="group",
                        limit="a group without members",
                        found=claim.member_id,
                    )
            # Also without any: RocketMQ's file of groups may have it.
            return self._ending(group, topics, number)

        self._await(self._store.inner_put.put_decided(decide))
        return topics

    def forget_unused(self, unused_since_ms: int) -> list[str]:
        """Delete the offsets of groups that nothing has used since this time, and of which no member has a claim.

        A commit, a claim and a release are a use: a member may find no message, so that it commits nothing. So is what
        workers lease and settle. A group of workers that has a lease, a session or unsettled messages stays.

        Returns: the names of the groups. The caller publishes the records.
        """
        old, used = set[str](), set[str]()
        for name, topic in list(self._store.state.offsets):
            if name.startswith(REDRIVE_PREFIX) and topic in self._store.state.topics:
                # Dead letters that went back would be there again.
                used.add(name)
            is_old = 0 < self._used_ms(name, topic) <= unused_since_ms
            (old if is_old else used).add(name)
        return [name for name in sorted(old - used) if self._forget(name, unused_since_ms)]

    def _forget(self, group: str, unused_since_ms: int) -> bool:
        """Delete the offsets of a group on this shard, if all that it has is old and no member has a claim."""
        note_level(self._leader)

        def decide() -> list[tuple[str, bytes]]:
            state, table = self._store.state, self._store.claims
            claims = table.of_group(group)
            topics = [topic for name, topic in state.offsets if name == group]
            times = [self._used_ms(group, topic) for topic in topics]
            # Those without a time are of an earlier version, and count as new.
            times += [table.times_ms.get((group, topic), 0) for topic in {key[0] for key in claims}]
            is_old = bool(topics) and min(times) > 0 and max(times) <= unused_since_ms
            is_held = any(self._is_held(group, *key, claim) for key, claim in claims.items())
            if not is_old or is_held or self._store.leases.group(group).is_held:
                return []
            number = max((claim.number for claim in claims.values()), default=0)
            return self._ending(group, topics, number)

        return self._store.inner_put.put_decided(decide) is not None

    def _used_ms(self, group: str, topic: str) -> int:
        """When offsets of a group were stored last, ms since 1970; 0: not known."""
        stored_ms = self._store.state.offset_times_ms.get((group, topic), 0)
        leases = self._store.leases.group(group)
        is_leased = any(name == topic for name, _ in list(leases.queues))
        return max(stored_ms, leases.used_ms if is_leased else 0)

    def _record(self, group: str, topic: str, claims: Mapping[int, Claim]) -> tuple[str, bytes]:
        """The record of new claims, with its time."""
        value = claim_value(group, topic, claims, record_time_ms(self._store))
        return CLAIM, encoded(value)

    def _ending(self, group: str, topics: Sequence[str], number: int) -> list[tuple[str, bytes]]:
        """The records that delete what this shard has of a group. Args: `number`: no claim below it is valid again."""
        records = [(OFFSETS, no_offsets_body(group, topic)) for topic in topics]
        if group in self._store.leases.groups:
            records.insert(0, (SETTLE, pack_checked(group, [EndEntry()])))
        return [*records, (CLAIM, encoded(ended_value(group, number)))]

    def _check_stream(self, group: str, topic: str) -> None:
        """Raises: Rejected for a group whose workers have leased messages of a topic. Has the put lock."""
        if self._store.leases.is_used(group, topic):
            raise Rejected(
                f"workers of group {group} have leased messages of {topic}: members need another group",
                field="group",
                limit="a group of members",
                found=group,
            )

    def _check_topic(self, topic: str) -> None:
        """Raises: Rejected for a topic that was deleted meanwhile: its offsets must not come back. Has the put lock."""
        if topic not in self._store.state.topics:
            raise unknown_topic(topic)

    def _await(self, appended: AppendedRows | None) -> None:
        """Let an answer wait for everything that it rests on: its own record, or earlier ones and a check."""
        if appended is not None:
            self._leader.await_promise(appended)
        else:
            self._leader.await_promise(AppendedRows.up_to(self._store.log.end))
            self._leader.await_check()


def _belongs(group: str, topic: str, queue_id: int, claim: Claim) -> Rejected:
    """Why an offset that names no member is refused."""
    if claim.is_lock:
        return Rejected(
            f"queue {queue_id} of {topic} is locked for group {group} by a client of RocketMQ, {claim.member_id}: only "
            "that client commits its offset. A lock ends with its consumer, or 60 s after it was renewed last",
            field="offsets",
            limit="queues that no client has locked",
            found=queue_id,
        )
    return Rejected(
        f"queue {queue_id} of {topic} belongs to member {claim.member_id} of group {group}: only that "
        "member commits its offset, until it closes. If it was killed, let a consumer of the group without "
        "queues= join and close; or use another group",
        field="offsets",
        limit="queues that no member has",
        found=queue_id,
    )
