"""The command line: `raymq`. Here are the words; what they do is in commands.py.

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

from . import commands, store_commands
from .commands import EXIT_USAGE, Console, exit_code

_EPILOG = "exit codes: 0 done, 1 a fault was found, 2 wrong command, 3 cluster not available"

_BENCH_EPILOG = (
    "In an open loop a latency counts from when the message was due. "
    "exit codes: 0 done; 1 a message was lost, repeated, damaged or out of order; 2 and 3 as elsewhere"
)


class _Parser(argparse.ArgumentParser):
    """argparse, with every option spelled out and a hint for a misspelled one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Checked here, not by the outermost parser, so that the hint knows the options of this very
        # command.
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
        help="data directory, name or raymq://host:port (default: the one started here)",
    )
    cluster_option.add_argument(
        "--token-file", metavar="FILE", help="holds the token, for raymq:// (or set RAYMQ_TOKEN)"
    )
    both = [json_option, cluster_option]
    _lifecycle(words, json_option)
    _topics(words, both)
    _messages(words, both)
    _store(words, json_option)
    _bench(words, cluster_option)
    _grafana(words, json_option)
    doctor = words.add_parser(
        "doctor", parents=[json_option], help="check this machine; says what to do"
    )
    doctor.add_argument("data_dir", nargs="?", metavar="DIR", help="also check this data directory")
    doctor.set_defaults(run=commands.doctor)
    return parser


def _lifecycle(words: Any, json_option: argparse.ArgumentParser) -> None:
    start = words.add_parser(
        "start", parents=[json_option], help="create or resume the cluster of a data directory"
    )
    start.add_argument("data_dir", metavar="DIR")
    start.add_argument("--name", help="how other commands find it (default: default)")
    start.add_argument("--shards", type=_count(1), metavar="N", help="commit logs (default: 1)")
    start.add_argument(
        "--replication", choices=("single", "mirror"), help="mirror keeps each shard twice"
    )
    start.add_argument(
        "--flush",
        choices=("sync", "async"),
        help="acknowledge after the disk's sync (default) or before",
    )
    start.add_argument(
        "--file-reserved-hours",
        type=float,
        metavar="HOURS",
        help="how long a full file of messages is kept at least, 72 if not given; may change at each start",
    )
    start.add_argument(
        "--transient-pool",
        action=argparse.BooleanOptionalAction,
        help="append through shared memory (128 MiB of /dev/shm a shard)",
    )
    start.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="run in this Ray (default: RAY_ADDRESS, else an own one)",
    )
    start.add_argument(
        "--ephemeral", action="store_true", help="allow a directory that a reboot empties"
    )
    start.add_argument("--segment-size-bytes", type=_count(4096), metavar="N")
    start.add_argument(
        "--nodes",
        type=lambda text: text.split(","),
        metavar="LABEL,...",
        help="spread the shards over Ray's nodes that have these values of the label raymq-node",
    )
    start.add_argument(
        "--host",
        help="address the shards listen on (default: 127.0.0.1; with --nodes their node's)",
    )
    start.add_argument(
        "--insecure",
        action="store_true",
        help="allow a host that other machines reach, unencrypted",
    )
    start.add_argument("--timeout-s", type=_count(1), default=120, metavar="N")
    start.set_defaults(run=commands.start)

    stop = words.add_parser(
        "stop",
        parents=[json_option],
        help="end a cluster (and Ray, if start started it); data stays",
    )
    stop.add_argument("target", nargs="?", metavar="TARGET", help="data directory or name")
    stop.add_argument("--timeout-s", type=_count(1), default=60, metavar="N")
    stop.set_defaults(run=commands.stop)

    status = words.add_parser(
        "status", parents=[json_option], help="state, positions and roles of every shard"
    )
    status.add_argument("target", nargs="?", metavar="TARGET", help="data directory, name or URL")
    status.add_argument("--token-file", metavar="FILE")
    status.set_defaults(run=commands.status)


def _topics(words: Any, both: Sequence[argparse.ArgumentParser]) -> None:
    topic = words.add_parser("topic", help="list, create and describe topics")
    verbs = topic.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = verbs.add_parser("list", parents=both, help="all topics")
    listing.set_defaults(run=commands.topic_list)
    create = verbs.add_parser("create", parents=both, help="make a topic")
    create.add_argument("topic", metavar="TOPIC")
    create.add_argument("--queues", type=_count(1), default=4, metavar="N", help="default: 4")
    create.add_argument(
        "--compacted", action="store_true", help="keep the latest message of each index key"
    )
    create.set_defaults(run=commands.topic_create)
    describe = verbs.add_parser("describe", parents=both, help="a topic's queues and offsets")
    describe.add_argument("topic", metavar="TOPIC")
    describe.set_defaults(run=commands.topic_describe)


