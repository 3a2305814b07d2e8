"""Every error that RayMQ raises, by the action that it leaves to the caller.

Errors pickle with their fields, because Ray raises them again in other processes. `to_wire` and `from_wire` carry them
between clients and shards. Programs import them from `raymq.errors`.

A *kind* is a direct subclass of RayMQError: it says what the caller may do. A *case* is a subclass of a kind, by which
RayMQ's own code chooses its next step: no code reads `field`, `limit` or `found`, which are for people.
"""

from __future__ import annotations

from typing import Any, ClassVar


class RayMQError(Exception):
    """The root of all errors.

    `message` is the text. `fields` holds the named facts of the failure (field, limit, row, path, offset...), which are
    attributes too. `retriable` says whether the same call may succeed later.
    """

    #: whether the same call may succeed later without a change by the caller
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        # Called after the normal lookup failed: the named facts are attributes.
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[object, ...]:
        return from_wire, (to_wire(self),)

    def __str__(self) -> str:
        return self.message


class Rejected(RayMQError):
    """The call is wrong, and nothing was stored. Change the call. Fields: field, limit, and row if it is known."""


class Unavailable(RayMQError):
    """Nothing was stored. Repeat the same call later."""

    retriable = True


class DeliveryUnknown(RayMQError):
    """The message may or may not be stored. Fields: status, append; for a send also topic, queue_id and shard.

    `append` holds the fields of the `AppendedRows`, or None if the place of the message is unknown.

    `Producer.resend` sends the message again with the same sequence number, so that it is stored once. `send` might
    store it twice.
    """

    retriable = True


class CommitUnknown(RayMQError):
    """The transaction may or may not be committed: no shard has said so in time. Fields: shard.

    `commit()` of the same transaction asks again, and `abort()` lets it be aborted, unless it is committed.
    """

    retriable = True


class Fenced(RayMQError):
    """A newer producer epoch, leader epoch or incarnation exists. The caller must stop: another instance took over."""


class OffsetOutOfRange(RayMQError):
    """The queue does not hold the offset to read or to commit. Fields: min, max (the queue holds [min, max)).

    After a read, `seek` chooses where to continue.
    """


class StorageFull(RayMQError):
    """The disk has no room, and nothing was stored. Reads continue. Free space and repeat the call."""

    retriable = True


class Corrupt(RayMQError):
    """Stored bytes are damaged. Fields: path, offset, rule, expected, found.

    With several replicas a shard repairs its log by itself, if another replica has the bytes. Otherwise see `raymq
    store verify` and `raymq store repair`.
    """


class Bug(RayMQError):
    """A state that RayMQ's own code rules out. Please report it. The process that meets it stops."""


# --- cases ----------------------------------------------------------------------------------------


class NotLeading(Unavailable):
    """Another replica leads the shard, or none. Fields: endpoint of the leader, or None; epoch, if it is known."""


class NotServing(Unavailable):
    """This replica takes no such call: its epoch has not begun or is over, or it starts or stops. Another one may."""


class NotReached(Unavailable):
    """Nothing listens at the address of a call, which was not sent."""


class ReplicaBehind(Unavailable):
    """This replica has not confirmed yet what the caller has seen or asks for. It may soon."""


class QueueMissing(Unavailable):
    """A topic does not have a queue, or not on all shards yet. It may soon."""


class UntrustedReplica(Unavailable):
    """The certificate of this replica is not accepted, and that of another one is."""


class AnotherShard(Rejected):
    """Another shard or cluster listens at the address of the call."""


class AnotherRay(Rejected):
    """The cluster's Ray, or its Python, has another version than that of this process."""


class UntrustedServer(Rejected):
    """The certificate of a server is not accepted."""


class InstanceReplaced(Fenced):
    """A newer process of the same instance has the place of this member of a consumer group."""


class SequenceGap(Rejected):
    """The shard lacks rows of this producer before those of the call."""


class PropertiesTooLong(Rejected):
    """The properties of a message have no room in a record."""


class TopicOnOtherShards(Rejected):
    """The topic is, or has to be, on other shards than the call names. Nothing else differs. Fields: shards."""


class TopicWithOtherQueues(Rejected):
    """The topic exists with another number of queues. Fields: queues."""


class TopicMissing(Rejected):
    """The topic does not exist, or not on this shard yet."""


class TopicDeleted(Rejected):
    """The topic was deleted since the reader began; there may be another one of its name."""


class StoreDamaged(Corrupt):
    """The store cannot be opened: bytes changed, are gone, or cannot be trusted. A copy of another replica mends it."""


class Unreadable(Corrupt):
    """Stored bytes cannot be read, or their file ends before them. Fields: offset of the first one."""


class ChainDamaged(Corrupt):
    """Bytes differ from the checksum of the chain unit that they came with."""


_KIND_CLASSES: list[type[RayMQError]] = [RayMQError, *RayMQError.__subclasses__()]
#: the kinds, by their names on the wire
_KINDS = {kind.__name__: kind for kind in _KIND_CLASSES}
#: the cases, in the same way
_CASES = {case.__name__: case for kind in _KIND_CLASSES[1:] for case in kind.__subclasses__()}


def to_wire(error: RayMQError) -> dict[str, Any]:
    """The error as a JSON-able dict: kind, message, fields, and case if it is one."""
    # Ray raises an error again as a class of its own, which is a subclass.
    names = [each.__name__ for each in type(error).__mro__]
    kind = next(name for name in names if name in _KINDS)
    case = next((name for name in names if name in _CASES), None)
    wire = {"kind": kind, "message": error.message, "fields": error.fields}
    return wire if case is None else {**wire, "case": case}


def from_wire(wire: dict[str, Any]) -> RayMQError:
    """The inverse of `to_wire`. An unknown kind becomes the root error, an unknown case the error of its kind."""
    kind = _KINDS.get(wire["kind"], RayMQError)
    case = _CASES.get(wire.get("case", ""), kind)
    return (case if issubclass(case, kind) else kind)(wire["message"], **wire.get("fields", {}))


def require(condition: bool, message: str, **values: object) -> None:
    """Check an invariant. Raises: Bug with the values when it does not hold."""
    if not condition:
        raise broken(message, **values)


def broken(message: str, **values: object) -> Bug:
    """The error of `require`, for the path of every put: there the call costs more than the comparison."""
    return Bug(f"{message} ({', '.join(f'{k}={v!r}' for k, v in values.items())})", **values)
