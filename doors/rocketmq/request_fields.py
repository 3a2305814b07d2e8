"""The fields of a request, by their long names, with their types checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .answers import Refused
from .codes import ResponseCode
from .command import RemotingCommand
from .json_dialect import read_json
from .malformed import Malformed


class RequestFields:
    """The fields of one request."""

    def __init__(self, request: RemotingCommand, names: Mapping[str, str] | None = None) -> None:
        """Args: `names`: long name -> name in the header; None: they are the same."""
        self._fields = request.fields
        self._names = names

    def text(self, name: str, default: str | None = None) -> str:
        """A text. Raises: Refused when it is missing without a default."""
        found = self._fields.get(name if self._names is None else self._names[name])
        if found is not None:
            return found
        if default is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"the request has no field {name!r}")
        return default

    def integer(self, name: str, default: int | None = None) -> int:
        """A number of 64 bits. Raises: Refused for anything else, and when it is missing without a default."""
        text = self.text(name, None if default is None else str(default))
        try:
            number = int(text)
        except ValueError:
            number = 1 << 63
        if not -(1 << 63) <= number < 1 << 63:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"the field {name!r} must be a number of 64 bits, not {text!r}",
            )
        return number

    def flag(self, name: str) -> bool:
        """A truth value; false without one."""
        return self.text(name, "false").lower() == "true"


def json_body(request: RemotingCommand) -> dict[str, Any]:
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
