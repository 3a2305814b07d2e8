"""Addresses of other replicas that are out of date are found out and replaced, also without Ray."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.ray import actor_classes
from raymq.actors.ray.peer_calls import ASK_AGAIN_MS, EndpointQuestions, NotedCalls
from raymq.actors.ray.replica_files import PeerAddresses, ShardAddresses
from raymq.actors.supervise.addresses import ClusterAddresses
from raymq.store.base.errors import Corrupt, Unavailable
from tests.support.clock import ManualClock

OLD, NEW, STALE = "old:1", "new:2", "stale:3"
#: of a wait that ends at once unless the test fails
PATIENCE_S = 30.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "raymq").mkdir()
    return tmp_path


def addresses_of(root: Path) -> PeerAddresses:
    """Those of replica 0 of three, each on a node of its own."""
    return PeerAddresses(root, {1: root / "1", 2: root / "2"}, over_nodes=True)


# --- addresses ------------------------------------------------------------------------------------


def test_the_word_of_another_replica_is_tried_only_after_the_known_address_failed(
    root: Path,
) -> None:
    addresses = addresses_of(root)
    addresses.note(1, OLD, is_own=True)
    addresses.note(1, NEW, is_own=False)
    assert addresses.find(1) == OLD
    addresses.note_failure(1, OLD)
    assert addresses.find(1) == NEW


def test_clients_get_the_addresses_that_elections_know_before_those_of_the_controller(
    root: Path,
) -> None:
    peers, own = addresses_of(root), [OLD]
    addresses = ClusterAddresses(0, (0, 1, 2), ShardAddresses(peers, 0, lambda: own[-1]))
    addresses.set_routes({"0": STALE, "1": "b:1"}, {"0": {"1": STALE}, "1": {"0": "b:1"}})
    assert addresses.routes(None) == {"0": STALE, "1": "b:1"}
    addresses.note(1, NEW, is_own=True)
    assert addresses.routes(1) == {"0": NEW, "1": "b:1"}
    assert addresses.replicas() == {"0": {"0": OLD, "1": NEW}, "1": {"0": "b:1"}}
    # Its own server listens elsewhere from now on.
    own.append(NEW)
    assert (addresses.find(0), addresses.find(None)) == (NEW, None)


def test_attempts_alternate_between_two_addresses_that_fail(root: Path) -> None:
    addresses = addresses_of(root)
    addresses.note(1, OLD, is_own=True)
    addresses.note(1, STALE, is_own=False)
    tried = []
    for _ in range(4):
        endpoint = addresses.find(1)
        assert endpoint is not None
        tried.append(endpoint)
        addresses.note_failure(1, endpoint)
    assert tried == [OLD, STALE, OLD, STALE]


def test_a_replicas_own_word_replaces_an_address_that_failed_and_lasts(root: Path) -> None:
    addresses = addresses_of(root)
    addresses.note(1, OLD, is_own=True)
    addresses.note_failure(1, OLD)
    addresses.note(1, NEW, is_own=True)
    addresses.note(1, STALE, is_own=False)
    assert addresses.find(1) == NEW
    assert addresses_of(root).find(1) == NEW


def test_an_address_that_works_again_is_no_longer_replaced_by_what_others_say(root: Path) -> None:
    addresses = addresses_of(root)
    addresses.note(1, OLD, is_own=True)
    addresses.note_failure(1, OLD)
    addresses.note(1, OLD, is_own=True)
    addresses.note(1, STALE, is_own=False)
    assert addresses.find(1) == OLD


# --- connections ----------------------------------------------------------------------------------


class Network:
    """Replicas 1 and 2 at their addresses, the Ray that knows them, and the connections of replica 0."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        #: endpoint -> the replica that listens there
        self.listening: dict[str, int] = {}
        #: replica -> what Ray answers
        self.ray: dict[int, str] = {}
        #: set: Ray answers
        self.ray_answers = threading.Event()
        self.ray_answers.set()
        #: the replicas that Ray was asked for
        self.asked: list[int] = []
        self.tried: list[str] = []

        monkeypatch.setattr(actor_classes, "start_thread", lambda *_: None)
        monkeypatch.setattr(actor_classes, "keep_freed_memory", lambda: None)
        monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
        monkeypatch.setattr(actor_classes, "_transport", lambda _: self)
        monkeypatch.setattr(actor_classes, "_ask_ray", self._ask_ray)
        self.spec: Any = {
            "cluster_id": "c",
            "shard": 0,
            "replica": 0,
            "generation": 0,
            "token": "secret",
            "data_dir": str(root),
            "node": "a",
            "candidates": (0, 1, 2),
            "peers": {each: (str(root / str(each)), f"actor-{each}") for each in (1, 2)},
        }
        self.actor = actor_classes.CommitLogActor(self.spec)

    def _ask_ray(self, spec: dict[str, Any], replica: int) -> str | None:
        self.asked.append(replica)
        self.ray_answers.wait(PATIENCE_S)
        return self.ray.get(replica)

    def replica_calls(self, endpoint: str, sender: Any) -> Any:
        network = self

        class Calls:
            def elect(self, frame: bytes, timeout_s: float) -> list[bytes]:
                network.tried.append(endpoint)
                if endpoint not in network.listening:
                    raise Unavailable("connection refused")
                return [b"answer"] if network.listening[endpoint] == 1 else []

            status = elect

            def close(self) -> None:
                pass

        return Calls()

    def elect(self) -> bool:
        """Connect to replica 1 and send it a message. Returns: whether it has answered."""
        calls = self.actor._connect_peer(1)
        try:
            return bool(calls.elect(b"frame", 1.0))
        except Unavailable:
            return False

    def await_answers_of_ray(self) -> None:
        for question in self.actor._questions._questions.values():
            assert question.answered.wait(PATIENCE_S)


