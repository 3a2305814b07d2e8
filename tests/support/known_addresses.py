"""The addresses of a shard's replicas, as a test knows them."""

from __future__ import annotations


class KnownAddresses:
    """A `PeerAddressBook` over a dictionary, which a test may fill later."""

    def __init__(self, known: dict[int, str] | None = None) -> None:
        #: replica -> endpoint
        self.known: dict[int, str] = {} if known is None else known

    def find(self, replica: int) -> str | None:
        return self.known.get(replica)

    def note(self, replica: int, endpoint: str, *, is_own: bool) -> None:
        return
