"""The id of a half message: a text by which any producer of the cluster ends it."""

from __future__ import annotations

from typing import NamedTuple

from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.base.format import check_group_name

#: digits of the cluster's id: a text of another cluster must end no half message of this one
CLUSTER_DIGITS = 8
_FORM = "CLUSTER-SHARD-OFFSET-PLACE-GROUP"


class HalfId(NamedTuple):
    """Where a half message is, and which producer group has prepared it."""

    #: the first digits of the cluster's id
    cluster: str
    shard: int
    #: in the queue of half messages of its shard
    offset: int
    #: of its record in the log
    physical_offset: int
    group: str

    @property
    def text(self) -> str:
        """The id as programs keep it."""
        return "-".join(map(str, self))

    @classmethod
    def of(cls, text: object, cluster_id: str) -> HalfId:
        """The id that a program has kept. Raises: Rejected for another text, and for one of another cluster."""
        parts = text.split("-", 4) if isinstance(text, str) else []
        if len(parts) != len(cls._fields):
            raise _not_an_id(text)
        cluster, *numbers, group = parts
        try:
            shard, offset, place = map(_number, numbers)
            check_group_name(group)
        except (RayMQError, ValueError):
            raise _not_an_id(text) from None

        if cluster != cluster_id[:CLUSTER_DIGITS]:
            raise Rejected(
                f"half message {text} is one of the cluster {cluster}..., and this is {cluster_id}: end it with a "
                "producer of that cluster",
                field="half_id",
                limit=cluster_id[:CLUSTER_DIGITS],
                found=cluster,
            )
        return cls(cluster, shard, offset, place, group)


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 19:
        raise ValueError(text)
    return int(text)


def _not_an_id(text: object) -> Rejected:
    return Rejected(
        f"{text!r} is not the id of a half message: give the `id` that `send_half` or a check has named",
        field="half_id",
        limit=_FORM,
        found=text if isinstance(text, str) else type(text).__name__,
    )
