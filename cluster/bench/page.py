"""The result of a benchmark as one self-contained HTML page with inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from typing import Any

from .report import FAULTS

HEIGHT = 300
#: every chart is drawn for a wide and for a narrow window: letters do not shrink with the chart
WIDTHS = {"wide": 860, "narrow": 400}
_NARROW_PX = 640
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 28, 44

#: (x, y) in the units of the axes
Points = Sequence[tuple[float, float]]

#: at least; and between the labels of an axis
_LETTER, _GAP = 7.0, 8.0

_STYLE = f"""
:root {{ color-scheme: light dark; --ink: #1d2433; --soft: #667085; --line: #e3e6ec; --paper: #ffffff;
  --card: #f7f8fa; --a: #2563eb; --b: #d97706; --c: #be123c; --good: #15803d; --bad: #be123c; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e8ee; --soft: #98a2b3; --line: #2c3342;
  --paper: #12161f; --card: #1a202c; --a: #60a5fa; --b: #fbbf24; --c: #fb7185; --good: #4ade80;
  --bad: #fb7185; }} }}
body {{ font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: var(--ink);
  background: var(--paper); max-width: 900px; margin: 32px auto; padding: 0 20px; }}
h1 {{ font-size: 24px; margin: 0 0 4px; }} h2 {{ font-size: 18px; margin: 36px 0 8px; }}
h3 {{ font-size: 14px; margin: 22px 0 2px; }} p.soft {{ color: var(--soft); margin: 0 0 20px; }}
.cards {{ display: grid; grid-template-columns: repeat(3, 1fr); gap: 10px; }}
.card {{ white-space: nowrap; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 14px; }} .card b {{ display: block; font-size: 20px; font-weight: 600; }}
.card span {{ color: var(--soft); font-size: 13px; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
td, th {{ text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); }}
td:first-child, th:first-child {{ text-align: left; }} th {{ color: var(--soft); font-weight: 500; }}
svg {{ width: 100%; height: auto; display: block; }} svg text {{ fill: var(--soft); font-size: 12px; }}
.grid {{ stroke: var(--line); }} .curve {{ fill: none; stroke-width: 2; stroke-linejoin: round; }}
.a {{ stroke: var(--a); }} .b {{ stroke: var(--b); }} .c {{ stroke: var(--c); }}
.legend text {{ fill: var(--ink); }} .good {{ color: var(--good); }} .bad {{ color: var(--bad); }}
.facts {{ margin: 16px 0; font-size: 13px; }} .facts td {{ text-align: left; white-space: normal; }}
.facts td:first-child {{ color: var(--soft); width: 80px; }}
.scroll {{ overflow-x: auto; }} .narrow {{ display: none; }}
@media (max-width: {_NARROW_PX}px) {{ .wide {{ display: none; }} .narrow {{ display: block; }}
  body {{ margin: 20px auto; padding: 0 12px; }} .cards {{ grid-template-columns: repeat(2, 1fr); }}
  td, th {{ padding: 4px 7px; white-space: nowrap; }} }}
"""


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` over a length of the picture, with marks."""

    low: float
    high: float
    marks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end; values beyond are put on the end."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = (math.log10(max(each, 1e-9)) for each in (value, low, high))
        return min(max((value - low) / (high - low), 0.0), 1.0)


def linear_axis(low: float, high: float, *, marks: int = 5) -> Axis:
    """An axis with round marks; `low` stays, `high` grows to the next mark."""
    raw = max(high - low, 1e-9) / marks
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    values = [step * number for number in range(first, last + 1)]
    return Axis(values[0], values[-1], [(value, _number(value)) for value in values])


def log_axis(low: float, high: float) -> Axis:
    """A logarithmic axis over whole powers of ten; between them 2 and 5 where they fit."""
    first = math.floor(math.log10(max(low, 1e-3)))
    last = max(math.ceil(math.log10(max(high, 1e-3)) - 1e-9), first + 1)
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    values = [
        factor * 10.0**power
        for power in range(first, last + 1)
        for factor in factors
        if factor * 10.0**power <= 10.0**last * 1.001
    ]
    marks = [(value, _number(value)) for value in values]
    return Axis(10.0**first, 10.0**last, marks, logarithmic=True)


def nines_axis(highest: float) -> Axis:
    """Percentiles by their nines: 0, 90, 99, 99.9 ... are evenly apart."""
    last = max(2, math.ceil(highest - 1e-6))
    names = ["0 %", "90 %", *(f"{100 * (1 - 10.0**-n):.{n - 2}f} %" for n in range(2, last + 1))]
    return Axis(0.0, float(last), [(float(n), name) for n, name in enumerate(names)])


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g} M"
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def chart(
    curves: Sequence[tuple[str, str, Points]], x: Axis, y: Axis, *, x_name: str, y_name: str
) -> str:
    """A picture of curves: (legend, CSS class, points), once for each width. Axes carry their names."""
    return "".join(
        f'<div class="{name}">{_svg(curves, x, y, width, x_name=x_name, y_name=y_name)}</div>'
        for name, width in WIDTHS.items()
    )


def _svg(
    curves: Sequence[tuple[str, str, Points]],
    x: Axis,
    y: Axis,
    width: int,
    *,
    x_name: str,
    y_name: str,
) -> str:
    right, bottom = width - _RIGHT, HEIGHT - _BOTTOM

    def across(value: float) -> float:
        return _LEFT + x.place(value) * (right - _LEFT)

    def down(value: float) -> float:
        return bottom - y.place(value) * (bottom - _TOP)

    parts = [
        f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{escape(y_name)} by {escape(x_name)}</title>",
        *_grid(x, y, across, down, width),
    ]
    for name, style, points in curves:
        text = " ".join(f"{across(a):.1f},{down(b):.1f}" for a, b in points)
        parts.append(f'<polyline class="curve {style}" points="{text}"/>')
        if len(points) <= 120:
            parts += [
                f'<circle class="{style}" cx="{across(a):.1f}" cy="{down(b):.1f}" r="2.5" '
                f'fill="var(--paper)"><title>{escape(name)} {_exact(b)}</title></circle>'
                for a, b in points
            ]
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">')
    parts.append(f"{escape(x_name)}</text>")
    parts.append(f'<text transform="translate(14 {(_TOP + bottom) / 2}) rotate(-90)" ')
    parts.append(f'text-anchor="middle">{escape(y_name)}</text>')
    parts += _legend([(name, style) for name, style, _ in curves])
    return "".join([*parts, "</svg>"])


def _exact(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _grid(
    x: Axis,
    y: Axis,
    across: Callable[[float], float],
    down: Callable[[float], float],
    width: int,
) -> list[str]:
    right, bottom = width - _RIGHT, HEIGHT - _BOTTOM
    parts = []
    for value, name in y.marks:
        at = down(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{name}</text>'
        )
    # From the right: the last label is always there, and those that would touch their neighbour are not.
    free = float(width)
    for value, name in reversed(x.marks):
        at = across(value)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 5}"/>'
        )
        half = len(name) * _LETTER / 2
        middle = min(at, width - half)
        if middle + half <= free:
            free = middle - half - _GAP
            parts.append(
                f'<text x="{middle:.1f}" y="{bottom + 19}" text-anchor="middle">{name}</text>'
            )
    return parts


def _legend(names: Sequence[tuple[str, str]]) -> list[str]:
    if len(names) < 2:
        return []
    parts = ['<g class="legend">']
    for number, (name, style) in enumerate(names):
        at, height = _LEFT + 84 * number, _TOP - 16
        parts.append(
            f'<line class="curve {style}" x1="{at}" x2="{at + 18}" y1="{height}" y2="{height}"/>'
            f'<text x="{at + 24}" y="{height + 4}">{escape(name)}</text>'
        )
    return [*parts, "</g>"]


def page(report: dict[str, Any]) -> str:
    """The whole page of report.as_dict's data."""
    plan, cluster = report["plan"], report["cluster"]
    loop = "closed loop" if plan["rate"] is None else f"{plan['rate']:,.0f} messages/s offered"
    extent = f"{plan['duration_s']:g} s after {plan['warmup_s']:g} s warm-up"
    if report["mode"] == "consume":
        loop, extent = "a backlog", f"{plan['messages']:,} messages"
    where = f"{cluster['shards']} shard(s)"
    if plan["shards"] is not None:
        where = f"shard {', '.join(map(str, plan['shards']))} of {cluster['shards']}"
    facts = (
        f"{plan['workers']} workers ({report['runner']}), {loop}, {plan['topics']} topic(s) of "
        f"{plan['queues']} queues on {where}, replication "
        f"{cluster['replication']}, flush {cluster['flush']}, acks {plan['acks']}, batches of up "
        f"to {plan['batch']:,}, {extent}"
    )
    title = f"raymq bench {report['mode']}"
    body = [f"<h1>{escape(title)}</h1>", f'<p class="soft">{escape(facts)}</p>', _cards(report)]
    body.append(_measured_on(report))
    body += [_channel(name, channel) for name, channel in report["channels"].items()]
    if report["find_max"] is not None:
        body.append(_search(report["find_max"]))
    body.append(_verification(report["verification"]))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _cards(report: dict[str, Any]) -> str:
    channel = report["channels"][report["channel"]]
    throughput, latency = channel["throughput"], channel["latency"]
    sound = report["verification"]["sound"]
    verified = report["verification"]["log"] is not None
    word = "sound" if sound and verified else "not verified" if sound else "FAULTS"
    style = "good" if sound and verified else "bad"
    cards = [
        (f"{throughput['messages_per_s']:,.0f}", "messages/s", ""),
        (f"{throughput['mb_per_s']:,.1f}", "MB/s of bodies", ""),
        (f"{latency['p50_ms']:,.2f} ms", "p50", ""),
        (f"{latency['p99_ms']:,.2f} ms", "p99", ""),
        (f"{latency['max_ms']:,.2f} ms", "slowest", ""),
        (word, f"{report['acknowledged']:,} messages", style),
    ]
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card"><b class="{style}">{escape(value)}</b><span>{name}</span></div>'
            for value, name, style in cards
        )
        + "</div>"
    )


