"""Checks of what the members of consumer groups send, before any of it is used."""

from __future__ import annotations

import re
from typing import Any

from raymq.store.base.errors import Rejected
from raymq.store.base.format import check_group_name
from raymq.store.groups.foreign_members import (
    CLIENT_CHARS_MAX,
    FOREIGN_CLIENTS_MAX,
    FOREIGN_GROUPS_MAX,
    ForeignClient,
)
from raymq.store.groups.heartbeat import REPLACES_MAX, Beat, unpack_beat
from raymq.store.groups.members import TOPICS_MAX
from raymq.store.state.topics import QUEUES_MAX

from .call_arguments import (
    check_integer,
    check_name,
    check_offsets,
    check_selector,
    shown,
    wrong_value,
)

#: heartbeats in one call
BEATS_MAX = 4_096
#: of the texts that a member says of itself
TEXT_CHARS_MAX = 255
#: milliseconds
SESSION_TIMEOUT_MS = (1_000, 30 * 60_000)
REVOKE_TIMEOUT_MS = (0, 60 * 60_000)

_MEMBER_ID = re.compile(r"[0-9a-f]{32}\Z")
_BEAT_FIELDS = {"group", "member", "version", "owned", "join", "leaving", "keeps_place"}
_JOIN_FIELDS = {
    "topics",
    "pattern",
    "instance",
    "client",
    "session_ms",
    "revoke_ms",
    "kind",
    "filter",
    "again",
}


def check_beats(beats: object) -> list[tuple[str, Beat]]:
    """Heartbeats, each with its group. Raises: Rejected for a malformed one: none is taken then."""
    if type(beats) is not list or not 1 <= len(beats) <= BEATS_MAX:
        advice = f"give a list of 1 to {BEATS_MAX} heartbeats"
        raise wrong_value("beats", beats, advice, f"1..{BEATS_MAX}")
    return [_check_beat(each) for each in beats]


def _check_beat(beat: object) -> tuple[str, Beat]:
    fields = _object("beats", beat, _BEAT_FIELDS)

    group = fields.get("group")
    check_group_name(group)  # type: ignore[arg-type]
    check_member(fields.get("member"))
    check_integer("version", fields.get("version", 0))
    for name in ("leaving", "keeps_place"):
        if type(fields.get(name, False)) is not bool:
            raise wrong_value(name, fields[name], "use true or false", "bool")
    if fields.get("owned") is not None:
        _check_grants(fields["owned"])
    if fields.get("join") is not None:
        _check_join(fields["join"])
    return str(group), unpack_beat(fields)


def check_member(member_id: object) -> str:
    """The id of a member. Raises: Rejected unless it is 32 hexadecimal digits."""
    if type(member_id) is not str or not _MEMBER_ID.match(member_id):
        advice = "give 32 hexadecimal digits, random ones for each member"
        raise wrong_value("member", member_id, advice, "32 hexadecimal digits")
    return member_id


def check_queues(queues: object) -> list[tuple[str, int]]:
    """Queues as {topic: [queue ids]}. Raises: Rejected naming the field."""
    advice = f"give queue ids of 1 to {TOPICS_MAX} topics"
    if type(queues) is not dict or not 1 <= len(queues) <= TOPICS_MAX:
        raise wrong_value("queues", queues, advice, TOPICS_MAX)
    found = []
    for topic, queue_ids in queues.items():
        check_name("queues", topic)
        if type(queue_ids) is not list or len(queue_ids) > QUEUES_MAX:
            raise wrong_value("queues", queue_ids, advice, QUEUES_MAX)
        found += [(topic, check_integer("queues", each, 0, QUEUES_MAX - 1)) for each in queue_ids]
    return found


def check_clients(clients: object) -> dict[int, str | None]:
    """queue -> id of a client; empty: it is not known; None: it is an operator. Raises: Rejected naming the field."""
    if type(clients) is not dict or len(clients) > QUEUES_MAX:
        advice = f"give a client for each of at most {QUEUES_MAX} queues"
        raise wrong_value("clients", clients, advice, QUEUES_MAX)
    for client in clients.values():
        if client is not None and (type(client) is not str or len(client) > TEXT_CHARS_MAX):
            advice = f"give texts of at most {TEXT_CHARS_MAX} characters"
            raise wrong_value("clients", client, advice, TEXT_CHARS_MAX)
    if not clients:
        return {}
    numbered = dict.fromkeys(clients, 0)
    queues = check_offsets(numbered, field="clients")
    return dict(zip(queues, clients.values(), strict=True))


def check_foreign_groups(groups: object) -> dict[str, list[ForeignClient]]:
    """group -> the clients of another protocol that consume in it, each as a list of its fields.

    Raises: Rejected naming the field.
    """
    if type(groups) is not dict or len(groups) > FOREIGN_GROUPS_MAX:
        advice = f"give the clients of at most {FOREIGN_GROUPS_MAX} groups"
        raise wrong_value("groups", groups, advice, FOREIGN_GROUPS_MAX)
    found: dict[str, list[ForeignClient]] = {}
    for group, clients in groups.items():
        check_group_name(group)
        if type(clients) is not list or len(clients) > FOREIGN_CLIENTS_MAX:
            advice = f"give a list of at most {FOREIGN_CLIENTS_MAX} clients"
            raise wrong_value("groups", clients, advice, FOREIGN_CLIENTS_MAX)
        found[group] = [_foreign_client(each) for each in clients]
    return found


