"""IdleCores: what the kernel's times say, and how often they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.actors.shared.idle_cores import PERIOD_MS, IdleCores
from raymq.store.base.files import Files
from tests.support.clock import ManualClock


class Times(Files):
    """The kernel's times of all cores, as the test sets them."""

    def __init__(self) -> None:
        super().__init__()
        #: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice
        self.ticks = [0] * 10
        self.content: bytes | None = None
        self.readings = 0

    def pass_(self, *, busy: int = 0, idle: int = 0, iowait: int = 0, guest: int = 0) -> None:
        for column, ticks in ((0, busy), (3, idle), (4, iowait), (8, guest)):
            self.ticks[column] += ticks

    def read_file(self, path: str | Path) -> bytes:
        assert str(path) == "/proc/stat"
        self.readings += 1
        if self.content is not None:
            return self.content
        return b"cpu  " + b" ".join(b"%d" % each for each in self.ticks) + b"\ncpu0 1 2 3\n"


class Machine:
    """Cores whose times pass as the test says."""

    def __init__(self) -> None:
        self.times, self.clock = Times(), ManualClock()
        self.cores = IdleCores(clock=self.clock, files=self.times)
        assert self.cores.are_idle()

    def after(self, ms: int, **ticks: int) -> bool:
        self.times.pass_(**ticks)
        self.clock.advance(ms)
        return self.cores.are_idle()


def test_cores_that_compute_all_the_time_have_no_time_to_spare_until_they_rest():
    machine = Machine()
    assert not machine.after(PERIOD_MS, busy=98, idle=2)
    assert machine.after(PERIOD_MS, busy=90, idle=10)
    assert not machine.after(PERIOD_MS, busy=100)


def test_cores_that_wait_for_a_disk_have_time_to_spare():
    assert Machine().after(PERIOD_MS, busy=50, iowait=50)


def test_the_time_of_guests_is_counted_once():
    # It is in the user time, too.
    assert Machine().after(PERIOD_MS, busy=96, idle=4, guest=96)


def test_times_are_read_once_in_a_while():
    machine = Machine()
    assert machine.after(PERIOD_MS - 1, busy=100)
    assert machine.times.readings == 1
    assert not machine.after(1)
    assert not machine.after(PERIOD_MS - 1, idle=100)
    assert machine.times.readings == 2


@pytest.mark.parametrize("content", [b"", b"cpu", b"cpu 1 2 x 4 5", b"cpu 1 2"])
def test_cores_count_as_idle_where_the_kernel_does_not_say(content: bytes):
    machine = Machine()
    machine.times.content = content
    assert machine.after(PERIOD_MS, busy=100)
    # Nothing is known of the time in between, either.
    machine.times.content = None
    assert machine.after(PERIOD_MS, busy=100)
    assert not machine.after(PERIOD_MS, busy=100)


def test_a_machine_without_these_times_counts_as_idle():
    class Without(Files):
        def read_file(self, path: str | Path) -> bytes:
            raise FileNotFoundError(path)

    assert IdleCores(clock=ManualClock(), files=Without()).are_idle()


def test_the_times_of_this_machine_can_be_read():
    cores = IdleCores(clock=ManualClock(), files=Files())
    cores.are_idle()
    assert cores._last is not None
    assert 0 < cores._last[0] <= cores._last[1]