_NAMES = {"raymq": "RayMQ", "python": "Python", "ray": "Ray"}


def _measured_on(report: dict[str, Any]) -> str:
    """When, on which machine and with which versions: what a comparison needs."""
    machine = report["machine"]
    finished = datetime.fromtimestamp(report["finished_at_ms"] / 1000, timezone.utc)
    versions = ", ".join(
        f"{_NAMES.get(name, name)} {version}" for name, version in report["versions"].items()
    )
    rows = "".join(
        f"<tr><td>{name}</td><td>{escape(text)}</td></tr>"
        for name, text in (
            ("date", f"{finished:%Y-%m-%d %H:%M} UTC"),
            (
                "host",
                f"{machine['host']}, {machine['cores']} cores, "
                f"{machine['memory_bytes'] / 2**30:.0f} GiB of memory",
            ),
            ("disk", machine["disk"]),
            ("versions", versions),
            ("kernel", f"{machine['system']} {machine['kernel']}"),
        )
    )
    return f'<table class="facts">{rows}</table>'


_CHANNELS = {
    "send": "Sending: from when a message was due until it was acknowledged",
    "receive": "End to end: from when a message was due until a consumer had it",
    "poll": "Reading a backlog: the time of one poll",
}


def _channel(name: str, channel: dict[str, Any]) -> str:
    window_s = channel["throughput"]["window_s"]
    ticks = [tick for tick in channel["ticks"] if tick["messages"] and tick["t_s"] < window_s]
    if not ticks:
        return f"<h2>{_CHANNELS[name]}</h2><p>Nothing within the measured time.</p>"
    first, last = ticks[0]["t_s"], ticks[-1]["t_s"]
    time = linear_axis(min(first, 0.0), max(last, first + 1.0), marks=8)
    rates = [(tick["t_s"], tick["messages_per_s"]) for tick in ticks]
    times = {
        which: [(tick["t_s"], max(tick[f"{which}_ms"], 0.001)) for tick in ticks]
        for which in ("p50", "p99", "max")
    }
    lowest = min(value for _, value in times["p50"])
    highest = max(value for _, value in times["max"])
    seconds = "seconds since the end of the warm-up"
    curve = [
        (-math.log10(max(1.0 - percent / 100.0, 1e-12)), max(value, 0.001))
        for percent, value in channel["percentiles"][:-1]
    ]
    nines = max((x for x, _ in curve), default=2.0)
    top = channel["latency"]["max_ms"]
    parts = [
        f"<h2>{_CHANNELS[name]}</h2>{_percentile_table(channel['latency'])}",
        "<h3>Throughput</h3>",
        chart(
            [("messages/s", "a", rates)],
            time,
            linear_axis(0.0, max(rate for _, rate in rates)),
            x_name=seconds,
            y_name="messages/s",
        ),
        "<h3>Latency over time</h3>",
        chart(
            [("p50", "a", times["p50"]), ("p99", "b", times["p99"]), ("max", "c", times["max"])],
            time,
            log_axis(lowest, highest),
            x_name=seconds,
            y_name="ms",
        ),
        "<h3>Latency by percentile</h3>",
        chart(
            [("latency", "a", curve)],
            nines_axis(nines),
            log_axis(min((y for _, y in curve), default=0.001), max(top, 0.001)),
            x_name="percentile",
            y_name="ms",
        ),
    ]
    return "".join(parts)


