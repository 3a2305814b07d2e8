"""RocketMQ's configuration files: imported into the log, and written back from the state.

Topics and offsets live in records of the log. A file that RocketMQ changed while it had the store open is imported
once, at the next start. At a stop the files are written from the state, so that RocketMQ finds its topics and offsets.
Fields that the log has no record for (permissions, settings of groups) stay in the files as they are.
Source: ConfigManager, TopicConfigManager, ConsumerOffsetManager, SubscriptionGroupManager, ScheduleMessageService of
RocketMQ 5.3.3, which overwrite in place. Here a crash leaves the old or the new file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from raymq.store.base import format as fmt
from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Corrupt, RayMQError
from raymq.store.base.failpoints import fail_point
from raymq.store.config.delay_levels import LEVELS_SERVICE
from raymq.store.groups.leases.entries import ResetEntry
from raymq.store.groups.leases.lease_table import SETTLE
from raymq.store.groups.leases.offsets import OFFSET_MAX
from raymq.store.groups.leases.packing import pack_checked
from raymq.store.groups.members import GROUP, GroupFacts, dated, group_value
from raymq.store.put.inner_message import ServiceProgress
from raymq.store.put.inner_put import InnerPut
from raymq.store.put.service_host import ServiceHost
from raymq.store.state import shard_state
from raymq.store.state.features import FEATURES, GROUPS_LEVEL, LEVEL, feature_level
from raymq.store.state.shard_state import INTERNAL_TOPIC, TopicInfo
from raymq.store.state.topic_schema import SCHEMA, check_schema, extends
from raymq.store.state.topics import QUEUES_MAX, is_system_topic

from . import fastjson

TOPICS = "topics.json"
CONSUMER_OFFSETS = "consumerOffset.json"
GROUPS = "subscriptionGroup.json"
LEVELS = "delayOffset.json"
#: no client of RocketMQ shall read or write these
_OWN_TOPICS = (INTERNAL_TOPIC, fmt.STAGED_TOPIC, fmt.DECISIONS_TOPIC)
NAMES = (TOPICS, CONSUMER_OFFSETS, GROUPS, LEVELS)

#: the service whose progress holds the CRCs of imported files, in the log after the records of the import
IMPORT_SERVICE = "config"
#: in raymq/meta: file name -> CRCs of the contents that RayMQ wrote into it last
WRITTEN = "config"
#: a topic may be read and written. RayMQ's own topic only has to be listed, or RocketMQ deletes its queue
_PERM_READ_WRITE, _PERM_NONE = 6, 0
#: a topic with this bit is a pattern for new ones (TBW102, the cluster's, the broker's)
_PERM_INHERIT = 1
#: topics with this attribute have queues of inner batches, which RayMQ does not have
_QUEUE_TYPE, _BATCH_QUEUE = "queue.type", "BatchCQ"

Table = dict[Any, Any]


class Tables(NamedTuple):
    """The content of all files at one moment."""

    topics: Mapping[str, TopicInfo]
    #: (group, topic) -> queue -> next offset
    offsets: Mapping[tuple[str, str], Mapping[int, int]]
    #: delay level -> next offset of its queue
    levels: Mapping[str, Any]
    #: topic and id of each consume queue
    queues: list[tuple[str, int]]
    #: names of which a topic was deleted: another one may exist
    deleted: frozenset[str] = frozenset()
    #: groups that had members
    groups: Mapping[str, GroupFacts] = {}
    #: groups that were deleted: what the files have of them goes
    ended: frozenset[str] = frozenset()


def tables_of(store: ServiceHost) -> Tables:
    """The tables of the current state. Callers: any thread; each table is copied in one step of the interpreter."""
    state = store.state
    return Tables(
        dict(state.topics),
        {key: dict(table) for key, table in list(state.offsets.items())},
        dict(state.progress.get(LEVELS_SERVICE, {})),
        store.queues(),
        frozenset(state.deleted_topics),
        {name: group.facts for name, group in list(store.groups.groups.items())},
        frozenset(list(store.claims.ended)),
    )


def import_changed(store: ServiceHost, put: InnerPut) -> list[str]:
    """Import each file that is not known yet. Returns: their names. Durable: after the next sync.

    From a known file only missing values are imported, and only if RocketMQ deleted the snapshots that had them.
    Args: `put` appends the records.
    Callers: a store that was recovered and is not in use yet. A crash on the way imports once more, which is harmless.
    Raises: Corrupt when neither a file nor its `.bak` is a configuration of RocketMQ.
    """
    changed = []
    for name in NAMES:
        found = _read(store, name)
        if found is None:
            continue

        table, crc = found
        is_new = not _is_known(store, name, crc)
        if not is_new and store.state_is_whole:
            continue

        import_table, _ = _FILES[name]
        try:
            import_table(store, put, table, is_new)
        except (AttributeError, TypeError, ValueError) as error:
            raise _not_rocketmqs(name, str(error)) from error

        if is_new:
            fail_point("config.imported")
            put.put([], progress=ServiceProgress(IMPORT_SERVICE, {name: crc}))
            changed.append(name)
    return changed


def write_back(
    store: ServiceHost,
    tables: Tables | None = None,
    *,
    known: dict[str, tuple[Table, int]] | None = None,
) -> list[str]:
    """Write the state, or `tables`, into the files. Returns: the names of the files that changed.

    Args: `known`: the content of the files after the last call, updated here. No other program writes the files of an
    open store.
    Durable: at return. Callers: one at a time. Raises: Corrupt as `import_changed`, StorageFull, OSError.
    """
    tables = tables or tables_of(store)
    known = {} if known is None else known
    written = []

    for name in NAMES:
        # After a failed write the files' content is unknown.
        table, crc = known.pop(name, None) or _read(store, name) or ({}, None)

        before = json.dumps(table, sort_keys=True)
        _, fill_table = _FILES[name]
        fill_table(tables, table)
        if json.dumps(table, sort_keys=True) != before:
            crc = _write(store, name, table, crc)
            written.append(name)
        if crc is not None:
            known[name] = table, crc

    return written


# --- the files ------------------------------------------------------------------------------------


def _read(store: ServiceHost, name: str) -> tuple[Table, int] | None:
    """A file's content and its CRC; of `.bak` if the file itself is missing, empty or damaged; None: neither."""
    directory, files = store.log.root / "config", store.files
    reason = ""

    for path in (directory / name, directory / f"{name}.bak"):
        data = files.read_file(path) if files.exists(path) else b""
        if not data:
            continue
        try:
            value = fastjson.loads(data.decode())
            if isinstance(value, dict):
                return value, crc32c(data)
            reason = reason or "it holds no object"
        except ValueError as error:
            reason = reason or str(error)

    if not reason:
        return None
    raise Corrupt(
        f"{directory / name} cannot be read ({reason}), nor can its .bak; restore one of them, or move both away to "
        "start without their contents",
        path=str(directory / name),
        rule="configuration files are JSON objects",
    )


