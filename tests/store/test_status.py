"""The statuses of a put: RocketMQ's names, and the codes that rings and the wire carry."""

from __future__ import annotations

from raymq.store.base.status import PutStatus


def test_the_statuses_are_rocketmqs_and_keep_their_codes():
    assert len(PutStatus) == 16
    assert [PutStatus.of_code(status.code) for status in PutStatus] == list(PutStatus)
    assert PutStatus.PUT_OK.code == 0
    assert PutStatus("FLUSH_DISK_TIMEOUT") is PutStatus.FLUSH_DISK_TIMEOUT
