"""The result of a benchmark as one self-contained HTML page with inline SVG."""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from typing import Any

from .report import FAULTS

HEIGHT = 300
#: every chart is drawn for a wide and for a narrow window: letters do not shrink with the chart
WIDTHS = {"wide": 860, "narrow": 400}
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 28, 44

#: (x, y) in the units of the axes
Points = Sequence[tuple[float, float]]
#: its name in the legend, its CSS class, its points
Curve = tuple[str, str, Points]

#: at least; and between the labels of an axis
_LETTER, _GAP = 7.0, 8.0


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` over a length of the picture, with marks."""

    low: float
    high: float
    marks: Sequence[tuple[float, str]]
    name: str = ""
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end; values beyond are put on the end."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = (math.log10(max(each, 1e-9)) for each in (value, low, high))
        return min(max((value - low) / (high - low), 0.0), 1.0)


def linear_axis(low: float, high: float, name: str = "", *, marks: int = 5) -> Axis:
    """An axis with round marks; `low` stays, `high` grows to the next mark."""
    raw = max(high - low, 1e-9) / marks
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    values = [step * number for number in range(first, last + 1)]
    return Axis(values[0], values[-1], [(value, _number(value)) for value in values], name)


def log_axis(low: float, high: float, name: str = "") -> Axis:
    """A logarithmic axis over whole powers of ten; between them 2 and 5 if they fit."""
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
    return Axis(10.0**first, 10.0**last, marks, name, logarithmic=True)


def nines_axis(highest: float) -> Axis:
    """Percentiles by their nines: 0, 90, 99, 99.9 ... are evenly apart."""
    last = max(2, math.ceil(highest - 1e-6))
    names = ["0 %", "90 %", *(f"{100 * (1 - 10.0**-n):.{n - 2}f} %" for n in range(2, last + 1))]
    return Axis(0.0, float(last), [(float(n), name) for n, name in enumerate(names)], "percentile")


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g} M"
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def chart(curves: Sequence[Curve], x: Axis, y: Axis) -> str:
    """A picture of curves, once for each width."""
    return "".join(
        f'<div class="{name}">{_Picture(x, y, width).svg(curves)}</div>'
        for name, width in WIDTHS.items()
    )


class _Picture:
    """An SVG of one width. Its coordinates are pixels from the top left corner."""

    def __init__(self, x: Axis, y: Axis, width: int) -> None:
        self._x = x
        self._y = y
        self._width = width
        self._right = width - _RIGHT
        self._bottom = HEIGHT - _BOTTOM

    def _across(self, value: float) -> float:
        return _LEFT + self._x.place(value) * (self._right - _LEFT)

    def _down(self, value: float) -> float:
        return self._bottom - self._y.place(value) * (self._bottom - _TOP)

    def svg(self, curves: Sequence[Curve]) -> str:
        """The picture of curves, with axes, their names and a legend."""
        x_name, y_name = escape(self._x.name), escape(self._y.name)
        across, down = (_LEFT + self._right) / 2, (_TOP + self._bottom) / 2
        parts = [
            f'<svg viewBox="0 0 {self._width} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">',
            f"<title>{y_name} by {x_name}</title>",
            *self._horizontal_lines(),
            *self._vertical_marks(),
            *(self._curve(*curve) for curve in curves),
            f'<text x="{across}" y="{HEIGHT - 6}" text-anchor="middle">{x_name}</text>',
            f'<text transform="translate(14 {down}) rotate(-90)" text-anchor="middle">{y_name}</text>',
            _legend(curves),
            "</svg>",
        ]
        return "".join(parts)

    def _curve(self, name: str, style: str, points: Points) -> str:
        places = [(f"{self._across(x):.1f}", f"{self._down(y):.1f}") for x, y in points]
        line = " ".join(f"{across},{down}" for across, down in places)
        found = f'<polyline class="curve {style}" points="{line}"/>'
        if len(points) <= 120:
            for (across, down), (_, y) in zip(places, points, strict=True):
                found += (
                    f'<circle class="{style}" cx="{across}" cy="{down}" r="2.5" fill="var(--paper)">'
                    f"<title>{escape(name)} {_exact(y)}</title></circle>"
                )
        return found

    def _horizontal_lines(self) -> Iterator[str]:
        for value, name in self._y.marks:
            at = self._down(value)
            yield f'<line class="grid" x1="{_LEFT}" x2="{self._right}" y1="{at:.1f}" y2="{at:.1f}"/>'
            yield f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{name}</text>'

    def _vertical_marks(self) -> Iterator[str]:
        bottom = self._bottom
        # From the right: the last label is always there, and those that would touch their neighbour are not.
        free = float(self._width)
        for value, name in reversed(self._x.marks):
            at = self._across(value)
            yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 5}"/>'
            half = len(name) * _LETTER / 2
            middle = min(at, self._width - half)
            if middle + half <= free:
                free = middle - half - _GAP
                yield f'<text x="{middle:.1f}" y="{bottom + 19}" text-anchor="middle">{name}</text>'


def _exact(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _legend(curves: Sequence[Curve]) -> str:
    if len(curves) < 2:
        return ""
    found, y = "", _TOP - 16
    for number, (name, style, _) in enumerate(curves):
        x = _LEFT + 84 * number
        found += f'<line class="curve {style}" x1="{x}" x2="{x + 18}" y1="{y}" y2="{y}"/>'
        found += f'<text x="{x + 24}" y="{y + 4}">{escape(name)}</text>'
    return f'<g class="legend">{found}</g>'


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
        f"{plan['queues']} queues on {where}, {cluster['replicas']} replica(s) of each, "
        f"flush {cluster['flush']}, acks {plan['acks']}, batches of up "
        f"to {plan['batch']:,}, {extent}"
    )

    title = f"raymq bench {report['mode']}"
    style = importlib.resources.files(__package__).joinpath("page.css").read_text("utf-8")
    body = [f"<h1>{escape(title)}</h1>", f'<p class="soft">{escape(facts)}</p>', _cards(report)]
    body.append(_measured_on(report))
    body += [_channel(name, channel) for name, channel in report["channels"].items()]
    if report["find_max"] is not None:
        body.append(_search(report["find_max"]))
    body.append(_verification(report["verification"]))

    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _cards(report: dict[str, Any]) -> str:
    channel = report["channels"][report["channel"]]
    throughput, latency = channel["throughput"], channel["latency"]
    sound = report["verification"]["sound"]
    verified = report["verification"]["log"] is not None
    if not sound:
        word = "FAULTS"
    else:
        word = "sound" if verified else "not verified"
    style = "good" if sound and verified else "bad"

    cards = [
        (f"{throughput['messages_per_s']:,.0f}", "messages/s", ""),
        (f"{throughput['mb_per_s']:,.1f}", "MB/s of bodies", ""),
        (f"{latency['p50_ms']:,.2f} ms", "p50", ""),
        (f"{latency['p99_ms']:,.2f} ms", "p99", ""),
        (f"{latency['max_ms']:,.2f} ms", "slowest", ""),
        (word, f"{report['acknowledged']:,} messages", style),
    ]

    shown = "".join(
        f'<div class="card"><b class="{style}">{escape(value)}</b><span>{name}</span></div>'
        for value, name, style in cards
    )
    return f'<div class="cards">{shown}</div>'


_NAMES = {"raymq": "RayMQ", "python": "Python", "ray": "Ray"}


def _measured_on(report: dict[str, Any]) -> str:
    """The facts that a comparison needs: date, machine and versions."""
    machine = report["machine"]
    finished = datetime.fromtimestamp(report["finished_at_ms"] / 1000, timezone.utc)
    versions = ", ".join(
        f"{_NAMES.get(name, name)} {version}" for name, version in report["versions"].items()
    )
    memory_gib = machine["memory_bytes"] / 2**30
    facts = {
        "date": f"{finished:%Y-%m-%d %H:%M} UTC",
        "host": f"{machine['host']}, {machine['cores']} cores, {memory_gib:.0f} GiB of memory",
        "disk": machine["disk"],
        "versions": versions,
        "kernel": f"{machine['system']} {machine['kernel']}",
    }

    rows = "".join(
        f"<tr><td>{name}</td><td>{escape(text)}</td></tr>" for name, text in facts.items()
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
    return (
        f"<h2>{_CHANNELS[name]}</h2>{_percentile_table(channel['latency'])}"
        f"<h3>Throughput</h3>{_throughput(ticks)}"
        f"<h3>Latency over time</h3>{_latency_over_time(ticks)}"
        f"<h3>Latency by percentile</h3>{_latency_by_percentile(channel)}"
    )


def _throughput(ticks: list[dict[str, Any]]) -> str:
    rates = [(tick["t_s"], tick["messages_per_s"]) for tick in ticks]
    y = linear_axis(0.0, max(rate for _, rate in rates), "messages/s")
    return chart([("messages/s", "a", rates)], _time_axis(ticks), y)


def _time_axis(ticks: list[dict[str, Any]]) -> Axis:
    first, last = ticks[0]["t_s"], ticks[-1]["t_s"]
    name = "seconds since the end of the warm-up"
    return linear_axis(min(first, 0.0), max(last, first + 1.0), name, marks=8)


def _latency_over_time(ticks: list[dict[str, Any]]) -> str:
    curves: list[Curve] = [
        (which, style, [(tick["t_s"], max(tick[f"{which}_ms"], 0.001)) for tick in ticks])
        for which, style in (("p50", "a"), ("p99", "b"), ("max", "c"))
    ]
    lowest = min(value for _, value in curves[0][2])
    highest = max(value for _, value in curves[-1][2])
    return chart(curves, _time_axis(ticks), log_axis(lowest, highest, "ms"))


def _latency_by_percentile(channel: dict[str, Any]) -> str:
    curve = [
        (-math.log10(max(1.0 - percent / 100.0, 1e-12)), max(value, 0.001))
        for percent, value in channel["percentiles"][:-1]
    ]
    x = nines_axis(max((nines for nines, _ in curve), default=2.0))
    lowest = min((value for _, value in curve), default=0.001)
    y = log_axis(lowest, max(channel["latency"]["max_ms"], 0.001), "ms")
    return chart([("latency", "a", curve)], x, y)


def _percentile_table(latency: dict[str, Any]) -> str:
    names = [name for name in latency if name.endswith("_ms")]
    head = ["", *(name.removesuffix("_ms") for name in names)]
    return _table(head, [["ms", *(f"{latency[name]:,.2f}" for name in names)]])


def _table(head: list[str], rows: list[list[str]]) -> str:
    """A table that is scrolled if the window is too narrow, instead of the page."""
    found = f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"
    for row in rows:
        found += f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
    return f'<div class="scroll"><table>{found}</table></div>'


def _search(search: dict[str, Any]) -> str:
    rows = [
        [
            f"{each['rate']:,.0f}",
            f"{each['achieved']:,.0f}",
            f"{each['p99_ms']:,.2f}",
            "yes" if each["kept_up"] else "no",
        ]
        for each in search["rounds"]
    ]
    table = _table(["offered, messages/s", "achieved", "p99 ms", "kept up"], rows)
    return f"<h2>Highest rate with p99 up to {search['p99_limit_ms']:g} ms</h2>{table}"


def _verification(verification: dict[str, Any]) -> str:
    rows, examples = [], ""
    for part, name in (("log", "read back at the end"), ("consumed", "as consumed")):
        verdict = verification[part]
        if verdict is not None:
            counts = [f"{verdict[field]:,}" for field in ("acknowledged", *FAULTS)]
            rows.append([name, *counts])
            examples += "".join(f"<li>{escape(text)}</li>" for text in verdict["examples"])
    if not rows:
        return "<h2>Verification</h2><p>Not asked for.</p>"
    listed = f"<ul>{examples}</ul>" if examples else ""
    return f"<h2>Verification</h2>{_table(['', 'acknowledged', *FAULTS.values()], rows)}{listed}"
