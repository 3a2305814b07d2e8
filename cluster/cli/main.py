"""The grammar of the command line `raymq`; the commands are in the modules beside this one.

Exit codes: 0 done; 1 a fault was found (damage, a failed check, a shard that does not serve); 2 the
command is wrong; 3 the cluster is not available now; 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from raymq import __version__
from raymq.store.errors import RayMQError, Unavailable
from raymq.store.promise import ACKS

from . import commands, message_commands, store_commands
from .console import EXIT_USAGE, Console, exit_code

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


class _Parser(argparse.ArgumentParser):
    """argparse, with every option spelled out and a hint for a misspelled one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_abbrev": False})

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


def _position(*words: str) -> Callable[[str], str | int]:
    def parse(text: str) -> str | int:
        if text in words:
            return text
        if text.isdigit():
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is neither an offset nor {' or '.join(words)}")

    return parse


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    parser = _Parser(
        prog="raymq", description="A durable, replicated message log on Ray.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"raymq {__version__}")
    words = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    json_option = _Parser(add_help=False)
    json_option.add_argument("--json", action="store_true", help="print JSON")
    cluster_option = _Parser(add_help=False)
    cluster_option.add_argument(
        "-c",
        "--cluster",
        metavar="TARGET",
        help="the cluster: data directory, name or raymq://host:port (default: the only cluster known here, "
        'else "default")',
    )
    cluster_option.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with the token, for raymq:// (default: the variable RAYMQ_TOKEN)",
    )
    both = [json_option, cluster_option]
    _lifecycle(words, json_option)
    _topics(words, both)
    _messages(words, both)
    _store(words, json_option, both)
    _bench(words, cluster_option)
    _grafana(words, json_option)
    doctor = words.add_parser(
        "doctor",
        parents=[json_option],
        help="check this machine and a data directory as `raymq start` would",
    )
    doctor.add_argument(
        "data_dir",
        nargs="?",
        metavar="DIR",
        help="data directory to check, made or not yet made (default: check only the machine)",
    )
    doctor.add_argument(
        "--ephemeral",
        action="store_true",
        help="judge as `raymq start --ephemeral`: a directory that a reboot empties is accepted",
    )
    doctor.set_defaults(run=commands.doctor)
    return parser


def _lifecycle(words: Any, json_option: argparse.ArgumentParser) -> None:
    start = words.add_parser(
        "start", parents=[json_option], help="create or resume the cluster of a data directory"
    )
    start.add_argument("data_dir", metavar="DIR", help="data directory, made if missing")
    start.add_argument(
        "--name", help='how other commands find it (first start only; default: "default")'
    )
    start.add_argument(
        "--shards",
        type=_count(1),
        metavar="N",
        help="number of shards, each with its own commit log (first start only; default: 1)",
    )
    start.add_argument(
        "--replication",
        choices=("single", "mirror"),
        help="mirror keeps each shard twice, without failover (first start only; default: single)",
    )
    start.add_argument(
        "--flush",
        choices=("sync", "async"),
        help="acknowledge after the sync to disk, or before (default: as at the last start, at first sync)",
    )
    start.add_argument(
        "--file-reserved-hours",
        type=float,
        metavar="HOURS",
        help="how many hours a full file of messages is kept at least (default: as at the last start, at first 72)",
    )
    start.add_argument(
        "--transient-pool",
        action=argparse.BooleanOptionalAction,
        help="append through shared memory, 128 MiB of /dev/shm per shard "
        "(default: as at the last start, at first off)",
    )
    start.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the Ray to run in (default: the variable RAY_ADDRESS, else a Ray of its own)",
    )
    start.add_argument(
        "--ephemeral",
        action="store_true",
        help="allow a directory that does not survive a reboot, such as /tmp",
    )
    start.add_argument(
        "--segment-size-bytes",
        type=_count(4096),
        metavar="N",
        help="bytes of each file of the commit log (first start only; default: 1073741824)",
    )
    start.add_argument(
        "--nodes",
        type=lambda text: text.split(","),
        metavar="LABEL,...",
        help="spread the shards over the Ray nodes with these values of the label raymq-node "
        "(first start only; default: this machine)",
    )
    start.add_argument(
        "--host",
        help="address that the shards listen on (default: 127.0.0.1; with --nodes each node's own)",
    )
    start.add_argument(
        "--insecure",
        action="store_true",
        help="allow an unencrypted --host that other machines reach",
    )
    start.add_argument(
        "--timeout-s",
        type=_count(1),
        default=180,
        metavar="N",
        help="seconds that the whole start may take (default: 180)",
    )
    start.set_defaults(run=commands.start)

    stop = words.add_parser(
        "stop",
        parents=[json_option],
        help="end a cluster (and Ray, if start started it); data stays",
    )
    stop.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="data directory or name (default: the cluster known here, if it is the only one)",
    )
    stop.add_argument(
        "--timeout-s",
        type=_count(1),
        default=60,
        metavar="N",
        help="seconds that the shards have to close (default: 60)",
    )
    stop.set_defaults(run=commands.stop)

    status = words.add_parser(
        "status",
        parents=[json_option],
        help="health, shards, topics, messages, disk and lag of a cluster",
    )
    status.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help='data directory, name or URL (default: the only cluster known here, else "default")',
    )
    status.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with the token, for raymq:// (default: the variable RAYMQ_TOKEN)",
    )
    status.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also positions in bytes, process ids, endpoints (--json has them always)",
    )
    status.set_defaults(run=commands.status)


