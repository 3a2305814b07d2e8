"""Producers: messages are batched, numbered, sent, resent and acknowledged.

producer         `Producer`, which blocks
async_producer   `AsyncProducer`, for asyncio
cancel_timer     cancels a message that waits for its time
producer_config  options, defaults and checks of both
message_encoder  checks and encodes single messages
message_batcher  gathers messages per queue into batches, and closes them
hooked_sends     messages that pass hooks, and the outcomes that the hooks get
open_batch       a batch that takes messages
linger           the linger time of open batches, and its thread
batch_sender     sends batches to the shards of their queues, within one byte limit
byte_limiter     the limit of unanswered bytes
shard_sender     the threads and the stream to one shard
send_window      the rules of one shard: order, resend, drain; a pure state machine
queue_sequence   sequence numbers of one producer in one queue
read_turn        decides which thread reads the acks
call_threads     threads that run calls which wait for a shard
half_sender      sends half messages, and ends them
half_checks      asks programs what has become of half messages, and its thread
half_message     half messages as programs see them
half_future      the result of `send_half`
half_id          the id by which any producer ends a half message
transaction      messages, offsets and acks that count together
transaction_rows   the messages of one, and which queue gets each
transaction_calls  has transactions decided, under names that are repeated
callbacks        the done callbacks of futures: what they raise, and what they may not wait for
send_future      the results of `send`, and the receipt of a batch
"""
