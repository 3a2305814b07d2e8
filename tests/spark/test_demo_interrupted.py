"""Ctrl-C at any moment of the demo: two lines, everything stopped, nothing left, exit 130."""

from __future__ import annotations

import signal

import pytest

from tests.support.interrupted_demo import MOMENTS, Interruption, interrupt

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=pytest.mark.beside(interrupt, (moment, signal.SIGINT)))
        for moment in MOMENTS
    ],
)
def test_ctrl_c_ends_everything_with_two_lines_and_130(beside: Interruption, moment: str) -> None:
    assert beside.exit_status == 130
    # Of the demo's own last word, and of a JVM that names the options with which the test has it start.
    other = ("kill -9", "JDK_JAVA_OPTIONS")
    lines = [line for line in beside.said if not any(word in line for word in other)]
    first = [line.split(" ")[0].strip() for line in lines]
    if moment == "at_the_end":
        # A table that is half written then is written to its end.
        assert "Interrupted" in first, lines
        assert first[-1] == "Stopped:", lines
    else:
        assert first == ["Interrupted", "Stopped:"], lines
    assert beside.left == []
    assert not beside.data_is_left


@pytest.mark.beside(interrupt, ("while_ray_starts", signal.SIGTERM))
def test_sigterm_ends_it_likewise_with_143(beside: Interruption) -> None:
    assert beside.exit_status == 143
    assert beside.left == []
    assert not beside.data_is_left