def _topics(words: Any, both: Sequence[argparse.ArgumentParser]) -> None:
    topic = words.add_parser("topic", help="list, create and describe topics")
    verbs = topic.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = verbs.add_parser("list", parents=both, help="all topics")
    listing.set_defaults(run=commands.topic_list)
    create = verbs.add_parser("create", parents=both, help="make a topic")
    create.add_argument("topic", metavar="TOPIC", help="name of the new topic")
    create.add_argument(
        "--queues",
        type=_count(1),
        default=4,
        metavar="N",
        help="number of queues, over all shards (default: 4)",
    )
    create.add_argument(
        "--compacted",
        action="store_true",
        help="keep only the latest message of each index key",
    )
    create.set_defaults(run=commands.topic_create)
    describe = verbs.add_parser("describe", parents=both, help="a topic's queues and offsets")
    describe.add_argument("topic", metavar="TOPIC", help="name of the topic")
    describe.set_defaults(run=commands.topic_describe)


def _messages(words: Any, both: Sequence[argparse.ArgumentParser]) -> None:
    produce = words.add_parser(
        "produce",
        parents=both,
        help="send each line of standard input, or of a file, as a message",
        epilog=_PUT_BACK_EPILOG,
    )
    produce.add_argument(
        "topic",
        nargs="?",
        metavar="TOPIC",
        help="topic to send to (default: with --input the topic that each line names)",
    )
    produce.add_argument(
        "--key-separator",
        metavar="TEXT",
        help="a line is KEY, TEXT, BODY (default: a line is only a body)",
    )
    produce.add_argument(
        "--input",
        metavar="FILE",
        help="read JSON lines from FILE, - for standard input: those of `raymq consume -o json` or of "
        '`raymq store dump`, or {"body": ..., "key": ..., "tag": ..., "index_keys": [...], "properties": {...}, '
        '"deliver_at_ms": ..., "topic": ..., "queue_id": ...} (default: lines of text on standard input)',
    )
    produce.set_defaults(run=message_commands.produce)

    consume = words.add_parser("consume", parents=both, help="print messages")
    consume.add_argument("topic", metavar="TOPIC", help="name of the topic")
    consume.add_argument(
        "--from",
        dest="start",
        type=_position("earliest", "latest"),
        default="earliest",
        metavar="POSITION",
        help="where to begin in each queue: earliest, latest or an offset (default: earliest)",
    )
    consume.add_argument(
        "--to",
        dest="stop",
        type=_position("latest"),
        default="latest",
        metavar="POSITION",
        help="end before this offset of each queue; latest is the end at the start of the command (default: latest)",
    )
    consume.add_argument(
        "--follow", action="store_true", help="wait for new messages until interrupted"
    )
    consume.add_argument(
        "--max", type=_count(1), metavar="N", help="end after N messages (default: no limit)"
    )
    consume.add_argument(
        "-o",
        "--output",
        choices=("json", "raw", "hex"),
        default="raw",
        help="raw: body and newline; hex: body in hexadecimal; json: the whole message, which "
        "`raymq produce --input` takes (default: raw)",
    )
    consume.set_defaults(run=message_commands.consume)