def _write(store: ServiceHost, name: str, table: Table, old_crc: int | None) -> int:
    """Write a file. Its old content goes to `.bak`, which RocketMQ reads if the file is damaged. Returns: its CRC."""
    files, directory = store.files, store.log.root / "config"
    data = encode(table, store.clock.now_ms())
    crc = crc32c(data)
    # Both contents count as RayMQ's from here on. So a crash may leave either: nothing is imported from it.
    _remember(store, name, [crc] if old_crc is None else [old_crc, crc])
    files.make_dirs(directory)
    path = directory / name
    if files.exists(path):
        files.write_file_atomic(directory / f"{name}.bak", files.read_file(path))
        fail_point("config.backed_up")
    files.write_file_atomic(path, data)
    return crc


def encode(table: Table, now_ms: int) -> bytes:
    """The content of a file, as of its next version."""
    version = table.setdefault("dataVersion", {"counter": 0, "stateVersion": 0})
    version["counter"] = int(version.get("counter", 0)) + 1
    version["timestamp"] = now_ms
    return fastjson.dumps(table).encode()


def _is_known(store: ServiceHost, name: str, crc: int) -> bool:
    """Whether a file's content was imported already, or written by RayMQ."""
    written = (store.log.meta.get(WRITTEN) or {}).get(name, [])
    return crc == store.state.progress.get(IMPORT_SERVICE, {}).get(name) or crc in written


