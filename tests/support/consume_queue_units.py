"""Checks the units of a consume queue."""

from __future__ import annotations

import numpy as np

from raymq.store.queues.consume_queue import BLANK_SIZE, ConsumeQueue


def check_units(queue: ConsumeQueue) -> None:
    """Fail unless every unit is valid and the records of the units that are not blank ascend."""
    units = queue.read(queue.min_offset, queue.max_offset - queue.min_offset)
    positions, sizes = units["position"].astype(np.int64), units["size"].astype(np.int64)
    assert ((sizes > 0) & (positions >= 0)).all()
    solid = sizes != BLANK_SIZE
    ends = (positions + sizes)[solid]
    assert (positions[solid][1:] >= ends[:-1]).all()
