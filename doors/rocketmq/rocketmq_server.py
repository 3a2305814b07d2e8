"""The server for RocketMQ's clients: its parts put together, and the thread in which they run."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Mapping

from raymq.client.handle import ClusterHandle

from .access import Access, AccessCheck
from .admin_clients import ClientAdminProcessor, ClientRelayProcessor
from .admin_cluster import ClusterAdminProcessor, NameServerAdminProcessor
from .admin_groups import GroupAdminProcessor
from .admin_topics import TopicAdminProcessor
from .arrivals import Arrivals
from .client_manage import ClientManageProcessor
from .client_table import ClientTable
from .consumer_offsets import ConsumerOffsetProcessor, OffsetStore, QueueOffsetProcessor
from .end_transaction import EndTransactionProcessor
from .half_sends import HalfMessageSender
from .processors import (
    ADMIN,
    CALL,
    MEMORY,
    PULL,
    RELAY,
    SEND,
    CodedProcessor,
    Executor,
    ProcessorTable,
)
from .pull_message import PullMessageProcessor
from .query_messages import QueryMessageProcessor, RecordReader
from .queue_locks import QueueLockProcessor
from .remoting_server import RemotingServer, ServerCounts
from .route_info import RouteInfoProcessor
from .send_back import SendBackProcessor
from .send_lanes import SendLanes
from .send_message import SendMessageProcessor
from .shards import Shards
from .shared_groups import SharedGroups
from .topology import BrokerAddress, BrokerTable
from .transaction_check import TransactionCheckService

#: the table of processors: what runs each of them, and how many of its requests at a time. The codes are theirs.
#: Source: BrokerController#registerProcessor
EXECUTORS: Mapping[type[CodedProcessor], Executor] = {
    SendMessageProcessor: SEND,
    EndTransactionProcessor: SEND,
    PullMessageProcessor: PULL,
    ClientManageProcessor: MEMORY,
    SendBackProcessor: CALL,
    ConsumerOffsetProcessor: CALL,
    QueueLockProcessor: CALL,
    QueueOffsetProcessor: CALL,
    RouteInfoProcessor: CALL,
    # What RocketMQ's tools and dashboards ask.
    QueryMessageProcessor: ADMIN,
    TopicAdminProcessor: ADMIN,
    GroupAdminProcessor: ADMIN,
    ClusterAdminProcessor: ADMIN,
    ClientAdminProcessor: MEMORY,
    NameServerAdminProcessor: MEMORY,
    ClientRelayProcessor: RELAY,
}
#: how long new requests are answered with GO_AWAY at the end
GRACE_S = 0.5


class RocketMQServer:
    """Serves RocketMQ's clients in a thread of its own. Use it in a `with` block, or call `close`.

    A shard has a port, by which older clients name it. A further port is for name server requests.
    """

    def __init__(
        self,
        handle: ClusterHandle,
        *,
        host: str = "127.0.0.1",
        advertised: str | None = None,
        shard_ports: Mapping[int, int] | None = None,
        brokers: BrokerTable | None = None,
        access: Access = "key",
        tls: ssl.SSLContext | None = None,
        takes_plain: bool = True,
    ) -> None:
        """Listen, and serve.

        Args: `advertised`: the IP address that clients dial; None: `host`. `shard_ports`: shard -> port, 0: any that is
        free; None: all shards, at any. `brokers`: where all shards are served; None: here.
        `access`: "key": clients sign with AccessKey raymq, and the cluster's token as SecretKey; "open": they need not.
        `tls`: for connections that begin with TLS. `takes_plain`: those that do not are served, too.
        Raises: OSError for a port that is taken; Rejected for "open" on another address than 127.0.0.1.
        """
        check = AccessCheck(access, handle.token, host)
        self._handle = handle
        self._host = host
        self.brokers = brokers or BrokerTable()
        self._loop = asyncio.new_event_loop()
        #: shard -> where its clients dial
        self.addresses: dict[int, BrokerAddress] = {}
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="raymq-rocketmq", daemon=True
        )
        self._thread.start()
        self._shards = Shards(handle, self._loop)
        self._services: list[asyncio.Task[None]] = []

        try:
            self._run(self._open(check, tls, takes_plain=takes_plain))
            ports = dict.fromkeys(range(handle.shards), 0) if shard_ports is None else shard_ports
            for shard, port in ports.items():
                found = BrokerAddress(advertised or host, self.listen(port, shard))
                self.addresses[shard] = found
                if brokers is None:
                    self.brokers.note(shard, 0, {0: found})
        except BaseException:
            self._run(self._end_requests(0.0))
            self._end()
            raise

    def _run(self, work: object) -> int:
        return int(asyncio.run_coroutine_threadsafe(work, self._loop).result() or 0)  # type: ignore[arg-type]

    def listen(self, port: int, shard: int | None = None) -> int:
        """Take connections to a further port. Returns: that port. Raises: OSError when it is taken.

        Args: `port`: 0: any that is free. `shard`: the one that its clients mean; None: any, as a request says.
        """

        async def listen() -> int:
            return self._server.listen(self._host, port, shard)

        return self._run(listen())

    @property
    def counts(self) -> ServerCounts:
        """What happened since the beginning."""
        return self._server.counts

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._server.connections)

    async def _open(
        self, access: AccessCheck, tls: ssl.SSLContext | None, *, takes_plain: bool
    ) -> None:
        loop = self._loop
        clients, arrivals = ClientTable(), Arrivals()
        lanes = SendLanes(self._shards, arrivals, loop)
        offsets = self._offsets = OffsetStore(self._shards, loop)
        shared = SharedGroups(self._shards, clients, on_free=lambda each: manage.notify_soon(each))
        manage = ClientManageProcessor(
            clients,
            loop,
            create_retry_topic=self._shards.create_retry_topic,
            on_changed=shared.note_changed,
        )

        self.table = ProcessorTable()
        self._server = RemotingServer(
            self.table,
            check=access.check,
            on_closed=manage.drop,
            tls=tls,
            takes_plain=takes_plain,
        )

        halves = HalfMessageSender(self._shards)
        tools = self._shards.for_tools()
        records = RecordReader(tools, self.brokers)
        processors: tuple[CodedProcessor, ...] = (
            SendMessageProcessor(self._shards, lanes, halves, self.brokers),
            EndTransactionProcessor(self._shards, arrivals),
            PullMessageProcessor(self._shards, clients, offsets, shared, arrivals),
            manage,
            SendBackProcessor(self._shards),
            ConsumerOffsetProcessor(self._shards, clients, offsets, shared),
            QueueLockProcessor(self._shards, offsets, shared),
            QueueOffsetProcessor(self._shards),
            RouteInfoProcessor(self._shards, self.brokers),
            QueryMessageProcessor(tools, records),
            TopicAdminProcessor(tools),
            GroupAdminProcessor(tools, clients, offsets),
            ClusterAdminProcessor(tools, self.brokers),
            ClientAdminProcessor(clients),
            NameServerAdminProcessor(),
            ClientRelayProcessor(clients, records),
        )
        for each in processors:
            self.table.register(EXECUTORS[type(each)], each.process, each.CODES)

        checks = TransactionCheckService(self._shards, clients, self.brokers)
        self._services = [loop.create_task(each.run()) for each in (checks, shared)]

    def close(self) -> None:
        """Tell clients to go away, and end. What was stored stays."""
        if self._loop.is_closed():
            return
        self._run(self._end_requests(GRACE_S))
        self._end()

    async def _end_requests(self, grace_s: float) -> None:
        await self._server.close(grace_s)
        for service in self._services:
            service.cancel()
        await asyncio.gather(*self._services, return_exceptions=True)
        await self._offsets.flush()
        await self._shards.stop()

    def _end(self) -> None:
        self._shards.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> RocketMQServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
