"""Consumer send-back: a message that could not be handled is delivered again later, finally to the dead letter queue.

Source: AbstractSendMessageProcessor#consumerSendMsgBack, RocketMQ 5.3.3. As there, a call that is repeated because its
outcome was unknown may deliver the message twice.
"""

from __future__ import annotations

from dataclasses import replace

from raymq.store.base import format as fmt
from raymq.store.base.errors import Rejected
from raymq.store.base.format import SCHEDULE_TOPIC
from raymq.store.delay.delayed_record import BUNDLE_RESERVE_BYTES
from raymq.store.delay.delivery_time import delay_level as level_of
from raymq.store.put.inner_message import EncodedInner, InnerMessage
from raymq.store.put.service_host import ServiceHost
from raymq.store.records.properties import DELAY, REAL_QUEUE, REAL_TOPIC
from raymq.store.records.requests import AppendedRows
from raymq.store.state.shard_state import TopicInfo
from raymq.store.state.topics import RETRY_MAX_TIMES, dlq_topic, retry_topic

from .stored_message import StoredMessage, read_one

#: level of the first retry. Each further retry takes the next level: 10 s, 30 s, 1 m, ... 2 h
FIRST_LEVEL = 3


def send_back(
    store: ServiceHost,
    group: str,
    topic: str,
    queue_id: int,
    offset: int,
    *,
    delay_level: int = 0,
    most: int = RETRY_MAX_TIMES,
    shard: int = 0,
) -> tuple[str, AppendedRows]:
    """Put a message that a group could not handle into its retry topic, with a delay, or into its dead letter queue.

    Args: `delay_level`: 0: the next level of the schedule; above: that level; below: the dead letter queue at once.
    `most`: a message that came so often goes there, too. `shard`: this store's, which has the queue. A missing topic
    is created here, with 1 queue.
    Returns: the topic of the delivery, and the offsets of the appended record.
    Durable: after the flush service's sync.
    Raises: Rejected for a missing message or a bad group name. Otherwise as put_inner.
    """
    message = read_one(store, topic, queue_id, offset)
    if message is None:
        raise Rejected(
            f"queue {queue_id} of {topic} has no message at {offset} to send back",
            field="offset",
            limit="a readable message",
        )

    dead = delay_level < 0 or message.reconsume_times >= most
    target = dlq_topic(group) if dead else retry_topic(group)
    here = queue_of(store, target, shard)
    level = 0 if dead else delay_level or FIRST_LEVEL + message.reconsume_times
    levels = len(store.config.delay_levels_ms)
    copy = _copy(message, target, here, min(level, levels))
    return target, _put(store, copy)


def put_retry(
    store: ServiceHost,
    group: str,
    message: InnerMessage,
    most: int,
    *,
    is_ordered: bool = False,
    shard: int = 0,
) -> tuple[str, AppendedRows]:
    """Put a message that a client has sent to the retry topic of its group by itself, with all of its fields.

    Args: `message`: its properties name the delay level. `most`: one that shall come more often goes to the dead letter
    queue. `is_ordered`: the group consumes in order: what it cannot handle goes there, too.
    Returns, Durable, Raises: as `send_back`.
    Source: SendMessageProcessor#handleRetryAndDLQ, and HookUtils#handleScheduleMessage.
    """
    # Its count has this delivery in it, which is the last one if it is the limit. In `send_back` it has not.
    dead = is_ordered or message.reconsume_times > most
    target = dlq_topic(group) if dead else retry_topic(group)
    here = queue_of(store, target, shard)
    properties = dict(message.properties)
    level = 0 if dead else min(level_of(properties), len(store.config.delay_levels_ms))
    if dead:
        properties.pop(DELAY, None)
    if level <= 0:
        return target, _put(
            store, replace(message, topic=target, queue_id=here, properties=properties)
        )

    properties |= {DELAY: str(level), REAL_TOPIC: target, REAL_QUEUE: str(here)}
    waiting = replace(message, topic=SCHEDULE_TOPIC, queue_id=level - 1, properties=properties)
    return target, _put(store, waiting)


def queue_of(store: ServiceHost, target: str, shard: int) -> int:
    """A queue of this shard of a topic, which is made if it is missing."""
    if target not in store.state.topics:
        fmt.check_topic_name(target)
        store.topics.create(target, 1, [shard])
    return _queue_here(store.state.topics[target], shard)


def _put(store: ServiceHost, copy: InnerMessage) -> AppendedRows:
    limit = store.config.record_bytes_max - BUNDLE_RESERVE_BYTES
    size = EncodedInner(copy, store_host=store.log.store_host).size
    if size > limit:
        raise Rejected(
            f"sent back the message makes a record of {size} bytes; one that is delivered later may have {limit}",
            field="record",
            limit=limit,
        )

    (appended,) = store.put_inner([copy])
    return appended


def _queue_here(info: TopicInfo, shard: int) -> int:
    for queue_id in range(info.queues):
        if info.shard_of(queue_id) == shard:
            return queue_id
    raise Rejected(
        f"topic {info.name} has no queue on shard {shard}; create it with a queue for every shard",
        field="topic",
        limit="a queue on each shard",
    )


def _copy(message: StoredMessage, target: str, queue_id: int, level: int) -> InnerMessage:
    return copy_of(message, target, queue_id, level, message.reconsume_times + 1)


def copy_of(
    message: StoredMessage, target: str, queue_id: int, level: int, reconsume_times: int
) -> InnerMessage:
    """A message to put into another topic again. Args: `level`: of its delay; 0: at once."""
    properties = dict(message.properties)
    properties.setdefault("RETRY_TOPIC", message.topic)
    host, port = message.store_host
    origin = fmt.offset_message_id(host, port, message.physical_offset)
    properties.setdefault("ORIGIN_MESSAGE_ID", origin)
    properties["WAIT"] = "false"
    properties[DELAY] = str(level)
    if not level:
        return message.moved(target, queue_id, properties, reconsume_times=reconsume_times)
    properties.update({REAL_TOPIC: target, REAL_QUEUE: str(queue_id)})
    return message.moved(SCHEDULE_TOPIC, level - 1, properties, reconsume_times=reconsume_times)
