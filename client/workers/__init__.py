"""Workers: processes of a group that share the messages of topics, and settle each message alone.

workers          `Workers`: hands leased messages out
async_workers    the same for asyncio
workers_config   their options
leased           `LeasedMessage` and `LeasedBatch`: what a program gets, and settles
held             what this process holds: leases, and the parts of them that wait for the program
worker_state     what the program and the threads of one `Workers` share
shard_session    what one `Workers` does at one shard
shard_leases     the thread that leases messages of one shard
shard_settles    the thread that settles messages at one shard
shard_renewals   the thread that renews the leases of one shard
"""
