"""The remoting protocol of Apache RocketMQ, for its own clients. It is being built: nothing starts it yet.

door              the server beside one replica, and where the others are
rocketmq_server   the server: its parts put together
remoting_server   connections, and who answers their requests
connection        one connection: frames in, answers out, within bounds
processors        the table of processors
access            who may use the server
topology          shards as brokers, and the numbers of their queues
shards            puts, fetches and calls of the shards
answers           errors as response codes
request_fields    the fields of a request
named_queue       the queue that a request means
route_info        routes
send_message      sends
send_lanes        gathers sends of many clients into batches
delayed_sends     messages that are delivered later
half_sends        half messages of transactions
end_transaction   their commits and rollbacks
transaction_check  asks producers what has become of them
retry_sends       messages that clients put into retry topics by themselves
send_back         messages that a consumer could not handle
pull_message      pulls
query_messages    messages by key, by id, and by their place in the log
stored_record     records, and fields of them
admin_cluster     brokers for RocketMQ's tools, and what else they ask a name server
admin_topics      topics for them
admin_groups      groups for them
offset_resets     offsets that operators have set, for connected consumers
admin_clients     connected clients for them
fetch_turns       gathers reads of many pulls into fetches
queue_read_ahead  reads the messages of several pulls at a time
arrivals          wakes pulls that wait
client_manage     heartbeats, members of groups, notifications
shared_groups     groups in which both kinds of client want to consume
queue_locks       locks of queues for consumers in order
limited_warnings  warnings of which clients can cause any number
client_table      the clients that are connected
consumer_offsets  offsets of groups and of queues
codes             the numbers of requests, answers, languages and versions
command           frames: header in JSON or binary, and body
property_text     the properties string of a message, and what a put takes of it
message_row       one message of a send
message_batch     the messages in the body of a batch
sys_flags         the bits of sysFlag
signature         signs requests, and checks signatures
json_dialect      the JSON of bodies: fastjson's dialect, and the standard one
malformed         the error for bytes that the protocol does not allow
"""
