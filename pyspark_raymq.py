"""Lets Spark 4 find `format("raymq")`: it takes `DefaultSource` of each module whose name begins with `pyspark_`."""

from __future__ import annotations

from raymq.spark.data_source import RaymqDataSource as DefaultSource

__all__ = ["DefaultSource"]
