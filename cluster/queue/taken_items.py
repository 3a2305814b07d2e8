"""Reads the items that a get was assigned, and decodes each by the codec that it names."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raymq.client.messages import codecs
from raymq.store.base.errors import Corrupt, OffsetOutOfRange, RayMQError, Rejected

from .queue_client import Items, QueueClient

#: field of an error about a damaged item
_ITEM = "item"


@dataclass
class BadItem:
    """An item that was taken from the queue and cannot be returned."""

    error: RayMQError


class TakenItems:
    """Reads and decodes items of one queue for one handle.

    Args: `codec`: that of the handle. `accept`: names of the others that it decodes.
    """

    def __init__(self, queue: str, codec: codecs.Codec, accept: tuple[str, ...]) -> None:
        self._queue = queue
        self._codec = codec
        self._accept = accept

    def pieces(self, client: QueueClient, first: int, count: int) -> list[Items | BadItem]:
        """Read `count` assigned items from offset `first`, in one or more runs.

        One that is damaged or deleted takes no other with it.

        Raises: as `QueueClient.read`; the request is repeated.
        """
        try:
            return [*client.read(first, count)]
        except Corrupt as error:
            if count == 1:
                return [BadItem(self._damaged(error))]
        except OffsetOutOfRange as error:
            if count == 1:
                # It was deleted before it was read.
                return [BadItem(error)]

        found: list[Items | BadItem] = []
        for offset in range(first, first + count):
            for part in self.pieces(client, offset, 1):
                if not (found and _are_deleted(found[-1], part)):
                    found.append(part)
        return found

    def _damaged(self, error: Corrupt) -> Corrupt:
        return Corrupt(
            f"{error.message}. The item was taken from queue {self._queue!r} and is still in the topic",
            **{**error.fields, "field": _ITEM},
        )

    def decode(self, pieces: list[Items | BadItem]) -> list[Any | BadItem]:
        """Decode items by the codec that each names. In the place of one that cannot be decoded is its error."""
        items: list[Any | BadItem] = []
        for piece in pieces:
            if isinstance(piece, BadItem):
                items.append(piece)
                continue
            row = 0
            # Neighbours usually share a codec.
            for name, run in itertools.groupby(piece.codecs):
                decode = self._decoder_of(name)
                for _ in run:
                    try:
                        items.append(decode(piece.bodies[row]))
                    except Exception as error:
                        # A codec of the user's own may raise anything.
                        items.append(BadItem(self._undecodable(piece.first + row, error)))
                    row += 1
        return items

    def _undecodable(self, offset: int, error: Exception) -> Rejected:
        why = Rejected(
            f"the item at offset {offset} of {self._queue!r} cannot be decoded: {error}. It was taken from the "
            "queue and is still in the topic",
            field="codec",
            limit=self._codec.name,
            offset=offset,
        )
        why.__cause__ = error
        return why

    def _decoder_of(self, name: str | None) -> Callable[[bytes], object]:
        """Decodes an item that names this codec. Raises, for each item: Rejected if this handle does not accept it."""
        try:
            return self._codec_of(name).decode
        except Rejected as error:
            refusal = error

        def refuse(_: bytes) -> object:
            raise refusal

        return refuse

    def _codec_of(self, name: str | None) -> codecs.Codec:
        """The codec that an item names, if this handle accepts it. Raises: Rejected."""
        if name == self._codec.name:
            return self._codec
        plain = codecs.BytesCodec.name
        if name is None or name == plain or name in self._accept:
            return codecs.codec(name or plain)
        allowed = ", ".join(dict.fromkeys((self._codec.name, *self._accept, plain)))
        raise Rejected(
            f"it names codec {name!r}, and this handle takes {allowed}; open the queue with accept=[{name!r}]",
            field="codec",
            limit=allowed,
        )


def _are_deleted(before: Items | BadItem, part: Items | BadItem) -> bool:
    """Whether both stand for items that were deleted: one error says so."""
    return all(
        isinstance(each, BadItem) and isinstance(each.error, OffsetOutOfRange)
        for each in (before, part)
    )
