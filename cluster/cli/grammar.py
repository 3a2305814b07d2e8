"""The grammar of the command line, with the help of each option, as a table. Its reader is below it.

A command is a line with its words, two blanks and its help. `= method` takes the help from the docstring of that method
of `Cluster`. A line `group *` has the help of a group, and `@name` stands for lines that several commands have.
Each indented line is an option: names, value, two blanks, help. A deeper line goes on with the help of the one before.
A line that begins with a dot is printed after the options.

    --name              a switch; `--[no-]name` can be switched on and off
    --name VALUE        an option; `name VALUE` is an argument; `[VALUE]` may be left out
    --name a|b|c        one of these words; FLUSHES and ACKS are those of the promise
    --name>field VALUE  the command finds the value as `field`

Braces after a value say more of it: `>=4` is a whole number of at least 4 (`N` alone: at least 1), and there are
`decimal`, `pause` (of `--watch`), `rocketmq` (a port, or off), `labels`, `time`, `start` and `stop` (offsets),
`repeated`, `several` (words), `required` and `default 4`. A default that the help does not name is added to it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

from raymq.store.config.promise import ACKS, FLUSHES

from . import (
    commands,
    config_commands,
    dlq_commands,
    door_commands,
    group_commands,
    message_commands,
    query_commands,
    shard_commands,
    store_commands,
)
from .console import Console
from .time_text import time_of

#: a command: it returns its exit code
RunCommand = Callable[[argparse.Namespace, Console], int]

RUNS: dict[str, RunCommand] = {
    "start": commands.start,
    "stop": commands.stop,
    "status": commands.status,
    "shard list": shard_commands.shard_list,
    "shard describe": shard_commands.shard_describe,
    "shard move-leader": shard_commands.MOVE_LEADER,
    "shard add": shard_commands.ADD,
    "shard replace-replica": shard_commands.REPLACE_REPLICA,
    "shard set-replicas": shard_commands.SET_REPLICAS,
    "shard recover": shard_commands.shard_recover,
    "shard restart-all": shard_commands.RESTART_ALL,
    "shard drain-node": shard_commands.DRAIN_NODE,
    "door list": door_commands.LIST,
    "door enable": door_commands.ENABLE,
    "door disable": door_commands.DISABLE,
    "config list": config_commands.config_list,
    "config get": config_commands.config_get,
    "config set": config_commands.config_set,
    "topic list": commands.TOPIC_LIST,
    "topic create": commands.topic_create,
    "topic delete": commands.topic_delete,
    "topic add-queues": commands.ADD_QUEUES,
    "topic add-column": commands.topic_add_column,
    "topic describe": commands.TOPIC_DESCRIBE,
    "group list": group_commands.GROUP_LIST,
    "group describe": group_commands.GROUP_DESCRIBE,
    "group lag": group_commands.group_lag,
    "group reset": group_commands.GROUP_RESET,
    "group pause": group_commands.GROUP_PAUSE,
    "group resume": group_commands.GROUP_RESUME,
    "group delete": group_commands.GROUP_DELETE,
    "dlq list": dlq_commands.DLQ_LIST,
    "dlq show": dlq_commands.DLQ_SHOW,
    "dlq redrive": dlq_commands.redrive,
    "lease release": group_commands.LEASE_RELEASE,
    "topic query": query_commands.query,
    "topic tail": query_commands.tail,
    "topic browse": query_commands.browse,
    "produce": message_commands.produce,
    "consume": message_commands.consume,
    "store verify": store_commands.verify,
    "store dump": store_commands.dump,
    "store scrub": store_commands.scrub,
    "store repair": store_commands.repair,
    "store export": store_commands.export,
    "store import": store_commands.import_,
    "bench produce": commands.bench,
    "bench consume": commands.bench,
    "bench e2e": commands.bench,
    "bench spark": commands.bench_datasets,
    "bench data": commands.bench_datasets,
    "grafana install": commands.grafana_install,
    "grafana show": commands.grafana_show,
    "doctor": commands.doctor,
}

_GRAMMAR = """\
@json
    --json  print JSON
@token
    --token-file FILE  file with the token, for raymq:// (default: the variable RAYMQ_TOKEN)
@cluster
    -c --cluster TARGET  the cluster: data directory, name or raymq://host:port (default: the only cluster known
        here, else "default")
    @token
@shard
    shard SHARD{>=0}  number of the shard, from 0
@store
    directory DIR  a store, or a cluster's data directory
