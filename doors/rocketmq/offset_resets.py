"""Lets connected consumers go on at offsets that an operator has set.

Source: Broker2Client#resetOffset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .admin_topics import queue_key
from .client_table import GroupClient
from .codes import Language, RequestCode
from .json_dialect import write_json
from .topology import BrokerQueues


def notify_reset(
    members: Iterable[GroupClient],
    group: str,
    queues: BrokerQueues,
    shard: int,
    offsets: Mapping[int, int],
    *,
    time_text: str,
    is_forced: str,
) -> None:
    """Push the offsets of a topic's queues on a shard to members of a group.

    Args: `time_text`, `is_forced`: as the request of a tool has them. Clients do not use them.
    """
    fields = {
        "group": group,
        "isForce": is_forced,
        "timestamp": time_text,
        "topic": queues.route.name,
    }
    keys = {queue_key(queues, shard, each): offset for each, offset in offsets.items()}
    table = write_json({"offsetTable": keys}, standard=False)
    # C++ clients read no map with objects as keys.
    rows = [{**key.as_dict(), "offset": offset} for key, offset in keys.items()]
    listed = write_json({"offsetTable": rows}, standard=False)
    for member in members:
        body = listed if member.connection.language == Language.CPP.name else table
        member.connection.push(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, fields, body)
