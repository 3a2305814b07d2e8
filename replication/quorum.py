"""How many replicas of a shard must agree, for any number of replicas.

A put is confirmed when a majority of complete replicas holds it durably. A replica is *complete* if it still has
everything that it ever reported as durable. A replica that lost its disk, or found it rotten, is not complete until it
has caught up with a leader. Until then its answers may come from a log that lacks confirmed records.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

#: a follower's time must exceed twice another one's by so much before that takes its place in `prompt_followers`
CHANGE_MS = 2.0


def majority(members: int) -> int:
    """The least number of replicas of which any two sets have one in common."""
    return members // 2 + 1


def can_fail_over(members: int) -> bool:
    """Whether a shard can go on without one of its replicas, and so elects another leader."""
    return majority(members) < members


def sees_all_confirmed(members: int, answers: Mapping[int, bool]) -> bool:
    """Whether at least one of the replicas that answered has every confirmed record.

    A confirmed record was on a majority of `members`, so at least `len(answers) + majority - members` of those that
    answered held it. Those that are not complete may have lost it, and all answers together are always enough.

    Args: `answers`: id of a replica -> whether that replica is complete.
    """
    lost = min(list(answers.values()).count(False), majority(members) - 1)
    return len(answers) + majority(members) - members > lost


def may_lack_confirmed(members: int, lost: int) -> bool:
    """Whether so many replicas, which have lost what they held, may be all that held a confirmed record."""
    return lost >= majority(members)


def can_spare(members: int, others: Collection[tuple[bool, bool]]) -> bool:
    """Whether a shard may do without what one replica holds: the others have a leader, and a majority is complete.

    Args: `others`: of each other replica that answers, whether it leads, and whether it is complete.
    """
    complete = sum(is_complete for _, is_complete in others)
    return any(leads for leads, _ in others) and complete >= majority(members)


def may_lead(members: int, votes: Mapping[int, bool], *, sole: bool = False) -> bool:
    """Whether these votes elect a leader.

    Args: `votes`: id -> whether that replica is complete, the candidate included. `sole`: no other replica may ever
    be a candidate, so that no second leader needs to be excluded by a majority.
    """
    enough = sole or len(votes) >= majority(members)
    return enough and sees_all_confirmed(members, votes)


def confirmed_end(members: int, durable_ends: Mapping[int, int]) -> int:
    """The end up to which a majority of all members holds the leader's log durably; 0 without a majority.

    Args: `durable_ends`: of the complete replicas, the leader included.
    """
    ends = sorted(durable_ends.values(), reverse=True)
    needed = majority(members)
    return ends[needed - 1] if len(ends) >= needed else 0


def published_end(epoch_end: int, own_durable: int, follower_ends: Sequence[int]) -> int:
    """The end that a leader's Replication may call confirmed; 0: none yet in this epoch.

    Args: `epoch_end`: of the leader's EPOCH record. `own_durable`: of the leader. `follower_ends`: as of
    `replicated_end`, from log streams of this epoch.
    """
    end = min(own_durable, replicated_end(follower_ends)) if follower_ends else own_durable
    return end if end >= epoch_end else 0


def replicated_end(follower_ends: Sequence[int]) -> int:
    """The end up to which enough followers hold the leader's log durably: with the leader they are a majority.

    Args: `follower_ends`: durable and matched, of each follower. One that does not answer or is not complete counts
    with 0.
    """
    ends = sorted(follower_ends, reverse=True)
    return ends[majority(len(ends) + 1) - 2]


def prompt_followers(
    members: int, ack_ms: Mapping[int, float], before: Collection[int]
) -> frozenset[int]:
    """The followers that get each byte at once: as many as with the leader are a majority, or fewer if fewer are there.

    The puts wait for no other follower, and others may get the bytes of many puts together. A follower stays prompt
    until another one takes less than half its time: each change makes the puts under way wait for a linger time.

    Args: `ack_ms`: id -> how long it takes to make bytes durable, of the followers that have nearly all bytes, which a
    stream reaches and whose acks count. `before`: the result of the last call.
    """
    needed = majority(members) - 1
    order = sorted(ack_ms, key=lambda each: (each not in before, ack_ms[each], each))
    prompt, others = order[:needed], order[needed:]
    if prompt and others:
        slowest = max(prompt, key=lambda each: ack_ms[each])
        fastest = min(others, key=lambda each: ack_ms[each])
        if ack_ms[slowest] > 2 * ack_ms[fastest] + CHANGE_MS:
            prompt[prompt.index(slowest)] = fastest
    return frozenset(prompt)
