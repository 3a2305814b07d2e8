"""Where the shards and replicas of a cluster listen, as far as one replica knows."""

from __future__ import annotations

from typing import Any, Protocol


class PeerAddressBook(Protocol):
    """The addresses of the replicas of this shard. They outlive the host, which a failed start makes again."""

    def find(self, replica: int) -> str | None:
        """Where a replica listens, this one included; None: it is not known."""

    def note(self, replica: int, endpoint: str, *, is_own: bool) -> None:
        """Note where a replica listens. Args: `is_own`: that replica itself has said it."""


class _NoAddresses:
    """The book of a replica that knows no address."""

    def find(self, replica: int) -> str | None:
        return None

    def note(self, replica: int, endpoint: str, *, is_own: bool) -> None:
        return


NO_ADDRESSES: PeerAddressBook = _NoAddresses()


class ClusterAddresses:
    """The addresses that this replica gives to clients. Callers: any thread."""

    def __init__(self, shard: int, members: tuple[int, ...], book: PeerAddressBook) -> None:
        self._shard = str(shard)
        self._members = members
        self._book = book
        #: shard -> endpoint of its leader
        self._routes: dict[str, str] = {}
        #: shard -> replica -> endpoint
        self._replicas: dict[str, dict[str, str]] = {}

    def set_routes(
        self, routes: dict[str, str], replicas: dict[str, dict[str, str]] | None = None
    ) -> None:
        """Take the addresses of all shards, as the controller or `start` knows them."""
        self._routes = routes
        self._replicas = replicas or {}

    def find(self, replica: int | None) -> str | None:
        """Where a replica of this shard listens; None: that is not known, or there is none."""
        return None if replica is None else self._book.find(replica)

    def note(self, replica: int, endpoint: str, *, is_own: bool) -> None:
        """See `PeerAddressBook.note`."""
        self._book.note(replica, endpoint, is_own=is_own)

    def routes(self, leader: int | None) -> dict[str, object]:
        """Shard -> endpoint of its leader. Args: `leader`: that of this shard, as elections know it."""
        endpoint = self.find(leader)
        return {**self._routes} if endpoint is None else {**self._routes, self._shard: endpoint}

    def replicas(self) -> dict[str, Any]:
        """Shard -> replica -> endpoint. Of this shard also what elections know before the controller has said so."""
        known = self._replicas
        elected = {str(each): self._book.find(each) for each in self._members}
        found = {replica: endpoint for replica, endpoint in elected.items() if endpoint}
        own = self._shard
        return {**known, own: {**known.get(own, {}), **found}} if found else known
