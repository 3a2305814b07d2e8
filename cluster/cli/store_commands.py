"""`raymq store ...`: commands on store directories, without a cluster but for `import`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files

from .console import EXIT_FAULT, EXIT_OK, Console, cluster_of
from .store_progress import StoreProgress

if TYPE_CHECKING:
    from raymq.store.tools.faults import Fault
    from raymq.store.tools.repair import Plan, Repaired


def verify(options: argparse.Namespace, console: Console) -> int:
    """raymq store verify DIR: a store, or every store of a data directory."""
    from raymq.store.tools.inspect import check

    found = 0
    for root in stores(options.directory):
        with StoreProgress(console.stderr) as progress:
            report = check(root, progress=progress.report)
        faults, verdict = report.faults, report.verdict
        found += len(faults)
        facts = {
            "store": str(root),
            "faults": [fault.as_dict() for fault in faults],
            "verdict": None if verdict is None else verdict.as_dict(),
            "rebuilt_at_start": report.rebuilt_at_start,
        }

        lines = _fault_lines(root, faults)
        if verdict is not None and verdict.decision == "truncate":
            lines.append(f"{root}: no fault: {verdict}")
        for name in report.rebuilt_at_start:
            lines.append(f"{root}/{name}: no fault: a cache that the next start rebuilds")
        verdict_text = f"{len(faults)} faults" if faults else "sound"
        console.result(options, facts, *lines, f"{root}: {verdict_text}")

    return EXIT_FAULT if found else EXIT_OK


def dump(options: argparse.Namespace, console: Console) -> int:
    """raymq store dump DIR: always JSON, one object per line."""
    from raymq.store.tools.inspect import dump as messages

    faults = 0
    for root in stores(options.directory):
        for item in messages(root):
            console.json(item)
            faults += item.get("errors", 0) if item.get("kind") == "end" else 0
    if faults:
        console.note(
            f"{faults} faults; see raymq store verify {shlex.quote(str(options.directory))}"
        )
    return EXIT_FAULT if faults else EXIT_OK


def repair(options: argparse.Namespace, console: Console) -> int:
    """raymq store repair DIR: shows the plan. --yes carries it out."""
    from raymq.store.tools.repair import Repair

    roots = stores(options.directory)
    if len(roots) > 1 and (options.truncate_at is not None or options.keep is not None):
        message = "--truncate-at and --keep are for one store; name its directory"
        raise Rejected(message, field="DIR", limit="one store")

    clean = True
    for root in roots:
        with StoreProgress(console.stderr) as progress:
            job = Repair(
                root,
                truncate_at=options.truncate_at,
                rebuild=options.rebuild or (),
                keep=None if options.keep is None else Path(options.keep),
                progress=progress.report,
            )
            done = job.run() if options.yes else None
            plan = None if options.yes else job.plan()

        if done is not None:
            clean &= not done.faults
            _show_done(root, done, options, console)
        if plan is not None:
            clean &= not plan.faults and plan.needs_truncation is None
            _show_plan(root, plan, options, console)

    return EXIT_OK if clean else EXIT_FAULT


def _fault_lines(root: Path, faults: Sequence[Fault]) -> list[str]:
    return [f"{root}/{each.file} at {each.offset}: {each.rule}: {each.detail}" for each in faults]


def _show_plan(root: Path, plan: Plan, options: argparse.Namespace, console: Console) -> None:
    lines = _fault_lines(root, plan.faults)
    lines += [f"{root}: would {step.action} ({', '.join(step.files)})" for step in plan.steps]
    if plan.needs_truncation is not None:
        lines += _truncation_lines(root, plan.needs_truncation)
    elif plan.steps:
        lines.append(f"{root}: nothing was changed; --yes does it, and keeps what it changes")
    else:
        lines.append(f"{root}: {'no step repairs this' if plan.faults else 'nothing to repair'}")
    console.result(options, {"store": str(root), "plan": plan.as_dict()}, *lines)


def _truncation_lines(root: Path, truncation: Any) -> list[str]:
    return [
        f"{root}: the log is damaged and cannot be repaired; {truncation}",
        f"{root}: copy the other replica, or save what can be read (raymq store export --after-damage), or cut with "
        f"--truncate-at {truncation.offset} --yes",
    ]


def _show_done(root: Path, done: Repaired, options: argparse.Namespace, console: Console) -> None:
    facts = {
        "store": str(root),
        "steps": [vars(step) for step in done.steps],
        "kept": None if done.kept is None else str(done.kept),
        "faults": [fault.as_dict() for fault in done.faults],
    }
    lines = [f"{root}: done: {step.action}" for step in done.steps]
    if done.kept is not None:
        lines.append(f"{root}: what was changed is kept in {done.kept}")
    if done.needs_truncation is not None:
        lines += _truncation_lines(root, done.needs_truncation)
    lines += _fault_lines(root, done.faults)
    lines.append(f"{root}: {len(done.faults)} faults left" if done.faults else f"{root}: sound")
    console.result(options, facts, *lines)


def scrub(options: argparse.Namespace, console: Console) -> int:
    """raymq store scrub DIR: one pass, of a running store or of one at rest."""
    from raymq.store.tools.scrub_store import scrub_of

    clean = True
    for root in stores(options.directory):
        with closing(scrub_of(root, bytes_per_s=options.mib_per_s << 20)) as job:
            if options.again:
                job.restart()
            with StoreProgress(console.stderr) as progress:
                faults = job.one_pass(progress.report)

        clean &= not faults
        done = f"{job.counters.bytes} bytes in {job.counters.units} append units"
        verdict = f"{len(faults)} faults" if faults else "sound"
        lines = [*map(str, faults), f"{root}: {done}: {verdict}"]
        console.result(options, {"store": str(root), **job.status()}, *lines)

    return EXIT_OK if clean else EXIT_FAULT


def export(options: argparse.Namespace, console: Console) -> int:
    """raymq store export DIR TARGET: Parquet files."""
    from raymq.store.tools.export import ExportChoice, export

    (root, *others) = stores(options.directory)
    if others:
        message = f"{options.directory} holds {1 + len(others)} stores; name one"
        raise Rejected(message, field="DIR", limit=1)

    if options.topic is None and (
        options.queue_id is not None or options.start is not None or options.stop is not None
    ):
        message = "--queue-id, --from and --to choose messages of one topic; name it with --topic"
        raise Rejected(message, field="topic", limit="a topic")
    if options.start is not None and options.stop is not None and options.start >= options.stop:
        chosen = f"--from {options.start} --to {options.stop}"
        message = f"{chosen} choose nothing: --to is not included and must be above --from"
        raise Rejected(message, field="to", limit=options.start + 1)

    choice = ExportChoice(
        topic=options.topic,
        queue_id=options.queue_id,
        start=options.start,
        stop=options.stop,
        after_damage=options.after_damage,
    )

    with StoreProgress(console.stderr) as progress:
        done = export(
            root,
            Path(options.target),
            choice,
            file_bytes=options.file_mib << 20,
            progress=progress.report,
        )

    facts = {"store": str(root), "target": options.target, **vars(done)}
    written = f"{done.messages} messages in {len(done.files)} files, {done.bytes} bytes, in {options.target}"
    damaged = [f"not readable: [{start}, {stop}) of the log" for start, stop in done.damaged]
    console.result(options, facts, written, *damaged)
    return EXIT_FAULT if done.damaged else EXIT_OK


def import_(options: argparse.Namespace, console: Console) -> int:
    """raymq store import SOURCE"""
    from .store_import import send_export

    with cluster_of(options, console) as cluster:
        done = send_export(Path(options.source).expanduser(), cluster, topic=options.topic)
    console.result(options, done.facts(), done.summary())
    return EXIT_OK


def stores(directory: str) -> list[Path]:
    """The store itself, or the stores of a cluster's data directory. Raises: Rejected."""
    root, files = Path(directory), Files()
    if files.exists(root / "cluster.json"):
        found = [
            root / shard / replica
            for shard in files.list(root)
            if shard.startswith("shard-")
            for replica in files.list(root / shard)
            if replica.startswith("replica-")
        ]
        if found:
            return found
    if not files.exists(root):
        raise Rejected(f"{root} does not exist", field="DIR")
    return [root]
