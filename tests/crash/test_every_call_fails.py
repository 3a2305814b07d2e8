"""The k-th call of the disk fails, for every k of nine workloads, once and for ever (SQLite's loop).

No acknowledged message is lost, and no refused one comes back. A failed sync ends writing and is never tried again. The
disk that is left opens with all that was promised, or says that it is poisoned. No error is of an unexpected kind.
"""

from __future__ import annotations

import pytest

from tests.support.failing_workloads import FAULTS, WORKLOADS, fail_every_call
from tests.support.workers import Workers


@pytest.mark.parametrize("workload", WORKLOADS)
def test_whichever_call_fails_nothing_promised_is_lost(
    workload: str, crash_explorers: Workers
) -> None:
    done = crash_explorers.result(fail_every_call, workload)
    print(
        f"\n{workload}: {done.injections} injections into {done.calls}, {done.poisoned} poisoned, "
        f"{done.refused} refused, {done.seconds:.1f} s"
    )
    assert done.injections >= 30


def test_every_kind_of_call_fails_in_some_workload(crash_explorers: Workers) -> None:
    calls = [crash_explorers.result(fail_every_call, name).calls for name in WORKLOADS]
    assert all(any(each[kind] for each in calls) for kind in FAULTS)
    assert len(WORKLOADS) == 9
