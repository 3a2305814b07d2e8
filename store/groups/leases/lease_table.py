"""The leases of all groups of a shard, as a function of its log: a part of the shard's state."""

from __future__ import annotations

from collections.abc import Iterator

from .entries import EndEntry, Entry, LeaseEntry, NumberEntry, ResetEntry, keys_of
from .group_leases import GroupLeases
from .packing import pack, unpack

#: kind of the record that leases offsets of queues, and of those of snapshots
LEASE = "LEASE"
#: kind of the record that settles them
SETTLE = "SETTLE"
#: bytes of all groups; beyond it the largest one leases no further messages for the first time
LEASE_BYTES_MAX = 64 << 20
#: leases between two looks at these bytes
LOOK_LEASES = 256
#: bytes of one record of a snapshot, about
_RECORD_BYTES = 60_000


class LeaseTable:
    """Not thread-safe: the put lock guards it."""

    #: the kinds of records that it applies. Their values are packed
    packed_kinds: tuple[str, ...] = (LEASE, SETTLE)

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        #: the highest number of a lease. It belongs to the shard, so that a group that is deleted and made again
        #: recognises the leases of the former one
        self.number = 0
        self.groups: dict[str, GroupLeases] = {}
        #: groups without a record so far, for the machines that will write the first one
        self._coming: dict[str, GroupLeases] = {}
        #: leases since the last look at the memory that all take, and the group that takes too much
        self._since_look = LOOK_LEASES
        self._largest = ""

    def group(self, name: str) -> GroupLeases:
        """What a group has. One that has nothing is made with its first record."""
        return self.groups.get(name) or GroupLeases()

    def coming(self, name: str) -> GroupLeases:
        """What a group has, or will have with its first record. A group that is deleted has another one then."""
        return self.known(name) or self._coming.setdefault(name, GroupLeases())

    def known(self, name: str) -> GroupLeases | None:
        """What a group has, or what `coming` gave for it."""
        return self.groups.get(name) or self._coming.get(name)

    def forget_coming(self, name: str) -> None:
        """Forget a group without a record. Machines that know it are not used after that."""
        self._coming.pop(name, None)

    def apply_packed(self, body: bytes) -> dict[tuple[str, str], dict[int, int]]:
        """Account for one record. Returns: (group, topic) -> queue -> low mark, of those that have moved.

        A low mark is the group's committed offset. Raises: ValueError, LookupError for a malformed record.
        """
        name, entries = unpack(body)
        keys = {key for entry in entries for key in keys_of(entry)}
        before = {key: each.low for key, each in self.group(name).queues.items() if key in keys}
        for entry in entries:
            self.apply(name, entry)
            if isinstance(entry, ResetEntry):
                # Others may have committed another offset meanwhile.
                before.pop(entry.key, None)

        moved: dict[tuple[str, str], dict[int, int]] = {}
        for key, columns in self.group(name).queues.items():
            if key in keys and before.get(key) != columns.low:
                moved.setdefault((name, key[0]), {})[key[1]] = columns.low
        return moved

    def apply(self, name: str, entry: Entry) -> None:
        """Account for one entry. Raises: as `apply_packed`."""
        if isinstance(entry, NumberEntry):
            self.number = max(self.number, entry.number)
        elif isinstance(entry, EndEntry):
            self.groups.pop(name, None)
            self._coming.pop(name, None)
        else:
            if isinstance(entry, LeaseEntry):
                self.number = max(self.number, entry.number)
                self._since_look += 1
            if name not in self.groups:
                self.groups[name] = self.coming(name)
                self._coming.pop(name, None)
            self.groups[name].apply(entry)

    def drop_topic(self, topic: str) -> None:
        """Forget what groups have of a topic that is deleted."""
        for group in self.groups.values():
            group.drop_topic(topic)

    def may_grow(self, name: str) -> bool:
        """Whether a group may lease further messages for the first time. It may not if it takes most memory of all, and
        all take too much. Cost: that of all groups, once in many leases.
        """
        if self._since_look >= LOOK_LEASES:
            self._since_look = 0
            sizes = {each: group.nbytes for each, group in self.groups.items()}
            is_full = sum(sizes.values()) > LEASE_BYTES_MAX
            self._largest = max(sizes, key=sizes.__getitem__) if is_full else ""
        return not self._largest or name != self._largest

    def is_used(self, name: str, topic: str) -> bool:
        """Whether a group of workers has something of a topic that a stream would lose: a lease, a message that waits,
        or one that is settled above the low mark.
        """
        queues = self.group(name).queues
        return any(each.next > each.low for key, each in queues.items() if key[0] == topic)

    def packed_records(self) -> Iterator[tuple[str, bytes]]:
        """The whole state as kinds and bodies of records: applied to an empty table, they make this one."""
        if self.number:
            yield LEASE, pack("", [NumberEntry(self.number)])
        for name, group in self.groups.items():
            entries: list[Entry] = []
            size = 0
            for entry in group.entries():
                packed = len(pack(name, [entry]))
                if entries and size + packed > _RECORD_BYTES:
                    yield LEASE, pack(name, entries)
                    entries, size = [], 0
                entries.append(entry)
                size += packed
            if entries:
                yield LEASE, pack(name, entries)
