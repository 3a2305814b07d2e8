"""Servers of foreign protocols, for clients that people already have. A door is a client of the shards.

rocketmq/  the remoting protocol of Apache RocketMQ
"""
