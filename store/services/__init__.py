"""Services of a running store. They put messages of their own.

checkpoint_service  syncs queues, index and configuration files; writes the checkpoint
transaction         half messages: prepare, commit, roll back, check
half_messages       those of a store that leads: which are open, which are due to be checked
staged_rows         rows of writes that are published whole, once they are decided
stream_batches      the producers that batches of a stream share
producer_ids        producer ids that names make
write_decisions     which staged rows a write consists of: the first decision of a write counts
decision_body       a decision as the body of its record
transaction_commits  transactions whose rows, offsets and acks lie on this shard: one append group
resolutions         the outcomes of half messages
leases              workers that share the messages of queues
lease_offers        what queues have for them
lease_copies        copies for the dead letters and the retry topic, made before the put lock is taken
lease_decisions     calls that wait together are decided together, and share records
redrive             dead letters that go back to where they came from
redriven_message    the message that a dead letter was, to be put again
leased_records      the messages that a worker has leased
retry               send-back of consumers, and the dead letter queue
stored_message      one stored message, to be put again with changes
"""