@put-back
    . Messages that are put back keep body, key, tag, index keys, properties and their queue id, if the topic
        has that queue (else their key decides). Their offsets and times are new. Create the topics first: raymq
        topic create TOPIC --queues N.
@shown
    -o --output line|json|raw|hex{default line}  line: store time, queue and offset, id, keys and the begin of
        the body; raw: body and newline; hex: body in hexadecimal; json: the whole message
    . TIME is 2026-11-29T14:30, in this machine's time zone unless it names one, milliseconds since 1970, or so
        long ago: 90s, 15m, 2h, 1d. Store times count.
@report
    --json [FILE]  write the result as JSON to FILE, without FILE to standard output (default: as text)
@bench-load
    --topic NAME  name of the topic (default: bench)
    --topics N  number of topics, NAME-0 ... (default: 1)
    --queues N  queues of each topic (default: 4)
    --shards N,...  only the queues on these shards (default: all)
    --workers N  workers (default: 2)
    --batch N  rows of a batch at most (default: 1000)
    --in-flight N  closed loop: unacknowledged batches per worker (default: 4)
    --size DIST  bytes of a body: N, uniform:LOW-HIGH, lognormal:MEDIAN[:SIGMA] (default: 1024)
    --keys DIST  none, uniform:K or zipf:K[:SKEW] of K keys (default: none)
    --api batches|messages  send columns, or one message per call (default: batches)
    --acks ACKS  what a receipt waits for (default: quorum)
@bench-time
    --rate N{decimal}  open loop: messages per second of all workers together (default: closed loop)
    --linger-ms MS{decimal}  open loop: milliseconds to wait for a fuller batch (default: 5)
    --duration-s N{decimal}  seconds that are measured (default: 10)
    --warmup-s N{decimal}  seconds before them (default: 2)
    --find-max MS{decimal}  search the highest rate with a p99 of up to MS milliseconds (default: one rate)
