"""The numbers of the protocol. tests/interop compares them with RocketMQ's own."""

from __future__ import annotations

import pytest

from raymq.doors.rocketmq.codes import Language, MQVersion, RequestCode, ResponseCode


@pytest.mark.parametrize("kind", [RequestCode, ResponseCode, Language, MQVersion])
def test_no_number_has_two_names_and_they_are_in_order(kind):
    members = list(kind.__members__.values())
    assert len(set(members)) == len(members)
    assert members == sorted(members)
