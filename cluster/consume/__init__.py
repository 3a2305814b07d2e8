"""Consumers: read messages from an offset, in order, and read ahead.

consumer         `Consumer`, which blocks
async_consumer   `AsyncConsumer`, for asyncio
consumer_config  options, defaults and checks of both
shard_reader     reads ahead from one shard
range_reader     reads one queue by offset, for Spark tasks, queues and checks
verify_crcs      compares fetched records with their CRCs
"""
