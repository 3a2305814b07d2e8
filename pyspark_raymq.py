"""Lets Spark 4 find `format("raymq")`: it takes `DefaultSource` of each module whose name begins with `pyspark_`."""

from __future__ import annotations

import importlib.util

__all__ = ["DefaultSource"]

if all(map(importlib.util.find_spec, ("pyarrow", "numpy"))):
    # The format imports them when it is used. Until then they cost 0.1 s in each process that looks for formats. A
    # Python that lacks them does not have the format.
    from raymq.spark.data_source import RaymqDataSource as DefaultSource
