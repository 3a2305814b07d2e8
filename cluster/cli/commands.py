"""The commands on a cluster and this machine. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from raymq.cluster.transport.tls import url_of
from raymq.store.errors import Rejected
from raymq.store.files import Files

from .console import EXIT_FAULT, EXIT_OK, EXIT_UNAVAILABLE, Console, cluster_of, connect
from .status_text import status_lines


def start(options: argparse.Namespace, console: Console) -> int:
    """raymq start DIR"""
    cluster = console.lifecycle.start(
        options.data_dir,
        name=options.name,
        shards=options.shards,
        replication=options.replication,
        flush=options.flush,
        transient_pool=options.transient_pool,
        file_reserved_hours=options.file_reserved_hours,
        address=options.address,
        ephemeral=options.ephemeral,
        segment_size_bytes=options.segment_size_bytes,
        host=options.host,
        insecure=options.insecure,
        nodes=options.nodes,
        timeout_s=options.timeout_s,
        progress=console.note,
    )
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
    if options.json:
        console.json(facts)
    else:
        console.line(f"{cluster.name}: {url_of(endpoints[0])} ({len(endpoints)} shard(s))")
    return EXIT_OK


def stop(options: argparse.Namespace, console: Console) -> int:
    """raymq stop [TARGET]"""
    report = console.lifecycle.stop(
        options.target, timeout_s=options.timeout_s, progress=console.note
    )
    if options.json:
        console.json(asdict(report))
    else:
        for name, outcome in sorted(report.actors.items()):
            if outcome != "closed":
                console.note(f"{name}: {outcome}")
        console.line(f"stopped; Ray: {report.ray}")
    return EXIT_OK if report.clean else EXIT_FAULT


def status(options: argparse.Namespace, console: Console) -> int:
    """raymq status [TARGET]"""
    with connect(options.target, options.token_file, console) as cluster:
        facts = cluster.status()
        # A shard that does not answer would only make the command wait longer.
        topics = cluster.topics() if facts["state"] == "RUNNING" else None
    if options.json:
        console.json({**facts, "topics": topics})
    else:
        for line in status_lines(facts, topics, verbose=options.verbose):
            console.line(line)
    codes = {"RUNNING": EXIT_OK, "DOWN": EXIT_UNAVAILABLE}
    return codes.get(facts["state"], EXIT_FAULT)


def topic_list(options: argparse.Namespace, console: Console) -> int:
    """raymq topic list"""
    with cluster_of(options, console) as cluster:
        topics = cluster.topics()
    if options.json:
        console.json(topics)
    else:
        for name, facts in topics.items():
            console.line(f"{name}\t{facts['queues']} queues")
    return EXIT_OK


def topic_create(options: argparse.Namespace, console: Console) -> int:
    """raymq topic create TOPIC"""
    with cluster_of(options, console) as cluster:
        more = {"compacted": True} if options.compacted else {}
        created = cluster.create_topic(options.topic, queues=options.queues, **more)
    if options.json:
        console.json({"topic": options.topic, "queues": options.queues, "created": created})
    else:
        console.line(f"{options.topic}: {'created' if created else 'was there already'}")
    return EXIT_OK


def topic_describe(options: argparse.Namespace, console: Console) -> int:
    """raymq topic describe TOPIC"""
    with cluster_of(options, console) as cluster:
        facts = cluster.describe_topic(options.topic)
    if options.json:
        console.json(facts)
        return EXIT_OK
    console.line(f"{facts['topic']}: {facts['messages']} messages")
    for queue in facts["queues"]:
        console.line(
            f"  queue {queue['queue_id']} on shard {queue['shard']}: [{queue['min_offset']}, {queue['max_offset']})"
        )
    return EXIT_OK


def doctor(options: argparse.Namespace, console: Console) -> int:
    """raymq doctor [DIR]"""
    from .doctor import examine

    checks = examine(options.data_dir, ephemeral=options.ephemeral)
    if options.json:
        console.json([asdict(check) for check in checks])
    else:
        for check in checks:
            console.line(f"{check.verdict:4}  {check.name}: {check.found}")
            if check.advice:
                console.line(f"      -> {check.advice}")
    return EXIT_FAULT if any(check.verdict == "fail" for check in checks) else EXIT_OK


def grafana_install(options: argparse.Namespace, console: Console) -> int:
    """raymq grafana install [TARGET] [--directory DIR]"""
    from . import grafana

    files = Files()
    ray = None if options.directory is not None else grafana.ray_of(options.target, files=files)
    place = grafana.install(options.directory, ray, files=files)
    if options.json:
        console.json({"file": str(place)})
    else:
        console.line(f"{place}: Grafana shows it as the dashboard RayMQ")
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
    if options.json == "-":
        console.json(report)
    else:
        for line in lines(report):
            console.line(line)
        if options.json is not None:
            _write(options.json, json.dumps(report, indent=1), "--json")
    if options.html is not None:
        _write(options.html, page(report), "--html")
    return EXIT_OK if outcome.sound else EXIT_FAULT


def _check_writable(option: str, path: Path) -> None:
    """Raises: Rejected now, not after the run."""
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise Rejected(
            f"{option} {path}: name a file in a directory that is there and can be written",
            field=option,
            path=str(path),
        )


def _write(path: str, text: str, option: str) -> None:
    try:
        Files().write_file_atomic(Path(path).expanduser(), text.encode())
    except OSError as error:
        raise Rejected(f"{option} {path}: {error}", field=option) from error
