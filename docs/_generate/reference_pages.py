"""The pages that are made from the code: `python docs/_generate/reference_pages.py` writes them.

The pages are committed, so that links lead to them everywhere. A test compares them with the code.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from field_comments import field_comments

import raymq
from raymq.client.messages.fields import FIELDS
from raymq.client.produce.producer_config import ProducerConfig
from raymq.cluster.cli.main import build_parser
from raymq.cluster.record.cluster_record import StartOptions, new_record, resume_record
from raymq.cluster.record.rocketmq_options import NOT_TAKEN
from raymq.cluster.record.store_options import KEYWORDS
from raymq.doors.rocketmq.codes import PUSHED, RequestCode
from raymq.doors.rocketmq.rocketmq_server import EXECUTORS
from raymq.store.base.errors import Rejected
from raymq.store.config.option import Option as StoreOption
from raymq.store.config.store_config import IN_CLUSTER, OPTIONS, WHILE_RUNNING, StoreConfig

USAGE_WIDTH = 76
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# --- the command line -----------------------------------------------------------------------------

#: description of an argument whose parser has no help for it
ARGUMENTS = {
    "directory": "the data directory, or one store in it",
    "data_dir": "the data directory of the cluster",
    "topic": "the name of the topic",
    "segment_size_bytes": "bytes of one commit log file (default: 1 GiB), decided at the first start",
    "timeout_s": "seconds that the whole command may take",
    "token_file": "holds the token, for raymq:// (or set RAYMQ_TOKEN)",
}


class Command(NamedTuple):
    """One command that does something, such as `raymq topic list`."""

    words: str
    help: str
    parser: argparse.ArgumentParser


def commands(
    parser: argparse.ArgumentParser, words: str = "raymq", text: str = ""
) -> Iterator[Command]:
    """Every command of the grammar, in its order."""
    groups = [x for x in parser._actions if isinstance(x, argparse._SubParsersAction)]
    if not groups:
        yield Command(words, text, parser)
    for group in groups:
        helps = {choice.dest: choice.help or "" for choice in group._choices_actions}
        for name, inner in group.choices.items():
            yield from commands(inner, f"{words} {name}", helps.get(name, ""))


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments of a command without `--help`: positional ones first."""
    found = [x for x in parser._actions if not isinstance(x, argparse._HelpAction)]
    return sorted(found, key=lambda action: bool(action.option_strings))


def argument_text(action: argparse.Action) -> str:
    """The meaning of an argument, with its choices and its default; empty where neither parser nor page says so."""
    text = action.help or ARGUMENTS.get(action.dest, "")
    if not text:
        return ""
    parts = [_sentence(text)]
    if action.choices is not None:
        parts.append("One of " + ", ".join(f"`{choice}`" for choice in action.choices) + ".")
    switch = isinstance(action, argparse._StoreTrueAction)
    if action.default not in (None, False) and not switch and "default" not in text:
        parts.append(f"Default: `{action.default}`.")
    return " ".join(parts)


def cli_page() -> str:
    """docs/reference/cli.md."""
    found = list(commands(build_parser()))
    lines = [
        "# Command line",
        "",
        "Generated from the parsers of `raymq` by `docs/_generate/reference_pages.py`. Every command has `--help`.",
        "",
        "`TARGET` is a data directory, the name of a cluster, or a `raymq://host:port` address. "
        "`raymq stop` takes no address. Exit codes: 0 done; 1 a fault was found; 2 the command is "
        "wrong; 3 the cluster is not available now; 130 interrupted.",
        "",
        "| command | does |",
        "|---|---|",
        *(f"| [`{c.words}`](#{c.words.replace(' ', '-')}) | {_cell(c.help)} |" for c in found),
        "",
    ]
    for command in found:
        text = command.parser.description or command.help
        lines += [f"## {command.words}", "", _sentence(text), ""]
        lines += ["```text", usage(command), "```", ""]
        for action in arguments(command.parser):
            lines += [_argument_name(action), f":   {argument_text(action)}", ""]
        if command.parser.epilog:
            lines += [_sentence(command.parser.epilog), ""]
    return "\n".join(lines).rstrip() + "\n"


