"""Heartbeats of clients, the members of groups, and the word to them that these have changed.

Source: ClientManageProcessor, ConsumerManageProcessor, DefaultConsumerIdsChangeListener.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from raymq.client.consume.selector import selector_of
from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.state.topics import retry_topic

from .answers import Refused
from .client_table import CLUSTERING, ClientTable, ConsumerFacts
from .codes import RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection
from .json_dialect import write_json
from .request_fields import RequestFields, json_body

logger = logging.getLogger("raymq.rocketmq")

#: changes of a group within this time are one notification: five hundred consumers that start together make few
NOTIFY_AFTER_S = 0.1


class ClientManageProcessor:
    """Answers HEART_BEAT, UNREGISTER_CLIENT, CHECK_CLIENT_CONFIG and GET_CONSUMER_LIST_BY_GROUP."""

    CODES = (
        RequestCode.HEART_BEAT,
        RequestCode.UNREGISTER_CLIENT,
        RequestCode.CHECK_CLIENT_CONFIG,
        RequestCode.GET_CONSUMER_LIST_BY_GROUP,
    )

    def __init__(
        self,
        clients: ClientTable,
        loop: asyncio.AbstractEventLoop,
        *,
        create_retry_topic: Callable[[str], Awaitable[object]],
        on_changed: Callable[[set[str]], object],
    ) -> None:
        """Args: `create_retry_topic`: makes the retry topic of a group, if there is none. `on_changed`: hears of groups
        whose consumers have changed, at once.
        """
        self._clients = clients
        self._on_changed = on_changed
        self._create_retry_topic = create_retry_topic
        #: groups whose retry topic is there, or being made
        self._with_retries: set[str] = set()
        self._tasks: set[asyncio.Future[None]] = set()
        self._loop = loop
        #: groups whose members will hear that they have changed
        self._changed: set[str] = set()

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Answer from memory. Raises: Refused."""
        if request.code == RequestCode.HEART_BEAT:
            return self._beat(connection, request)
        if request.code == RequestCode.UNREGISTER_CLIENT:
            return self._unregister(request)
        if request.code == RequestCode.CHECK_CLIENT_CONFIG:
            return _check_client(request)
        return self._members(request)

    def _beat(self, connection: ClientConnection, request: RemotingCommand) -> RemotingCommand:
        fields = json_body(request)
        try:
            client_id = str(fields["clientID"])
            producers = [str(each["groupName"]) for each in fields.get("producerDataSet") or ()]
            consumers = [ConsumerFacts.of(each) for each in fields.get("consumerDataSet") or ()]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"a heartbeat without {error!r}") from error
        self._note_changed(self._clients.note(connection, client_id, producers, consumers))
        for each in consumers:
            if each.message_model == CLUSTERING and each.group not in self._with_retries:
                self._with_retries.add(each.group)
                # The client asks for the route of its retry topic every 30 s.
                task = asyncio.ensure_future(self._create(each.group))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        # Whole heartbeats: the short ones of 5.x name a subscription that the server must have kept.
        answered = {"IS_SUPPORT_HEART_BEAT_V2": "false", "IS_SUB_CHANGE": "true"}
        return answer(request, ResponseCode.SUCCESS, answered)

    async def _create(self, group: str) -> None:
        try:
            await self._create_retry_topic(retry_topic(group))
        except RayMQError as error:
            # The next heartbeat tries again. A name that no topic can have is said once.
            if error.retriable:
                self._with_retries.discard(group)
            logger.warning("group %s has no retry topic: %s", group, error)

    def _unregister(self, request: RemotingCommand) -> RemotingCommand:
        fields = RequestFields(request)
        left = self._clients.remove(
            fields.text("clientID"),
            producer_group=fields.text("producerGroup", ""),
            consumer_group=fields.text("consumerGroup", ""),
        )
        self._note_changed(left)
        return answer(request, ResponseCode.SUCCESS)

    def _members(self, request: RemotingCommand) -> RemotingCommand:
        group = RequestFields(request).text("consumerGroup")
        found = [each.client_id for each in self._clients.consumers(group)]
        if not found:
            # An empty list would make the client give up its queues.
            raise Refused(ResponseCode.SYSTEM_ERROR, f"no consumer of group {group} is connected")
        body = write_json({"consumerIdList": found}, standard=True)
        return answer(request, ResponseCode.SUCCESS, body=body)

    # --- notifications ----------------------------------------------------------------------------

    def drop(self, connection: ClientConnection) -> None:
        """A connection has ended."""
        self._note_changed(self._clients.drop(connection))

    def _note_changed(self, groups: set[str]) -> None:
        if groups:
            self._on_changed(groups)
        self.notify_soon(groups)

    def notify_soon(self, groups: set[str]) -> None:
        """Let the consumers of groups look again at who has which queue."""
        if groups and not self._changed:
            self._loop.call_later(NOTIFY_AFTER_S, self._notify)
        self._changed |= groups

    def _notify(self) -> None:
        groups, self._changed = self._changed, set()
        for group in sorted(groups):
            for member in self._clients.consumers(group):
                member.connection.push(
                    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group}
                )


def _check_client(request: RemotingCommand) -> RemotingCommand:
    """Refuse an SQL expression that cannot be used. Raises: Refused with the place of the fault."""
    fields = json_body(request)
    subscription = fields.get("subscriptionData")
    if isinstance(subscription, dict) and subscription.get("expressionType") == "SQL92":
        try:
            selector_of(None, str(subscription.get("subString", "")))
        except Rejected as error:
            raise Refused(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from error
    return answer(request, ResponseCode.SUCCESS)
