"""The numbers of rows in errors: those by which a user finds them, whatever parts the rows came in."""

from __future__ import annotations

import re

from raymq.store.base.errors import Rejected


def renumbered(error: Rejected, row: int, of: str = "") -> Rejected:
    """The same refusal with another number of its row. Args: `of`: words after the number, such as "of task 3"."""
    found = error.fields.get("row")
    number = f"row {row} {of}" if of else f"row {row}"
    text = re.sub(rf"\brow {found}\b", lambda _: number, error.message, count=1)
    fields = {**error.fields, "row": row}
    # The other rows of a refusal that names several are not renumbered.
    fields.pop("rows", None)
    return type(error)(text, **fields)
