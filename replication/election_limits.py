"""The times of elections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ElectionLimits:
    """Times of elections. No promise depends on any of them.

    Where a machine is short of CPU, messages come late and processes still live. So those times that end a leadership
    or a candidacy grow with the slowest delay that was measured lately.
    """

    #: a follower that hears no leader for this long, and up to as long again, asks for votes. Both grow by twice the
    #: slowest delay, and the second part doubles with each candidacy in a row
    election_ms: int = 1_000
    #: between two checks of a leader, which are its heartbeats too; `retry_ms` during a hand-over, if that is less
    heartbeat_ms: int = 400
    #: a leader that no majority answers for this long, and three times the slowest delay, steps down
    majority_silence_ms: int = 2_000
    #: a leader whose log streams reach no majority for this long, and three times the slowest delay, lets another
    #: replica lead. Each such leadership that follows another in a row lasts twice as long, because no other one may
    #: be able to lead
    stream_silence_ms: int = 10_000
    #: a leader whose process for log streams has ended this long ago lets a replica lead whose process runs. Each such
    #: leadership that follows another one in a row lasts twice as long
    streams_lost_ms: int = 800
    #: the same of a leader for which that process never ran: all replicas may have just started
    streams_missing_ms: int = 3_000
    #: a leader that no majority can call for this long hands over to a replica that one can call. Each such leadership
    #: that follows another one in a row lasts twice as long
    uncalled_ms: int = 3_000
    #: for how long a replica says no to candidates that it cannot call, without hearing a leader
    refuse_uncallable_ms: int = 5_000
    #: between two followers that ask for votes because the leader's process has ended
    turn_ms: int = 100
    #: between two questions that were not answered
    retry_ms: int = 200
    #: a leader whose own disk stores nothing for this long, although there is something to store, lets another replica
    #: lead. Each such leadership that follows another one in a row lasts twice as long, because the disks of the other
    #: replicas may be no better
    disk_stall_ms: int = 3_000
    #: a leader's own disk is late while it lacks what a majority of the replicas stored this long ago without it. The
    #: slowest delay is added
    disk_lag_ms: int = 200
    #: a leader whose own disk was late for so much longer than it was in time lets another replica lead
    disk_late_ms: int = 3_000
    #: how long a leader waits for the replica that takes over; twice the slowest delay is added
    hand_over_ms: int = 1_000
    #: no delay counts with more: a cut can be longer
    delay_most_ms: int = 5_000
    #: a delay counts half after this time, a quarter after as long again
    delay_halving_ms: int = 30_000
    #: one delay raises the slowest one to twice its value and this at most
    delay_step_ms: int = 500


#: of `stream_silence_ms` and `disk_stall_ms`: ten seconds become ten minutes
MOST_DOUBLINGS = 6
#: of the spread of candidacies
MOST_SPREAD_DOUBLINGS = 3
