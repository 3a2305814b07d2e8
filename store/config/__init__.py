"""The options of a store: its modes, and the promises that they give.

store_config  the options, as RocketMQ's MessageStoreConfig has them
delay_levels  the delays that the option `message_delay_level` names
promise       flush, replication and ack modes: the ends that a receipt and a reader wait for
"""
