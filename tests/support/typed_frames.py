"""A DataFrame with every type that a schema can have, and checks that it comes back."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from raymq.spark import from_value, to_value
from raymq.store.base.errors import Rejected

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("flag", pa.bool_()),
        ("tiny", pa.int8()),
        ("price", pa.float64()),
        ("note", pa.string()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("local_at", pa.timestamp("us")),
        ("amount", pa.decimal128(20, 4)),
        ("inner", pa.struct([("a b", pa.int32()), ("days", pa.list_(pa.date32()))])),
        ("tags", pa.map_(pa.string(), pa.float64())),
    ]
)

_SQL = """
    select 'k' as key, 1L as id, true as flag, cast(-7 as tinyint) as tiny, cast(0.1 as double) as price,
        'a "b" \\n é' as note, cast('x' as binary) as raw, date'2024-02-29' as day,
        timestamp'2024-01-02 03:04:05.123456' as at, timestamp_ntz'1999-12-31 23:59:59.000001' as local_at,
        cast(123.4567 as decimal(20,4)) as amount,
        named_struct('a b', 5, 'days', array(date'2020-01-01', null)) as inner,
        map('x', cast(1.5 as double), 'y', null) as tags
    union all
    select null, 2L, null, null, null, null, null, null, null, null, null, null, null
    union all
    select 'k', 3L, false, cast(0 as tinyint), double('NaN'), '', cast('' as binary), date'0001-01-01',
        timestamp'1969-12-31 23:59:59.999999', timestamp_ntz'2024-01-01 00:00:00',
        cast(-0.0001 as decimal(20,4)), named_struct('a b', cast(null as int), 'days', array()), map()
"""


def typed_frame(spark: Any) -> Any:
    """Three rows: of values, of nulls and of empty ones."""
    return spark.sql(_SQL)


def check_round_trip(before: Any, after: Any) -> None:
    """Compare rows, whose keys a topic returns as bytes."""
    frames = [
        frame.withColumn("key", frame["key"].cast("string")).orderBy("id")
        for frame in (before, after)
    ]
    kinds = [dict(frame.dtypes) for frame in frames]
    assert kinds[0] == kinds[1]
    texts = [[repr(row) for row in frame.collect()] for frame in frames]
    assert texts[0] == texts[1]


def check_names(spark: Any, codec: Any) -> None:
    """Columns whose names Spark would parse become a value and come back."""
    frame = spark.sql("select 1 as `a.b`, 'x' as `c``d`, 'k' as key, 2 as `e.f`")
    values = to_value(frame, "a.b", "c`d", codec=codec)
    assert values.columns == ["key", "e.f", "value"]
    found = from_value(values, frame.select("`a.b`", "`c``d`").schema, codec=codec)
    assert found.columns == ["key", "e.f", "a.b", "c`d"]
    assert [tuple(row) for row in found.collect()] == [("k", 2, 1, "x")]


def check_value_types(spark: Any, codec: Any) -> None:
    """`to_value` and `from_value` are inverse of each other, and name what they do not take."""
    frame = typed_frame(spark)
    values = to_value(frame, codec=codec)
    assert values.columns == ["key", "value"]
    own = frame.drop("key")
    check_round_trip(frame, from_value(values, own.schema, codec=codec))
    check_round_trip(frame, from_value(values, SCHEMA, codec=codec))

    with_null = values.selectExpr("key", "case when key is null then null else value end as value")
    found = from_value(with_null, own.schema, codec=codec).filter("key is null").collect()
    assert [row["id"] for row in found] == [None]
    damaged = values.selectExpr("cast('{' as binary) as value")
    with pytest.raises(Exception, match="(?i)malformed|not one row"):
        from_value(damaged, "id bigint", codec=codec).collect()

    for sql, field in (
        ("select map(1, 2) as m", "m"),
        ("select named_struct('i', interval 1 day) as s", "s.i"),
        ("select 'x' as value, 1 as id", None),
    ):
        with pytest.raises(Rejected) as caught:
            to_value(spark.sql(sql), *([] if field else ["id"]), codec=codec)
        assert caught.value.field == (field or "value")