@pytest.fixture
def network(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    network = Network(root, monkeypatch)
    yield network
    network.ray_answers.set()


def test_after_a_failed_call_ray_is_asked_and_the_next_connection_uses_its_answer(
    network: Network, root: Path
) -> None:
    addresses_of(root).note(1, OLD, is_own=True)
    network.listening[NEW], network.ray[1] = 1, NEW
    assert not network.elect()
    network.await_answers_of_ray()
    assert network.elect()
    assert network.tried == [OLD, NEW]
    # Replication reads the file.
    assert addresses_of(root).find(1) == NEW


def test_a_ray_that_hangs_keeps_no_attempt_from_the_known_address(
    network: Network, root: Path
) -> None:
    addresses_of(root).note(1, OLD, is_own=True)
    network.ray_answers.clear()
    assert not network.elect()
    assert not network.elect()
    network.listening[OLD] = 1
    assert network.elect()
    assert network.asked == [1]


def test_without_ray_the_word_of_the_former_leader_leads_to_a_replica_that_moved(
    network: Network, root: Path
) -> None:
    addresses_of(root).note(1, OLD, is_own=True)
    network.listening[NEW] = 1
    network.actor._addresses.note(1, NEW, is_own=False)
    assert not network.elect()
    assert network.elect()
    # It has answered there, so Replication may use the address.
    assert addresses_of(root).find(1) == NEW


def test_an_address_at_which_another_replica_listens_is_not_kept(
    network: Network, root: Path
) -> None:
    addresses_of(root).note(1, OLD, is_own=True)
    network.listening[NEW] = 2
    network.actor._addresses.note(1, NEW, is_own=False)
    assert not network.elect()
    assert not network.elect()
    assert network.tried == [OLD, NEW]
    assert addresses_of(root).find(1) == OLD


def test_published_rows_of_the_shard_are_tried_after_a_failure(
    network: Network, root: Path
) -> None:
    addresses_of(root).note(1, OLD, is_own=True)
    network.listening[NEW] = 1
    network.actor.set_routes({}, {"0": {"0": "self:0", "1": NEW}, "1": {"1": STALE}})
    assert not network.elect()
    assert network.elect()


def test_a_known_replica_needs_no_ray(network: Network, root: Path) -> None:
    addresses_of(root).note(1, OLD, is_own=True)
    network.listening[OLD] = 1
    assert network.elect()
    assert network.asked == []


def test_replication_asks_ray_beside_each_attempt_and_uses_the_answer_for_the_next(
    network: Network, root: Path
) -> None:
    addresses_of(root).note(1, OLD, is_own=True)
    network.ray[1] = NEW
    network.ray_answers.clear()
    satellite = actor_classes.ReplicationActor(network.spec | {"role": "replication"})
    assert satellite._peer_endpoint(1) == OLD
    network.ray_answers.set()
    assert satellite._questions._questions[1].answered.wait(PATIENCE_S)
    assert satellite._peer_endpoint(1) == NEW


def test_bytes_that_are_damaged_there_too_do_not_make_an_address_doubtful() -> None:
    class Damaged:
        def log_units(self, *_: Any) -> None:
            raise Corrupt("damaged here, too")

    failures: list[bool] = []
    calls = NotedCalls(
        Damaged(), note_answer=lambda: None, note_failure=lambda: failures.append(True)
    )
    with pytest.raises(Corrupt):
        calls.log_units(0, 1, 1.0)
    assert failures == []


# --- questions ------------------------------------------------------------------------------------


class Questions:
    """Questions to a Ray that gives `answer`, and what they asked and noted."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.asked: list[int] = []
        self.noted: list[tuple[int, str]] = []
        self.answer: str | Exception | None = NEW
        self.questions = EndpointQuestions(
            self._ask, lambda *answer: self.noted.append(answer), clock=self.clock
        )

    def _ask(self, replica: int) -> str | None:
        self.asked.append(replica)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_question_that_is_waited_for_is_asked_each_time() -> None:
    case = Questions()
    case.answer = None
    assert case.questions.ask(1, PATIENCE_S) is None
    case.answer = NEW
    assert case.questions.ask(1, PATIENCE_S) == NEW
    assert case.noted == [(1, NEW)]


def test_a_replica_that_stays_away_is_not_asked_for_at_each_failure() -> None:
    case = Questions()
    assert case.questions.ask(1, PATIENCE_S) == NEW
    case.questions.begin(1)
    assert case.asked == [1]
    case.clock.advance(ASK_AGAIN_MS)
    case.questions.begin(1)
    # It joins the question under way, or asks once more.
    case.questions.ask(1, PATIENCE_S)
    assert case.asked[:2] == [1, 1]


def test_an_error_of_ray_ends_the_question_and_not_those_after_it() -> None:
    case = Questions()
    case.answer = OSError("no connection")
    assert case.questions.ask(1, PATIENCE_S) is None
    case.answer = NEW
    assert case.questions.ask(1, PATIENCE_S) == NEW