def _remember(store: ServiceHost, name: str, crcs: list[int]) -> None:
    store.log.meta.update({WRITTEN: {**(store.log.meta.get(WRITTEN) or {}), name: crcs}})


# --- topics ---------------------------------------------------------------------------------------


def _import_topics(store: ServiceHost, put: InnerPut, table: Table, is_new: bool) -> None:
    """Put a TOPIC record for each user topic of the file that is unknown, or that a new file changes."""
    shard = int(store.log.meta.get("shard") or 0)
    for name, config in _rows(table, "topicConfigTable", TOPICS):
        queues = max(int(config.get("readQueueNums", 0)), int(config.get("writeQueueNums", 0)))
        if is_system_topic(name) or int(config.get("perm", 6)) & _PERM_INHERIT:
            continue

        attributes = {str(key): str(value) for key, value in config.get("attributes", {}).items()}
        known = store.state.topics.get(name, TopicInfo(name, 0, (shard,)))
        queues = max(queues, known.queues)
        if not 1 <= queues <= QUEUES_MAX or attributes.get(_QUEUE_TYPE) == _BATCH_QUEUE:
            continue

        try:
            fmt.check_topic_name(name)
            if SCHEMA in attributes:
                check_schema(attributes[SCHEMA])
        except RayMQError as error:
            raise _not_rocketmqs(TOPICS, f"its topic {name!r} cannot be one: {error}") from error

        own, imported = dict(known.attributes).get(SCHEMA), attributes.get(SCHEMA)
        if own is not None and (
            imported is None or not extends(check_schema(imported), check_schema(own))
        ):
            # The file is from before the last column was added, whose rows may be in the log.
            attributes[SCHEMA] = own

        changed = (queues, attributes) != (known.queues, dict(known.attributes))
        if changed and (is_new or not known.queues):
            pairs = tuple(sorted(attributes.items()))
            info = replace(known, queues=queues, attributes=pairs)
            if 0 < known.queues < queues:
                former = (*known.former_queues, known.queues)
                info = replace(info, former_queues=former, hidden_queues=0)
            put.put_state_record(shard_state.TOPIC, shard_state.topic_body(info))


def _export_topics(tables: Tables, table: Table) -> None:
    """Raise the numbers of queues in the file to those of the state, and add missing topics."""
    queues = {info.name: info.queues for info in tables.topics.values()}
    # A queue that has messages must be readable even if its topic was never created here (retry and dead letters).
    for name in tables.deleted - tables.topics.keys():
        table.get("topicConfigTable", {}).pop(name, None)
    for topic, queue_id in tables.queues:
        # A queue of a name that was deleted may be the earlier topic's.
        if not is_system_topic(topic) and topic not in tables.deleted:
            queues[topic] = max(queues.get(topic, 0), queue_id + 1)
    if not queues:
        return
    queues[INTERNAL_TOPIC] = 1
    add_topics(table, queues, tables.topics, tables.deleted)