@bench-report
    --no-verify  do not read every message back at the end
    --runner auto|ray|processes{default auto}  where workers run: ray, as tasks on all nodes; processes, on this
        machine (default: auto, which is processes for a raymq:// target, else ray)
    @report
    --html FILE  write one page with all plots and what was measured on (default: none)
    . In an open loop, latency is measured from the time at which a message was due. exit codes: 0 done; 1 a
        message was lost, repeated, damaged or out of order; 2 and 3 as elsewhere
@bench-rows
    --topic NAME  name of the topic (default: bench)
    --queues N  queues of the topic (default: 4)
    --messages N  rows (default: 1000000)
    --size N  bytes of a value (default: 1024)
    --tasks N  tasks that write rows; Spark gets so many cores (default: 4)
    . exit codes: 0 done; 1 a row was lost, repeated or damaged; 2 and 3 as elsewhere
start  create or resume the cluster of a data directory
    @json
    data_dir DIR  data directory, made if missing
    --name NAME  how other commands find it (first start only; default: "default")
    --shards N  number of shards, each with its own commit log (first start only; default: 1)
    --replicas N  copies of each shard: 1, 2, 3 or 5; 3 or 5 elect another leader by themselves (first start
        only; default: 1)
    --flush FLUSHES  acknowledge after the sync to disk, or before (default: as at the last start, at first
        sync)
    --file-reserved-hours HOURS{decimal}  how many hours a full file of messages is kept at least (default: as
        at the last start, at first 72)
    --producer-expiry-hours HOURS{decimal}  how many hours a full table of producers remembers each of them
        (default: as at the last start, at first 168)
    --catch-up-bytes-per-s BYTES{>=0}  bytes per second to a follower that catches up while others keep up
        (default: as at the last start, at first 0: no limit)
    --config NAME=VALUE{repeated}  another option of the stores, such as flush_interval_ms=200 (default: as at the last
        start, at first those of docs/reference/configuration.md); may be repeated
    --[no-]transient-pool  append through shared memory, 128 MiB of /dev/shm per shard (default: as at the last
        start, at first off)
    --address HOST:PORT  the Ray to run in (default: the variable RAY_ADDRESS, else a Ray of its own)
    --ephemeral  allow a directory that does not survive a reboot, such as /tmp
    --segment-size-bytes N{>=4096}  bytes of each file of the commit log (first start only; default: 1073741824)
    --nodes LABEL,...{labels}  spread the shards over the Ray nodes with these values of the label raymq-node
        (first start only; default: this machine)
    --host HOST  address that the shards listen on (default: 127.0.0.1; with --nodes each node's own)
    --insecure  allow an unencrypted --host that other machines reach
    --rocketmq [PORT]{rocketmq}  serve RocketMQ's own clients, with this port of each node for name server requests,
        9876 without one; off: do so no more (default: as at the last start, at first off)
    --rocketmq-access key|open  key: these clients sign requests with AccessKey raymq and the token as SecretKey;
        open: they need not, on 127.0.0.1 alone (default: as at the last start, at first key)
    --timeout-s N{default 180}  seconds that the whole start may take
stop  end a cluster (and Ray, if start started it); data stays
    @json
    target [TARGET]  data directory or name (default: the cluster known here, if it is the only one)
    --timeout-s N{default 60}  seconds that the shards have to close
status  health, shards, topics, messages, disk and lag of a cluster
    @json
    target [TARGET]  data directory, name or URL (default: the only cluster known here, else "default")
    @token
    -v --verbose  also positions in bytes, process ids, endpoints (--json has them always)
shard *  leaders and replicas of the shards
shard list  leader and health of each shard
    @json @cluster
shard describe  each replica of a shard
    @json @cluster
    @shard
shard move-leader  = move_leader
    @json @cluster
    @shard
    --to>replica REPLICA{>=0, required}  the replica that shall lead
shard add  = add_shards
    @json @cluster
    --count N{default 1}  how many shards
    --nodes LABEL,...{labels}  the nodes over which all shards would be spread, as `raymq-node`, in order
        (default: those of the first start that are there, and those that have replicas)
    --timeout-s N{default 600}  seconds until they must serve
shard replace-replica  = replace_replica
    @json @cluster
    @shard
    replica REPLICA{>=0}  number of the lost replica, from 0
    --node LABEL  the node for the new one, as `raymq-node` (default: that of the lost one)
    --timeout-s N{default 600}  seconds until the new one must be complete
shard set-replicas  = set_replicas
    @json @cluster
    replicas N{>=2}  copies of each shard: 2, 3 or 5
    --nodes LABEL,...{labels}  the nodes that have replicas then, as `raymq-node` (default: those of the first
        start)
    --timeout-s N{default 600}  seconds until all new replicas must count
shard recover  = recover_shard
    @json @cluster
    @shard
    --unclean  required: other recoveries need no command
    --yes-lose-messages  do not ask
    --node REPLICA=LABEL{repeated}  the node for the successor of a lost replica (default: that of the lost
        one); may be repeated
    --timeout-s N{default 600}  seconds until the new replicas must be complete
shard restart-all  = rolling_restart
    @json @cluster
    --timeout-s>replica_timeout_s N{default 120}  seconds that one replica may take
shard drain-node  = drain_node
    @json @cluster
    node NODE  the node, as its label `raymq-node`
    --timeout-s N{default 120}  seconds until the node must lead nothing
door *  servers for clients of other systems
door list  where they listen
    @json @cluster
door enable  = enable_door
    @json @cluster
    protocol PROTOCOL  the clients that are served: rocketmq
    --port N  the port of each node for name server requests of clients (default: that of before, at first 9876)
    --access key|open  as --rocketmq-access of `raymq start` (default: as before, at first key)
    --timeout-s N{default 60}  seconds until a server must work beside each replica
door disable  = disable_door
    @json @cluster
    protocol PROTOCOL  the clients that are served no more: rocketmq
config *  options of the stores: their values, and changes while the cluster runs
config list  every option, its value, its default, and the last change
    @json @cluster
    --changed  only those that have another value than the default, or that were set while the cluster ran
config get  the value of one option
    @json @cluster
    name NAME  name of the option, as in docs/reference/configuration.md
config set  = set_config
    @json @cluster
    values NAME=VALUE{several}  an option that may change while the cluster runs, and its new value
topic *  list, create and describe topics; find their messages
topic list  all topics
    @json @cluster
topic create  = create_topic
    @json @cluster
    topic TOPIC  name of the new topic
    --queues N{default 4}  number of queues, over all shards
    --compacted  keep only the latest message of each index key
    --column>columns NAME:TYPE{repeated}  a column of the values' schema, its type by its name in Spark: bigint,
        string, decimal(9,2), array<date>, struct<city:string,...>; "NAME:TYPE not null" needs a value; may be
        repeated (default: values are bytes)
    --allow-null-values  a value may be null, which is not an empty value
topic delete  = delete_topic
    @json @cluster
    topic TOPIC  name of the topic
    --yes  its messages and the offsets of groups are lost
topic add-queues  = add_queues
    @json @cluster
    topic TOPIC  name of the topic
    --queues N{required}  number of queues afterwards
    --break-key-order  also for a topic that has had messages: most keys go to another queue than before
topic add-column  = add_column
    @json @cluster
    topic TOPIC  name of a topic with a schema
    column NAME:TYPE  the column, as `raymq topic create --column` takes it
topic describe  a topic's options, schema, queues and offsets
    @json @cluster
    topic TOPIC  name of the topic
group *  what consumer groups do
group list  all groups
    @json @cluster
group describe  the members of a group, the owner of each queue, and how far the group is
    @json @cluster
    group GROUP  name of the group
group lag  how many messages of each queue a group has not committed, and how old they are
    @json @cluster
    group GROUP  name of the group
    --watch [SECONDS]{pause}  look again every SECONDS, or every 2, until interrupted or above --max (default: look
        once)
    --max N{>=0}  exit with 1 if the group lags by more messages than that (default: no limit)
group reset  = reset_group
    @json @cluster
    group GROUP  name of the group
    --to POSITION{position, required}  where it goes on in each queue: earliest, latest, an offset, or a time, as
        `raymq consume --from` takes them; group:NAME is where that group is
    --topic TOPIC  only this topic (default: all that the group reads)
    --queue-id>queue_ids N{>=0, several}  only these queues of the topic (default: all queues)
    --dry-run  print the old and the new offsets, and change nothing
    --force  also queues that members have: their later commits are refused
group pause  = pause_group
    @json @cluster
    group GROUP  name of the group
group resume  = resume_group
    @json @cluster
    group GROUP  name of the group
group delete  = delete_group
    @json @cluster
    group GROUP  name of the group
dlq *  messages that groups could not handle
dlq list  = dead_letter_groups
    @json @cluster
    group [GROUP]  only this group (default: all that have some)
dlq show  = dead_letters
    @json @cluster
    group GROUP  name of the group
    --max>max_records N{default 100}  so many messages at most, the oldest
    --where EXPRESSION  only those for whose properties this is true: "price > 5 AND region IN ('eu')" (default:
        all)
dlq redrive  = redrive
    @json @cluster
    group GROUP  name of the group
    --max>max_records N  so many messages at most (default: all that are there)
    --rate PER_S{decimal}  so many messages a second at most (default: no limit)
    --to TOPIC  another topic, with a queue on every shard that has some (default: where they came from)
    --where EXPRESSION  only those for whose properties this is true (default: all)
    --dry-run  print what would go where, and change nothing
    . exit codes: 0 done; 1 some stay, because their topic or queue does not exist any more for example; 2 and 3 as
        elsewhere
lease *  messages that workers have leased
lease release  = release_leases
    @json @cluster
    group GROUP  name of the group
    --topic TOPIC  only messages of this topic (default: of all topics)
topic query  the newest messages with a key, or of a time, over all queues
    @json @cluster
    topic TOPIC  name of the topic
    --key KEY  one of the index keys with which the message was sent (default: any)
    --unique-key KEY  the id that a client of RocketMQ, or a send for later, gave the message (default: any)
    --from>begin TIME{time}  stored then or later (default: at any time)
    --to>end TIME{time}  stored then or before (default: at any time)
    --max N{default 64}  so many messages at most, the newest
    @shown
topic tail  the newest messages, and with --follow those that come
    @json @cluster
    topic TOPIC  name of the topic
    -n --max N{default 10}  how many of the messages that are there
    --follow  print new messages until interrupted
    @shown
topic browse  the messages from a place or a time on, over all queues or of one
    @json @cluster
    topic TOPIC  name of the topic
    --from>begin TIME{time}  stored then or later (default: the oldest messages)
    --queue-id N{>=0}  only this queue of the topic (default: all queues)
    --offset OFFSET{>=0}  from this offset of the queue on; not with --from (default: its first)
    --id MESSAGE_ID  the one message with this id (default: any)
    --max N{default 20}  so many messages at most, the oldest
    @shown
produce  send each line of standard input, or of a file, as a message
    @json @cluster @put-back
    topic [TOPIC]  topic to send to (default: with --input the topic that each line names)
    --key-separator TEXT  a line is KEY, TEXT, BODY (default: a line is only a body)
    --input FILE  read JSON lines from FILE, - for standard input: those of `raymq consume -o json` or of `raymq
        store dump`, or {"body": ..., "key": ..., "tag": ..., "index_keys": [...], "properties": {...},
        "flag": ..., "sys_flag": ..., "deliver_at_ms": ..., "delay_level": ..., "wait_store_ok": ..., "topic": ...,
        "queue_id": ...} (default: lines of text on standard input)
consume  print messages
    @json @cluster
    topic TOPIC  name of the topic
    --from>start POSITION{start, default earliest}  where to begin in each queue: earliest, latest, an offset, or a
        time: 2026-11-29T14:30, in this machine's time zone unless it names one, or so long ago: 90s, 15m, 2h, 1d
    --to>stop POSITION{stop}  end before this offset of each queue; latest is the end at the start of the
        command (default: latest; with --follow: no end)
    --read-from leader|nearest{default leader}  the replica to read; nearest: one on this machine, else any
        follower, else the leader
    --tags TAGS  print only messages with one of these tags: 'new || paid' (default: all)
    --sql EXPRESSION  print only messages for whose properties this is true: "price > 5 AND region IN ('eu')" (default:
        all)
    --follow  wait for new messages, up to the offset of --to or until interrupted
    --max N  end after N messages (default: no limit)
    -o --output json|raw|hex{default raw}  raw: body and newline; hex: body in hexadecimal; json: the whole
        message, which `raymq produce --input` takes
store *  check, repair, export a store directory; import it
store verify  check every byte; 1 if damaged
    @json
    @store
store dump  every message as a line of JSON; `raymq produce --input` sends it again
    @json
    @store
store scrub  compare what is synced with its CRCs, at a limited rate
    @json
    @store
    --mib-per-s N{>=0, default 64}  MiB read per second at most, 0 for no limit
    --again  begin at the start, not where the last pass ended
store repair  print a repair plan; --yes carries it out
    @json
    @store
    --yes  carry the plan out; no process may have the store open
    --keep DIR  where to copy what is changed (default: raymq/repair-<time>/ in the store)
    --truncate-at OFFSET{>=0}  cut a damaged log at this offset, in bytes: everything after it is lost (default:
        no cut)
    --rebuild consumequeue|chain|index|checkpoint|marks|config{repeated}  rebuild this from the log even if it
        is sound; may be repeated (default: only damaged files)
store export  messages as Parquet files in a new directory
    @json
    directory DIR  a store
    target TARGET  the new directory
    --topic NAME  only this topic (default: all but RayMQ's own)
    --queue-id N{>=0}  only this queue of the topic (default: all queues)
    --from>start OFFSET{>=0}  first queue offset (default: the earliest)
    --to>stop OFFSET{>=0}  queue offset before which to end (default: the end)
    --file-mib N{default 256}  MiB after which a new file is begun
    --after-damage  also export the readable messages after damage in the log
store import  send the messages of an export to a running cluster
    @json @cluster @put-back
    source SOURCE  directory that `raymq store export` made
    --topic NAME  only this topic (default: every topic of the export)
bench *  load test, from every node of the Ray cluster
bench produce  send, and time each message until it is acknowledged
    @cluster
    @bench-load @bench-time @bench-report
bench consume  send a backlog, then read it as fast as it comes
    @cluster
    @bench-load
    --messages N  messages of the backlog (default: 200000)
    @bench-report
bench e2e  send and read, and time each message until a consumer has it
    @cluster
    @bench-load @bench-time
    --consumers N  consumers (default: 1)
    @bench-report
bench spark  write a DataFrame with Spark, and read it back
    @cluster
    @bench-rows
    --delivery direct|staged  how rows are written: docs/spark.md (default: staged)
    @report
bench data  write a dataset with Ray Data, and read it back
    @cluster
    @bench-rows @report
grafana *  a dashboard of the metrics (docs/metrics.md)
grafana install  put it where the Grafana of the running Ray looks
    @json
    target [TARGET]  data directory or name (default: the only cluster known here, else "default")
    --directory DIR  Grafana's dashboards folder (default: the one that Ray names)
grafana show  print it, as JSON
    @json
doctor  check this machine and a data directory as `raymq start` would
    @json
    data_dir [DIR]  data directory to check, made or not yet made (default: check only the machine)
    --ephemeral  judge as `raymq start --ephemeral`: a directory that a reboot empties is accepted
"""


class Command(NamedTuple):
    """One command or one group of them."""

    words: str
    #: its help, or `= method`
    text: str
    #: arguments of `add_argument`: names, then the rest
    options: list[tuple[list[str], dict[str, Any]]]
    epilog: str | None
    #: None: a group
    run: RunCommand | None


def commands_of_grammar() -> list[Command]:
    """Every command and group, in the order of the grammar."""
    sections: dict[str, list[str]] = {}
    for section in re.split(r"\n(?! )", _GRAMMAR.strip()):
        head, *rows = re.sub(r"\n {8}", " ", section).split("\n    ")
        sections[head] = rows

    found = []
    for head in sections:
        words, _, text = head.partition("  ")
        if words.endswith(" *"):
            found.append(Command(words.removesuffix(" *"), text, [], None, None))
        elif not words.startswith("@"):
            rows = _rows(sections, head)
            options = [_option(row) for row in rows if not row.startswith(". ")]
            epilog = next((row.removeprefix(". ") for row in rows if row.startswith(". ")), None)
            found.append(Command(words, text, options, epilog, RUNS[words]))
    return found


def _rows(sections: dict[str, list[str]], head: str) -> list[str]:
    """The lines of a section, with those that it shares with others."""
    found: list[str] = []
    for row in sections[head]:
        if row.startswith("@"):
            found += [each for name in row.split() for each in _rows(sections, name)]
        else:
            found.append(row)
    return found


#: names, value, what is said of the value, help
_OPTION = re.compile(
    r"(?P<names>\S+(?: -\S+)*)(?: (?P<value>[^{ ]+)(?:\{(?P<more>[^}]*)\})?)?  (?P<help>.*)"
)


def _option(row: str) -> tuple[list[str], dict[str, object]]:
    match = _OPTION.fullmatch(row)
    if match is None:
        raise ValueError(f"the grammar has a line that is no option: {row}")
    text, value, more = match["help"], match["value"], (match["more"] or "").split(", ")
    *names, last = match["names"].split()
    last, _, field = last.partition(">")
    given: dict[str, Any] = {"dest": field} if field else {}

    if value is None:
        switch = "--[no-]" in last
        given["action"] = argparse.BooleanOptionalAction if switch else "store_true"
        return [*names, last.replace("[no-]", "")], {**given, "help": text}
    if value.startswith("["):
        value = value.strip("[]")
        given |= {"nargs": "?", "const": "-"} if last.startswith("-") else {"nargs": "?"}
    if "|" in value or value in _CHOICES:
        given["choices"] = _CHOICES.get(value) or tuple(value.split("|"))
    else:
        given["metavar"] = value
    return [*names, last], {**given, **_value(value, more, text)}


def _value(value: str, more: list[str], text: str) -> dict[str, object]:
    """What the braces say of a value, as arguments of `add_argument`."""
    given: dict[str, Any] = {"type": _count(1)} if value == "N" else {}
    for each in more:
        if each.startswith(">="):
            given["type"] = _count(int(each.removeprefix(">=")))
        elif each.startswith("default "):
            default = each.removeprefix("default ")
            given["default"] = given.get("type", str)(default)
            text += "" if "default" in text else f" (default: {default})"
        elif each == "several":
            given["nargs"] = "+"
        elif each == "repeated":
            given |= {"action": "append", "default": []}
        elif each == "required":
            given["required"] = True
        elif each:
            given["type"] = _TYPES[each]
    return {**given, "help": text}


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return value

    return parse


def _position(*choices: str) -> Callable[[str], str | int]:
    def parse(text: str) -> str | int:
        if text in choices:
            return text
        if text.isdigit():
            return int(text)
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither an offset nor {' or '.join(choices)}"
        )

    return parse


def _place(text: str) -> str | int | datetime:
    """Where a group goes on."""
    return text if text.startswith("group:") else _start(text)


def _start(text: str) -> str | int | datetime:
    try:
        return _position("earliest", "latest")(text)
    except argparse.ArgumentTypeError:
        return time_of(text)


def _rocketmq(text: str) -> int | bool:
    """A port; True: the usual one; False: off."""
    if text in ("-", "off"):
        return text == "-"
    return _count(1)(text)


def _pause_s(text: str) -> float:
    if text == "-":
        return group_commands.WATCH_S
    try:
        pause_s = float(text)
    except ValueError:
        pause_s = 0.0
    if not 0.1 <= pause_s <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 86400")
    return pause_s


_CHOICES = {"FLUSHES": tuple(FLUSHES), "ACKS": tuple(ACKS)}
_TYPES: dict[str, Callable[[str], Any]] = {
    "decimal": float,
    "pause": _pause_s,
    "rocketmq": _rocketmq,
    "labels": lambda text: text.split(","),
    "time": time_of,
    "start": _start,
    "position": _place,
    "stop": _position("latest"),
}
