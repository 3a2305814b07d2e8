"""The messages between a client and a shard, and how each of them travels.

    from -> to                  carried by                          messages
    client -> shard             Arrow Flight, stream "put"          flight_messages, small_puts,
                                                                    column_puts
    client -> shard             Arrow Flight, stream "fetch"        flight_messages; also leases and settlements
    client -> shard             Arrow Flight, action                operations, below
    client -> shard             Ray actor calls, for ray://         ray_calls, small_puts, column_puts;
                                                                    operations
    leader -> follower          Arrow Flight, stream "replicate"    raymq.replication.wire
    replica <-> replica         Arrow Flight, action "elect"        raymq.replication.wire
    replica <-> replica         Arrow Flight, action "log_units"    log_units
    replica <-> replica         Arrow Flight, action "log_match"    JSON
    CommitLog <-> satellites    shared memory of one machine        actors/shared: control_block, ring, wakeup
    cluster -> shard            Ray actor calls                     ready, endpoint, status, credentials, set_routes,
                                                                    close of ray/actor_classes.py

flight_messages  the streams over Arrow Flight, between clients and shards and between replicas
ray_calls        the calls of a shard's Ray actor, for clients without Flight
column_puts      puts of Arrow columns: those that every put has, and those that few have
small_puts       small puts as plain bytes, many in one message
log_units        log bytes from one replica for another one that lacks them, or whose own are damaged
tls              certificates of the shards' connections, and the URLs of endpoints
grpc_polling     lets the thread that waits for a message read the socket itself

Every Flight call carries the header `authorization: Bearer <token>`. Streams and actions name the cluster and the shard
that they expect ("cluster_id", "shard"), and another one refuses them. An error travels as {"kind", "message",
"fields"} and, if it has one, "case": see store/base/errors.py `to_wire`. The kind, such as Unavailable, says what the
caller may do. The case names a subclass of the kind, by which the receiver chooses its next step: a receiver that does
not know it goes by the kind.

    case                        kind                            the receiver
    NotLeading                  Unavailable                     asks the replica at `endpoint`, if its `epoch` is newer
    NotServing                  Unavailable                     looks for the leader
    ReplicaBehind               Unavailable                     asks again a little later
    AnotherShard                Rejected                        looks the address up again
    InstanceReplaced            Fenced                          does not join again
    SequenceGap                 Rejected                        sends the rows that are missing before
    TopicOnOtherShards          Rejected                        asks again with these `shards`
    TopicWithOtherQueues        Rejected                        adds queues to a retry topic

Operations take JSON arguments and return a JSON object. Over Flight the action's type is the operation. Its body is
{"cluster_id", "shard", "args"}, its result {"result"} or {"error"}. An argument that is malformed, missing or unknown
is refused with Rejected: field, limit and found. Tables have the arguments of each operation: `api/operations.py`.

A shard that is being added does not answer those that are about all shards: describe, routes, replicas and topics.

    operation of any replica                                        result
    describe()                                                      facts of this process
    status()                                                        ends, satellites; of a leader also counters
    leader()                                                        {replica, epoch, endpoint}, as far as known
    routes()                                                        {shard: endpoint of its leader}
    replicas()                                                      {shard: {replica: endpoint}}
    set_door(protocol, replica, address, node_port, pid)            {}; a server for foreign clients listens there, or
                                                                      nowhere; a replica's records name its own
    doors()                                                         {leader: replica, as far as known, doors:
                                                                      {protocol: {replica: {address, node_port, pid}}}}
    topics()                                                        {topic: {queues, shards, compacted?, schema?,
                                                                      allow_null_values?, former_queues?,
                                                                      all_queues?, generation?}}
    config()                                                        {options: {option: {value, before?, at_ms?, by?}}}
    check_record(topic, queue_id, offset)                           {}; Corrupt when it is damaged and cannot be mended
    replica_id()                                                    {replica}, between replicas: it can be called
    elect(frame, replica, endpoints)                                {frames}, between replicas: a message of elections
    log_units(start, stop)                                          {start, data, units}; Corrupt when damaged here, too
    log_match(candidates)                                           {candidate: index of the last [unit end, chain
                                                                      value] that this log has, -1: none, last_end}

    operation of the leader                                         result
    move_leader(replica)                                            {}; that replica leads soon, if it can
    note_unclean_recovery(facts)                                    {}; what `cluster.recover_shard` gave up
    note_shards(known, joined)                                      {topics: {topic: arguments of create_topic}}
    create_topic(name, queues, shards, attributes, on_all, former_queues, hidden_queues, generation)  {created,
                                                                      shards: the joined, generation?: how often topics
                                                                      of the name were deleted}
    delete_topic(name, generation)                                  {deleted, generation, shards: the joined}
    add_queues(name, queues, shards, are_hidden, former_queues, hidden_queues)           {added, shards: the joined}
    set_schema(name, schema)                                        {changed, shards: the joined}
    queue_ranges(topic)                                             {queue_id: [min offset, max offset]}
    offsets_by_time(topic, times, boundary)                         {queue_id: offset}, for {queue_id: ms}; boundary:
                                                                      first, last
    find_messages(topic, key, is_unique, begin_ms, end_ms, max_records)  {found: [queue_id, offset, store time, record
                                                                      in base64 or none] of each, in the log's order}
    place_of_message(message_id)                                    {topic, queue_id, offset}; {} when it is not here
    place_of_record(physical_offset)                                {topic, queue_id, offset}; {} when no message begins
                                                                      there
    commit_offsets(group, topic, offsets, numbers, seeks, clients)  {}; with numbers or clients {fenced: {queue_id:
                                                                      [number, member]}}: of these nothing is stored
    offsets(group, topic)                                           {queue_id: next offset}
    send_back(group, topic, queue_id, offset, delay_level, max_reconsume_times)  {topic}
    put_retry(group, body, properties, born_time_ms, reconsume_times, max_reconsume_times, flag, sys_flag, born_host)  {
                                                                      topic, offset, physical_offset}; as prepare_half
    cancel_timer(offset)                                            {cancelled}; offset: in the timer topic
    prepare_half(topic, queue_id, group, body, properties, born_time_ms, flag, sys_flag, born_host)  {offset,
                                                                      physical_offset, transaction_id, message_id,
                                                                      topic, queue_id, is_repeated}; body: in base64,
                                                                      born_host: 1.2.3.4:5
    end_half(offset, group, decision, physical_offset)              {outcome, is_repeated, topic, queue_id}; decision:
                                                                      commit, rollback, unknown
    halves_to_check(groups, max_records)                            {halves: [{offset, checks, record in base64}],
                                                                      next_ms}
    commit_transaction(session, number, parts, rows, offsets, acks)  {decision, is_repeated, first_offsets,
                                                                      store_time_ms, fenced, lost}: api/transactions.py
    abort_transaction(session, number)                              the same: the first decision counts
    settle(group, session, settle, items, options, wanted)          {refused}: items and refused of api/leases.py
    extend_leases(group, session, lease_ms, message, leases, options, wanted)  {granted_ms: {lease: for how long the
                                                                      worker has it}}; message: [lease, topic, queue,
                                                                      offset]; leases: numbers, without it all
    release_leases(group, topic)                                    {released}: messages that workers had; without
                                                                      topic of all topics
    pause_leases(group, paused)                                     {}
    group_leases(group)                                             {queues: {topic: {queue_id: [low, next, leased,
                                                                      waiting]}}, paused: why it leases nothing}
    dead_letter_counts(group)                                       {groups: {group: [count, oldest and newest store
                                                                      time in ms]}}
    dead_letters(group, begin, max_records, with_records, wanted)   {found: [queue_id, offset, record in base64 or none]
                                                                      of each, next: {queue_id: offset}, more}
    redrive(group, session, settle, offsets, topic, trial)          {topics: {topic: how many went there}, stays:
                                                                      [queue_id, offset, settled | later | refused,
                                                                      text] of each}; offsets: {queue_id: packed}
    find_coordinator(group)                                         {shard}; shard 0 answers
    groups()                                                        {coordinated: {group: members}, clients: {group:
                                                                      clients of other protocols}, paused,
                                                                      with_offsets, workers: [groups], paused_workers:
                                                                      {group: why}}
    describe_group(group)                                           {kind, paused, filters, topics, members, clients,
                                                                      queues}
    group_topics(group)                                             {topics}: those of which it has offsets here
    lag_ages(group, topic)                                          {queue_id: ms}: age of the oldest message that is
                                                                      not committed
    group_beat(beats)                                               {answers}: of each heartbeat its assignment or
                                                                      error, see store/groups/heartbeat.py
    claim_queues(group, topic, member, numbers)                     {offsets: {queue_id: next offset}, fenced}
    release_claims(group, topic, member, numbers)                   {}
    lock_queues(group, topic, client, queues, number)               {locked: [queue ids], free: [queue ids]}; without
                                                                      number, free ones are not locked
    unlock_queues(group, topic, client, queues)                     {}
    queue_locks(group, topic)                                       {queue_id: [client, age in ms]}
    note_foreign_members(protocol, server, groups)                  {with_members: {group: [programs of members]},
                                                                      resets: [{group, number, offsets, clients}]};
                                                                      groups: {group: [fields of each client]}, see
                                                                      store/groups/foreign_members.py
    notify_reset(group, number, offsets)                            {clients}; offsets: {topic: {queue_id: offset}}
    take_group_number(group, queues, force)                         {number}; queues: {topic: [queue ids]}. Rejected
                                                                      naming members that have them, without force
    reset_offsets(group, topic, offsets, number)                    {fenced}: as of commit_offsets
    withdraw_queues(group, queues, number)                          {}; members of a lower number claim them again
    pause_group(group, paused)                                      {}
    end_group(group)                                                {number, existed}
    forget_offsets(group, number)                                   {topics}: those of which it had offsets here
    init_producer(producer_id)                                      {epoch}
    known_producers(producer_ids)                                   {producer_ids: those that are known}
    fence_producer(producer_id, epoch, topic)                       {sequences: {queue_id: next sequence}}
    decide_write(decision, complete)                                {decision: the first one of that write,
                                                                      is_published?}, or
                                                                      {previous: that of the batch to publish before}
    publish_rows(write_id, topic, queue_id, ranges, batch)          {rows, is_complete}
    set_config(values, by)                                          {options: those that were named, as config has them;
                                                                      shards: the joined}
    delete_expired_files()                                          {}
"""