def _foreign_client(fields: object) -> ForeignClient:
    """A client as a list of its fields. Raises: Rejected naming the field."""
    names = ForeignClient._fields
    if type(fields) is not list or len(fields) != len(names):
        raise wrong_value("groups", fields, f"give {', '.join(names)} of a client", len(names))
    client, address, language, version, since_ms = fields
    for text in (client, address, language, version):
        if type(text) is not str or len(text) > CLIENT_CHARS_MAX:
            advice = f"give texts of at most {CLIENT_CHARS_MAX} characters"
            raise wrong_value("groups", text, advice, CLIENT_CHARS_MAX)
    if not client:
        raise wrong_value("groups", client, "give the id of each client", 1)
    since_ms = check_integer("groups", since_ms)
    return ForeignClient(client, address, language, version, since_ms)


def check_reset(offsets: object) -> dict[str, dict[int, int]]:
    """Offsets that were set, as {topic: {queue id: offset}}. Raises: Rejected naming the field."""
    if type(offsets) is not dict or len(offsets) > TOPICS_MAX:
        raise wrong_value("offsets", offsets, f"give at most {TOPICS_MAX} topics", TOPICS_MAX)
    found = {}
    for topic, own in offsets.items():
        check_name("offsets", topic)
        found[topic] = check_offsets(own)
    return found


def _check_grants(grants: object) -> None:
    advice = "give {topic: [queue ids, numbers]}, both of one length"
    if type(grants) is not dict or len(grants) > TOPICS_MAX:
        raise wrong_value("owned", grants, advice, TOPICS_MAX)
    for topic, columns in grants.items():
        check_name("owned", topic)
        is_pair = type(columns) is list and len(columns) == 2
        if not is_pair or not all(type(each) is list for each in columns):
            raise wrong_value("owned", columns, advice, "[queue ids, numbers]")
        queues, numbers = columns
        if len(queues) != len(numbers) or len(queues) > QUEUES_MAX:
            raise wrong_value("owned", columns, advice, QUEUES_MAX)
        for queue_id in queues:
            check_integer("owned", queue_id, 0, QUEUES_MAX - 1)
        for number in numbers:
            check_integer("owned", number)


def _check_join(join: object) -> None:
    fields = _object("join", join, _JOIN_FIELDS | {"replaces"})
    missing = sorted(_JOIN_FIELDS - fields.keys())
    if missing:
        raise wrong_value(
            "join", join, f"add {', '.join(missing)}", ", ".join(sorted(_JOIN_FIELDS))
        )

    topics = fields["topics"]
    if type(topics) is not list or len(topics) > TOPICS_MAX:
        advice = f"give a list of at most {TOPICS_MAX} topics"
        raise wrong_value("topics", topics, advice, TOPICS_MAX)
    for topic in topics:
        check_name("topics", topic)

    for name in ("pattern", "instance", "client", "kind"):
        text = check_name(name, fields[name])
        if len(text) > TEXT_CHARS_MAX:
            advice = f"use at most {TEXT_CHARS_MAX} characters"
            raise wrong_value(name, text, advice, TEXT_CHARS_MAX)

    if bool(topics) == bool(fields["pattern"]):
        raise wrong_value(
            "topics", topics, "give topics, or a pattern of their names", "one of both"
        )
    if fields["kind"] != "stream":
        raise wrong_value("kind", fields["kind"], "this version has stream alone", "stream")
    if type(fields["again"]) is not bool:
        raise wrong_value("again", fields["again"], "use true or false", "bool")
    replaces = fields.get("replaces", [])
    if type(replaces) is not list or len(replaces) > REPLACES_MAX:
        advice = f"give a list of at most {REPLACES_MAX} member ids"
        raise wrong_value("replaces", replaces, advice, REPLACES_MAX)
    for member_id in replaces:
        check_member(member_id)
    check_integer("session_timeout_s", fields["session_ms"], *SESSION_TIMEOUT_MS)
    check_integer("revoke_timeout_s", fields["revoke_ms"], *REVOKE_TIMEOUT_MS)
    if fields["filter"] != ["", ""]:
        check_selector(fields["filter"])


def _object(field: str, value: object, known: set[str]) -> dict[str, Any]:
    """The fields of an object. Raises: Rejected for something else, and for a field that is not known."""
    if type(value) is not dict:
        raise wrong_value(field, value, "give an object", "an object")
    for name in value:
        if name not in known:
            raise Rejected(
                f"{field} has no field {shown(name)}; its fields: {', '.join(sorted(known))}",
                field=field,
                limit=", ".join(sorted(known)),
                found=shown(name),
            )
    return value
