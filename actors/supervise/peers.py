"""The other replicas of a shard that elects its leader: messages to them, and whether each can be called."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .callable_peers import CallablePeers
from .election_peers import ElectionPeers, PeerCalls
from .elections import Elections


class Peers:
    """The threads that call the other replicas for elections. None of them is started before `start`."""

    def __init__(
        self,
        others: Iterable[int],
        connect: Callable[[int], PeerCalls],
        elections: Elections,
        *,
        take_answer: Callable[[bytes], None],
    ) -> None:
        """Args: `connect`: makes the calls of a replica. `take_answer`: takes what answers a message."""
        others = list(others)
        self._elections = elections
        self._messages = ElectionPeers(others, connect, receive=take_answer)
        self._callable = CallablePeers(others, connect)

    def start(self) -> None:
        """Let the elections reach the other replicas. Callers: before the first tick of the elections.

        The first question of the preferred replica would otherwise be lost, and repeated only after the time of an
        election.
        """
        found = self._callable
        self._elections.connect(
            send_frame=self._messages.send,
            uncallable=lambda: found.uncallable,
            on_heard=found.hear,
        )
        self._messages.start()
        found.start()

    def refused_certificates(self) -> dict[int, str]:
        """The replicas whose certificates are refused, and why."""
        return self._callable.refused_certificates()

    def close(self) -> None:
        """Call none any more. Calls under way end by themselves."""
        self._messages.close()
        self._callable.close()
