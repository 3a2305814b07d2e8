"""The modules of actors/ import each other in one direction, and the protocol's page names every operation."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from raymq.actors import protocol
from raymq.actors.leader.admin_calls import AdminCalls
from raymq.actors.supervise.replica_operations import ReplicaOperations

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
    operations = {
        name.removeprefix("_op_"): ", ".join(list(inspect.signature(method).parameters)[1:])
        for name, method in {**vars(ReplicaOperations), **vars(AdminCalls)}.items()
        if name.startswith("_op_")
    }
    assert page == operations
