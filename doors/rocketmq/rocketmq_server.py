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
from .remoting_server import RemotingServer
from .route_info import RouteInfoProcessor
from .send_back import SendBackProcessor
from .send_lanes import SendLanes
from .send_message import SendMessageProcessor
from .shards import Shards
from .topology import LEADER_ID, BrokerAddress

#: how long new requests are answered with GO_AWAY at the end
GRACE_S = 0.5


class RocketMQServer:
    """Serves RocketMQ's clients in a thread of its own. Use it in a `with` block, or call `close`.

    Each shard has a port, by which older clients name it. A further port is for name server requests.
    """

    def __init__(
        self,
        handle: ClusterHandle,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        shard_ports: Mapping[int, int] | None = None,
        access: Access = "key",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Listen, and serve.

        Args: `port`: for name server requests; 0: any that is free. `shard_ports`: shard -> port; by default any.
        `access`: "key": clients sign with AccessKey raymq, and the cluster's token as SecretKey; "open": they need not.
        `tls`: for connections that begin with TLS.
        Raises: OSError for a port that is taken; Rejected for "open" on another address than 127.0.0.1.
        """
        check = AccessCheck(access, handle.token, host)
        self._handle = handle
        self._host = host
        self._loop = asyncio.new_event_loop()
        #: shard -> where its clients dial
        self.addresses: dict[int, BrokerAddress] = {}
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="raymq-rocketmq", daemon=True
        )
        self._thread.start()
        self._shards = Shards(handle, self._loop)
        try:
            self.port = self._run(self._open(port, shard_ports or {}, check, tls))
        except BaseException:
            self._run(self._server.close())
            self._end()
            raise

    def _run(self, work: object) -> int:
        return int(asyncio.run_coroutine_threadsafe(work, self._loop).result() or 0)  # type: ignore[arg-type]

    async def _open(
        self,
        port: int,
        shard_ports: Mapping[int, int],
        access: AccessCheck,
        tls: ssl.SSLContext | None,
    ) -> int:
        loop = self._loop
        clients, arrivals = ClientTable(), Arrivals()
        lanes = SendLanes(self._shards, arrivals, loop)
        offsets = self._offsets = OffsetStore(self._shards, loop)
        manage = ClientManageProcessor(
            clients, loop, create_retry_topic=self._shards.create_retry_topic
        )
        self.table = ProcessorTable()
        self._server = RemotingServer(
            self.table, check=access.check, on_closed=manage.drop, tls=tls
        )
        for shard in range(self._shards.count):
            found = self._server.listen(self._host, shard_ports.get(shard, 0), shard)
            self.addresses[shard] = BrokerAddress(self._host, found)

        send = SendMessageProcessor(self._shards, lanes, self.addresses)
        self.table.register(SEND, send.process, send.CODES)
        pull = PullMessageProcessor(self._shards, clients, offsets, arrivals)
        self.table.register(PULL, pull.process, pull.CODES)
        self.table.register(MEMORY, manage.process, manage.CODES)
        back = SendBackProcessor(self._shards)
        self.table.register(CALL, back.process, back.CODES)
        committed = ConsumerOffsetProcessor(self._shards, offsets)
        self.table.register(CALL, committed.process, committed.CODES)
        ranges = QueueOffsetProcessor(self._shards)
        self.table.register(CALL, ranges.process, ranges.CODES)
        self._register_tools(clients, offsets)
        routes = RouteInfoProcessor(self._shards, self._addresses)
        self.table.register(CALL, routes.process, routes.CODES)
        return self._server.listen(self._host, port, None)

    def _register_tools(self, clients: ClientTable, offsets: OffsetStore) -> None:
        """What RocketMQ's tools and dashboards ask."""
        shards = self._shards.for_tools()
        records = RecordReader(shards, self.addresses)
        rows: tuple[tuple[Executor, CodedProcessor], ...] = (
            (ADMIN, QueryMessageProcessor(shards, records)),
            (ADMIN, TopicAdminProcessor(shards)),
            (ADMIN, GroupAdminProcessor(shards, clients, offsets)),
            (ADMIN, ClusterAdminProcessor(shards, self._addresses)),
            (MEMORY, ClientAdminProcessor(clients)),
            (MEMORY, NameServerAdminProcessor()),
            (RELAY, ClientRelayProcessor(clients, records)),
        )
        for executor, processor in rows:
            self.table.register(executor, processor.process, processor.CODES)

    def _addresses(self, shard: int) -> dict[int, BrokerAddress]:
        """Broker id -> where to dial."""
        return {LEADER_ID: self.addresses[shard]}

    def close(self) -> None:
        """Tell clients to go away, and end. What was stored stays."""
        if self._loop.is_closed():
            return
        self._run(self._server.close(GRACE_S))
        self._run(self._offsets.flush())
        self._run(self._shards.stop_looking())
        self._end()

    def _end(self) -> None:
        self._shards.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> RocketMQServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
