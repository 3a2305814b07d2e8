"""Consumer groups: which member reads which queue, and whose commits a queue takes.

members        what a group and its members are; records of the log about them
heartbeat      what a member says with each heartbeat, and the answer; their form as JSON
group_table    groups of the shard that coordinates them, as a function of its log
target         who shall have each queue: sticky and balanced
coordinator    the decisions: join, release, assignment, session, removal
foreign_members  clients of other protocols in groups, as their servers say
claims         the fence of each queue of this shard, as a function of its log
leases/        workers that share the messages of a queue, and settle each one alone
transaction_requests  what clients ask about transactions, and the answers
"""
