"""The operations of a shard as a table: name -> the arguments that it takes, and the function that runs it.

Arguments come over the network. The table checks each by itself, before the operation looks at any of them. What
depends on the shard, such as a topic that exists, the operation checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from raymq.store.base.errors import Rejected, Unavailable

from .call_arguments import check_integer, shown, wrong_value

#: takes the field's name and a value. Returns: the checked value. Raises: Rejected with field, limit and found
ArgumentCheck = Callable[[str, Any], Any]


class Argument(NamedTuple):
    """One argument of an operation."""

    check: ArgumentCheck
    #: it may be missing
    is_optional: bool = False
    #: how errors call it; empty: by its own name
    field: str = ""


class Operation(NamedTuple):
    """One operation. Its function takes the scope, then the arguments by name, and returns a JSON object."""

    run: Callable[..., dict[str, Any]]
    arguments: Mapping[str, Argument]

    def call(self, scope: Any, op: str, args: Any) -> dict[str, Any]:
        """Run the operation. Args: `scope`: what its function works on. Raises: Rejected for malformed arguments."""
        return self.run(scope, **check_arguments(op, self.arguments, args))


#: operations by name
OperationTable = Mapping[str, Operation]


def operation(
    run: Callable[..., dict[str, object]], **arguments: Argument | ArgumentCheck
) -> Operation:
    """A row of a table. Args: `arguments`: a check alone is that of an argument that must be given."""
    found = {
        name: each if isinstance(each, Argument) else Argument(each)
        for name, each in arguments.items()
    }
    return Operation(run, found)


def merge(*tables: OperationTable) -> dict[str, Operation]:
    """All tables as one. Raises: ValueError for a name that two of them have."""
    merged: dict[str, Operation] = {}
    for table in tables:
        twice = merged.keys() & table.keys()
        if twice:
            raise ValueError(f"operations with the same name: {sorted(twice)}")
        merged.update(table)
    return merged


def call_leader(table: OperationTable, scope: object, op: str, args: object) -> dict[str, object]:
    """Run an operation of the leader. Raises: Rejected for an unknown one; Unavailable when the disk refuses."""
    found = table.get(op)
    if found is None:
        raise Rejected(
            f"unknown operation {shown(op)}",
            field="op",
            limit="a known operation",
            found=shown(op),
        )
    try:
        return found.call(scope, op, args)
    except OSError as error:
        # The operation's record could not be appended.
        raise Unavailable(f"{op}: {error}", field="store") from error


def check_arguments(op: str, wanted: Mapping[str, Argument], args: object) -> dict[str, object]:
    """The checked arguments of an operation. Raises: Rejected for one that is wrong, missing or unknown."""
    if type(args) is not dict:
        raise wrong_value("args", args, f"give the arguments of {op} as an object", "an object")
    names = ", ".join(wanted) or "none"
    for name in args:
        if name not in wanted:
            raise Rejected(
                f"{op} has no argument {shown(name)}; its arguments: {names}",
                field="args",
                limit=names,
                found=shown(name),
            )

    checked = {}
    for name, argument in wanted.items():
        field = argument.field or name
        if name in args:
            checked[name] = argument.check(field, args[name])
        elif not argument.is_optional:
            raise Rejected(
                f"{op} needs the argument {name!r}; its arguments: {names}",
                field=field,
                limit=names,
                found="nothing",
            )
    return checked


# --- checks ---------------------------------------------------------------------------------------


def integer(least: int = 0, most: int | None = None) -> ArgumentCheck:
    """An int in a range. Without `most`: up to the largest number of RocketMQ."""
    if most is None:
        return lambda field, value: check_integer(field, value, least)
    return lambda field, value: check_integer(field, value, least, most)


def flag(field: str, value: object) -> bool:
    """True or False. Raises: Rejected."""
    if type(value) is not bool:
        raise wrong_value(field, value, "use true or false", "bool")
    return value


def text(most: int) -> ArgumentCheck:
    """A text of 1 to so many characters."""

    def check_text(field: str, value: object) -> str:
        if type(value) is not str or not 1 <= len(value) <= most:
            raise wrong_value(field, value, f"give a text of 1 to {most} characters", most)
        return value

    return check_text


def choice(*choices: str) -> ArgumentCheck:
    """One of some texts."""

    def check_choice(field: str, value: object) -> str:
        if type(value) is not str or value not in choices:
            limit = ", ".join(choices)
            raise wrong_value(field, value, f"use {' or '.join(choices)}", limit)
        return value

    return check_choice


def integers(check: ArgumentCheck, *, least: int = 0, most: int) -> ArgumentCheck:
    """A list of so many ints. Args: `check`: of each."""

    def check_all(field: str, value: object) -> list[int]:
        if type(value) is not list or not least <= len(value) <= most:
            advice = f"give a list of {least} to {most} numbers"
            raise wrong_value(field, value, advice, f"{least}..{most}")
        return [check(field, each) for each in value]

    return check_all


def unnamed(check: Callable[[object], object]) -> ArgumentCheck:
    """A check that names its field itself."""
    return lambda field, value: check(value)


def optional(check: ArgumentCheck, field: str = "") -> Argument:
    """An argument that may be missing, or None."""
    return Argument(
        lambda name, value: None if value is None else check(name, value),
        is_optional=True,
        field=field,
    )
