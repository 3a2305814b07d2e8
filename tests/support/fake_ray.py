"""A Ray without processes: the few functions that cluster/deploy/actor_*.py use, over plain objects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.cluster.deploy import owned_ray, ray_host
from raymq.cluster.deploy.ray_host import RayTarget
from raymq.cluster.operations import context
from raymq.store.base.clock import Clock


class RayError(Exception):
    """ray.exceptions.RayError"""


class GetTimeoutError(RayError):
    """ray.exceptions.GetTimeoutError"""


class RayActorError(RayError):
    """ray.exceptions.RayActorError"""


class RayTaskError(RayError):
    """ray.exceptions.RayTaskError"""


class FakeActor:
    """One actor: answers by role. Every method is `actor.method.remote(...)`."""

    def __init__(self, ray: FakeRay, name: str, role: str, spec: dict[str, Any]) -> None:
        self.ray = ray
        self.name = name
        self.role = role
        self.spec = spec
        #: what `ready` answers, one after the other. The last one stays
        self.states: list[Any] = [
            {
                "state": "RUNNING",
                "endpoint": f"127.0.0.1:{7000 + spec.get('shard', 0)}",
                "error": None,
                "mode": "leader" if spec.get("replica") == 0 else "follower",
                "epoch": 1,
                "missing_roles": [],
                "pid": 1,
                "is_complete": True,
                "confirmed": 0,
            }
        ]
        self.routes: dict[str, str] | None = None
        self.replicas: dict[str, dict[str, str]] | None = None
        #: of `call`: (operation, arguments)
        self.operations: list[tuple[str, dict[str, Any]]] = []
        self.close_failure: Exception | None = None
        self.status_failure: Exception | None = None

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: lambda: getattr(self, f"on_{method}")(*args))

    def on_ready(self) -> Any:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return state

    def on_status(self) -> dict[str, Any]:
        if self.status_failure is not None:
            raise self.status_failure
        return {
            "cluster_id": self.spec["cluster_id"],
            "flush": self.spec["flush"],
            "endpoint": f"{'tls://' if self.spec['tls'] else ''}127.0.0.1:{7000 + self.spec['shard']}",
        }

    def on_credentials(self) -> dict[str, Any]:
        names = ("cluster_id", "shards", "replicas", "token", "ca", "placement")
        return {name: self.spec[name] for name in names}

    def on_set_routes(self, routes: dict[str, str], replicas: dict[str, dict[str, str]]) -> None:
        self.routes, self.replicas = routes, replicas

    def on_call(self, cluster_id: str, op: str, args: dict[str, Any]) -> dict[str, Any]:
        assert cluster_id == self.spec["cluster_id"]
        self.operations.append((op, args))
        answers: dict[str, Any] = {"routes": self.routes, "replicas": self.replicas}
        return answers.get(op) or {}

    def on_close(self, timeout_s: float | None = None) -> None:
        self.ray.events.append(("close", self.name))
        if self.close_failure is not None:
            raise self.close_failure


class JumpingClock(Clock):
    """Sleeps in no time at all."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic_ms(self) -> int:
        return int(self.now)

    def monotonic(self) -> float:
        return self.now / 1000

    def sleep_ms(self, ms: float) -> None:
        self.now += ms


def install(fake: FakeRay, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Let start and stop find this Ray, and no other one."""

    @contextlib.contextmanager
    def session(target: RayTarget, timeout_s: float | None = None, **options: Any) -> Iterator[Any]:
        yield fake

    def no_own_ray(*args: Any, **options: Any) -> Any:
        raise AssertionError("the test's Ray is there; none is to be started")

    monkeypatch.setattr(ray_host, "session", session)
    monkeypatch.setattr(owned_ray, "start_owned", no_own_ray)
    monkeypatch.setattr(ray_host, "_listens", lambda address: True)
    monkeypatch.setattr(context, "Clock", JumpingClock)
    monkeypatch.setenv("RAYMQ_HOME", str(home))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


class FakeRay:
    """The `ray` module."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        GetTimeoutError=GetTimeoutError,
        RayActorError=RayActorError,
        RayTaskError=RayTaskError,
    )

    def __init__(self, labels: dict[str, str] | None = None) -> None:
        self.actors: dict[str, FakeActor] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[str, str]] = []
        #: the arguments of `ray.method`, and of the last `ray.remote(...)`
        self.methods: dict[str, dict[str, Any]] = {}
        self.declared: dict[str, Any] = {}
        #: of this process's node, n1
        self.labels = labels or {}
        #: the other nodes by their ids: their labels
        self.others: dict[str, dict[str, str]] = {}
        #: called with every new actor, to prepare its answers
        self.on_create: Callable[[FakeActor], None] = lambda actor: None

    def method(self, **options: Any) -> Any:
        def mark(function: Any) -> Any:
            self.methods[function.__name__] = options
            return function

        return mark

    def remote(self, shell: type | None = None, **declared: Any) -> Any:
        if shell is None:
            self.declared = declared
            return self.remote

        def create(options: dict[str, Any], spec: dict[str, Any]) -> FakeActor:
            name = options["name"]
            if name not in self.actors:
                self.actors[name] = FakeActor(self, name, spec["role"], spec)
                self.options[name] = {**options, "shell": shell.__name__}
                self.on_create(self.actors[name])
            return self.actors[name]

        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda spec: create(options, spec))
        )

    def get_actor(self, name: str, namespace: str) -> FakeActor:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def get(self, calls: Any, timeout: float) -> Any:
        return [call() for call in calls] if isinstance(calls, list) else calls()

    def kill(self, actor: FakeActor, no_restart: bool) -> None:
        self.events.append(("kill", actor.name))
        del self.actors[actor.name]

    @property
    def util(self) -> Any:
        """ray.util"""
        names = [{"name": name, "namespace": "raymq"} for name in self.actors]
        return SimpleNamespace(list_named_actors=lambda all_namespaces: names)

    def nodes(self) -> list[dict[str, Any]]:
        facts = {"n1": self.labels, "n2": {}, **self.others}
        return [
            {"NodeID": name, "Labels": labels, "Alive": True, "NodeManagerAddress": "127.0.0.1"}
            for name, labels in facts.items()
        ]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "n1", gcs_address="10.0.0.1:6379")
