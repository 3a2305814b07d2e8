"""The result of a benchmark: plain data for JSON, and lines for a terminal. The page: page.py."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from raymq.store.base.clock import Clock

from .machine import machine, versions
from .run import Outcome


def as_dict(outcome: Outcome, clock: Clock | None = None) -> dict[str, object]:
    """Everything that was requested, found and verified, as JSON takes it."""
    plan, round_ = outcome.plan, outcome.round
    options = asdict(plan)
    # The list follows from `shards`, and may be thousands of numbers.
    del options["used_indexes"]
    options["size"] = {"kind": type(plan.size).__name__, **options["size"]}

    return {
        "finished_at_ms": (clock or Clock()).now_ms(),
        "machine": machine(outcome.cluster),
        "versions": versions(),
        "cluster": {
            name: outcome.cluster[name] for name in ("name", "shards", "replicas", "flush")
        },
        "runner": outcome.runner,
        "mode": plan.mode,
        "plan": options,
        "channel": round_.channel(),
        "channels": {name: series.as_dict() for name, series in sorted(round_.series.items())},
        "acknowledged": sum(ledger.acknowledged for ledger in round_.ledgers),
        "refused": sum(ledger.refused for ledger in round_.ledgers),
        "unknown": sum(ledger.unknown for ledger in round_.ledgers),
        "unsent": round_.unsent,
        "errors": round_.errors,
        "find_max": None
        if outcome.limit_ms is None
        else {"p99_limit_ms": outcome.limit_ms, "rate": plan.rate, "rounds": outcome.search},
        "verification": {
            "sound": outcome.sound,
            "log": None if outcome.verdict is None else asdict(outcome.verdict),
            "consumed": None if outcome.consumed is None else asdict(outcome.consumed),
        },
    }


def lines(report: dict[str, Any]) -> list[str]:
    """The summary for a terminal."""
    plan = report["plan"]
    rate = "closed loop" if plan["rate"] is None else f"{plan['rate']:,.0f} messages/s offered"
    found = [f"{report['mode']}: {plan['workers']} workers ({report['runner']}), {rate}"]

    for round_ in (report["find_max"] or {"rounds": []})["rounds"]:
        verdict = "kept up" if round_["kept_up"] else "too much"
        found.append(
            f"  {round_['rate']:>12,.0f} messages/s: p99 {round_['p99_ms']:,.2f} ms, "
            f"{round_['achieved']:,.0f} achieved: {verdict}"
        )

    for name, channel in report["channels"].items():
        throughput, latency = channel["throughput"], channel["latency"]
        found.append(
            f"  {name}: {throughput['messages_per_s']:,.0f} messages/s, "
            f"{throughput['mb_per_s']:,.1f} MB/s; ms: p50 {latency['p50_ms']:,.2f}, "
            f"p99 {latency['p99_ms']:,.2f}, p99.9 {latency['p99.9_ms']:,.2f}, "
            f"max {latency['max_ms']:,.2f}"
        )

    if report["unsent"]:
        found.append(f"  {report['unsent']:,} messages were due and never sent: not kept up")
    if report["errors"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report["errors"].items()))
        found.append(f"  sends that failed: {kinds}; {report['unknown']:,} messages unknown")
    return found + _verdict_lines(report["verification"])


def _verdict_lines(verification: dict[str, Any]) -> list[str]:
    found = []
    for part, where in (("log", "read back"), ("consumed", "as consumed")):
        verdict = verification[part]
        if verdict is None:
            continue
        counts = ", ".join(
            f"{verdict[name]:,} {word}"
            for name, word in FAULTS.items()
            if verdict[name] or name in ("lost", "duplicates", "disorder")
        )
        found.append(f"  {where}: {verdict['acknowledged']:,} acknowledged, {counts}")
        found += [f"    {example}" for example in verdict["examples"]]
    return found or ["  not verified"]


#: field of a verdict that should be 0 -> its name in text
FAULTS = {
    "lost": "lost",
    "hidden": "not visible so far",
    "duplicates": "repeated",
    "disorder": "out of order",
    "damaged": "damaged",
    "phantom": "never sent",
    "unread": "not handed out",
}
