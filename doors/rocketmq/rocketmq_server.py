"""The server for RocketMQ's clients: its parts put together, and the thread in which they run."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Mapping

from raymq.client.handle import ClusterHandle

from .access import Access, AccessCheck
from .arrivals import Arrivals
from .client_manage import ClientManageProcessor
from .client_table import ClientTable
from .consumer_offsets import ConsumerOffsetProcessor, OffsetStore, QueueOffsetProcessor
from .end_transaction import EndTransactionProcessor
from .half_sends import HalfMessageSender
from .processors import CALL, MEMORY, PULL, SEND, ProcessorTable
from .pull_message import PullMessageProcessor
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
            self._run(self._server.close())
            self._run(self._stop_services())
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
        send = SendMessageProcessor(self._shards, lanes, halves, self.brokers)
        self.table.register(SEND, send.process, send.CODES)
        pull = PullMessageProcessor(self._shards, clients, offsets, shared, arrivals)
        self.table.register(PULL, pull.process, pull.CODES)
        self.table.register(MEMORY, manage.process, manage.CODES)
        ends = EndTransactionProcessor(self._shards, arrivals)
        self.table.register(SEND, ends.process, ends.CODES)
        back = SendBackProcessor(self._shards)
        self.table.register(CALL, back.process, back.CODES)
        committed = ConsumerOffsetProcessor(self._shards, clients, offsets, shared)
        self.table.register(CALL, committed.process, committed.CODES)
        locks = QueueLockProcessor(self._shards, offsets, shared)
        self.table.register(CALL, locks.process, locks.CODES)
        ranges = QueueOffsetProcessor(self._shards)
        self.table.register(CALL, ranges.process, ranges.CODES)
        routes = RouteInfoProcessor(self._shards, self.brokers)
        self.table.register(CALL, routes.process, routes.CODES)

        checks = TransactionCheckService(self._shards, clients, self.brokers)
        self._services = [loop.create_task(each.run()) for each in (checks, shared)]

    def close(self) -> None:
        """Tell clients to go away, and end. What was stored stays."""
        if self._loop.is_closed():
            return
        self._run(self._stop_services())
        self._run(self._server.close(GRACE_S))
        self._run(self._offsets.flush())
        self._end()

    async def _stop_services(self) -> None:
        for service in self._services:
            service.cancel()
        await asyncio.gather(*self._services, return_exceptions=True)

    def _end(self) -> None:
        self._shards.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> RocketMQServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
