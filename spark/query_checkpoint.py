"""A query's checkpoint, with the files that Spark's structured streaming writes: `metadata`, `offsets/N`, `commits/N`.

So Spark 4 can go on with it by `readStream.format("raymq")`, and the other way round. The files are on any file system
of Hadoop, by Spark's own JVM. A file comes into being whole, by a rename that replaces nothing.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, Rejected

from .offsets import Offsets, from_json, to_json

#: the first line of each file of offsets and commits (OffsetSeqLog.VERSION, CommitLog.VERSION)
_VERSION = "v1"
#: as spark.sql.streaming.minBatchesToRetain
_BATCHES_KEPT = 100


class QueryCheckpoint:
    """The offsets of a query, and which of its batches are complete. One driver at a time."""

    def __init__(self, spark: Any, location: str) -> None:
        """Args: `location`: a path of Hadoop, such as /data/orders-checkpoint or s3a://bucket/orders."""
        context = spark.sparkContext
        self._jvm, self._gateway = context._jvm, context._gateway
        hadoop = self._jvm.org.apache.hadoop.fs
        conf = context._jsc.hadoopConfiguration()
        root = hadoop.Path(location)
        self._files = root.getFileSystem(conf)
        self._root = self._files.makeQualified(root)
        self._renames = hadoop.FileContext.getFileContext(self._root.toUri(), conf)
        self._location = location

    def query_id(self) -> str:
        """The id of the query, which a new checkpoint gets."""
        text = self._read("metadata")
        if text is None:
            self._write("metadata", json.dumps({"id": str(uuid.uuid4())}))
            text = self._read("metadata") or ""
        try:
            return str(json.loads(text)["id"])
        except (ValueError, KeyError):
            raise self._damaged("metadata", text) from None

    def last_batch(self) -> int | None:
        """The number of the last batch that was begun; None: none was."""
        return max(self._numbers("offsets"), default=None)

    def last_commit(self) -> int | None:
        """The number of the last batch that is complete; None: none is."""
        return max(self._numbers("commits"), default=None)

    def offsets(self, batch_id: int) -> Offsets:
        """The end of a batch. Raises: Corrupt for a file that is not one of a stream of RayMQ."""
        name = f"offsets/{batch_id}"
        text = self._read(name)
        try:
            version, _, offsets = (text or "").split("\n")
            if version != _VERSION:
                raise ValueError(version)
            return from_json(json.loads(offsets))
        except (ValueError, AttributeError):
            raise self._damaged(name, text) from None

    def begin(self, batch_id: int, end: Offsets) -> None:
        """Note the end of a batch before it runs. Raises: Rejected if another driver has begun it."""
        facts = {"batchWatermarkMs": 0, "batchTimestampMs": Clock().now_ms(), "conf": {}}
        lines = (_VERSION, json.dumps(facts), json.dumps(to_json(end)))
        self._write(f"offsets/{batch_id}", "\n".join(lines))

    def commit(self, batch_id: int) -> None:
        """Note that a batch is complete, and delete what is old."""
        self._write(f"commits/{batch_id}", f'{_VERSION}\n{{"nextBatchWatermarkMs":0}}')
        for kind in ("offsets", "commits"):
            old = self._path(f"{kind}/{batch_id - _BATCHES_KEPT}")
            if self._files.exists(old):
                self._files.delete(old, False)

    # --- files ------------------------------------------------------------------------------------

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name)

    def _numbers(self, directory: str) -> list[int]:
        path = self._path(directory)
        if not self._files.exists(path):
            return []
        names = [str(each.getPath().getName()) for each in self._files.listStatus(path)]
        return [int(name) for name in names if name.isdecimal()]

    def _read(self, name: str) -> str | None:
        path = self._path(name)
        if not self._files.exists(path):
            return None
        stream = self._files.open(path)
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        except Exception as error:
            if "ChecksumException" in str(error):
                raise self._damaged(name, None) from error
            raise
        finally:
            stream.close()

    def _write(self, name: str, text: str) -> None:
        """Write a new file. Raises: Rejected if it exists."""
        path = self._path(name)
        made = self._path(f"{name.rpartition('/')[0] or '.'}/.{path.getName()}.{uuid.uuid4()}.tmp")
        stream = self._files.create(made, False)
        stream.write(bytearray(text.encode()))
        stream.close()

        option = getattr(self._jvm.org.apache.hadoop.fs, "Options$Rename")
        try:
            # Without an option it replaces nothing.
            self._renames.rename(made, path, self._gateway.new_array(option, 0))
        except Exception as error:
            self._files.delete(made, False)
            if not self._files.exists(path):
                raise
            raise Rejected(
                f"{name} of the checkpoint {self._location} exists: another driver runs the same stream; end one of "
                "them, or give each its own checkpointLocation",
                field="checkpointLocation",
                limit="one driver",
            ) from error

    def _damaged(self, name: str, text: str | None) -> Corrupt:
        return Corrupt(
            f"{name} of the checkpoint {self._location} is damaged, or not that of a stream of RayMQ"
            f"{'' if text is None else f' ({text!r:.200})'}; use another checkpointLocation, or put the file back",
            path=name,
            rule="a checkpoint has Spark's files and RayMQ's offsets",
        )
