"""Where the servers for foreign protocols ("doors") of a shard's replicas listen, as one replica has heard lately.

Each door says it again and again, to all replicas of the shard that it knows. Nothing of it is stored, and one that
ends is forgotten.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from raymq.store.base.clock import Clock

#: the protocols that have a server
PROTOCOLS = ("rocketmq",)
#: how long the word of a door holds: three times as long as it takes until the next one
HEARD_MS = 30_000


#: an IP address, and a port
HostPort = tuple[str, int]


class Door(NamedTuple):
    """What a door has said last."""

    #: where clients dial it
    address: HostPort
    #: the port of the node that it has as well, for clients that look for the cluster; None: another door has it
    node_port: int | None
    pid: int | None
    heard_ms: int


class Doors:
    """The doors of one shard. Callers: any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: (protocol, replica) -> where its door listens
        self._heard: dict[tuple[str, int], Door] = {}

    def note(
        self,
        protocol: str,
        replica: int,
        address: HostPort,
        *,
        node_port: int | None,
        pid: int | None,
    ) -> None:
        """A door has said where it listens."""
        heard_ms = self._clock.monotonic_ms()
        self._heard[protocol, replica] = Door(address, node_port, pid, heard_ms)

    def forget(self, protocol: str, replica: int) -> None:
        """A door has ended."""
        self._heard.pop((protocol, replica), None)

    def known(self) -> dict[str, dict[str, Any]]:
        """Protocol -> replica -> {"address": [IP address, port], "node_port", "pid"} of its door, see `Door`."""
        oldest_ms = self._clock.monotonic_ms() - HEARD_MS
        found: dict[str, dict[str, Any]] = {}
        for (protocol, replica), door in sorted(self._heard.copy().items()):
            if door.heard_ms >= oldest_ms:
                found.setdefault(protocol, {})[str(replica)] = {
                    "address": list(door.address),
                    "node_port": door.node_port,
                    "pid": door.pid,
                }
        return found