def _percentile_table(latency: dict[str, Any]) -> str:
    names = [name for name in latency if name.endswith("_ms")]
    head = "".join(f"<th>{name.removesuffix('_ms')}</th>" for name in names)
    cells = "".join(f"<td>{latency[name]:,.2f}</td>" for name in names)
    return _scroll(f"<table><tr><th></th>{head}</tr><tr><td>ms</td>{cells}</tr></table>")


def _scroll(table: str) -> str:
    """A table that is scrolled where the window is too narrow, instead of the page."""
    return f'<div class="scroll">{table}</div>'


def _search(search: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{each['rate']:,.0f}</td><td>{each['achieved']:,.0f}</td>"
        f"<td>{each['p99_ms']:,.2f}</td><td>{'yes' if each['kept_up'] else 'no'}</td></tr>"
        for each in search["rounds"]
    )
    return f"<h2>Highest rate with p99 up to {search['p99_limit_ms']:g} ms</h2>" + _scroll(
        "<table><tr><th>offered, messages/s</th><th>achieved</th><th>p99 ms</th>"
        f"<th>kept up</th></tr>{rows}</table>"
    )


def _verification(verification: dict[str, Any]) -> str:
    rows, examples = [], []
    for part, name in (("log", "read back at the end"), ("consumed", "as consumed")):
        verdict = verification[part]
        if verdict is None:
            continue
        cells = "".join(f"<td>{verdict[field]:,}</td>" for field, _ in FAULTS)
        rows.append(f"<tr><td>{name}</td><td>{verdict['acknowledged']:,}</td>{cells}</tr>")
        examples += [f"<li>{escape(text)}</li>" for text in verdict["examples"]]
    if not rows:
        return "<h2>Verification</h2><p>Not asked for.</p>"
    head = "".join(f"<th>{word}</th>" for _, word in FAULTS)
    listed = f"<ul>{''.join(examples)}</ul>" if examples else ""
    return (
        "<h2>Verification</h2>"
        + _scroll(f"<table><tr><th></th><th>acknowledged</th>{head}</tr>{''.join(rows)}</table>")
        + listed
    )
