"""Every error RayMQ raises, by what the caller can do about it.

All pickle with their fields (Ray re-raises them in other processes), all travel on the wire through
`to_wire`/`from_wire`, and all carry the class attribute `retriable`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class RayMQError(Exception):
    """The root. `fields` holds the named facts of the failure (field, limit, row, path, offset...)."""

    #: True when the same call may succeed later without a change by the caller.
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        # Only reached when normal look-up failed: the named facts read as attributes.
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self).__name__, self.message, self.fields)

    def __str__(self) -> str:
        return self.message


class Rejected(RayMQError):
    """The call is wrong; nothing was stored. Fields: field, limit, row (when known)."""


class Unavailable(RayMQError):
    """Nothing was stored; the same call may work later."""

    retriable = True


class DeliveryUnknown(RayMQError):
    """The message may or may not be stored. Fields: status, append; of a send topic, queue_id and shard too.

    `Producer.resend` sends it again with the same sequence, so that it is stored once; `send` might store it twice.
    """

    retriable = True


class Fenced(RayMQError):
    """A newer producer epoch, leader epoch or incarnation exists; this one must stop."""


class OffsetOutOfRange(RayMQError):
    """The offset to read or to commit is not in the queue. Fields: min, max (the queue holds [min, max))."""


class StorageFull(RayMQError):
    """The disk has no room; nothing was stored, reads go on."""

    retriable = True


class Corrupt(RayMQError):
    """Stored bytes are damaged. Fields: path, offset, rule, expected, found. Never repaired unasked."""


class Bug(RayMQError):
    """An impossible state: our bug. The process stops."""


_KINDS: dict[str, type[RayMQError]] = {
    kind.__name__: kind
    for kind in (
        RayMQError,
        Rejected,
        Unavailable,
        DeliveryUnknown,
        Fenced,
        OffsetOutOfRange,
        StorageFull,
        Corrupt,
        Bug,
    )
}


def _rebuild(kind: str, message: str, fields: dict[str, Any]) -> RayMQError:
    return _KINDS.get(kind, RayMQError)(message, **fields)


def to_wire(error: RayMQError) -> dict[str, Any]:
    """The error as a JSON-able dict: kind, message, fields."""
    return {"kind": type(error).__name__, "message": error.message, "fields": error.fields}


def from_wire(wire: dict[str, Any]) -> RayMQError:
    """The inverse of `to_wire`; an unknown kind becomes the root error."""
    return _rebuild(wire["kind"], wire["message"], dict(wire.get("fields", {})))


def require(condition: bool, message: str, **values: Any) -> None:
    """An invariant, always checked. Raises: Bug with the values when it does not hold."""
    if not condition:
        raise broken(message, **values)


def broken(message: str, **values: Any) -> Bug:
    """The error that `require` raises, for hot paths, where the call of `require` costs more than the comparison."""
    return Bug(f"{message} ({', '.join(f'{k}={v!r}' for k, v in values.items())})", **values)
