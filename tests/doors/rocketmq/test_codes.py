"""The numbers of the protocol. tests/interop compares them with RocketMQ's own."""

from __future__ import annotations

import pytest

from raymq.doors.rocketmq.codes import (
    Language,
    MQVersion,
    RequestCode,
    ResponseCode,
    version_name,
)


@pytest.mark.parametrize("kind", [RequestCode, ResponseCode, Language, MQVersion])
def test_no_number_has_two_names_and_they_are_in_order(kind):
    members = list(kind.__members__.values())
    assert len(set(members)) == len(members)
    assert members == sorted(members)


def test_the_number_of_a_version_is_shown_as_the_version():
    for version in MQVersion:
        assert version_name(version) == version.name.removeprefix("V").replace("_", ".")
    assert version_name(MQVersion.V5_3_3 - 1) == "5.3.3-SNAPSHOT"
    assert version_name(213) == "4.0.0"
    assert version_name(212) == "212"
    assert version_name(1 << 20) == str(1 << 20)
