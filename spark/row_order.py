"""Whether a plan of Spark gives each partition the same rows in the same order at every attempt.

Operators that pass rows on within a partition keep the order of what they read. All others are refused: a shuffle, and
with it a sort, a window or a join that needs one. Their rows arrive in another order each time, also those with equal
sort keys. An operator that is not known here is refused, too.
"""

from __future__ import annotations

from typing import Any

from raymq.store.base.errors import Rejected

_NARROW_NAMES = (
    "WholeStageCodegen InputAdapter ColumnarToRow RowToColumnar Project Filter Generate Expand Sample Union Coalesce "
    "LocalLimit GlobalLimit CollectMetrics BroadcastExchange BroadcastHashJoin BroadcastNestedLoopJoin "
    "CartesianProduct MapInArrow PythonMapInArrow MapInPandas ArrowEvalPython BatchEvalPython ArrowEvalPythonUDTF "
    "BatchEvalPythonUDTF DeserializeToObject SerializeFromObject MapElements MapPartitions"
)
#: operators whose rows follow from those of the same partition below, in their order. A broadcast join is one if the
#: order of both sides is fixed
_NARROW = frozenset(_NARROW_NAMES.split())
_LEAF_NAMES = "Range LocalTableScan OneRowRelation EmptyRelation FileSourceScan BatchScan"
#: leaves whose order is fixed: rows of the driver, files, and sources that say which partition has which rows
_LEAVES = frozenset(_LEAF_NAMES.split())
#: leaves of RDDs, whose order is that of their lineage
_RDD_LEAVES = frozenset(("RDDScan", "ExternalRDDScan"))


def check_row_order(plan: Any) -> None:
    """Check the physical plan of a frame. Raises: Rejected naming the operator after which the order is not fixed."""
    nodes = [plan]
    while nodes:
        node = nodes.pop()
        kind = node.getClass().getSimpleName().removesuffix("Exec")

        if kind == "AdaptiveSparkPlan":
            nodes.append(node.initialPlan())
        elif kind == "InMemoryTableScan":
            # Rows of a cache are computed again if their executor is lost.
            nodes.append(node.relation().cachedPlan())
        elif kind == "ReusedExchange":
            nodes.append(node.child())
        elif kind in _NARROW:
            children = node.children()
            nodes += [children.apply(number) for number in range(children.size())]
        elif kind not in _LEAVES and not (kind in _RDD_LEAVES and _is_narrow(node.rdd())):
            raise Rejected(
                f"the plan has {kind}, after which rows come in another order at each attempt: give sort_by=[columns "
                "that order the rows without ties], or use delivery='staged'",
                field="plan",
                limit="a fixed row order",
                found=kind,
            )


def _is_narrow(rdd: Any) -> bool:
    # Spark draws a shuffle of the lineage as a new branch: "+-(partitions) name".
    return "+-(" not in rdd.toDebugString()
