"""The groups that this shard coordinates, as a function of its log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .members import (
    GROUP,
    MEMBER,
    Group,
    GroupFacts,
    dated,
    group_value,
    members_values,
    read_group,
    read_members,
)


class GroupTable:
    """Groups and their members. Not thread-safe: the put lock guards it."""

    #: the kinds of records that it applies
    kinds: tuple[str, ...] = (GROUP, MEMBER)

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        #: the highest number that was given. It belongs to the shard: a deleted group does not lower it
        self.number = 0
        self.groups: dict[str, Group] = {}

    def apply(self, kind: str, value: Mapping[str, Any]) -> None:
        """Account for one record. Raises: ValueError, LookupError or TypeError for a malformed one."""
        self.number = max(self.number, int(value["number"]))
        if "group" not in value:
            return
        name = str(value["group"])
        known = self.groups.get(name, Group())
        changed_ms = max(known.changed_ms, int(value.get("at", 0)))
        if kind == GROUP:
            facts = read_group(value)
            if facts is None:
                self.groups.pop(name, None)
            else:
                self.groups[name] = known._replace(facts=facts, changed_ms=changed_ms)
            return

        changed, gone = read_members(value)
        members = {**known.members, **changed}
        for member_id in gone:
            members.pop(member_id, None)
        former = tuple(map(str, value.get("former", known.former)))
        self.groups[name] = Group(known.facts, members, former, changed_ms)

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The whole state as records: applied to an empty table, they make this one."""
        if self.number:
            yield GROUP, {"number": self.number}
        for name, group in self.groups.items():
            yield GROUP, dated(group_value(name, group.facts, self.number), group.changed_ms)
            if group.members or group.former:
                values = members_values(name, group.members, (), self.number, group.former)
                yield from ((MEMBER, value) for value in values)

    def facts(self, name: str) -> GroupFacts:
        """The facts of a group, also of one that does not exist yet."""
        return self.groups[name].facts if name in self.groups else GroupFacts()
