"""The grammar of the command line `raymq`. The commands are in the modules beside this one.

Exit codes:

    0    done
    1    a fault was found: damage, a failed check, a shard that does not serve
    2    the command is wrong
    3    the cluster is not available now
    130  interrupted
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from raymq import __version__
from raymq.store.base.errors import RayMQError, Unavailable
from raymq.store.config.promise import ACKS, FLUSHES

from . import commands, message_commands, shard_commands, store_commands
from .console import EXIT_USAGE, Console, exit_code

#: a command: it returns its exit code
RunCommand = Callable[[argparse.Namespace, Console], int]

_EPILOG = "exit codes: 0 done, 1 a fault was found, 2 wrong command, 3 cluster not available"

_PUT_BACK_EPILOG = (
    "Messages that are put back keep body, key, tag, index keys, properties and their queue id, if the topic has "
    "that queue (else their key decides). Their offsets and times are new. Create the topics first: "
    "raymq topic create TOPIC --queues N."
)

_BENCH_EPILOG = (
    "In an open loop, latency is measured from the time at which a message was due. "
    "exit codes: 0 done; 1 a message was lost, repeated, damaged or out of order; 2 and 3 as elsewhere"
)


#: the argument of the commands on store directories, and its help
_STORE_DIR = ("directory DIR", "a store, or a cluster's data directory")


class _Parser(argparse.ArgumentParser):
    """argparse, with every option spelled out and a hint for a misspelled one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def option(self, spec: str, text: str, **more: Any) -> None:
        """Add an option or an argument.

        Args: `spec`: its names and its value: VALUE, [VALUE] if the value may be left out, or one|of|these.
        `text`: its help.
        """
        names = spec.split()
        metavar = names.pop() if names[-1].strip("[]").isupper() else None
        if metavar is not None and metavar.startswith("["):
            metavar = metavar.strip("[]")
            more["nargs"] = "?"
        if "|" in names[-1]:
            more["choices"] = tuple(names.pop().split("|"))
        self.add_argument(*names, metavar=metavar, help=text, **more)

    def number(self, spec: str, text: str, *, least: int = 1, **more: Any) -> None:
        """Add an option with a whole number."""
        self.option(spec, text, type=_count(least), **more)

    def decimal(self, spec: str, text: str) -> None:
        """Add an option with a number that need not be whole."""
        self.option(spec, text, type=float)

    def flag(self, spec: str, text: str) -> None:
        """Add an option without a value."""
        self.add_argument(*spec.split(), action="store_true", help=text)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Checked here and not by the outermost parser: the hint must know this command's options.
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            self.error(_unknown(extra[0], list(self._option_string_actions)))
        return found, extra