def add_topics(
    table: Table,
    queues: Mapping[str, int],
    known: Mapping[str, TopicInfo],
    deleted: Collection[str] = (),
) -> None:
    """Give each topic of topics.json the number of queues in `queues` at least, and the attributes in `known`.

    Args: `deleted`: names of which a topic was deleted. They get these numbers and attributes alone, because the file
    may still have those of the earlier topic.
    """
    topics = table.setdefault("topicConfigTable", {})
    for name, count in queues.items():
        config = topics.setdefault(name, _new_topic(name))
        info = known.get(name)
        if name in deleted and info is not None:
            config |= {"readQueueNums": 0, "writeQueueNums": 0, "attributes": {}}
        for field in ("readQueueNums", "writeQueueNums"):
            config[field] = max(int(config.get(field, 0)), count)
        if info is not None and info.attributes:
            config["attributes"] = {**(config.get("attributes") or {}), **dict(info.attributes)}


def _new_topic(name: str) -> Table:
    """The entry that RocketMQ writes for a topic without options."""
    return {
        "attributes": {},
        "order": False,
        "perm": _PERM_NONE if name in _OWN_TOPICS else _PERM_READ_WRITE,
        "readQueueNums": 0,
        "topicFilterType": "SINGLE_TAG",
        "topicName": name,
        "topicSysFlag": 0,
        "writeQueueNums": 0,
    }


# --- offsets and groups ---------------------------------------------------------------------------


def _import_offsets(store: ServiceHost, put: InnerPut, table: Table, is_new: bool) -> None:
    """Put an OFFSETS record for each group and topic whose offsets in the file are to be imported."""
    for name, offsets in _rows(table, "offsetTable", CONSUMER_OFFSETS):
        topic, _, group = name.partition("@")
        have = store.state.offsets.get((group, topic), {})
        found = {int(queue): int(offset) for queue, offset in offsets.items()}
        changes = {queue: found[queue] for queue in _keys_to_import(found, have, is_new)}
        leased = store.leases.group(group).queues
        resets = [
            ResetEntry((topic, queue), offset)
            for queue, offset in changes.items()
            if (topic, queue) in leased and 0 <= offset <= OFFSET_MAX
        ]
        if resets:
            # A settlement of workers would take these offsets back.
            put.put_state_record(SETTLE, pack_checked(group, resets))
        if changes:
            body = shard_state.offsets_body(group, topic, changes)
            put.put_state_record(shard_state.OFFSETS, body)


def _keys_to_import(found: Table, have: Table, is_new: bool) -> list[Any]:
    """The keys that an import changes: of a new file those that differ, else those that are missing."""
    if is_new:
        return [key for key in found if found[key] != have.get(key)]
    return [key for key in found if key not in have]


def _export_offsets(tables: Tables, table: Table) -> None:
    for name in list(table.get("offsetTable", {})):
        if name.partition("@")[0] in tables.deleted:
            # Those of a topic that was made again are added below.
            del table["offsetTable"][name]
    offsets = table.get("offsetTable") or {}
    for key in list(offsets):
        topic, _, group = key.partition("@")
        if group in tables.ended and (group, topic) not in tables.offsets:
            del offsets[key]
    if tables.offsets:
        add_offsets(table, tables.offsets)


def add_offsets(table: Table, known: Mapping[tuple[str, str], Mapping[int, int]]) -> None:
    """Write the known offsets of each (group, topic) into the table of consumerOffset.json."""
    # RocketMQ computes it again and never reads it.
    table.pop("groupTopicMap", None)
    offsets = table.setdefault("offsetTable", {})
    for (group, topic), ours in known.items():
        theirs = offsets.get(f"{topic}@{group}", {})
        offsets[f"{topic}@{group}"] = {**{int(queue): at for queue, at in theirs.items()}, **ours}


