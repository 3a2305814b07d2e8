"""Lets Spark 4 find `format("raymq")`: it takes `DefaultSource` of each module whose name begins with `pyspark_`."""

from __future__ import annotations

import importlib.util

from raymq.spark.data_source import RaymqDataSource as DefaultSource

if importlib.util.find_spec("pyarrow") is None:
    # The format imports it when it is used. Until then it costs 0.1 s in each process that looks for formats.
    raise ImportError("format('raymq') needs pyarrow: pip install raymq", name="pyarrow")

__all__ = ["DefaultSource"]
