"""Messages that expire before a stream of Spark 4 has read them: an error, or passed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from raymq.store.config.store_config import StoreConfig
from tests.support.served_shard import PATIENT, ServedShard
from tests.support.spark_query import Query

# pyspark leaves the sockets of its collect() calls to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def config() -> StoreConfig:
    return dataclasses.replace(PATIENT, file_reserved_hours=0)


def test_expired_messages_end_a_stream_or_are_passed_over(
    shard: ServedShard, put: Callable[..., None], query: Query
) -> None:
    from pyspark.errors import StreamingQueryException

    large = [body * 4_000 for body in (b"%04d" % number for number in range(40))]
    put("expiring", 0, large[0])
    query.run(subscribe="expiring", startingOffsets="earliest")
    put("expiring", 0, *large[1:])
    first = shard.expire("expiring")
    assert 1 < first < 40

    with pytest.raises(StreamingQueryException) as ended:
        query.run(subscribe="expiring")
    assert f"the messages of the offsets 1 to {first - 1} expired" in str(ended.value)
    assert "failOnDataLoss=false reads on without them" in str(ended.value)
    query.run(subscribe="expiring", failOnDataLoss="false")
    assert query.bodies() == [large[0], *large[first:]]
