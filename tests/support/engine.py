"""The engine with a clock by hand, whose records are confirmed when a test says so."""

from __future__ import annotations

from pathlib import Path

from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage
from raymq.store.services.stored_message import StoredMessage, read
from raymq.store.services.transaction import TransactionService
from tests.support.clock import ManualClock
from tests.support.confirming import confirm

CONFIG = StoreConfig(segment_size_bytes=256 * 1024, consume_queue_file_size_bytes=20_000)


class Engine:
    """A store whose records are confirmed at once, and its transactions."""

    def __init__(self, root: Path, config: StoreConfig = CONFIG, **options: int) -> None:
        self.root = root
        self.config = config
        self.options = options
        self.clock = ManualClock()
        self.open()
        if "t" not in self.store.state.topics:
            self.store.topics.create("t", 2, [0])

    def open(self) -> None:
        self.store = MessageStore.open(self.root, config=self.config, clock=self.clock)
        self.service = TransactionService(self.store, **self.options)
        self.confirm()

    def confirm(self) -> None:
        store = self.store
        confirm(store)

    def prepare(self, body: bytes, **properties: str) -> int:
        message = InnerMessage(
            "t", 1, body, properties, born_time_ms=self.clock.now_ms(), flag=3, sys_flag=0x1
        )
        half = self.service.prepare(message)
        self.confirm()
        return half.offset

    def read(self, topic: str = "t", queue_id: int = 1) -> list[StoredMessage]:
        self.confirm()
        first, _ = self.store.queue_range(topic, queue_id)
        return read(self.store, topic, queue_id, first, max_records=1000)[0]

    def bodies(self) -> list[bytes]:
        return [message.body for message in self.read()]

    def crash(self) -> None:
        self.confirm()
        self.store.abandon()
        self.open()
