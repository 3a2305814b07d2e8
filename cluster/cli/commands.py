"""The commands on a cluster and this machine. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raymq.actors.protocol.tls import url_of
from raymq.cluster.record.store_options import parse_config
from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files

from .console import (
    EXIT_FAULT,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    ClusterOperation,
    Console,
    cluster_of,
    connect,
)
from .status_text import status_lines

#: results of parsing `raymq start` that are no options of the function `start`
_NOT_OF_START = ("command", "run", "json", "data_dir")


def start(options: argparse.Namespace, console: Console) -> int:
    """raymq start DIR"""
    given = {name: value for name, value in vars(options).items() if name not in _NOT_OF_START}
    given["config"] = parse_config(given["config"]) or None
    cluster = console.lifecycle.start(options.data_dir, progress=console.note, **given)
    endpoints = [cluster.endpoints[shard] for shard in sorted(cluster.endpoints)]
    facts = {
        "name": cluster.name,
        "cluster_id": cluster.cluster_id,
        "shards": cluster.shards,
        "endpoints": endpoints,
        "data_dir": cluster.data_dir,
        "ray_address": cluster.ray_address,
    }

    cluster.close()
    shown = f"{cluster.name}: {url_of(endpoints[0])} ({len(endpoints)} shard(s))"
    console.result(options, facts, shown)
    return EXIT_OK


def stop(options: argparse.Namespace, console: Console) -> int:
    """raymq stop [TARGET]"""
    report = console.lifecycle.stop(
        options.target, timeout_s=options.timeout_s, progress=console.note
    )
    for name, outcome in sorted(report.actors.items()):
        if outcome != "closed" and not options.json:
            console.note(f"{name}: {outcome}")
    console.result(options, asdict(report), f"stopped; Ray: {report.ray}")
    return EXIT_OK if report.clean else EXIT_FAULT


def status(options: argparse.Namespace, console: Console) -> int:
    """raymq status [TARGET]"""
    with connect(options.target, options.token_file, console) as cluster:
        facts = cluster.status()
        # A shard that does not answer would only make the command wait longer.
        topics = cluster.topics() if facts["state"] == "RUNNING" else None
    lines = status_lines(facts, topics, verbose=options.verbose)
    console.result(options, {**facts, "topics": topics}, *lines)
    codes = {"RUNNING": EXIT_OK, "DOWN": EXIT_UNAVAILABLE}
    return codes.get(facts["state"], EXIT_FAULT)


TOPIC_LIST = ClusterOperation(
    "topics",
    "",
    "",
    lambda options, cluster, topics: (
        topics,
        [f"{name}\t{facts['queues']} queues" for name, facts in topics.items()],
    ),
)


def topic_create(options: argparse.Namespace, console: Console) -> int:
    """raymq topic create TOPIC"""
    with cluster_of(options, console) as cluster:
        created = cluster.create_topic(
            options.topic, queues=options.queues, **_topic_options(options)
        )
    facts = {"topic": options.topic, "queues": options.queues, "created": created}
    outcome = "created" if created else "was there already"
    console.result(options, facts, f"{options.topic}: {outcome}")
    return EXIT_OK


def topic_delete(options: argparse.Namespace, console: Console) -> int:
    """raymq topic delete TOPIC --yes"""
    if not options.yes:
        raise Rejected(
            f"the messages of {options.topic} and the offsets of groups would be lost: add --yes",
            field="--yes",
            limit="--yes",
        )
    with cluster_of(options, console) as cluster:
        cluster.delete_topic(options.topic)
    console.result(options, {"topic": options.topic, "deleted": True}, f"{options.topic}: deleted")
    return EXIT_OK


def _topic_options(options: argparse.Namespace) -> dict[str, object]:
    """What `raymq topic create` gives to `Cluster.create_topic`, besides name and queues. Raises: Rejected."""
    found: dict[str, Any] = {"compacted": True} if options.compacted else {}
    if options.columns:
        import pyarrow as pa

        from raymq.client.messages.column_text import column_of

        found["schema"] = pa.schema([column_of(text) for text in options.columns])
    if options.allow_null_values:
        found["allow_null_values"] = True
    return found


def topic_add_column(options: argparse.Namespace, console: Console) -> int:
    """raymq topic add-column TOPIC NAME:TYPE"""
    from raymq.client.messages.column_text import column_of, column_text

    column = column_of(options.column)
    with cluster_of(options, console) as cluster:
        added = cluster.add_column(options.topic, column)
    facts = {"topic": options.topic, "column": column_text(column), "added": added}
    outcome = f"has column {column.name}" + ("" if added else " already")
    console.result(options, facts, f"{options.topic}: {outcome}")
    return EXIT_OK


def _queues_added(
    options: argparse.Namespace, cluster: object, added: bool
) -> tuple[dict[str, object], list[str]]:
    facts = {"topic": options.topic, "queues": options.queues, "added": added}
    outcome = f"has {options.queues} queues" + ("" if added else " already")
    return facts, [f"{options.topic}: {outcome}"]


ADD_QUEUES = ClusterOperation("add_queues", "topic queues", "break_key_order", _queues_added)


def _described(
    options: argparse.Namespace, cluster: object, facts: dict[str, Any]
) -> tuple[dict[str, object], list[str]]:
    lines = [f"{facts['topic']}: {facts['messages']} messages", *_topic_facts(facts)]
    lines += [
        f"  queue {queue['queue_id']} on shard {queue['shard']}: [{queue['min_offset']}, {queue['max_offset']})"
        for queue in facts["queues"]
    ]
    return facts, lines


TOPIC_DESCRIBE = ClusterOperation("describe_topic", "topic", "", _described)


def _topic_facts(facts: Mapping[str, object]) -> Iterator[str]:
    """A line for each option of a topic that is not the default, and for each column of its schema."""
    if facts.get("compacted"):
        yield "  compacted"
    if "schema" in facts:
        yield from _schema_lines(json.dumps(facts["schema"]))
    if facts.get("allow_null_values"):
        yield "  null values are allowed"


def _schema_lines(schema: str) -> Iterator[str]:
    """A line for each column; the JSON itself for a schema of a later version."""
    from raymq.client.messages.column_text import column_text
    from raymq.client.messages.topic_schema import from_json

    try:
        columns = from_json(schema)
    except Rejected:
        yield f"  schema of a later version: {schema}"
        return
    yield from (f"  column {column_text(each)}" for each in columns)


def doctor(options: argparse.Namespace, console: Console) -> int:
    """raymq doctor [DIR]"""
    from .doctor import examine

    checks = examine(options.data_dir, ephemeral=options.ephemeral)
    lines = []
    for check in checks:
        lines.append(f"{check.verdict:4}  {check.name}: {check.found}")
        if check.advice:
            lines.append(f"      -> {check.advice}")
    console.result(options, [asdict(check) for check in checks], *lines)
    return EXIT_FAULT if any(check.verdict == "fail" for check in checks) else EXIT_OK


def grafana_install(options: argparse.Namespace, console: Console) -> int:
    """raymq grafana install [TARGET] [--directory DIR]"""
    from . import grafana

    files = Files()
    ray = None if options.directory is not None else grafana.ray_of(options.target, files=files)
    path = grafana.install(options.directory, ray, files=files)
    shown = f"{path}: Grafana shows it as the dashboard RayMQ"
    console.result(options, {"file": str(path)}, shown)
    return EXIT_OK


def grafana_show(options: argparse.Namespace, console: Console) -> int:
    """raymq grafana show: always JSON."""
    from .grafana import dashboard

    console.stdout.write(dashboard())
    return EXIT_OK


def bench(options: argparse.Namespace, console: Console) -> int:
    """raymq bench produce|consume|e2e"""
    from raymq.cluster.bench.page import page
    from raymq.cluster.bench.plan import plan_of
    from raymq.cluster.bench.progress import watcher
    from raymq.cluster.bench.report import as_dict, lines
    from raymq.cluster.bench.run import Bench

    plan = plan_of(vars(options))
    for option, path in (("--json", options.json), ("--html", options.html)):
        if path is not None and path != "-":
            _check_writable(option, Path(path).expanduser())

    with cluster_of(options, console) as cluster:
        run = Bench(cluster, plan, runner=options.runner, watcher=watcher(console.stderr))
        outcome = run.run(
            find_max_ms=getattr(options, "find_max", None), verify=not options.no_verify
        )

    report = as_dict(outcome)
    _show(options, console, report, lines(report))

    if options.html is not None:
        _write(options.html, page(report), "--html")
    return EXIT_OK if outcome.sound else EXIT_FAULT


def bench_datasets(options: argparse.Namespace, console: Console) -> int:
    """raymq bench spark|data"""
    from raymq.cluster.bench.dataset_load import DatasetPlan, as_dict, lines, run

    given = {
        name: value
        for name in ("topic", "queues", "messages", "size", "tasks", "delivery")
        if (value := getattr(options, name, None)) is not None
    }
    plan = DatasetPlan(mode=options.mode, **given)
    if options.json is not None and options.json != "-":
        _check_writable("--json", Path(options.json).expanduser())

    module = _load_test(options.mode)
    with cluster_of(options, console) as cluster, module.engine(cluster, plan) as engine:
        result = run(
            cluster, plan, engine, lambda text: print(text, file=console.stderr, flush=True)
        )

    report = as_dict(result)
    _show(options, console, report, lines(report))
    return EXIT_OK if result.sound else EXIT_FAULT


def _show(
    options: argparse.Namespace, console: Console, report: Mapping[str, object], lines: list[str]
) -> None:
    """Show a report as `--json` asks: as JSON alone, or as text, beside a file of JSON."""
    if options.json == "-":
        console.json(report)
        return
    for line in lines:
        console.line(line)
    if options.json is not None:
        _write(options.json, json.dumps(report, indent=1), "--json")


def _load_test(mode: str) -> Any:
    """The module of an engine. PySpark and Ray Data are extras, so both are loaded by name.

    Raises: Rejected naming the extra that is not installed.
    """
    module, package, extra = {
        "spark": ("raymq.cluster.bench.spark_engine", "pyspark", "spark` or `spark4"),
        "data": ("raymq.cluster.bench.ray_data_engine", "ray.data", "data"),
    }[mode]
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise Rejected(
            f"`raymq bench {mode}` needs {package}: install the extra `{extra}` ({error})",
            field="bench",
            limit=package,
        ) from error
    return importlib.import_module(module)


def _check_writable(option: str, path: Path) -> None:
    """Raises: Rejected now, not after the run."""
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        message = f"{option} {path}: name a file in a directory that is there and can be written"
        raise Rejected(message, field=option, path=str(path))


def _write(path: str, text: str, option: str) -> None:
    try:
        Files().write_file_atomic(Path(path).expanduser(), text.encode())
    except OSError as error:
        raise Rejected(f"{option} {path}: {error}", field=option) from error
