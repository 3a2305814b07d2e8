"""The body of a request that is an object."""

from __future__ import annotations

from typing import Any

from .answers import Refused
from .codes import ResponseCode
from .command import RemotingCommand
from .json_dialect import read_json
from .malformed import Malformed


def object_body(request: RemotingCommand) -> dict[str, Any]:
    """The object in the body of a request. Raises: Refused."""
    try:
        found = read_json(request.body)
    except Malformed as error:
        raise Refused(
            ResponseCode.SYSTEM_ERROR, f"the body cannot be read as JSON: {error}"
        ) from error
    if not isinstance(found, dict):
        raise Refused(ResponseCode.SYSTEM_ERROR, "the body must be a JSON object")
    return found
