"""Log bytes from one replica for another one that lacks them, or whose own are damaged: `log_units` as JSON."""

from __future__ import annotations

import base64
from typing import Any

from raymq.store.base.errors import Unavailable
from raymq.store.log.chain import ChainUnit
from raymq.store.log.mending.fitting import SoundBytes


def pack_sound_bytes(found: SoundBytes) -> dict[str, object]:
    """The result of the operation."""
    return {
        "start": found.start,
        "data": base64.b64encode(found.data).decode(),
        "units": [list(unit) for unit in found.units],
    }


def unpack_sound_bytes(answer: dict[str, Any]) -> SoundBytes:
    """The bytes of an answer. Raises: Unavailable for an answer of another form."""
    try:
        units = [ChainUnit(*map(int, unit)) for unit in answer["units"]]
        data = base64.b64decode(answer["data"], validate=True)
        return SoundBytes(int(answer["start"]), data, units)
    except (KeyError, TypeError, ValueError) as error:
        raise Unavailable(f"not an answer to log_units: {error!r}", field="log_units") from error
