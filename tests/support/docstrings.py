"""The examples in the docstrings of everything that users may import.

As a program it runs all that need a cluster, one after the other, beside one cluster in the directory `raymq-data`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

#: modules that users may import
PUBLIC = (
    "raymq",
    "raymq.data",
    "raymq.errors",
    "raymq.serve",
    "raymq.spark",
    "raymq.store",
    "raymq.trace",
)
_FENCED = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


class DocstringExample(NamedTuple):
    """One block of code."""

    name: str
    code: str


def public_objects() -> Iterator[tuple[str, Any]]:
    """(dotted name, object) of each public module, of its classes and functions, and of the methods of its classes."""
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        yield module_name, module
        for name in module.__all__:
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            yield f"{module_name}.{name}", value
            for member, method in vars(value).items() if inspect.isclass(value) else ():
                method = getattr(method, "__func__", method)
                if inspect.isfunction(method) and (
                    not member.startswith("_") or member == "__init__"
                ):
                    yield f"{module_name}.{name}.{member}", method


def examples() -> list[DocstringExample]:
    """Every example, in the order of the modules."""
    return [
        DocstringExample(name, textwrap.dedent(block[2]))
        for name, value in public_objects()
        for block in _FENCED.finditer(value.__doc__ or "")
    ]


def needs_cluster(example: DocstringExample) -> bool:
    """Whether it runs in the program: a store needs no cluster, and Spark and Ray Data have sessions of their own."""
    return not example.name.startswith(("raymq.store", "raymq.spark", "raymq.data"))


def main() -> None:
    """Run the examples, and print a line for each that ended well."""
    import raymq

    with raymq.start("raymq-data", segment_size_bytes=64 << 20):
        for example in filter(needs_cluster, examples()):
            exec(compile(example.code, example.name, "exec"), {"__name__": "__main__"})
            print("ran", example.name)


if __name__ == "__main__":
    main()
