"""A cluster handle as the options of Spark 4's format("raymq")."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raymq.actors.protocol.tls import url_of
from raymq.client.transport.away import while_away
from raymq.replication.quorum import can_fail_over
from raymq.store.base.errors import Rejected

from .format_lookup import session_of_process, use_format

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle


def options(cluster: ClusterHandle) -> dict[str, str]:
    """The options `raymq.address` and `raymq.token` of a cluster. With three or five replicas all have their addresses.

    If this process has a session of Spark 4, the calling thread can use `format("raymq")` afterwards: see `use_format`.

    Example:
        With a SparkSession `spark` of Spark 4 and a `cluster`:

        ```python
        from raymq.spark import options

        cluster.create_topic("orders", queues=2)
        frame = spark.read.format("raymq").options(**options(cluster)).option("subscribe", "orders").load()
        print(frame.count())
        ```

    Args:
        cluster: the cluster. With TLS its authority is not among the options: set RAY_TLS_CA_CERT for the driver, or
            the option `raymq.ca` to the path of the authority's PEM file.

    Raises:
        Rejected: the handle reaches the shards by Ray only, and Spark speaks Arrow Flight.
        Unavailable: the cluster has three or five replicas, and no shard answers; as `use_format`.
    """
    if cluster.transport != "flight":
        raise Rejected(
            f"transport is {cluster.transport!r}; Spark speaks Arrow Flight: connect with transport='flight'",
            field="transport",
            limit="flight",
        )
    endpoints = [cluster.endpoints[shard] for shard in sorted(cluster.endpoints)]
    if can_fail_over(cluster.replicas):
        # The leaders may be away when Spark connects.
        replicas = while_away(lambda: cluster.call(None, "replicas", {}))
        endpoints += [str(there) for found in replicas.values() for there in found.values()]
    urls = dict.fromkeys(map(url_of, endpoints))

    session = session_of_process()
    if session is not None:
        use_format(session)
    return {"raymq.address": ",".join(urls), "raymq.token": cluster.token}
