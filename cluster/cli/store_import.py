"""The rows of `raymq store export`, sent to a running cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raymq.store.base.errors import Rejected
from raymq.store.state.topics import is_system_topic

from .put_back import PutBack, Sender, of_record

_COLUMNS = ("topic", "queue_id", "body", "properties", "flag", "sys_flag")
#: rows decoded at a time
_ROWS = 10_000


def send_export(source: Path, cluster: Any, *, topic: str | None) -> Sender:
    """Send every message of an export, or of one of its topics. Returns: the sender, whose messages are acknowledged.

    Raises: Rejected when `source` is not an export, or the cluster lacks a topic: nothing was sent.
    """
    files = _files(source)
    _check_topics(files, cluster, topic)
    with cluster.producer() as producer:
        sender = Sender(cluster, producer)
        for message in _messages(files, topic):
            sender.send(message)
    return sender


def _files(source: Path) -> list[Path]:
    found = sorted(source.glob("*.parquet"))
    if not found:
        message = f"{source} is not a directory of `raymq store export`: it has no *.parquet"
        raise Rejected(message, field="SOURCE", path=str(source))

    for path in found:
        try:
            names = pq.read_schema(path).names
        except (pa.ArrowInvalid, OSError) as error:
            message = f"{path} cannot be read: {error}"
            raise Rejected(message, field="SOURCE", path=str(path)) from error

        missing = [name for name in _COLUMNS if name not in names]
        if missing:
            message = f"{path} is not a file of `raymq store export`: it has no column {', '.join(missing)}"
            raise Rejected(message, field="SOURCE", path=str(path))

    return found


def _check_topics(files: list[Path], cluster: Any, topic: str | None) -> None:
    """Raises: Rejected naming every topic that the cluster does not have, with the command that makes it."""
    queues: dict[str, int] = {}
    for path in files:
        table = pq.read_table(path, columns=["topic", "queue_id"])
        highest = table.group_by("topic").aggregate([("queue_id", "max")])
        for row in highest.to_pylist():
            queues[row["topic"]] = max(queues.get(row["topic"], 0), row["queue_id_max"] + 1)

    wanted = {name for name in queues if not is_system_topic(name)}
    if topic is not None:
        if topic not in wanted:
            fault = f"the export has no message of topic {topic!r}; it has {', '.join(sorted(wanted)) or 'no topics'}"
            raise Rejected(fault, field="topic")
        wanted = {topic}

    known = cluster.topics()
    missing = sorted(name for name in wanted if name not in known)
    if missing:
        commands = "; ".join(
            f"raymq topic create '{name}' --queues {queues[name]}" for name in missing
        )
        message = (
            f"the cluster has no topic {', '.join(missing)}; nothing was sent. With at least as many queues as the "
            f"export shows, messages keep their queue: {commands}"
        )
        raise Rejected(message, field="topic", limit=", ".join(known))


def _messages(files: list[Path], topic: str | None) -> Iterator[PutBack]:
    for path in files:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS, columns=list(_COLUMNS)):
                if topic is not None:
                    batch = batch.filter(pc.equal(batch.column("topic"), topic))
                columns = [batch.column(name).to_pylist() for name in _COLUMNS]
                for name, queue_id, body, properties, flag, bits in zip(*columns, strict=True):
                    text = dict(properties)
                    yield of_record(name, queue_id, body, text, flag=flag, sys_flag=bits)
