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
from collections.abc import Callable, Iterable, Mapping

from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.base.format import check_group_name
from raymq.store.groups.foreign_members import CLIENTS_SHOWN_MAX, FOREIGN_GROUPS_MAX

from .answers import Refused
from .client_table import ClientTable
from .codes import ResponseCode
from .connection import ClientConnection
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
        found = {each: self._clients.sharing(each)[:CLIENTS_SHOWN_MAX] for each in groups}
        words = {
            group: clients
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

        parts = [
            (shard, of_shard[at : at + FOREIGN_GROUPS_MAX])
            for shard, of_shard in by_shard.items()
            for at in range(0, len(of_shard), FOREIGN_GROUPS_MAX)
        ]
        tasks = (self._ask(shard, {each: words[each] for each in part}) for shard, part in parts)
        await asyncio.gather(*tasks)

    async def _ask(self, shard: int, words: Mapping[str, list[str]]) -> None:
        """Tell one coordinator, and note what it answers. If it does not, all stays as it was."""
        arguments = {"protocol": PROTOCOL, "server": self._server, "groups": words}
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


def _is_name(group: str) -> bool:
    try:
        check_group_name(group)
    except Rejected:
        return False
    return True
