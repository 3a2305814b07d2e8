"""What a task of a write tells the driver. Needs PySpark 4."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.datasource import WriterCommitMessage


@dataclass
class TaskMessage(WriterCommitMessage):
    """What one task attempt has staged, as JSON, and the query that it belongs to."""

    #: None: its rows are in their queues
    staged: str | None
    #: None: the write is not a batch of a stream
    query_id: str | None
