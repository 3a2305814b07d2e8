"""Changes of a store's options while it is open: each is a record of the log, which all replicas follow."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from raymq.store.log.commit_log import CommitLog
from raymq.store.records.requests import AppendedRows
from raymq.store.state.shard_state import OPTIONS

from .inner_message import ServiceProgress
from .inner_put import InnerPut
from .service_host import ServiceHost

logger = logging.getLogger("raymq.store")


class OptionRecords:
    """Sets options. Callers: any thread."""

    def __init__(self, log: CommitLog, inner_put: InnerPut) -> None:
        self._log = log
        self._config = log.config
        self._inner_put = inner_put
        #: held from the look at the present values until the record is appended
        self._lock = threading.Lock()

    def set(self, values: Mapping[str, object], *, by: str) -> AppendedRows | None:
        """Set options of `WHILE_RUNNING`, whose values were checked. Returns: None if they have these values.

        They hold here at once, and on a follower when the record is confirmed there. Args: `by`: the operator.
        Raises: as `PutPath.append`; nothing was set then.
        """
        with self._lock:
            now_ms, config = self._log.clock.now_ms(), self._config
            before = {name: getattr(config, name) for name in values}
            entries = {
                name: {"value": value, "before": before[name], "at_ms": now_ms, "by": by}
                for name, value in values.items()
                if value != before[name]
            }
            if not entries:
                return None

            # Also on a full disk: an option may be what makes room.
            stored = self._inner_put.put_progress(ServiceProgress(OPTIONS, entries))
            for name, entry in entries.items():
                logger.info("%s set %s to %r; before: %r", by, name, entry["value"], before[name])
            return stored


def option_facts(store: ServiceHost, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Option -> its `value` here; if it was set while the store was open, also `before`, `at_ms` and `by`."""
    noted = store.state.progress.get(OPTIONS, {})
    found = {}
    for name in names:
        entry = noted.get(name, {})
        audit = {key: entry[key] for key in ("before", "at_ms", "by") if key in entry}
        found[name] = {"value": getattr(store.config, name), **audit}
    return found
