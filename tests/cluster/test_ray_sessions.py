"""Threads of one process share its connection to Ray: the last one to leave ends it."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.cluster.deploy import ray_host
from raymq.cluster.deploy.ray_host import RayTarget, session
from raymq.store.base.errors import Rejected

TARGET = RayTarget(address="10.0.0.1:6379")


class FakeRay:
    """The connection of this process: `ray` and the function that makes it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_connected = False

    def is_initialized(self) -> bool:
        return self.is_connected

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address=TARGET.address)

    def attach(self, target: RayTarget, timeout_s: float | None, **options: Any) -> FakeRay:
        self.calls.append("connect")
        self.is_connected = True
        return self

    def shutdown(self) -> None:
        self.calls.append("disconnect")
        self.is_connected = False


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setattr(ray_host, "attach", made.attach)
    return made


def test_the_last_of_two_threads_disconnects(fake: FakeRay) -> None:
    entered, left = threading.Event(), threading.Event()

    def second() -> None:
        with session(TARGET) as found:
            assert found is fake
            entered.set()
            assert left.wait(20)
            assert fake.is_connected

    thread = threading.Thread(target=second)
    with session(TARGET):
        thread.start()
        assert entered.wait(20)
    assert fake.calls == ["connect"]
    left.set()
    thread.join()
    assert fake.calls == ["connect", "disconnect"]
    with session(TARGET):
        assert fake.calls == ["connect", "disconnect", "connect"]


def test_a_connection_that_the_program_made_stays(fake: FakeRay) -> None:
    fake.is_connected = True
    with session(TARGET), session(TARGET):
        pass
    assert fake.calls == []


def test_another_ray_is_refused_and_changes_nothing(fake: FakeRay) -> None:
    other = session(RayTarget(address="10.0.0.2:6379"))
    with session(TARGET):
        with pytest.raises(Rejected, match="this process is connected"):
            other.__enter__()
        assert fake.is_connected
    assert fake.calls == ["connect", "disconnect"]