def _import_groups(store: ServiceHost, put: InnerPut, table: Table, is_new: bool) -> None:
    """Pause groups that may not consume, and resume those that may again. A group exists as soon as it commits offsets
    or has a member. Its other settings stay in the file.
    """
    values = []
    for name, config in _rows(table, "subscriptionGroupTable", GROUPS):
        is_paused = not config.get("consumeEnable", True)
        known = store.groups.groups.get(name)
        facts = GroupFacts() if known is None else known.facts
        is_newer = is_new or known is None
        if facts.is_paused != is_paused and is_newer and _is_group_name(name):
            values.append(
                group_value(name, facts._replace(is_paused=is_paused), store.groups.number)
            )

    if values and feature_level(store.state.progress) < GROUPS_LEVEL:
        # A version that does not know groups must not write to this log.
        put.put([], progress=ServiceProgress(FEATURES, {LEVEL: GROUPS_LEVEL}))
    for value in values:
        put.put_state_record(GROUP, json.dumps(dated(value, store.clock.now_ms())).encode())


def _is_group_name(name: str) -> bool:
    try:
        fmt.check_group_name(name)
    except RayMQError:
        return False
    return True


def _export_groups(tables: Tables, table: Table) -> None:
    groups = {*tables.groups, *(group for group, _ in tables.offsets)}
    known = table.get("subscriptionGroupTable") or {}
    for group in known.keys() & (tables.ended - groups):
        del known[group]

    if groups:
        known = table.setdefault("subscriptionGroupTable", {})
        table.setdefault("forbiddenTable", {})
        for group in sorted(groups):
            known.setdefault(group, _new_group(group))
    for group, facts in tables.groups.items():
        known[group]["consumeEnable"] = not facts.is_paused


def _new_group(name: str) -> Table:
    """The entry that RocketMQ writes for a consumer group without options."""
    return {
        "attributes": {},
        "brokerId": 0,
        "consumeBroadcastEnable": True,
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "consumeMessageOrderly": False,
        "consumeTimeoutMinute": 15,
        "groupName": name,
        "groupRetryPolicy": {"type": "CUSTOMIZED"},
        "groupSysFlag": 0,
        "notifyConsumerIdsChangedEnable": True,
        "retryMaxTimes": 16,
        "retryQueueNums": 1,
        "whichBrokerWhenConsumeSlowly": 1,
    }


# --- delay levels ---------------------------------------------------------------------------------


def _import_levels(store: ServiceHost, put: InnerPut, table: Table, is_new: bool) -> None:
    """Note the offset of each delay level as the progress of the delay service."""
    found = {str(level): int(offset) for level, offset in table.get("offsetTable", {}).items()}
    changes = _keys_to_import(found, store.state.progress.get(LEVELS_SERVICE, {}), is_new)
    if changes:
        values = {level: found[level] for level in changes}
        put.put([], progress=ServiceProgress(LEVELS_SERVICE, values))


def _export_levels(tables: Tables, table: Table) -> None:
    if tables.levels:
        levels = {int(level): at for level, at in table.get("offsetTable", {}).items()}
        ours = {int(level): int(at) for level, at in tables.levels.items()}
        table["offsetTable"] = levels | ours


def _rows(table: Table, name: str, file: str) -> list[tuple[str, Table]]:
    """The rows of a table whose values are tables. Raises: Corrupt."""
    rows = table.get(name) or {}
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise _not_rocketmqs(file, f"its {name} is not a table of tables")
    return [(str(key), row) for key, row in rows.items()]


def _not_rocketmqs(name: str, reason: str) -> Corrupt:
    return Corrupt(
        f"config/{name} is not a file of RocketMQ: {reason}; repair it or move it away",
        path=str(Path("config") / name),
        rule="configuration files are RocketMQ's",
    )


_Import = Callable[[ServiceHost, InnerPut, Table, bool], None]
_Export = Callable[[Tables, Table], None]
#: file name -> the function that imports the file, and the one that makes its content
_FILES: dict[str, tuple[_Import, _Export]] = {
    TOPICS: (_import_topics, _export_topics),
    CONSUMER_OFFSETS: (_import_offsets, _export_offsets),
    GROUPS: (_import_groups, _export_groups),
    LEVELS: (_import_levels, _export_levels),
}
