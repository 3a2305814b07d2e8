"""Whole benchmarks in plain processes, against a shard in memory with real Flight, and their report."""

from __future__ import annotations

import io
import itertools
import json
import os
import platform
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import raymq
from raymq.cluster.bench.check import Ledger
from raymq.cluster.bench.histogram import Histogram
from raymq.cluster.bench.job import Snapshot, Tick
from raymq.cluster.bench.machine import machine
from raymq.cluster.bench.page import linear_axis, log_axis, nines_axis, page
from raymq.cluster.bench.plan import BenchPlan
from raymq.cluster.bench.progress import LiveWatcher, watcher
from raymq.cluster.bench.run import Bench, QueueEnd, Round, judge
from raymq.cluster.cli.console import Console
from raymq.cluster.cli.main import main
from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import Rejected
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeBackend, FakeCluster
from tests.support.waiting import until


class BenchBackend(FakeBackend):
    """Also makes topics. `lie_about` batches are acknowledged and forgotten.

    The last row of each queue stays hidden from the first `hides` reads of its end.
    """

    lie_about = 0
    hides = 0

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        if op == "create_topic":
            known = args["name"] in self.state.topics
            self.create(args["name"], args["queues"], tuple(args["shards"]))
            return {"created": not known}
        answer = super().call(op, args)
        if op == "queue_ranges" and self.hides and any(high > low for low, high in answer.values()):
            self.hides -= 1
            return {queue: [low, max(low, high - 1)] for queue, (low, high) in answer.items()}
        return answer

    def _store(self, request: Any) -> Any:
        outcome = super()._store(request)
        if self.lie_about:
            self.lie_about -= 1
            # As if a flush had been reported that never was: the rows come again under new offsets.
            entry = self.queues[request.topic, request.queue_id]
            del entry.records[-request.batch.num_rows :]
        return outcome


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    monkeypatch.setattr("tests.support.fake_backend.FakeBackend", BenchBackend)
    fake = FakeCluster()
    yield fake
    fake.close()


@pytest.fixture
def cluster(served: FakeCluster) -> Iterator[Cluster]:
    """A handle that pickles, as `connect("raymq://...")` gives it."""
    endpoints = dict(served.endpoints)
    with Cluster(
        name="fake", cluster_id=CLUSTER_ID, shards=1, token=TOKEN, endpoints=endpoints
    ) as handle:
        yield handle


