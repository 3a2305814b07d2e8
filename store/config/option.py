"""What is declared of each option of a store: its range, its name in RocketMQ, and when a cluster changes it.

`StoreConfig` declares each option once, by `option`. From that follow its checks, the keyword `config` of
`raymq.start`, the flag `--config` and docs/reference/configuration.md. Imports neither pyarrow nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final, Literal, TypeVar

_Value = TypeVar("_Value")

#: when another value of an option holds in a cluster
Changes = Literal["first start", "each start", "while running"]

_KEY: Final = "option"
#: the largest number of RocketMQ's int options
INT_MAX: Final = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a store."""

    name: str
    #: "int", "float", "bool", "str", or what `StoreConfig` checks itself
    kind: str
    default: Any
    #: RocketMQ's name; empty: RocketMQ has no such option
    rocketmq: str = ""
    #: the range of a number; None: no limit
    least: float | None = None
    most: float | None = None
    #: a number is a multiple of this one
    multiple_of: int = 1
    #: when another value holds in a cluster; None: a cluster does not take the option
    changes: Changes | None = None
    #: the largest value in a cluster, if that is less than `most`
    most_in_cluster: float | None = None
    #: why a cluster does not take it
    not_in_cluster: str = ""

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers."""
        return self.kind in ("int", "float")

    def range_text(self, *, in_cluster: bool = False) -> str:
        """The range of a number, or the values of a switch; empty for other kinds."""
        if self.kind == "bool":
            return "true or false"
        if not self.is_number:
            return ""
        most, least = self.largest(in_cluster=in_cluster), f"{self.least or 0:,}"
        text = f"{least} or more" if most is None else f"{least} to {most:,}"
        return text + (f", a multiple of {self.multiple_of:,}" if self.multiple_of > 1 else "")

    def largest(self, *, in_cluster: bool) -> float | None:
        """The largest value of a number; None: it has none."""
        limited = in_cluster and self.most_in_cluster is not None
        return self.most_in_cluster if limited else self.most


def option(
    default: _Value,
    *,
    rocketmq: str = "",
    least: float | None = None,
    most: float | None = None,
    multiple_of: int = 1,
    changes: Changes | None = None,
    most_in_cluster: float | None = None,
    not_in_cluster: str = "",
) -> _Value:
    """Declare a field of `StoreConfig`. Args: as the fields of `Option`."""
    facts = {
        "rocketmq": rocketmq,
        "least": least,
        "most": most,
        "multiple_of": multiple_of,
        "changes": changes,
        "most_in_cluster": most_in_cluster,
        "not_in_cluster": not_in_cluster,
    }
    return field(default=default, metadata={_KEY: facts})


def options_of(config: type) -> Mapping[str, Option]:
    """Every option that a class declares, by its name."""
    return {
        each.name: Option(
            name=each.name,
            kind=str(each.type),
            default=None if each.default is MISSING else each.default,
            **each.metadata[_KEY],
        )
        for each in fields(config)
    }