def _store(
    words: Any, json_option: argparse.ArgumentParser, both: Sequence[argparse.ArgumentParser]
) -> None:
    store = words.add_parser("store", help="check, repair, export a store directory; import it")
    verbs = store.add_subparsers(dest="verb", required=True, metavar="VERB")
    verify = verbs.add_parser(
        "verify", parents=[json_option], help="check every byte; 1 if damaged"
    )
    verify.add_argument("directory", metavar="DIR", help="a store, or a cluster's data directory")
    verify.set_defaults(run=store_commands.verify)
    dump = verbs.add_parser(
        "dump",
        parents=[json_option],
        help="every message as a line of JSON; `raymq produce --input` sends it again",
    )
    dump.add_argument("directory", metavar="DIR", help="a store, or a cluster's data directory")
    dump.set_defaults(run=store_commands.dump)
    scrub = verbs.add_parser(
        "scrub",
        parents=[json_option],
        help="compare what is synced with its CRCs, at a limited rate",
    )
    scrub.add_argument("directory", metavar="DIR", help="a store, or a cluster's data directory")
    scrub.add_argument(
        "--mib-per-s",
        type=_count(0),
        default=64,
        metavar="N",
        help="MiB read per second at most, 0 for no limit (default: 64)",
    )
    scrub.add_argument(
        "--again", action="store_true", help="begin at the start, not where the last pass ended"
    )
    scrub.set_defaults(run=store_commands.scrub)
    _store_repair(verbs, json_option)
    _store_export(verbs, json_option)
    _store_import(verbs, both)


def _store_repair(verbs: Any, json_option: argparse.ArgumentParser) -> None:
    repair = verbs.add_parser(
        "repair", parents=[json_option], help="say what would mend a store; --yes does it"
    )
    repair.add_argument("directory", metavar="DIR", help="a store, or a cluster's data directory")
    repair.add_argument(
        "--yes", action="store_true", help="carry the plan out; no process may have the store open"
    )
    repair.add_argument(
        "--keep",
        metavar="DIR",
        help="where to copy what is changed (default: raymq/repair-<time>/ in the store)",
    )
    repair.add_argument(
        "--cut-at",
        type=_count(0),
        metavar="OFFSET",
        help="cut a damaged log at this offset, in bytes: everything after it is lost (default: no cut)",
    )
    repair.add_argument(
        "--rebuild",
        action="append",
        choices=("consumequeue", "chain", "index", "checkpoint", "marks", "config"),
        help="rebuild this from the log even if it is sound; may be repeated (default: only what is damaged)",
    )
    repair.set_defaults(run=store_commands.repair)


def _store_export(verbs: Any, json_option: argparse.ArgumentParser) -> None:
    export = verbs.add_parser(
        "export", parents=[json_option], help="messages as Parquet files in a new directory"
    )
    export.add_argument("directory", metavar="DIR", help="a store")
    export.add_argument("target", metavar="TARGET", help="the new directory")
    export.add_argument(
        "--topic", metavar="NAME", help="only this topic (default: all but RayMQ's own)"
    )
    export.add_argument(
        "--queue-id",
        type=_count(0),
        metavar="N",
        help="only this queue of the topic (default: all queues)",
    )
    export.add_argument(
        "--from",
        dest="start",
        type=_count(0),
        metavar="OFFSET",
        help="first queue offset (default: the earliest)",
    )
    export.add_argument(
        "--to",
        dest="stop",
        type=_count(0),
        metavar="OFFSET",
        help="queue offset before which to end (default: the end)",
    )
    export.add_argument(
        "--file-mib",
        type=_count(1),
        default=256,
        metavar="N",
        help="MiB after which a new file is begun (default: 256)",
    )
    export.add_argument(
        "--behind-damage",
        action="store_true",
        help="of a damaged log also what is readable after the damage",
    )
    export.set_defaults(run=store_commands.export)


def _store_import(verbs: Any, both: Sequence[argparse.ArgumentParser]) -> None:
    importing = verbs.add_parser(
        "import",
        parents=both,
        help="send the messages of an export to a running cluster",
        epilog=_PUT_BACK_EPILOG,
    )
    importing.add_argument(
        "source", metavar="SOURCE", help="directory that `raymq store export` made"
    )
    importing.add_argument(
        "--topic", metavar="NAME", help="only this topic (default: every topic of the export)"
    )
    importing.set_defaults(run=store_commands.import_)


def _grafana(words: Any, json_option: argparse.ArgumentParser) -> None:
    grafana = words.add_parser("grafana", help="a dashboard of the metrics (docs/metrics.md)")
    verbs = grafana.add_subparsers(dest="verb", required=True, metavar="VERB")
    install = verbs.add_parser(
        "install", parents=[json_option], help="put it where the Grafana of the running Ray looks"
    )
    install.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help='data directory or name (default: the only cluster known here, else "default")',
    )
    install.add_argument(
        "--directory",
        metavar="DIR",
        help="Grafana's dashboards folder (default: the one that Ray names)",
    )
    install.set_defaults(run=commands.grafana_install)
    show = verbs.add_parser("show", parents=[json_option], help="print it, as JSON")
    show.set_defaults(run=commands.grafana_show)