def command(cluster: Cluster, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and error of `raymq bench`."""
    out, err = io.BytesIO(), io.StringIO()
    lifecycle = SimpleNamespace(connect=lambda *_, **__: cluster)
    code = main(["bench", *words], console=Console(stdout=out, stderr=err, lifecycle=lifecycle))
    return code, out.getvalue().decode(), err.getvalue()


LOAD = ("--warmup-s", "0.2", "--batch", "50", "--size", "uniform:60-300")
SHORT = ("--duration-s", "0.6", *LOAD)
#: for what needs several batches however busy the machine is
LONGER = ("--duration-s", "2.5", *LOAD)


def test_end_to_end_over_several_topics_with_keys_in_an_open_loop(
    served: FakeCluster, cluster: Cluster, tmp_path: Path
) -> None:
    backend = served.backends[0]
    assert isinstance(backend, BenchBackend)
    # As with a transient pool: rows are acknowledged before they are visible.
    backend.hides = 3
    files = ("--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"))
    load = ("--rate", "1000", "--topics", "2", "--queues", "2", "--keys", "zipf:50")
    code, out, err = command(cluster, "e2e", *SHORT, *load, "--consumers", "2", *files)

    assert code == 0, out + err
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["runner"] == "processes"
    assert report["verification"]["sound"]
    for part in ("log", "consumed"):
        assert report["verification"][part]["acknowledged"] == report["acknowledged"] == 800
    assert report["verification"]["log"]["read"] == 800
    for name in ("send", "receive"):
        channel = report["channels"][name]
        assert channel["latency"]["count"] >= 590
        assert channel["latency"]["p50_ms"] <= channel["latency"]["p99_ms"]
    assert "as consumed: 800 acknowledged, 0 lost" in out
    assert backend.hides == 0

    html = (tmp_path / "r.html").read_text()
    for channel in report["channels"].values():
        # On a busy machine every answer may come after the measured time, of which the page shows the charts.
        channel["throughput"]["window_s"] = 3600.0
    page_is_whole(page(report))
    assert report["machine"]["host"] == platform.node()
    for fact in (
        datetime.fromtimestamp(report["finished_at_ms"] / 1000, timezone.utc).strftime("%Y-%m-%d"),
        f"{platform.node()}, {os.cpu_count()} cores",
        "unknown: the data directory is on another machine",
        f"RayMQ {raymq.__version__}, Python {platform.python_version()}, Ray 2.",
        f"Linux {platform.machine()} {platform.release()}",
    ):
        assert fact in html


@pytest.mark.thorough
def test_a_closed_loop_of_single_messages_is_sound(cluster: Cluster) -> None:
    # On a busy machine the first answer may take a second.
    words = ("--warmup-s", "1.4", "--api", "messages", "--json")
    code, out, err = command(cluster, "produce", *LONGER, *words)
    assert code == 0, err
    report = json.loads(out)
    # Names from outside are text on the page.
    report["verification"]["log"]["examples"] = ["<script>alert(1)</script>"]
    report["cluster"]["flush"] = "<b>"
    assert "<script" not in page(report)
    assert "<b>," not in page(report)
    assert report["acknowledged"] == report["verification"]["log"]["read"] > 0
    assert report["channels"]["send"]["throughput"]["messages_per_s"] > 0


@pytest.mark.thorough
def test_a_backlog_is_sent_and_read(cluster: Cluster) -> None:
    words = ("--messages", "3001", "--batch", "100", "--size", "100", "--shards", "0", "--json")
    code, out, err = command(cluster, "consume", *words)
    assert code == 0, err
    report = json.loads(out)
    assert report["channels"]["poll"]["throughput"]["messages"] == 3002
    assert report["verification"]["consumed"]["acknowledged"] == 3002


def test_acknowledged_rows_that_are_not_there_end_with_1_and_are_named(
    served: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raymq.cluster.bench.run.VISIBLE_S", 0)
    backend = served.backends[0]
    assert isinstance(backend, BenchBackend)
    backend.lie_about = 1
    code, out, _ = command(cluster, "produce", *LONGER, "--workers", "1", "--queues", "1")
    assert code == 1
    assert "50 lost" in out
    assert "worker 0, bench queue 0: sequence 0 was acknowledged and is not there" in out


def test_while_ever_more_becomes_visible_it_is_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raymq.cluster.bench.run.VISIBLE_S", 0.001)
    bench, promised, ends = Bench(cluster, BenchPlan()), Ledger(0), iter(range(10))
    promised.acknowledge(0, 0, 5)
    monkeypatch.setattr(bench, "_begin", {0: QueueEnd(0, 0)})
    monkeypatch.setattr(bench, "_ends", lambda: {0: QueueEnd(0, next(ends))})
    assert bench._visible_ends([promised]) == {0: QueueEnd(0, 5)}
    monkeypatch.setattr(bench, "_ends", lambda: {0: QueueEnd(0, 4)})
    assert bench._visible_ends([promised]) == {0: QueueEnd(0, 4)}


@pytest.mark.thorough
def test_the_highest_rate_is_searched_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_up = iter((False, True))

    def reported(found: Round, limit_ms: float) -> dict[str, Any]:
        # The rate of a busy machine does not matter here.
        return {**judge(found, limit_ms), "kept_up": next(kept_up)}

    monkeypatch.setattr("raymq.cluster.bench.run.judge", reported)
    monkeypatch.setattr("raymq.cluster.bench.run.SEARCH_ROUNDS", 2)
    plan = BenchPlan(duration_s=0.3, warmup_s=0.9, batch=20, in_flight=1, workers=1, queues=1)
    outcome = Bench(cluster, plan).run(find_max_ms=10_000.0)
    assert outcome.sound
    first, second = outcome.search
    assert second["rate"] == pytest.approx(first["rate"] / 2, rel=0.01)
    assert outcome.plan.rate == pytest.approx(second["rate"], rel=0.01)


@pytest.mark.parametrize(
    ("messages", "latency_ms", "kept_up"), [(1000, 5, True), (900, 5, False), (1000, 11, False)]
)
def test_a_rate_is_kept_up_when_all_is_done_in_time_below_the_limit(
    messages: int, latency_ms: int, kept_up: bool
) -> None:
    found, latency = Round(BenchPlan(rate=1000.0, duration_s=1.0)), Histogram()
    latency.record_repeated(latency_ms * 1000, messages)
    found.take(Snapshot("send", 0, Tick(messages, 0, latency)))
    assert judge(found, 10.0)["kept_up"] is kept_up


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("produce", "--runner", "ray"), "Ray is not known"),
        (("produce", "--size", "1"), "size is '1'"),
        (("produce", "--find-max", "5", "--rate", "9"), "leave --rate out"),
        (
            ("produce", "--html", "/nowhere/at/all/x.html"),
            "--html /nowhere/at/all/x.html: name a file",
        ),
        (("produce", "--find-max", "nan"), "find_max is nan: use more than 0"),
        (("produce", "--shards", "0,3"), "shards names 3: the cluster has 0 to 0"),
    ],
)
def test_what_cannot_be_run_is_said_at_once(
    cluster: Cluster, words: tuple[str, ...], field: str
) -> None:
    code, _, err = command(cluster, *words)
    assert (code, field in err) == (2, True), err


def test_a_cluster_that_went_away_is_not_a_success(served: FakeCluster, cluster: Cluster) -> None:
    served.down(0)
    assert command(cluster, "produce", *SHORT)[0] == 3


def test_a_worker_that_cannot_go_on_ends_the_run(cluster: Cluster) -> None:
    with pytest.raises(Rejected, match="bad topic"):
        Bench(cluster, BenchPlan(topic="bad topic!", workers=1)).run()


class Terminal(io.StringIO):
    """Takes what is drawn."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_table_shows_rate_and_percentiles(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream, found, latency = Terminal(), Round(BenchPlan(duration_s=2.0)), Histogram()
    latency.record_repeated(5000, 1200)
    found.take(Snapshot("send", 0, Tick(1200, 1_200_000, latency)))
    live = watcher(stream)
    assert isinstance(live, LiveWatcher)
    live.phase("produce", 4.0)
    until(lambda: "1,200" in stream.getvalue(), lambda: live.figures(found))
    live.done()
    assert "5.00" in stream.getvalue()


def test_the_disk_of_a_data_directory_is_named(tmp_path: Path) -> None:
    disk = machine({"data_dir": str(tmp_path)})["disk"]
    assert re.search(r"^\w+ on \S+, [\d,]+ GiB free of [\d,]+ GiB \(", disk), disk


# --- the page -------------------------------------------------------------------------------------


def page_is_whole(text: str) -> None:
    """Check that the page needs no other file, is well-formed, and every curve lies in its picture."""
    assert not re.search(r"<script|<link|<img|url\(|src=|href=", text)

    tree = ElementTree.fromstring(text.removeprefix("<!doctype html>\n"))
    namespace = "{http://www.w3.org/2000/svg}"
    pictures = list(tree.iter(f"{namespace}svg"))
    # Three a channel, each for wide and narrow windows.
    assert len(pictures) == 12

    for picture in pictures:
        _, _, width, height = map(float, str(picture.get("viewBox")).split())
        curves = list(picture.iter(f"{namespace}polyline"))
        assert curves
        for curve in curves:
            points = [
                tuple(map(float, pair.split(","))) for pair in curve.get("points", "").split()
            ]
            assert points
            assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
        labels_are_apart(picture, width)


def labels_are_apart(picture: ElementTree.Element, width: float) -> None:
    """No text below a picture touches its neighbour or an edge."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        if text.get("text-anchor") == "middle" and text.get("transform") is None:
            middle, half = float(text.get("x", "")), 3.5 * len(text.text or "")
            rows.setdefault(text.get("y", ""), []).append((middle - half, middle + half))
    for row in map(sorted, rows.values()):
        assert row[0][0] >= 0
        assert row[-1][1] <= width
        assert all(left[1] < right[0] for left, right in itertools.pairwise(row))


def test_axes_reach_over_their_values_with_few_round_marks() -> None:
    for high in (0.3, 1.0, 7.0, 99.0, 123_456.0, 2e6):
        axis = linear_axis(0.0, high)
        assert axis.low == 0
        assert high <= axis.high <= 1.6 * high
        assert 3 <= len(axis.marks) <= 8
    axis = log_axis(0.2, 1500.0)
    assert (axis.low, axis.high, axis.place(0.1), axis.place(10_000.0)) == (0.1, 10_000.0, 0, 1)
    assert axis.place(1.0) == pytest.approx(0.2)
    assert [name for _, name in nines_axis(3.0).marks] == ["0 %", "90 %", "99 %", "99.9 %"]
