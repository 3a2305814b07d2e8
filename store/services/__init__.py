"""Services of a running store. They put messages of their own.

checkpoint_service  syncs queues, index and configuration files; writes the checkpoint
transaction         half messages
resolutions         the outcomes of half messages
retry               send-back of consumers, and the dead letter queue
stored_message      one stored message, to be put again with changes
"""
