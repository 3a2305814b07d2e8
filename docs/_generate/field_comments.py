"""`#:` comments above fields, and options that functions pass on: for the configuration page and the API reference."""

from __future__ import annotations

import ast
import inspect
import pydoc
from pathlib import Path
from typing import Any

from griffe import (
    Attribute,
    Docstring,
    Extension,
    Function,
    Parameter,
    ParameterKind,
    Parameters,
)

MARK = "#:"


def comment_above(lines: list[str], number: int) -> str:
    """The text of the `#:` comment that ends above line `number` (the first line is 1); empty without one."""
    found: list[str] = []
    for line in reversed(lines[: number - 1]):
        text = line.strip()
        if not text.startswith(MARK):
            break
        found.insert(0, text.removeprefix(MARK).strip())
    return " ".join(found)


def field_comments(cls: type) -> dict[str, str]:
    """Field -> the text of its comment; fields that follow each other without a comment share one."""
    lines = inspect.getsource(cls).splitlines()
    (tree,) = ast.parse("\n".join(lines)).body
    found: dict[str, str] = {}
    before = ""
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            before = comment_above(lines, node.lineno) or before
            found[node.target.id] = before
    return found


class FieldComments(Extension):
    """Gives mkdocstrings the `#:` comment of an attribute as its docstring."""

    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:
        """Called by griffe for each attribute that it meets."""
        if attr.docstring is None and attr.lineno and isinstance(attr.filepath, Path):
            text = comment_above(attr.lines_collection[attr.filepath], attr.lineno)
            if text:
                attr.docstring = Docstring(text[:1].upper() + text[1:], parent=attr)

    def on_function_instance(self, *, func: Function, **kwargs: Any) -> None:
        """Called by griffe for each function: shows the options of one that `takes_options_of` decorates."""
        if not any("takes_options_of" in str(each.value) for each in func.decorators):
            return
        shown = inspect.signature(pydoc.locate(func.path)).parameters.values()
        func.parameters = Parameters(
            *(
                Parameter(
                    each.name,
                    annotation=None if each.annotation is each.empty else each.annotation,
                    kind=ParameterKind[each.kind.name.lower()],
                    default=None if each.default is each.empty else repr(each.default),
                )
                for each in shown
            )
        )
