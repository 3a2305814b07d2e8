"""The modules of actors/ import each other in one direction, and the protocol's page names every operation."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from raymq.actors import protocol
from raymq.actors.replica import OPERATIONS

ROOT = Path(__file__).resolve().parents[2]


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / "actors").rglob("*.py")):
        name = ".".join(("raymq", *path.relative_to(ROOT).with_suffix("").parts))
        yield name.removesuffix(".__init__"), ast.parse(path.read_text())


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    """Imported names, also those inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = name.rsplit(".", node.level)[0] + "." if node.level else ""
            start = base + (node.module or "")
            yield start
            yield from (f"{start}.{alias.name}" for alias in node.names)


def test_no_modules_import_each_other_in_a_circle():
    trees = dict(modules())
    graph = {
        name: {used for used in imports(name, tree) if used in trees}
        for name, tree in trees.items()
    }
    assert len(graph) > 30
    # Raises CycleError, which names the circle.
    order = list(TopologicalSorter(graph).static_order())
    assert order.index("raymq.actors.shared.control_block") < order.index(
        "raymq.actors.leader.leader"
    )


def test_the_page_of_the_protocol_names_every_operation_with_its_arguments():
    page = dict(re.findall(r"^    (\w+)\(([\w, ]*)\) {2,}", protocol.__doc__ or "", re.MULTILINE))
    operations = {name: ", ".join(each.arguments) for name, each in OPERATIONS.items()}
    assert page == operations


def test_the_function_of_an_operation_takes_what_its_table_checks():
    for name, each in OPERATIONS.items():
        _, *parameters = inspect.signature(each.run).parameters.values()
        assert [parameter.name for parameter in parameters] == list(each.arguments), name
        assert [parameter.default is not parameter.empty for parameter in parameters] == [
            argument.is_optional for argument in each.arguments.values()
        ], name
