"""RocketMQ's configuration files, the directory `config/` of a store.

config_json  imports them into the log, and writes them from the state
fastjson     their dialect of JSON
"""
