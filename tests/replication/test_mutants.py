"""The interleavings find every missing rule: with a rule removed, some seed fails."""

from __future__ import annotations

import pytest

from raymq.replication import log_receiver
from raymq.replication.wire import Ack
from raymq.store.config import promise
from tests.replication.test_interleavings import Chaos

SEEDS = 1500


def ack_before_sync(self, log):
    return Ack(self.matched_end, log.tail().end, self.matched_end)


def confirm_without_own_sync(self, ends):
    return ends.replicated


def confirm_without_the_follower(self, ends):
    return ends.synced


def match_by_length(log, end, value):
    return log.tail().end >= end


def serve_every_process(self, header, message):
    return True


MUTANTS = [
    (log_receiver.LogReceiver, "acknowledge", ack_before_sync),
    (promise.Promise, "acknowledged_end", confirm_without_own_sync),
    (promise.Promise, "acknowledged_end", confirm_without_the_follower),
    (log_receiver, "_holds", match_by_length),
    (log_receiver.LogReceiver, "is_mine", serve_every_process),
]


def try_seeds() -> None:
    for seed in range(SEEDS):
        Chaos(seed, "sync").run()


@pytest.mark.parametrize(("owner", "name", "mutant"), MUTANTS, ids=[m[2].__name__ for m in MUTANTS])
def test_a_missing_rule_is_detected(monkeypatch, owner, name, mutant):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        try_seeds()
