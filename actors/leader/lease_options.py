"""Which options the workers of each group have on this shard: all of a group have the same ones."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from raymq.actors.api.leases import LeaseCall
from raymq.store.base.errors import Rejected
from raymq.store.groups.leases.options import LeaseOptions
from raymq.store.records.requests import MessageSelector

#: a session that is silent for so long, or for its lease if that is longer, keeps no others from other options
SILENT_MS = 30_000


class SharedOptions(NamedTuple):
    """What all workers of a group have in common."""

    options: LeaseOptions
    #: None: they want all messages
    selector: MessageSelector | None


@dataclass
class _GroupUse:
    """The options of a group, and its sessions that have them."""

    options: LeaseOptions
    selector: MessageSelector | None
    #: session -> when it asked last
    sessions: dict[bytes, int] = field(default_factory=dict)


class WorkerOptions:
    """The options of the workers that ask this leader. Not thread-safe. A new leader learns them again."""

    def __init__(self) -> None:
        self._uses: dict[str, _GroupUse] = {}

    @property
    def groups(self) -> set[str]:
        """The groups of these workers."""
        return set(self._uses)

    def note(self, call: LeaseCall, now_ms: int) -> bool:
        """Take a call into account. Returns: whether the group has other options than before.

        Raises: Rejected while another session of the group has other options.
        """
        known = self._uses.get(call.group)
        if known is None or (known.options, known.selector) != (call.options, call.selector):
            if known is not None:
                self._check_unused(known, call, now_ms)
            self._uses[call.group] = known = _GroupUse(call.options, call.selector)
            known.sessions[call.session] = now_ms
            return True
        known.sessions[call.session] = now_ms
        return False

    def note_use(
        self,
        group: str,
        session: bytes,
        options: LeaseOptions,
        selector: MessageSelector | None,
        now_ms: int,
    ) -> bool:
        """A session of a group has settled messages, or asked for more time.

        Returns: whether this leader hears of the group's options for the first time.
        """
        known = self._uses.get(group)
        if known is None:
            self._uses[group] = _GroupUse(options, selector, {session: now_ms})
            return True
        if session in known.sessions or (known.options, known.selector) == (options, selector):
            known.sessions[session] = now_ms
        return False

    def end(self, group: str, session: bytes) -> None:
        """A session is over."""
        known = self._uses.get(group)
        if known is not None:
            known.sessions.pop(session, None)
            if not known.sessions:
                del self._uses[group]

    def forget_silent(self, now_ms: int) -> None:
        """Forget sessions that have not asked for long, and groups without any."""
        for group, known in list(self._uses.items()):
            limit_ms = max(SILENT_MS, known.options.lease_ms)
            known.sessions = {
                session: used_ms
                for session, used_ms in known.sessions.items()
                if now_ms - used_ms < limit_ms
            }
            if not known.sessions:
                del self._uses[group]

    def _check_unused(self, known: _GroupUse, call: LeaseCall, now_ms: int) -> None:
        """Raises: Rejected naming both, if another session has the known options."""
        limit_ms = max(SILENT_MS, known.options.lease_ms)
        others = [
            session
            for session, used_ms in known.sessions.items()
            if session != call.session and now_ms - used_ms < limit_ms
        ]
        if not others:
            return
        theirs, mine = _differences(known, call)
        raise Rejected(
            f"{len(others)} worker(s) of group {call.group} have {theirs}, and this one has {mine}: all workers of a "
            "group have the same options. Close the others first, or use another group",
            field="options",
            limit=theirs,
            found=mine,
        )


def _differences(known: _GroupUse, call: LeaseCall) -> tuple[str, str]:
    """What differs, as texts: of the group, and of a call."""
    theirs, mine = [], []
    for each in fields(LeaseOptions):
        old, new = getattr(known.options, each.name), getattr(call.options, each.name)
        if old != new:
            theirs.append(f"{each.name} {old!r}")
            mine.append(f"{each.name} {new!r}")
    if known.selector != call.selector:
        theirs.append(_shown(known.selector))
        mine.append(_shown(call.selector))
    return ", ".join(theirs), ", ".join(mine)


def _shown(selector: MessageSelector | None) -> str:
    return (
        "no filter" if selector is None else f"the filter {selector.kind} {selector.expression!r}"
    )