def _bench(words: Any, cluster_option: argparse.ArgumentParser) -> None:
    bench = words.add_parser("bench", help="load test, from every node of the Ray cluster")
    verbs = bench.add_subparsers(dest="mode", required=True, metavar="MODE")
    for mode, text in (
        ("produce", "send, and time each message until it is acknowledged"),
        ("consume", "send a backlog, then read it as fast as it comes"),
        ("e2e", "send and read, and time each message until a consumer has it"),
    ):
        verb = verbs.add_parser(mode, parents=[cluster_option], help=text, epilog=_BENCH_EPILOG)
        _bench_load(verb, mode)
        verb.add_argument(
            "--no-verify", action="store_true", help="do not read every message back at the end"
        )
        verb.add_argument(
            "--runner",
            choices=("auto", "ray", "processes"),
            default="auto",
            help="where workers run: ray, as tasks on all nodes; processes, on this machine (default: auto, which is "
            "processes for a raymq:// target, else ray)",
        )
        verb.add_argument(
            "--json",
            nargs="?",
            const="-",
            metavar="FILE",
            help="write the result as JSON to FILE, without FILE to standard output (default: as text)",
        )
        verb.add_argument(
            "--html",
            metavar="FILE",
            help="write one page with all plots and what was measured on (default: none)",
        )
        verb.set_defaults(run=commands.bench)


def _bench_load(verb: argparse.ArgumentParser, mode: str) -> None:
    """The options that make a BenchPlan; defaults are its own."""
    verb.add_argument("--topic", metavar="NAME", help="name of the topic (default: bench)")
    verb.add_argument(
        "--topics", type=_count(1), metavar="N", help="number of topics, NAME-0 ... (default: 1)"
    )
    verb.add_argument(
        "--queues", type=_count(1), metavar="N", help="queues of each topic (default: 4)"
    )
    verb.add_argument(
        "--shards", metavar="N,...", help="only the queues on these shards (default: all)"
    )
    verb.add_argument("--workers", type=_count(1), metavar="N", help="workers (default: 2)")
    verb.add_argument(
        "--batch", type=_count(1), metavar="N", help="rows of a batch at most (default: 1000)"
    )
    verb.add_argument(
        "--in-flight",
        type=_count(1),
        metavar="N",
        help="closed loop: unacknowledged batches per worker (default: 4)",
    )
    verb.add_argument(
        "--size",
        metavar="DIST",
        help="bytes of a body: N, uniform:LOW-HIGH, lognormal:MEDIAN[:SIGMA] (default: 1024)",
    )
    verb.add_argument(
        "--keys", metavar="DIST", help="none, uniform:K or zipf:K[:SKEW] of K keys (default: none)"
    )
    verb.add_argument(
        "--api",
        choices=("batches", "messages"),
        help="send columns, or one message per call (default: batches)",
    )
    verb.add_argument("--acks", choices=ACKS, help="what a receipt waits for (default: quorum)")
    if mode == "consume":
        verb.add_argument(
            "--messages",
            type=_count(1),
            metavar="N",
            help="messages of the backlog (default: 200000)",
        )
        return
    verb.add_argument(
        "--rate",
        type=float,
        metavar="N",
        help="open loop: messages per second of all workers together (default: closed loop)",
    )
    verb.add_argument(
        "--linger-ms",
        type=float,
        metavar="MS",
        help="open loop: milliseconds to wait for a fuller batch (default: 5)",
    )
    verb.add_argument(
        "--duration-s", type=float, metavar="N", help="seconds that are measured (default: 10)"
    )
    verb.add_argument(
        "--warmup-s", type=float, metavar="N", help="seconds before them (default: 2)"
    )
    verb.add_argument(
        "--find-max",
        type=float,
        metavar="MS",
        help="search the highest rate with a p99 of up to MS milliseconds (default: one rate)",
    )
    if mode == "e2e":
        verb.add_argument("--consumers", type=_count(1), metavar="N", help="consumers (default: 1)")


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
    except RayMQError as error:
        console.error(error, as_json=getattr(options, "json", False))
        return exit_code(error)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            where = "" if error.filename is None else f"{error.filename}: "
            wrong = Unavailable(f"{where}{error.strerror or error}", errno=error.errno)
            console.error(wrong, as_json=getattr(options, "json", False))
            return exit_code(wrong)
        # The reader (head, less) has seen enough. Python would complain again when it flushes at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