def usage(command: Command) -> str:
    """One line, wrapped. argparse wraps differently in each Python, and a page is the same in all."""
    parts = []
    for action in sorted(arguments(command.parser), key=lambda each: not each.option_strings):
        if action.option_strings:
            switch = isinstance(action, argparse.BooleanOptionalAction)
            parts.append(f"[{action.option_strings[0 if switch else -1]}{_value(action)}]")
        else:
            name = str(action.metavar or action.dest)
            shown = {"?": f"[{name}]", "+": f"{name} ..."}
            parts.append(shown.get(str(action.nargs), name))
    joined = [part.replace(" ", "\0") for part in parts]
    indent = " " * (len(command.words) + 1)
    wrapped = textwrap.wrap(
        f"{command.words} {' '.join(joined)}",
        USAGE_WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(wrapped).replace("\0", " ")


def _argument_name(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    return ", ".join(f"`{name}{_value(action)}`" for name in action.option_strings)


def _value(action: argparse.Action) -> str:
    """The value of an option, with a blank before it; empty for a switch."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return ""
    choices = "|".join(map(str, action.choices)) if action.choices is not None else None
    return f" {action.metavar or choices or action.dest.upper()}"


# --- the configuration ----------------------------------------------------------------------------

#: options of a store by subject; options that stand nowhere here are listed at the end
GROUPS = {
    "Flush and replication": (
        "flush sync_flush_timeout_ms slave_timeout_ms flush_commit_log_timed flush_interval_ms "
        "flush_least_pages flush_thorough_interval_ms catch_up_bytes_per_s"
    ),
    "Commit log": (
        "segment_size_bytes max_message_bytes prewrite_window_bytes snapshot_interval_bytes "
        "allocate_timeout_ms os_page_cache_busy_timeout_ms warm_mapped_file recycle_commit_log_files "
        "commit_log_paths read_only_commit_log_paths store_host"
    ),
    "Transient pool": (
        "transient_pool transient_pool_slices transient_pool_slice_bytes commit_interval_ms "
        "commit_least_pages commit_thorough_interval_ms"
    ),
    "Retention": (
        "file_reserved_hours delete_when disk_max_used_space_ratio disk_space_clean_forcibly_ratio "
        "disk_space_warning_level_ratio clean_file_forcibly clean_resource_interval_ms "
        "delete_file_batch_max delete_files_interval_ms"
    ),
    "Consume queues, index and reads": (
        "consume_queue_file_size_bytes message_index max_hash_slot_num max_index_num "
        "max_msgs_num_batch max_filter_message_size travel_cq_file_num_when_get_message "
        "access_message_in_memory_max_ratio max_transfer_bytes_on_message_in_memory "
        "max_transfer_count_on_message_in_memory max_transfer_bytes_on_message_in_disk "
        "max_transfer_count_on_message_in_disk"
    ),
    "Delayed messages": (
        "message_delay_level timer_wheel_enabled timer_max_delay_s timer_congest_num_each_slot "
        "timer_log_file_size_bytes"
    ),
    "Compaction topics": (
        "compaction_file_size_bytes compaction_queue_file_size_bytes compaction_interval_ms"
    ),
    "Idempotent producers": "producer_entries_max producer_expiry_hours",
    "Scrub": "scrub_bytes_per_s scrub_interval_ms",
}

#: parameters that are no options
NO_OPTIONS = {
    "self",
    "cluster",
    "topic",
    "topics",
    "name",
    "config",
    "clock",
    "options",
    "data_dir",
    "target",
}

#: the environment variables that RayMQ reads, beside the variables of TLS
VARIABLES = {
    "RAYMQ_HOME": "directory of the list of clusters that this user started; default `~/.raymq`, "
    "and `/tmp/raymq-UID/home` for a user without a home",
    "RAYMQ_TOKEN": "the token, for `raymq://` addresses",
    "RAYMQ_LOG_LEVEL": "what the processes of a cluster log: DEBUG, INFO, WARNING or ERROR; default WARNING",
    "RAY_ADDRESS": "the Ray that `raymq start` attaches to, and in which `connect` looks a name up",
    "RAY_AUTH_MODE": "Ray's own authentication; a Ray that `raymq start` starts runs with `token`, from Ray 2.52 on",
    "RAY_AUTH_TOKEN_PATH": "file of Ray's token; without it `~/.ray/auth_token`, and for a user without a home "
    "`ray-token` in the data directory",
    "RAY_worker_niceness": "priority of Ray's workers; a Ray that `raymq start` starts has 0",
    "GRPC_EXPERIMENTS": "switches of gRPC; without it RayMQ's processes read Flight's sockets in the threads that "
    "wait for messages, and with it they leave gRPC as it says",
    "JAVA_HOME": "the Java 17 that Spark uses",
}


class Option(NamedTuple):
    """One option as the page shows it."""

    name: str
    text: str
    unit: str
    default: str
    #: RocketMQ's name for it, or empty
    rocketmq: str = ""
    #: where it can be given
    given: str = ""
    #: when another value takes effect
    changes: str = ""
    #: the values that it may have
    range: str = ""


def store_options() -> list[Option]:
    """Every field of StoreConfig."""
    texts = joined(field_comments(StoreConfig))
    return [
        Option(
            each.name,
            texts[each.name],
            unit_of(each.name, each.kind),
            show(each.name, each.default),
            each.rocketmq,
            _given(each.name)
            if each.changes is not None
            else f"embedded only: {each.not_in_cluster}",
            CHANGES.get(each.changes or "", ""),
            range_of(each),
        )
        for each in OPTIONS.values()
    ]


#: when another value of an option of a store holds in a cluster
CHANGES = {
    "first start": "decided at the first start",
    "each start": "each start may change it",
    "while running": "may change while the cluster runs",
}


def range_of(option: StoreOption) -> str:
    """The range of a number, with that in a cluster if it is another one."""
    if not option.is_number:
        return ""
    text = option.range_text()
    if option.most_in_cluster is not None:
        return f"{text}, in a cluster {option.range_text(in_cluster=True)}"
    return text


def joined(texts: dict[str, str]) -> dict[str, str]:
    """A comment that goes on where the one before ended ("...unless") names the option that it belongs to."""
    found, before = {}, ""
    for name, text in texts.items():
        found[name] = f"see `{before}`: {text.strip('.')}" if text.startswith("...") else text
        before = name
    return found


def start_flags() -> dict[str, str]:
    """Keyword of `raymq.start` -> flag of `raymq start`."""
    (start,) = (
        command.parser for command in commands(build_parser()) if command.words == "raymq start"
    )
    return {x.dest: x.option_strings[0] for x in start._actions if x.option_strings}


#: options of a later start, which show whether the option may change
_OTHER: dict[str, Any] = {
    "name": "other",
    "shards": 2,
    "replicas": 2,
    "segment_size_bytes": 1 << 20,
    "nodes": ("a",),
    "flush": "async",
    "host": "node",
    "transient_pool": True,
    "file_reserved_hours": 1.0,
    "producer_expiry_hours": 1.0,
    "catch_up_bytes_per_s": 1,
    "insecure": True,
    "config": {"flush_interval_ms": 1},
}


def changes(name: str) -> str:
    """When another value of an option of `start` takes effect: the code that resumes a cluster is asked."""
    if name in WHILE_RUNNING:
        return CHANGES["while running"]
    if name == "ephemeral":
        return "kept once it was given"
    if name not in _OTHER:
        return "holds for this call"
    try:
        resume_record(new_record(StartOptions()), StartOptions(**{name: _OTHER[name]}))
    except Rejected:
        return "decided at the first start"
    return "each start may change it"


def producer_options() -> list[Option]:
    """Every option of `Producer` and `AsyncProducer`."""
    texts = joined(field_comments(ProducerConfig)) | documented(raymq.Producer)
    return [
        Option(
            field.name,
            texts[field.name],
            unit_of(field.name, str(field.type)),
            show(field.name, field.default),
        )
        for field in fields(ProducerConfig)
    ]


def signature_options(function: Callable[..., Any], keep: tuple[str, ...] = ()) -> list[Option]:
    """Every option of a public function, with the lines of its docstring."""
    texts = documented(function)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in NO_OPTIONS and name not in keep:
            continue
        default = (
            "required" if parameter.default is parameter.empty else show(name, parameter.default)
        )
        found.append(
            Option(name, texts.get(name, ""), unit_of(name, str(parameter.annotation)), default)
        )
    return found


def documented(function: Callable[..., Any]) -> dict[str, str]:
    """Parameter -> text, of a docstring whose `Args:` has one parameter on each indented line."""
    docstring = inspect.getdoc(function) or ""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", docstring, re.MULTILINE)
    if not section:
        return {}
    entries = re.findall(
        r"^ {4}`{0,2}(\w+)`{0,2}(?: \([^)]*\))?: (.*(?:\n {5,}.*|\n(?=\n {5}))*)",
        section[1],
        re.MULTILINE,
    )
    return {name: " ".join(text.split()) for name, text in entries}


def configuration_page() -> str:
    """docs/reference/configuration.md."""
    store = store_options()
    lines = [
        "# Configuration",
        "",
        "Generated from the code by `docs/_generate/reference_pages.py`.",
        "",
        f"A cluster takes {len(IN_CLUSTER)} of the {len(store)} options of a store, and says of each other one why "
        f"not. {len(KEYWORDS)} of them are keywords of `raymq.start` and flags of `raymq start`. The others are given "
        'together, as `raymq.start(config={"flush_interval_ms": 200})` or '
        "`raymq start --config flush_interval_ms=200`. The cluster keeps in `cluster.json` what was given. What was "
        "never given has its default. Programs that [embed the store](store.md) set all of them.",
        "",
        "A name or value that a cluster does not take is refused before anything starts. "
        f"{sum(each.changes == 'while running' for each in OPTIONS.values())} options may change while a cluster runs: "
        "[options of the store](../operating/options.md).",
        "",
        "## Starting a cluster",
        "",
        "The options of `raymq.start`, with the flag of `raymq start`.",
        "",
    ]
    flags = start_flags()
    record = new_record(StartOptions())
    for option in signature_options(raymq.start, keep=("name", "config")):
        if hasattr(record, option.name):
            option = option._replace(default=show(option.name, getattr(record, option.name)))
        flag = f"flag `{flags[option.name]}`" if option.name in flags else "no flag"
        lines += definition(option, flag, changes(option.name))
    lines += ["## Connecting", "", "The options of `raymq.connect`.", ""]
    for option in signature_options(raymq.connect):
        lines += definition(option)
    lines += [
        "## Producer",
        "",
        "Keywords of `Producer`, `AsyncProducer`, `cluster.producer()` and ",
    ]
    lines += ["`cluster.async_producer()`.", ""]
    for option in producer_options():
        lines += definition(option)
    lines += [
        "## Consumer",
        "",
        "Keywords of `Consumer`, `AsyncConsumer`, `cluster.consumer(topic)` and ",
    ]
    lines += ["`cluster.async_consumer(topic)`.", ""]
    for option in signature_options(raymq.Consumer):
        lines += definition(option)
    lines += [
        "## Workers",
        "",
        "Keywords of `Workers`, `AsyncWorkers`, `cluster.workers(topics)` and ",
    ]
    lines += ["`cluster.async_workers(topics)`.", ""]
    for option in signature_options(raymq.Workers):
        lines += definition(option)
    lines += ["## Queue", "", "Keywords of `raymq.Queue`.", ""]
    for option in signature_options(raymq.Queue, keep=("cluster",)):
        lines += definition(option)
    lines += [
        "## Store",
        "",
        "The fields of `raymq.store.StoreConfig`. *Embedded only*: a program that embeds the store "
        "sets the option, a cluster has the default. An embedded store takes other values each time it is opened. But "
        "the options that name the size of a file must be those with which the files were made.",
        "",
    ]
    for title, options in grouped(store).items():
        lines += [f"### {title}", ""]
        for option in options:
            lines += definition(option, option.range, option.given, option.changes)
    lines += [
        "## RocketMQ's other options",
        "",
        "Options of RocketMQ's `MessageStoreConfig` that RayMQ does not have.",
        "",
        "| options | why not |",
        "|---|---|",
        *(
            f"| {', '.join(f'`{name}`' for name in names)} | {_cell(_sentence(reason))} |"
            for reason, names in reasons().items()
        ),
        "",
        "## Environment",
        "",
        "For the variables of TLS see [security](../operating/security.md#tls).",
        "",
    ]
    for name, text in VARIABLES.items():
        lines += [f"`{name}`", f":   {_sentence(text)}", ""]
    return "\n".join(lines).rstrip() + "\n"


def reasons() -> dict[str, list[str]]:
    """The reason -> RocketMQ's options that RayMQ does not have for it."""
    found: dict[str, list[str]] = {}
    for name, reason in NOT_TAKEN.items():
        found.setdefault(reason, []).append(name)
    return found


def grouped(options: list[Option]) -> dict[str, list[Option]]:
    """The options under their headings; each exactly once."""
    by_name = {option.name: option for option in options}
    found = {
        title: [by_name.pop(name) for name in names.split() if name in by_name]
        for title, names in GROUPS.items()
    }
    return found | ({"Other": list(by_name.values())} if by_name else {})


def definition(option: Option, *facts: str) -> list[str]:
    """An option as an entry of a definition list: a sentence, then its facts."""
    parts = [option.unit, f"default {option.default}", *facts]
    if option.rocketmq:
        parts.append(f"RocketMQ `{option.rocketmq}`")
    return [
        f"`{option.name}`",
        f":   {_sentence(option.text)}",
        "",
        "    *" + " · ".join(part for part in parts if part) + "*",
        "",
    ]


_UNITS = (
    ("_bytes_per_s", "bytes a second"),
    ("_per_s", "bytes a second"),
    ("_bytes", "bytes"),
    ("_ms", "milliseconds"),
    ("_hours", "hours"),
    ("_ratio", "percent"),
    ("_pages", "pages of 4 KiB"),
    ("_s", "seconds"),
)


def unit_of(name: str, annotation: str) -> str:
    """The unit that the name ends with, else the kind of value."""
    for ending, unit in _UNITS:
        if name.endswith(ending):
            return unit
    if "bytes" in name and "int" in annotation:
        return "bytes"
    if "bool" in annotation:
        return "switch"
    if annotation in ("int", "float"):
        return "number"
    return ""


def show(name: str, value: Any) -> str:
    """A default, readable."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if "bytes" in name and isinstance(value, int):
        for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
            if value >= size and value % size == 0:
                return f"{value // size} {unit}"
    if value is None:
        return "not given"
    if value == ():
        return "none"
    if isinstance(value, int | float):
        return f"{value:,}" if value >= 10_000 else f"{value:g}"
    return f"`{value}`"


def _given(name: str) -> str:
    if name not in KEYWORDS:
        return "`start(config=)`, flag `--config`"
    return f"`start({name}=)`, flag `{start_flags()[name]}`"


def _sentence(text: str) -> str:
    text = text.strip()
    text = text[:1].upper() + text[1:]
    text = re.sub(r"(?<![`\w<])<(?=\w)", "&lt;", text).removesuffix("...")
    return text if text.endswith((".", "...", "?")) else text + "."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# --- the fields of a message ----------------------------------------------------------------------


def message_page() -> str:
    """docs/reference/message.md."""
    lines = [
        "# Fields of a message",
        "",
        "Generated from the table of fields (`client/messages/fields.py`) by `docs/_generate/reference_pages.py`.",
        "",
        "`Message` and `send` have the fields that are sent, `ReceivedMessage` those that are read. `produce` and "
        "`consume` stand for the lines of `raymq produce --input` and `raymq consume -o json`.",
        "",
        "| field | type | is | limits | place in a record |",
        "|---|---|---|---|---|",
    ]
    for each in FIELDS:
        cells = (f"`{each.name}`", f"`{each.type}`", each.doc, each.limits, each.stored)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    lines += [
        "",
        "## Where each field is",
        "",
        "| field | sent | read | `send_batch` | `poll_batch` | `produce` | `consume` | Spark reads | Spark writes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in FIELDS:
        column = f"`{each.column_name}`" if each.column is not None else ""
        marks = (
            f"`{each.name}`",
            "yes" if each.is_sent else "",
            "yes" if each.is_read else "",
            column if each.column is not None and each.column.is_sent else "",
            column,
            "yes" if each.json is not None and each.is_put_back else "",
            "yes" if each.json is not None and each.is_printed else "",
            "" if each.spark is None else f"`{each.spark}`",
            "" if each.spark_sink is None else f"`{each.spark_sink}`",
        )
        lines.append(f"| {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def rocketmq_page() -> str:
    """docs/reference/rocketmq.md."""
    rows = sorted(
        (code, kind, executor) for kind, executor in EXECUTORS.items() for code in kind.CODES
    )
    served = {code for code, _, _ in rows}
    others = [each for each in RequestCode if each not in served and each not in PUSHED]
    lines = [
        "# Requests of RocketMQ's clients",
        "",
        "Generated from the code by `docs/_generate/reference_pages.py`.",
        "",
        "The requests that the [server for RocketMQ's clients](../guides/from-rocketmq.md) answers, what answers them, "
        "and how many of a kind it takes at a time. One more is refused as SYSTEM_BUSY.",
        "",
        "| code | request | processor | executor | at a time |",
        "|---|---|---|---|---|",
        *(
            f"| {int(code)} | {code.name} | {kind.__name__} | {executor.name} | {executor.requests_max:,} |"
            for code, kind, executor in rows
        ),
        "",
        "The server itself sends these to clients:",
        "",
        "| code | request |",
        "|---|---|",
        *(f"| {int(code)} | {code.name} |" for code in sorted(PUSHED)),
        "",
        "These are answered with REQUEST_CODE_NOT_SUPPORTED, as is every code that is in no table:",
        "",
        "| code | request |",
        "|---|---|",
        *(f"| {int(code)} | {code.name} |" for code in others),
    ]
    return "\n".join(lines) + "\n"


#: page -> the function that makes it
PAGES = {
    "cli.md": cli_page,
    "configuration.md": configuration_page,
    "message.md": message_page,
    "rocketmq.md": rocketmq_page,
}


def main() -> None:
    """Write the pages."""
    for name, make in PAGES.items():
        path = Path(__file__).resolve().parents[1] / "reference" / name
        path.write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
