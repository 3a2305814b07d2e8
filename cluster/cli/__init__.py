"""The command line: grammar, commands, doctor, Grafana.

main              the parser and the exit codes
grammar           every command with its options and their help, as a table
commands          commands on a cluster and this machine
shard_commands    `raymq shard ...`
door_commands     `raymq door ...`
config_commands   `raymq config ...`
dlq_commands      `raymq dlq ...`
group_commands    `raymq group ...`
message_commands  `raymq produce` and `raymq consume`
query_commands    `raymq topic query`, `tail` and `browse`
time_text         points in time on the command line
put_back          printed messages as arguments of `send`
status_text       the lines of `raymq status`
doctor            `raymq doctor`
tls_check         checks a certificate by a handshake
grafana           the Grafana dashboard
store_commands    `raymq store ...`, on directories
store_import      sends exported rows to a cluster
store_progress    progress of a long walk over a store
console           input, output, exit codes and the connection of all commands; those that call one method
"""
