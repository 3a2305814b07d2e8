"""The modules of the product import each other in one direction, also inside functions and for type checks alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("store", "replication", "actors", "client", "cluster", "spark", "doors")


def modules() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree of every module. A package is the module of its `__init__.py`."""
    found = {}
    for path in (path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))):
        name = ".".join(("raymq", *path.relative_to(ROOT).with_suffix("").parts))
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(name: str, trees: dict[str, ast.Module]) -> Iterator[str]:
    """The modules that a module imports, wherever in it the import is."""
    for node in ast.walk(trees[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = name.rsplit(".", node.level)[0] + "." if node.level else ""
            start = (base + (node.module or "")).rstrip(".")
            for alias in node.names:
                module = f"{start}.{alias.name}"
                # Of a package a module or a name, which then is in its `__init__`.
                yield from (module,) if module in trees else (start, f"{start}.__init__")


def graph_of(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> the modules that it imports."""
    return {name: {used for used in imports(name, trees) if used in trees} for name in trees}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = graph_of(modules())
    assert len(graph) > 400
    # Raises CycleError, which names the circle.
    order = list(TopologicalSorter(graph).static_order())
    handle, routes = "raymq.client.handle", "raymq.client.transport.routes"
    assert order.index(routes) < order.index(handle) < order.index("raymq.cluster.cluster")


@pytest.mark.parametrize(
    "source",
    [
        "from .b import B",
        "from . import b",
        "from raymq.store import b",
        "import raymq.store.b",
        "def use():\n    from raymq.store.b import B",
        "if TYPE_CHECKING:\n    from .b import B",
    ],
)
def test_the_search_for_circles_sees_every_kind_of_import(source: str) -> None:
    trees = {
        "raymq.store.a": ast.parse(source),
        "raymq.store.b": ast.parse("from raymq.store.a import A"),
    }
    with pytest.raises(CycleError):
        TopologicalSorter(graph_of(trees)).prepare()
