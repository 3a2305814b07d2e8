"""Groups in which both clients of RocketMQ and members of RayMQ want to consume: those that come second are refused.

The coordinator of a group hears of the clients of RocketMQ in it, and refuses members that join anew. In return it says
which groups have members, and their clients of RocketMQ get no queue and no message here. Both kinds commit the same
offsets, so that one goes on where the other has stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.base.format import check_group_name
from raymq.store.groups.foreign_members import (
    CLIENT_CHARS_MAX,
    FOREIGN_CLIENTS_MAX,
    FOREIGN_GROUPS_MAX,
    ForeignClient,
)

from .answers import Refused
from .client_table import ClientTable, GroupClient
from .codes import ResponseCode, version_name
from .connection import ClientConnection
from .offset_resets import notify_reset
from .shards import Shards

logger = logging.getLogger("raymq.rocketmq")

#: how coordinators call these clients
PROTOCOL = "RocketMQ"
#: how often a coordinator hears of all groups, and of those that are refused. Its knowledge holds 30 s
ROUND_S, REFUSED_ROUND_S = 10.0, 3.0
#: changes within this time are one call
GATHER_S = 0.02
#: how long the first requests of a group wait for the word of its coordinator. Without it they are served: the shards
#: refuse a commit to a queue that a member has
FIRST_WORD_S = 0.5
#: how long one call may take
CALL_S = 2.5
#: clients of all groups that one call names, if it names more than one group
CALL_CLIENTS_MAX = 1_000
#: resets of topics that are remembered, so that clients are notified of each one once
RESETS_MAX = 1_000


class SharedGroups:
    """Tells coordinators of the consumers that share groups, and refuses them. Callers: one event loop."""

    def __init__(
        self, shards: Shards, clients: ClientTable, on_free: Callable[[set[str]], object]
    ) -> None:
        """Args: `on_free`: hears of groups that are refused no longer."""
        self._shards = shards
        self._clients = clients
        self._on_free = on_free
        #: how coordinators tell this server from others
        self._server = uuid.uuid4().hex
        #: group -> the shard that coordinates it
        self._coordinators: dict[str, int] = {}
        #: groups of which coordinators hear with each round
        self._tracked: set[str] = set()
        #: group -> some programs of its members
        self._refused: dict[str, list[str]] = {}
        #: new group -> done when its coordinator has answered, or did not
        self._asked: dict[str, asyncio.Event] = {}
        self._changed: set[str] = set()
        self._wakeup = asyncio.Event()
        #: group and number of the resets that clients have heard of, the newest one last
        self._heard: dict[tuple[str, int, str], None] = {}

    # --- requests ---------------------------------------------------------------------------------

    async def check(self, group: str, connection: ClientConnection) -> None:
        """Refuse what a consumer of a group asks if the group has members. Raises: Refused."""
        asked = self._asked.get(group)
        if asked is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asked.wait(), FIRST_WORD_S)
        self.check_now(group, connection)

    def check_now(self, group: str, connection: ClientConnection) -> None:
        """Do as `check`, with what is known now. Raises: Refused."""
        programs = self._refused.get(group)
        if programs is not None and self._clients.is_sharing(group, connection):
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"group {group} has consumers of RayMQ, such as {', '.join(programs)}. A group has consumers of one "
                "kind at a time: when these are closed, this one goes on where they have stopped. Or use another group",
            )

    async def coordinator(self, group: str) -> int:
        """The shard that coordinates a group. Raises: RayMQError."""
        found = self._coordinators.get(group)
        if found is None:
            # It stays the same when shards are added.
            answer = await self._shards.call(0, "find_coordinator", {"group": group}, CALL_S)
            found = self._coordinators[group] = int(answer["shard"])
        return found

    # --- words ------------------------------------------------------------------------------------

    def note_changed(self, groups: Iterable[str]) -> None:
        """The consumers of groups have changed."""
        for group in groups:
            self._changed.add(group)
            if group not in self._tracked and group not in self._asked:
                self._asked[group] = asyncio.Event()
        self._wakeup.set()

    async def run(self) -> None:
        """Tell coordinators until cancelled."""
        loop = asyncio.get_running_loop()
        all_s, refused_s = loop.time() + ROUND_S, loop.time() + REFUSED_ROUND_S
        while True:
            until_s = min(all_s, refused_s) if self._refused else all_s
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wakeup.wait(), max(0.0, until_s - loop.time()))
            self._wakeup.clear()
            await asyncio.sleep(GATHER_S)

            groups, self._changed = self._changed, set()
            now_s = loop.time()
            if now_s >= all_s:
                groups |= self._tracked
                all_s = now_s + ROUND_S
            if now_s >= refused_s:
                groups |= self._refused.keys()
                refused_s = now_s + REFUSED_ROUND_S
            try:
                await self._tell(groups)
            except Exception:
                # Without this loop members and clients would not hear of each other.
                logger.exception("groups of both kinds of client")
            finally:
                for group in groups:
                    asked = self._asked.pop(group, None)
                    if asked is not None:
                        asked.set()

    async def _tell(self, groups: set[str]) -> None:
        found = {each: self._clients.sharing(each)[:FOREIGN_CLIENTS_MAX] for each in groups}
        words = {
            group: [_client(each) for each in clients]
            for group, clients in found.items()
            if (clients or group in self._tracked) and _is_name(group)
        }

        # Also those of which a coordinator does not hear now.
        self._tracked |= words.keys()
        by_shard: defaultdict[int, list[str]] = defaultdict(list)
        try:
            for group in sorted(words):
                by_shard[await self.coordinator(group)].append(group)
        except RayMQError as error:
            logger.info("coordinators of groups: %s", error)

        sizes = {group: len(clients) for group, clients in words.items()}
        parts = [
            (shard, part)
            for shard, of_shard in by_shard.items()
            for part in _parts(of_shard, sizes)
        ]
        tasks = (self._ask(shard, {each: words[each] for each in part}) for shard, part in parts)
        await asyncio.gather(*tasks)

    async def _ask(self, shard: int, words: Mapping[str, list[ForeignClient]]) -> None:
        """Tell one coordinator, and note what it answers. If it does not, all stays as it was."""
        arguments = {
            "protocol": PROTOCOL,
            "server": self._server,
            "groups": {group: [list(each) for each in clients] for group, clients in words.items()},
        }
        try:
            found = await self._shards.call(shard, "note_foreign_members", arguments, CALL_S)
        except RayMQError as error:
            logger.info("the coordinator raymq-%d has not heard of consumers: %s", shard, error)
            # The next round says it again.
            return

        members: Mapping[str, list[str]] = found["with_members"]
        freed = set()
        for group, clients in words.items():
            if not clients:
                self._tracked.discard(group)
                self._refused.pop(group, None)
                continue
            if group in members:
                if group not in self._refused:
                    logger.warning(
                        "group %s has members of RayMQ: its clients of RocketMQ get nothing", group
                    )
                self._refused[group] = members[group]
            elif self._refused.pop(group, None) is not None:
                freed.add(group)
        if freed:
            self._on_free(freed)
        for reset in found["resets"]:
            await self._notify(reset)

    async def _notify(self, reset: Mapping[str, Any]) -> None:
        """Let clients of a group go on at the offsets that an operator has set, once."""
        group, number = str(reset["group"]), int(reset["number"])
        wanted = set(reset["clients"])
        topics = [each for each in reset["offsets"] if (group, number, each) not in self._heard]
        found = await asyncio.gather(*map(self._shards.topic, topics), return_exceptions=True)

        members = [each for each in self._clients.consumers(group) if _shown_id(each) in wanted]
        for topic, queues in zip(topics, found, strict=True):
            if isinstance(queues, BaseException):
                # The coordinator repeats the reset.
                logger.warning("a reset of group %s: %s", group, queues)
                continue
            self._note_heard(group, number, topic)
            offsets = reset["offsets"][topic]
            for shard, own in queues.by_shard.items():
                mine = {each: int(offsets[str(each)]) for each in own if str(each) in offsets}
                if mine:
                    notify_reset(
                        members, group, queues, shard, mine, time_text="0", is_forced="true"
                    )
        if topics:
            logger.info("%d clients of group %s: an operator's offsets", len(members), group)

    def _note_heard(self, group: str, number: int, topic: str) -> None:
        self._heard[group, number, topic] = None
        if len(self._heard) > RESETS_MAX:
            del self._heard[next(iter(self._heard))]


def _shown_id(member: GroupClient) -> str:
    """The id of a client as coordinators take it: a client says of itself what it likes."""
    return member.client_id[:CLIENT_CHARS_MAX] or "?"


def _client(member: GroupClient) -> ForeignClient:
    connection = member.connection
    return ForeignClient(
        _shown_id(member),
        repr(connection),
        str(connection.language)[:CLIENT_CHARS_MAX],
        version_name(connection.version),
        member.since_ms,
    )


def _parts(groups: list[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """The groups in parts that one call can name."""
    part: list[str] = []
    clients = 0
    for group in groups:
        is_full = clients + sizes[group] > CALL_CLIENTS_MAX or len(part) == FOREIGN_GROUPS_MAX
        if part and is_full:
            yield part
            part, clients = [], 0
        part.append(group)
        clients += sizes[group]
    if part:
        yield part


def _is_name(group: str) -> bool:
    try:
        check_group_name(group)
    except Rejected:
        return False
    return True
