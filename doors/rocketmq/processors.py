"""The table of processors: which requests the server takes, what answers each of them, and how many at a time.

Source: BrokerController#registerProcessor, NettyRemotingAbstract#processRequestCommand.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from .codes import RequestCode
from .command import RemotingCommand

if TYPE_CHECKING:
    from .connection import ClientConnection

#: answers a request of a connection, now or later
Processor: TypeAlias = Callable[["ClientConnection", RemotingCommand], Awaitable[RemotingCommand]]


class CodedProcessor(Protocol):
    """A processor that names its requests."""

    @property
    def CODES(self) -> tuple[RequestCode, ...]:
        """The requests that it answers."""

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Answer a request. Raises: Refused, RayMQError."""


class Executor(NamedTuple):
    """What runs processors of one kind, and its bound."""

    name: str
    #: requests that it has taken and not answered. More are refused as SYSTEM_BUSY, and one-way requests are dropped
    requests_max: int


#: they wait for a durable put, and take no thread meanwhile
SEND = Executor("send", 10_000)
#: they wait for messages, and take no thread meanwhile
PULL = Executor("pull", 100_000)
#: calls of shards, each in a thread
CALL = Executor("call", 1_000)
#: calls of shards for tools and dashboards, in threads of their own: these cannot take those of clients
ADMIN = Executor("admin", 200)
#: they wait for the answer of another client, and take no thread meanwhile
RELAY = Executor("relay", 1_000)
#: answered from memory at once
MEMORY = Executor("memory", 10_000)


class ProcessorEntry(NamedTuple):
    """One row of the table."""

    code: RequestCode
    executor: Executor
    processor: Processor


class ProcessorTable:
    """The requests that the server takes."""

    def __init__(self) -> None:
        self._entries: dict[int, ProcessorEntry] = {}

    def register(
        self, executor: Executor, processor: Processor, codes: Iterable[RequestCode]
    ) -> None:
        """Let a processor answer requests. Raises: ValueError for a code that has one already."""
        for code in codes:
            if code in self._entries:
                raise ValueError(f"{code.name} has two processors")
            self._entries[code] = ProcessorEntry(code, executor, processor)

    def find(self, code: int) -> ProcessorEntry | None:
        """The row of a request; None: it is not supported."""
        return self._entries.get(code)

    def __iter__(self) -> Iterator[ProcessorEntry]:
        return iter(sorted(self._entries.values()))