def _messages(words: Any, both: Sequence[argparse.ArgumentParser]) -> None:
    produce = words.add_parser(
        "produce", parents=both, help="send each line of standard input as a message"
    )
    produce.add_argument("topic", metavar="TOPIC")
    produce.add_argument(
        "--key-separator", metavar="TEXT", help="a line is KEY, TEXT, BODY (default: only a body)"
    )
    produce.add_argument(
        "--input-json",
        action="store_true",
        help='a line is {"body": ..., "key": ..., "tag": ..., "index_keys": [...], '
        '"properties": {...}, "deliver_at_ms": ...}',
    )
    produce.set_defaults(run=commands.produce)

    consume = words.add_parser("consume", parents=both, help="print messages")
    consume.add_argument("topic", metavar="TOPIC")
    consume.add_argument(
        "--from",
        dest="start",
        type=_position("earliest", "latest"),
        default="earliest",
        metavar="POSITION",
        help="earliest (default), latest or an offset, of each queue",
    )
    consume.add_argument(
        "--to",
        dest="stop",
        type=_position("latest"),
        default="latest",
        metavar="POSITION",
        help="end before this offset of each queue; latest (default): what is there now",
    )
    consume.add_argument("--follow", action="store_true", help="wait for new messages, for ever")
    consume.add_argument("--max", type=_count(1), metavar="N", help="at most N messages")
    consume.add_argument(
        "-o", "--output", choices=("json", "raw", "hex"), default="raw", help="default: raw"
    )
    consume.set_defaults(run=commands.consume)


def _store(words: Any, json_option: argparse.ArgumentParser) -> None:
    store = words.add_parser("store", help="look into a store directory, without a cluster")
    verbs = store.add_subparsers(dest="verb", required=True, metavar="VERB")
    verify = verbs.add_parser(
        "verify", parents=[json_option], help="check every byte; 1 if damaged"
    )
    verify.add_argument("directory", metavar="DIR", help="a store, or a cluster's data directory")
    verify.set_defaults(run=store_commands.verify)
    dump = verbs.add_parser("dump", parents=[json_option], help="every message as a line of JSON")
    dump.add_argument("directory", metavar="DIR")
    dump.set_defaults(run=store_commands.dump)
    scrub = verbs.add_parser(
        "scrub", parents=[json_option], help="read what is synced against its CRCs, at a pace"
    )
    scrub.add_argument("directory", metavar="DIR", help="a store, or a cluster's data directory")
    scrub.add_argument(
        "--mib-per-s", type=_count(0), default=64, metavar="N", help="0: unpaced (default: 64)"
    )
    scrub.add_argument(
        "--again", action="store_true", help="from the start, not from where the last one was"
    )
    scrub.set_defaults(run=store_commands.scrub)
    _store_repair(verbs, json_option)
    _store_export(verbs, json_option)


def _store_repair(verbs: Any, json_option: argparse.ArgumentParser) -> None:
    repair = verbs.add_parser(
        "repair", parents=[json_option], help="say what would mend a store; --yes does it"
    )
    repair.add_argument("directory", metavar="DIR", help="a store, or a cluster's data directory")
    repair.add_argument("--yes", action="store_true", help="do it; the store must not be open")
    repair.add_argument(
        "--keep",
        metavar="DIR",
        help="copy what is changed here (default: raymq/repair-<time>/ in the store)",
    )
    repair.add_argument(
        "--cut-at",
        type=_count(0),
        metavar="OFFSET",
        help="cut a damaged log here: everything behind is lost",
    )
    repair.add_argument(
        "--rebuild",
        action="append",
        choices=("consumequeue", "chain", "index", "checkpoint", "marks", "config"),
        help="make this again from the log even if it looks sound (may be repeated)",
    )
    repair.set_defaults(run=store_commands.repair)


