"""Delay levels and timers: messages that are delivered later.

delay_hook       moves a message with a delivery time to the topic where it waits
delivery_time    the properties that name a time, and its second
delay_service    delivers waiting messages
delayed_record   a waiting record and the message that it becomes
timer_store      timers: which second is due, and what was delivered
timer_cancel     cancels a timer that waits
timer_rule       the second of a record, from the record alone
timer_topic      the topic in which timers wait
timer_wheel      RocketMQ's file with a slot per second
timer_log        RocketMQ's file with a unit per waiting timer
timer_cache      both files together, as a cache of the timer topic
timer_import     the progress of RocketMQ's own timers
"""
