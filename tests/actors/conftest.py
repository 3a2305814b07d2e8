"""Shared by the tests of the actors."""

from __future__ import annotations

import pytest

from raymq.actors.follower import session


@pytest.fixture(autouse=True)
def short_ack_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a follower's stream waits for a look at the durable end. It comes sooner here."""
    monkeypatch.setattr(session, "ACK_WAIT_MS", 20)
