"""What the commands do. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from raymq.cluster.transport.tls import TLS_PREFIX, is_loopback, url_of
from raymq.store.errors import (
    DeliveryUnknown,
    OffsetOutOfRange,
    RayMQError,
    Rejected,
    StorageFull,
    Unavailable,
    to_wire,
)
from raymq.store.files import Files

EXIT_OK = 0
EXIT_FAULT = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3

_POLL_TIMEOUT_S = 1.0
_POLL_RECORDS = 1000
#: of a line of `produce --input-json`, beside body and key
_FIELDS = ("tag", "index_keys", "properties", "deliver_at_ms")


def exit_code(error: RayMQError) -> int:
    """The exit code of an error that ended a command."""
    if isinstance(error, (Rejected, OffsetOutOfRange)):
        return EXIT_USAGE
    if isinstance(error, (Unavailable, DeliveryUnknown, StorageFull)):
        return EXIT_UNAVAILABLE
    return EXIT_FAULT


class Console:
    """Standard input and output, and the door to clusters; tests put their own in place."""

    def __init__(
        self,
        *,
        stdin: IO[bytes] | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[str] | None = None,
        lifecycle: Any = None,
    ) -> None:
        self.stdin = stdin or sys.stdin.buffer
        self.stdout = stdout or sys.stdout.buffer
        self.stderr = stderr or sys.stderr
        self._lifecycle = lifecycle

    @property
    def lifecycle(self) -> Any:
        """`start`, `connect`, `stop`: module cluster/start.py, loaded when first needed."""
        if self._lifecycle is None:
            from raymq.cluster import start

            self._lifecycle = start
        return self._lifecycle

    def line(self, text: str | bytes) -> None:
        """One line of result."""
        self.stdout.write((text.encode() if isinstance(text, str) else text) + b"\n")

    def json(self, value: Any) -> None:
        """One JSON value of result, on one line."""
        self.line(json.dumps(value, default=str))

    def note(self, text: str) -> None:
        """Progress: never part of the result."""
        print(text, file=self.stderr, flush=True)

    def error(self, error: RayMQError, *, as_json: bool) -> None:
        """An error that ends the command."""
        text = json.dumps(to_wire(error), default=str) if as_json else f"raymq: {error}"
        print(text, file=self.stderr, flush=True)

    def flush(self) -> None:
        """Everything written so far is out."""
        self.stdout.flush()


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
    with _connect(options.target, options.token_file, console) as cluster:
        facts = cluster.status()
    if options.json:
        console.json(facts)
    else:
        console.line(f"{facts['name']} {facts['cluster_id'][:8]}: {facts['state']}")
        for shard in facts["shards"]:
            console.line(_shard_line(shard))
            if shard.get("replication") == "mirror":
                console.line(f"    {_mirror_words(shard)}")
            for line in _role_lines(shard):
                console.line(line)
    codes = {"RUNNING": EXIT_OK, "DOWN": EXIT_UNAVAILABLE}
    return codes.get(facts["state"], EXIT_FAULT)


def _shard_line(shard: dict[str, Any]) -> str:
    words = [f"  shard {shard.get('shard')}: {shard.get('state')}"]
    keys = ["appended", "synced", "confirmed"]
    if shard.get("transient_pool"):
        keys.insert(1, "committed")
    words += [f"{key} {shard[key]}" for key in keys if key in shard]
    if shard.get("endpoint"):
        words.append(f"at {shard['endpoint']}")
    if shard.get("error"):
        words.append(f"({shard['error']})")
    return " ".join(words)


def _mirror_words(shard: dict[str, Any]) -> str:
    """What a second replica protects against depends on where it is."""
    nodes = shard.get("nodes")
    if nodes:
        return f"mirror on the nodes {', '.join(nodes)}: what is confirmed outlives either machine"
    host = str(shard.get("endpoint") or "").removeprefix(TLS_PREFIX).rpartition(":")[0].strip("[]")
    if is_loopback(host):
        return (
            "mirror on one machine: what is confirmed outlives a process or one copy, not the disk"
        )
    return "mirror"


def _role_lines(shard: dict[str, Any]) -> Iterator[str]:
    for role, lease in shard.get("roles", {}).get("roles", {}).items():
        if lease["granted"]:
            yield f"    {role}: at {lease['position']}, pid {lease['pid']}, {lease['grants']} start(s)"
        else:
            yield f"    {role}: not at work (last end: {lease['last_end'] or 'none'})"


def topic_list(options: argparse.Namespace, console: Console) -> int:
    """raymq topic list"""
    with _cluster(options, console) as cluster:
        topics = cluster.topics()
    if options.json:
        console.json(topics)
    else:
        for name, facts in topics.items():
            console.line(f"{name}\t{facts['queues']} queues")
    return EXIT_OK


def topic_create(options: argparse.Namespace, console: Console) -> int:
    """raymq topic create TOPIC"""
    with _cluster(options, console) as cluster:
        more = {"compacted": True} if options.compacted else {}
        created = cluster.create_topic(options.topic, queues=options.queues, **more)
    if options.json:
        console.json({"topic": options.topic, "queues": options.queues, "created": created})
    else:
        console.line(f"{options.topic}: {'created' if created else 'was there already'}")
    return EXIT_OK


def topic_describe(options: argparse.Namespace, console: Console) -> int:
    """raymq topic describe TOPIC"""
    with _cluster(options, console) as cluster:
        facts = cluster.describe_topic(options.topic)
    if options.json:
        console.json(facts)
        return EXIT_OK
    console.line(f"{facts['topic']}: {facts['messages']} messages")
    for queue in facts["queues"]:
        console.line(
            f"  queue {queue['queue_id']} on shard {queue['shard']}: "
            f"[{queue['min_offset']}, {queue['max_offset']})"
        )
    return EXIT_OK


def produce(options: argparse.Namespace, console: Console) -> int:
    """raymq produce TOPIC: returns when every line is acknowledged."""
    sent = 0
    with _cluster(options, console) as cluster, cluster.producer() as producer:
        # The producer's end raises the first failure, so a line is never lost in silence.
        for number, line in enumerate(console.stdin, start=1):
            producer.send(options.topic, **_message(line.removesuffix(b"\n"), number, options))
            sent += 1
    if options.json:
        console.json({"topic": options.topic, "sent": sent})
    else:
        console.note(f"{sent} messages stored in {options.topic}")
    return EXIT_OK


def _message(line: bytes, number: int, options: argparse.Namespace) -> dict[str, Any]:
    """The fields of one input line. Raises: Rejected naming the line."""
    if options.input_json:
        return _json_message(line, number)
    if options.key_separator is None:
        return {"body": line}
    key, found, body = line.partition(options.key_separator.encode())
    if not found:
        raise Rejected(
            f"line {number} has no separator {options.key_separator!r}", field="key", row=number
        )
    return {"key": key, "body": body}


def _json_message(line: bytes, number: int) -> dict[str, Any]:
    try:
        given = json.loads(line)
        if set(given) - {"body", "key", *_FIELDS} or "body" not in given:
            may = ", ".join(("key", *_FIELDS))
            raise ValueError(f"fields {sorted(given)}; body is needed, {may} may be")
    except (ValueError, TypeError) as error:
        raise Rejected(
            f"line {number} is not a message: {error}", field="line", row=number
        ) from error
    body = given["body"]
    # Text goes as it is; anything else as the JSON it came as.
    message = {"body": body.encode() if isinstance(body, str) else json.dumps(body).encode()}
    if given.get("key") is not None:
        message["key"] = str(given["key"]).encode()
    return {**message, **{name: given[name] for name in _FIELDS if given.get(name)}}


def consume(options: argparse.Namespace, console: Console) -> int:
    """raymq consume TOPIC"""
    output = "json" if options.json else options.output
    with _cluster(options, console) as cluster:
        ends = None if options.follow else _ends(cluster, options)
        if ends is not None and not ends:
            return EXIT_OK
        printed = 0
        # An offset may lie behind the end of a queue that has nothing to print.
        queues = None if ends is None else sorted(ends)
        with cluster.consumer(options.topic, start=options.start, queues=queues) as consumer:
            for message in _until(consumer, ends):
                _print_message(message, output, console)
                printed += 1
                if printed == options.max:
                    break
                if options.follow:
                    console.flush()
    return EXIT_OK


def _ends(cluster: Any, options: argparse.Namespace) -> dict[int, int]:
    """queue -> the offset before which to end, of the queues that have anything to print now."""
    ends = {}
    for queue in cluster.describe_topic(options.topic)["queues"]:
        low, high = queue["min_offset"], queue["max_offset"]
        end = high if options.stop == "latest" else min(options.stop, high)
        begin = {"earliest": low, "latest": high}.get(options.start, options.start)
        if begin < end:
            ends[queue["queue_id"]] = end
    return ends


def _until(consumer: Any, ends: dict[int, int] | None) -> Iterator[Any]:
    """Messages up to `ends`; None: for ever."""
    left = None if ends is None else dict(ends)
    while left is None or left:
        for message in consumer.poll(_POLL_RECORDS, _POLL_TIMEOUT_S):
            if ends is None or left is None:
                yield message
                continue
            end = ends.get(message.queue_id, 0)
            if message.offset < end:
                yield message
            if message.offset + 1 >= end:
                left.pop(message.queue_id, None)


def _print_message(message: Any, output: str, console: Console) -> None:
    if output == "raw":
        console.line(message.body)
    elif output == "hex":
        console.line(message.body.hex())
    else:
        console.json(
            {
                "queue_id": message.queue_id,
                "offset": message.offset,
                "key": _text(message.key),
                "tag": message.tag,
                "properties": dict(message.properties),
                "store_time_ms": message.store_time_ms,
                "born_time_ms": message.born_time_ms,
                **_body(message.body),
            }
        )


def _body(body: bytes) -> dict[str, str]:
    """A body that is text as "body", any other as "body_base64".

    Either can be told from the other.
    """
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode("utf-8", "backslashreplace")


def doctor(options: argparse.Namespace, console: Console) -> int:
    """raymq doctor [DIR]"""
    from .doctor import examine

    checks = examine(options.data_dir)
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
    with _cluster(options, console) as cluster:
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


def _cluster(options: argparse.Namespace, console: Console) -> Any:
    return _connect(options.cluster, options.token_file, console)


def _connect(target: str | None, token_file: str | None, console: Console) -> Any:
    token = None
    if token_file is not None:
        try:
            token = Files().read_file(Path(token_file).expanduser()).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Rejected(f"--token-file {token_file}: {error}", field="token_file") from error
    return console.lifecycle.connect(target, token=token)
