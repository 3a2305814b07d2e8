"""A streaming query of Spark 4 that writes topics to files, for tests that start and stop it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA = "topic string, partition int, offset bigint, value binary"


class Query:
    """A query that writes a topic to files."""

    def __init__(self, spark: Any, place: Path, options: dict[str, str]) -> None:
        self._spark = spark
        self._options = options
        self.output = place / "output"
        self.checkpoint = place / "checkpoint"

    def run(self, *, trigger: dict[str, Any] | None = None, **given: str) -> Any:
        """Start it, let it read all that is there, and stop it. Returns: the stopped query."""
        reader = self._spark.readStream.format("raymq").schema(SCHEMA)
        frame = reader.options(**self._options, **given).load()
        writer = frame.writeStream.format("parquet").option("path", str(self.output))
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        query = (writer if trigger is None else writer.trigger(**trigger)).start()
        try:
            if trigger is None:
                query.processAllAvailable()
            else:
                query.awaitTermination(60)
        finally:
            query.stop()
        return query

    def bodies(self) -> list[bytes]:
        """What it wrote, sorted."""
        rows = self._spark.read.schema(SCHEMA).parquet(str(self.output)).collect()
        return sorted(bytes(row["value"]) for row in rows)

    def offsets(self, batch: int) -> Any:
        """The end of a batch, as Spark keeps it."""
        lines = (self.checkpoint / "offsets" / str(batch)).read_text().splitlines()
        return json.loads(lines[-1])
