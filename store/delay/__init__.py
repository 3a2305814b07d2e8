"""Delay levels and timers: messages that are delivered later.

delay_hook       moves a message with a delivery time to the topic where it waits
delay_service    delivers waiting messages
delayed_record   a waiting record and the message that it becomes
timer_store      timers: which second is due, and what was delivered
timer_rule       the second of a record, from the record alone
timer_topic      the topic in which timers wait
timer_cache      timer_wheel and timer_log, RocketMQ's files, as a cache
timer_import     the progress of RocketMQ's own timers
"""
