"""Warnings of which clients can cause any number."""

from __future__ import annotations

import logging
import socket

import pytest

from raymq.doors.rocketmq.limited_warnings import EVERY_S, LimitedWarnings
from raymq.doors.rocketmq.remoting_server import SWEEP_S
from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from tests.support.clock import ManualClock
from tests.support.hostile_remoting import lying_frames


def test_the_first_one_is_said_and_those_after_it_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    warnings = LimitedWarnings(clock.monotonic)
    warnings.log_pending()
    for number in range(1_000):
        warnings.note(f"fault {number}")
        clock.advance(1)
    assert caplog.messages == ["fault 0"]
    clock.advance(EVERY_S * 1000)
    warnings.log_pending()
    assert caplog.messages[1:] == ["fault 999, and 998 more like it"]
    # Nothing is left, and the next one waits for its turn.
    warnings.note("fault 1000")
    clock.advance(EVERY_S * 1000)
    warnings.log_pending()
    warnings.log_pending()
    assert caplog.messages[2:] == ["fault 1000"]


def test_a_thousand_bad_connections_are_a_few_lines(
    server: RocketMQServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "raymq.rocketmq")
    frame = next(iter(lying_frames().values()))
    address = server.addresses[0]
    for _ in range(1_000):
        with socket.create_connection((address.host, address.port), timeout=20) as hostile:
            hostile.sendall(frame)
            while hostile.recv(1 << 16):
                pass
    said = [each for each in caplog.messages if "is closed" in each]
    # However slow this machine is, a line comes with a bad connection or with a sweep.
    assert 1 <= len(said) <= 20
    assert SWEEP_S < EVERY_S