def _store_export(verbs: Any, json_option: argparse.ArgumentParser) -> None:
    export = verbs.add_parser(
        "export", parents=[json_option], help="messages as Parquet files in a new directory"
    )
    export.add_argument("directory", metavar="DIR", help="a store")
    export.add_argument("target", metavar="TARGET", help="the new directory")
    export.add_argument("--topic", metavar="NAME", help="default: all but RayMQ's own")
    export.add_argument("--queue", type=_count(0), metavar="N", help="only this queue of the topic")
    export.add_argument(
        "--from", dest="start", type=_count(0), metavar="OFFSET", help="queue offsets from here on"
    )
    export.add_argument(
        "--to", dest="stop", type=_count(0), metavar="OFFSET", help="queue offsets below this one"
    )
    export.add_argument(
        "--file-mib",
        type=_count(1),
        default=256,
        metavar="N",
        help="end a file here (default: 256)",
    )
    export.add_argument(
        "--behind-damage", action="store_true", help="of a damaged log also what can be read"
    )
    export.set_defaults(run=store_commands.export)


def _grafana(words: Any, json_option: argparse.ArgumentParser) -> None:
    grafana = words.add_parser("grafana", help="a dashboard of the metrics (docs/metrics.md)")
    verbs = grafana.add_subparsers(dest="verb", required=True, metavar="VERB")
    install = verbs.add_parser(
        "install", parents=[json_option], help="put it where the Grafana of the running Ray looks"
    )
    install.add_argument("target", nargs="?", metavar="TARGET", help="data directory or name")
    install.add_argument(
        "--directory", metavar="DIR", help="Grafana's dashboards folder (default: ask Ray)"
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
        verb.add_argument("--no-verify", action="store_true", help="do not read everything back")
        verb.add_argument(
            "--runner",
            choices=("auto", "ray", "processes"),
            default="auto",
            help="where workers run: Ray tasks on all nodes, or processes here (raymq:// targets)",
        )
        verb.add_argument(
            "--json", nargs="?", const="-", metavar="FILE", help="JSON to FILE, else printed"
        )
        verb.add_argument("--html", metavar="FILE", help="one page with all plots")
        verb.set_defaults(run=commands.bench)


def _bench_load(verb: argparse.ArgumentParser, mode: str) -> None:
    """The options that make a BenchPlan; defaults are its own."""
    verb.add_argument("--topic", metavar="NAME", help="default: bench")
    verb.add_argument(
        "--topics", type=_count(1), metavar="N", help="topics NAME-0 ... (default: 1)"
    )
    verb.add_argument("--queues", type=_count(1), metavar="N", help="of each topic (default: 4)")
    verb.add_argument(
        "--shards", metavar="N,...", help="only the queues on these shards (default: all)"
    )
    verb.add_argument("--workers", type=_count(1), metavar="N", help="default: 2")
    verb.add_argument("--batch", type=_count(1), metavar="N", help="rows at most (default: 1000)")
    verb.add_argument(
        "--in-flight",
        type=_count(1),
        metavar="N",
        help="closed loop: batches a worker (default: 4)",
    )
    verb.add_argument(
        "--size",
        metavar="DIST",
        help="bytes: N, uniform:LOW-HIGH, lognormal:MEDIAN[:SIGMA] (default: 1024)",
    )
    verb.add_argument(
        "--keys", metavar="DIST", help="none (default), uniform:K or zipf:K[:SKEW] of K keys"
    )
    verb.add_argument("--api", choices=("batches", "messages"), help="default: batches")
    verb.add_argument("--acks", choices=ACKS, help="default: quorum")
    if mode == "consume":
        verb.add_argument(
            "--messages", type=_count(1), metavar="N", help="the backlog (default: 200000)"
        )
        return
    verb.add_argument(
        "--rate", type=float, metavar="N", help="open loop: messages/s of all workers together"
    )
    verb.add_argument(
        "--linger-ms",
        type=float,
        metavar="N",
        help="open loop: wait for a fuller batch (default: 5)",
    )
    verb.add_argument("--duration-s", type=float, metavar="N", help="measured (default: 10)")
    verb.add_argument("--warmup-s", type=float, metavar="N", help="before it (default: 2)")
    verb.add_argument(
        "--find-max", type=float, metavar="MS", help="search the highest rate with p99 up to MS"
    )
    if mode == "e2e":
        verb.add_argument("--consumers", type=_count(1), metavar="N", help="default: 1")


def main(argv: Sequence[str] | None = None, *, console: Console | None = None) -> int:
    """Runs one command; returns its exit code. What RayMQ raises on purpose is one line."""
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