def _unknown(word: str, known: list[str]) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}"
    option = word.partition("=")[0]
    near = difflib.get_close_matches(option, known, n=1)
    return f"unknown option {option}" + (f"; did you mean {near[0]}?" if near else "")


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


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    parser = _Parser(
        prog="raymq", description="A durable, replicated message log on Ray.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"raymq {__version__}")

    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _start(parsers)
    _stop_and_status(parsers)
    _shards(parsers)
    _topics(parsers)
    _produce(parsers)
    _consume(parsers)
    _store(parsers)
    _bench(parsers)
    _grafana(parsers)
    _doctor(parsers)

    return parser


def _command(
    parsers: Any,
    name: str,
    run: RunCommand,
    text: str,
    *,
    json: bool = True,
    cluster: bool = False,
    **more: str,
) -> _Parser:
    """Add a command. Args: `json`: add --json. `cluster`: add the options that name a cluster."""
    command: _Parser = parsers.add_parser(name, help=text, **more)
    command.set_defaults(run=run)
    if json:
        command.flag("--json", "print JSON")
    if cluster:
        command.option(
            "-c --cluster TARGET",
            "the cluster: data directory, name or raymq://host:port (default: the only cluster known here, "
            'else "default")',
        )
        _token_file(command)
    return command


def _token_file(command: _Parser) -> None:
    command.option(
        "--token-file FILE", "file with the token, for raymq:// (default: the variable RAYMQ_TOKEN)"
    )


def _group(parsers: Any, name: str, text: str, dest: str = "verb") -> Any:
    """Add a command that has verbs. Returns: the object to which they are added."""
    return parsers.add_parser(name, help=text).add_subparsers(
        dest=dest, required=True, metavar=dest.upper()
    )


def _start(parsers: Any) -> None:
    start = _command(
        parsers, "start", commands.start, "create or resume the cluster of a data directory"
    )

    start.option("data_dir DIR", "data directory, made if missing")
    start.option("--name", 'how other commands find it (first start only; default: "default")')
    start.number(
        "--shards N",
        "number of shards, each with its own commit log (first start only; default: 1)",
    )
    start.number(
        "--replicas N",
        "copies of each shard: 1, 2, 3 or 5; 3 or 5 elect another leader by themselves (first start only; default: 1)",
    )

    start.option(
        f"--flush {'|'.join(FLUSHES)}",
        "acknowledge after the sync to disk, or before (default: as at the last start, at first sync)",
    )
    start.decimal(
        "--file-reserved-hours HOURS",
        "how many hours a full file of messages is kept at least (default: as at the last start, at first 72)",
    )
    start.decimal(
        "--producer-expiry-hours HOURS",
        "how many hours a full table of producers remembers each of them (default: as at the last start, at first 168)",
    )
    start.number(
        "--catch-up-bytes-per-s BYTES",
        "bytes per second to a follower that catches up while others keep up "
        "(default: as at the last start, at first 0: no limit)",
        least=0,
    )
    start.option(
        "--transient-pool",
        "append through shared memory, 128 MiB of /dev/shm per shard (default: as at the last start, at first off)",
        action=argparse.BooleanOptionalAction,
    )

    start.option(
        "--address HOST:PORT",
        "the Ray to run in (default: the variable RAY_ADDRESS, else a Ray of its own)",
    )
    start.flag("--ephemeral", "allow a directory that does not survive a reboot, such as /tmp")
    start.number(
        "--segment-size-bytes N",
        "bytes of each file of the commit log (first start only; default: 1073741824)",
        least=4096,
    )
    start.option(
        "--nodes LABEL,...",
        "spread the shards over the Ray nodes with these values of the label raymq-node "
        "(first start only; default: this machine)",
        type=lambda text: text.split(","),
    )

    start.option(
        "--host",
        "address that the shards listen on (default: 127.0.0.1; with --nodes each node's own)",
    )
    start.flag("--insecure", "allow an unencrypted --host that other machines reach")
    start.number(
        "--timeout-s N", "seconds that the whole start may take (default: 180)", default=180
    )


def _stop_and_status(parsers: Any) -> None:
    stop = _command(
        parsers, "stop", commands.stop, "end a cluster (and Ray, if start started it); data stays"
    )
    stop.option(
        "target [TARGET]",
        "data directory or name (default: the cluster known here, if it is the only one)",
    )
    stop.number("--timeout-s N", "seconds that the shards have to close (default: 60)", default=60)

    status = _command(
        parsers,
        "status",
        commands.status,
        "health, shards, topics, messages, disk and lag of a cluster",
    )
    status.option(
        "target [TARGET]",
        'data directory, name or URL (default: the only cluster known here, else "default")',
    )
    _token_file(status)
    status.flag(
        "-v --verbose", "also positions in bytes, process ids, endpoints (--json has them always)"
    )


def _shards(parsers: Any) -> None:
    verbs = _group(parsers, "shard", "leaders and replicas of the shards")
    _command(
        verbs, "list", shard_commands.shard_list, "leader and health of each shard", cluster=True
    )
    describe = _command(
        verbs, "describe", shard_commands.shard_describe, "each replica of a shard", cluster=True
    )
    describe.number("shard SHARD", "number of the shard, from 0", least=0)
    move = _command(
        verbs,
        "move-leader",
        shard_commands.shard_move_leader,
        "let another replica lead a shard; sends wait for less than a second",
        cluster=True,
    )
    move.number("shard SHARD", "number of the shard, from 0", least=0)
    move.number("--to REPLICA", "the replica that shall lead", least=0, required=True)

    add = _command(
        verbs,
        "add",
        shard_commands.shard_add,
        "add shards, which take new topics; sends go on, and existing topics stay where they are",
        cluster=True,
    )
    add.number("--count N", "how many shards (default: 1)", default=1)
    add.option(
        "--nodes LABEL,...",
        "the nodes over which all shards would be spread, as `raymq-node`, in order (default: those of the first start "
        "that are there, and those that have replicas)",
        type=lambda text: text.split(","),
    )
    add.number("--timeout-s N", "seconds until they must serve (default: 600)", default=600)
    _replica_verbs(verbs)


def _replica_verbs(verbs: Any) -> None:
    replace = _command(
        verbs,
        "replace-replica",
        shard_commands.shard_replace_replica,
        "give the place of a lost replica to a new, empty one, and wait until it has everything",
        cluster=True,
    )
    replace.number("shard SHARD", "number of the shard, from 0", least=0)
    replace.number("replica REPLICA", "number of the lost replica, from 0", least=0)
    replace.option(
        "--node LABEL", "the node for the new one, as `raymq-node` (default: that of the lost one)"
    )
    replace.number(
        "--timeout-s N", "seconds until the new one must be complete (default: 600)", default=600
    )

    grow = _command(
        verbs,
        "set-replicas",
        shard_commands.shard_set_replicas,
        "give each shard of a cluster of one replica further ones; sends go on",
        cluster=True,
    )
    grow.number("replicas N", "copies of each shard: 2, 3 or 5", least=2)
    grow.option(
        "--nodes LABEL,...",
        "the nodes that have replicas then, as `raymq-node` (default: those of the first start)",
        type=lambda text: text.split(","),
    )
    grow.number(
        "--timeout-s N", "seconds until all new replicas must count (default: 600)", default=600
    )

    recover = _command(
        verbs,
        "recover",
        shard_commands.shard_recover,
        "go on without a majority of a shard's replicas: confirmed messages may be lost",
        cluster=True,
    )
    recover.number("shard SHARD", "number of the shard, from 0", least=0)
    recover.flag("--unclean", "required: other recoveries need no command")
    recover.flag("--yes-lose-messages", "do not ask")
    recover.option(
        "--node REPLICA=LABEL",
        "the node for the successor of a lost replica (default: that of the lost one); may be repeated",
        action="append",
        default=[],
    )
    recover.number(
        "--timeout-s N",
        "seconds until the new replicas must be complete (default: 600)",
        default=600,
    )

    restart = _command(
        verbs,
        "restart-all",
        shard_commands.shard_restart_all,
        "restart all replicas of all shards, one after the other; sends go on",
        cluster=True,
    )
    restart.number("--timeout-s N", "seconds that one replica may take (default: 120)", default=120)

    drain = _command(
        verbs,
        "drain-node",
        shard_commands.shard_drain_node,
        "let other nodes lead what a node leads, so that it can be taken away",
        cluster=True,
    )
    drain.option("node NODE", "the node, as its label `raymq-node`")
    drain.number(
        "--timeout-s N", "seconds until the node must lead nothing (default: 120)", default=120
    )


def _topics(parsers: Any) -> None:
    verbs = _group(parsers, "topic", "list, create and describe topics")
    _command(verbs, "list", commands.topic_list, "all topics", cluster=True)

    create = _command(verbs, "create", commands.topic_create, "make a topic", cluster=True)
    create.option("topic TOPIC", "name of the new topic")
    create.number("--queues N", "number of queues, over all shards (default: 4)", default=4)
    create.flag("--compacted", "keep only the latest message of each index key")
    create.option(
        "--column NAME:TYPE",
        "a column of the values' schema, its type by its name in Spark: bigint, string, decimal(9,2), array<date>, "
        'struct<city:string,...>; "NAME:TYPE not null" needs a value; may be repeated (default: values are bytes)',
        action="append",
        default=[],
        dest="columns",
    )
    create.flag("--allow-null-values", "a value may be null, which is not an empty value")

    add = _command(
        verbs,
        "add-queues",
        commands.topic_add_queues,
        "give a topic more queues; producers and consumers go on",
        cluster=True,
    )
    add.option("topic TOPIC", "name of the topic")
    add.number("--queues N", "number of queues afterwards", least=1, required=True)
    add.flag(
        "--break-key-order",
        "also for a topic that has had messages: most keys go to another queue than before",
    )

    column = _command(
        verbs,
        "add-column",
        commands.topic_add_column,
        "give a topic's schema one more nullable column; producers and consumers go on",
        cluster=True,
    )
    column.option("topic TOPIC", "name of a topic with a schema")
    column.option("column NAME:TYPE", "the column, as `raymq topic create --column` takes it")

    describe = _command(
        verbs,
        "describe",
        commands.topic_describe,
        "a topic's options, schema, queues and offsets",
        cluster=True,
    )
    describe.option("topic TOPIC", "name of the topic")


def _produce(parsers: Any) -> None:
    produce = _command(
        parsers,
        "produce",
        message_commands.produce,
        "send each line of standard input, or of a file, as a message",
        cluster=True,
        epilog=_PUT_BACK_EPILOG,
    )

    produce.option(
        "topic [TOPIC]", "topic to send to (default: with --input the topic that each line names)"
    )
    produce.option(
        "--key-separator TEXT", "a line is KEY, TEXT, BODY (default: a line is only a body)"
    )
    produce.option(
        "--input FILE",
        "read JSON lines from FILE, - for standard input: those of `raymq consume -o json` or of "
        '`raymq store dump`, or {"body": ..., "key": ..., "tag": ..., "index_keys": [...], "properties": {...}, '
        '"deliver_at_ms": ..., "topic": ..., "queue_id": ...} (default: lines of text on standard input)',
    )


def _consume(parsers: Any) -> None:
    consume = _command(parsers, "consume", message_commands.consume, "print messages", cluster=True)

    consume.option("topic TOPIC", "name of the topic")
    consume.option(
        "--from POSITION",
        "where to begin in each queue: earliest, latest or an offset (default: earliest)",
        dest="start",
        type=_position("earliest", "latest"),
        default="earliest",
    )
    consume.option(
        "--to POSITION",
        "end before this offset of each queue; latest is the end at the start of the command (default: latest; with "
        "--follow: no end)",
        dest="stop",
        type=_position("latest"),
    )

    consume.option(
        "--read-from leader|nearest",
        "the replica to read; nearest: one on this machine, else any follower, else the leader (default: leader)",
        default="leader",
    )
    consume.flag("--follow", "wait for new messages, up to the offset of --to or until interrupted")
    consume.number("--max N", "end after N messages (default: no limit)")
    consume.option(
        "-o --output json|raw|hex",
        "raw: body and newline; hex: body in hexadecimal; json: the whole message, which "
        "`raymq produce --input` takes (default: raw)",
        default="raw",
    )


def _store(parsers: Any) -> None:
    verbs = _group(parsers, "store", "check, repair, export a store directory; import it")
    verify = _command(verbs, "verify", store_commands.verify, "check every byte; 1 if damaged")
    verify.option(*_STORE_DIR)

    dump = _command(
        verbs,
        "dump",
        store_commands.dump,
        "every message as a line of JSON; `raymq produce --input` sends it again",
    )
    dump.option(*_STORE_DIR)

    scrub = _command(
        verbs,
        "scrub",
        store_commands.scrub,
        "compare what is synced with its CRCs, at a limited rate",
    )
    scrub.option(*_STORE_DIR)
    scrub.number(
        "--mib-per-s N",
        "MiB read per second at most, 0 for no limit (default: 64)",
        least=0,
        default=64,
    )
    scrub.flag("--again", "begin at the start, not where the last pass ended")

    _store_repair(verbs)
    _store_export(verbs)
    _store_import(verbs)


def _store_repair(verbs: Any) -> None:
    repair = _command(
        verbs, "repair", store_commands.repair, "print a repair plan; --yes carries it out"
    )

    repair.option(*_STORE_DIR)
    repair.flag("--yes", "carry the plan out; no process may have the store open")
    repair.option(
        "--keep DIR", "where to copy what is changed (default: raymq/repair-<time>/ in the store)"
    )
    repair.number(
        "--truncate-at OFFSET",
        "cut a damaged log at this offset, in bytes: everything after it is lost (default: no cut)",
        least=0,
    )
    repair.option(
        "--rebuild consumequeue|chain|index|checkpoint|marks|config",
        "rebuild this from the log even if it is sound; may be repeated (default: only damaged files)",
        action="append",
    )


def _store_export(verbs: Any) -> None:
    export = _command(
        verbs, "export", store_commands.export, "messages as Parquet files in a new directory"
    )
    export.option("directory DIR", "a store")
    export.option("target TARGET", "the new directory")

    export.option("--topic NAME", "only this topic (default: all but RayMQ's own)")
    export.number("--queue-id N", "only this queue of the topic (default: all queues)", least=0)
    export.number(
        "--from OFFSET", "first queue offset (default: the earliest)", least=0, dest="start"
    )
    export.number(
        "--to OFFSET", "queue offset before which to end (default: the end)", least=0, dest="stop"
    )
    export.number("--file-mib N", "MiB after which a new file is begun (default: 256)", default=256)
    export.flag("--after-damage", "also export the readable messages after damage in the log")


def _store_import(verbs: Any) -> None:
    importing = _command(
        verbs,
        "import",
        store_commands.import_,
        "send the messages of an export to a running cluster",
        cluster=True,
        epilog=_PUT_BACK_EPILOG,
    )
    importing.option("source SOURCE", "directory that `raymq store export` made")
    importing.option("--topic NAME", "only this topic (default: every topic of the export)")


def _grafana(parsers: Any) -> None:
    verbs = _group(parsers, "grafana", "a dashboard of the metrics (docs/metrics.md)")
    install = _command(
        verbs,
        "install",
        commands.grafana_install,
        "put it where the Grafana of the running Ray looks",
    )
    install.option(
        "target [TARGET]",
        'data directory or name (default: the only cluster known here, else "default")',
    )
    install.option(
        "--directory DIR", "Grafana's dashboards folder (default: the one that Ray names)"
    )

    _command(verbs, "show", commands.grafana_show, "print it, as JSON")


def _doctor(parsers: Any) -> None:
    doctor = _command(
        parsers,
        "doctor",
        commands.doctor,
        "check this machine and a data directory as `raymq start` would",
    )
    doctor.option(
        "data_dir [DIR]",
        "data directory to check, made or not yet made (default: check only the machine)",
    )
    doctor.flag(
        "--ephemeral",
        "judge as `raymq start --ephemeral`: a directory that a reboot empties is accepted",
    )


def _bench(parsers: Any) -> None:
    verbs = _group(parsers, "bench", "load test, from every node of the Ray cluster", dest="mode")
    for mode, text in (
        ("produce", "send, and time each message until it is acknowledged"),
        ("consume", "send a backlog, then read it as fast as it comes"),
        ("e2e", "send and read, and time each message until a consumer has it"),
    ):
        verb = _command(
            verbs, mode, commands.bench, text, json=False, cluster=True, epilog=_BENCH_EPILOG
        )

        _bench_load(verb)
        if mode == "consume":
            verb.number("--messages N", "messages of the backlog (default: 200000)")
        else:
            _bench_time(verb)
        if mode == "e2e":
            verb.number("--consumers N", "consumers (default: 1)")
        _bench_report(verb)
    _bench_datasets(verbs)


def _bench_datasets(verbs: Any) -> None:
    """The load tests through other engines. Defaults are those of DatasetPlan."""
    for mode, text in (
        ("spark", "write a DataFrame with Spark, and read it back"),
        ("data", "write a dataset with Ray Data, and read it back"),
    ):
        verb = _command(
            verbs,
            mode,
            commands.bench_datasets,
            text,
            json=False,
            cluster=True,
            epilog="exit codes: 0 done; 1 a row was lost, repeated or damaged; 2 and 3 as elsewhere",
        )

        verb.option("--topic NAME", "name of the topic (default: bench)")
        verb.number("--queues N", "queues of the topic (default: 4)")
        verb.number("--messages N", "rows (default: 1000000)")
        verb.number("--size N", "bytes of a value (default: 1024)")
        verb.number("--tasks N", "tasks that write rows; Spark gets so many cores (default: 4)")

        if mode == "spark":
            verb.option(
                "--delivery direct|staged",
                "how rows are written: docs/spark.md (default: staged)",
            )
        verb.option(
            "--json [FILE]",
            "write the result as JSON to FILE, without FILE to standard output (default: as text)",
            const="-",
        )


def _bench_load(verb: _Parser) -> None:
    """The options that make a BenchPlan. Defaults are its own."""
    verb.option("--topic NAME", "name of the topic (default: bench)")
    verb.number("--topics N", "number of topics, NAME-0 ... (default: 1)")
    verb.number("--queues N", "queues of each topic (default: 4)")
    verb.option("--shards N,...", "only the queues on these shards (default: all)")

    verb.number("--workers N", "workers (default: 2)")
    verb.number("--batch N", "rows of a batch at most (default: 1000)")
    verb.number("--in-flight N", "closed loop: unacknowledged batches per worker (default: 4)")

    verb.option(
        "--size DIST",
        "bytes of a body: N, uniform:LOW-HIGH, lognormal:MEDIAN[:SIGMA] (default: 1024)",
    )
    verb.option("--keys DIST", "none, uniform:K or zipf:K[:SKEW] of K keys (default: none)")
    verb.option(
        "--api batches|messages", "send columns, or one message per call (default: batches)"
    )

    verb.option(f"--acks {'|'.join(ACKS)}", "what a receipt waits for (default: quorum)")


def _bench_time(verb: _Parser) -> None:
    """The options of a BenchPlan that sends for a time."""
    verb.decimal(
        "--rate N", "open loop: messages per second of all workers together (default: closed loop)"
    )
    verb.decimal(
        "--linger-ms MS", "open loop: milliseconds to wait for a fuller batch (default: 5)"
    )
    verb.decimal("--duration-s N", "seconds that are measured (default: 10)")
    verb.decimal("--warmup-s N", "seconds before them (default: 2)")
    verb.decimal(
        "--find-max MS",
        "search the highest rate with a p99 of up to MS milliseconds (default: one rate)",
    )


def _bench_report(verb: _Parser) -> None:
    verb.flag("--no-verify", "do not read every message back at the end")
    verb.option(
        "--runner auto|ray|processes",
        "where workers run: ray, as tasks on all nodes; processes, on this machine (default: auto, which is "
        "processes for a raymq:// target, else ray)",
        default="auto",
    )

    verb.option(
        "--json [FILE]",
        "write the result as JSON to FILE, without FILE to standard output (default: as text)",
        const="-",
    )
    verb.option(
        "--html FILE", "write one page with all plots and what was measured on (default: none)"
    )


def main(argv: Sequence[str] | None = None, *, console: Console | None = None) -> int:
    """Run one command. Returns: its exit code. An error of RayMQ becomes one line."""
    console = console or Console()
    try:
        options = build_parser().parse_args(argv)
    except SystemExit as leaving:
        # argparse has printed the help or the error.
        return int(leaving.code or 0) if not isinstance(leaving.code, str) else EXIT_USAGE

    try:
        code: int = options.run(options, console)
        console.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RayMQError as error:
        failure = error
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        failure = Unavailable(f"{where}{error.strerror or error}", errno=error.errno)

    console.error(failure, as_json=getattr(options, "json", False))
    return exit_code(failure)


if __name__ == "__main__":
    sys.exit(main())
