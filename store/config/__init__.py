"""The options of a store: its modes, and the promises that they give.

option        what is declared of each option: its range, its name in RocketMQ, when a cluster changes it
running_config  the options of an open store, of which some change
store_config  the options, as RocketMQ's MessageStoreConfig has them
delay_levels  the delays that the option `message_delay_level` names
promise       flush, replication and ack modes: the ends that a receipt and a reader wait for
"""
