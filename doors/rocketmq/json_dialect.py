from __future__ import annotations

import json
from typing import Any

from .malformed import Malformed


def write_json(value: Any, *, standard: bool) -> bytes:
    def w(v):
        if isinstance(v, dict):
            return (
                "{"
                + ",".join(
                    (json.dumps(str(k)) if standard or isinstance(k, str) else str(k)) + ":" + w(x)
                    for k, x in v.items()
                )
                + "}"
            )
        if isinstance(v, list):
            return "[" + ",".join(map(w, v)) + "]"
        return json.dumps(v)

    return w(value).encode()


def read_json(data) -> Any:
    try:
        return json.loads(bytes(data))
    except ValueError as e:
        raise Malformed(str(e)) from None
