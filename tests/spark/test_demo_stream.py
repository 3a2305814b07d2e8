"""The stream of the demo: what a driver counted survives it exactly, and the page shows what happened."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.served_shard import PATIENT, ROOT, ServedShard


@pytest.fixture(scope="module")
def stream() -> Any:
    path = ROOT / "examples" / "flight_stream.py"
    spec = importlib.util.spec_from_file_location("raymq_flight_stream", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its named tuples look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def outcome(stream: Any, **changed: Any) -> Any:
    counts = Counter({"AA": 3, "<UA>": 2})
    found = stream.Outcome(counts, Counter(counts), 5, len(stream.KILL_AT), Path("page.html"))
    return found._replace(**changed)


def test_a_count_goes_on_where_the_last_one_was_stored(stream: Any, tmp_path: Path) -> None:
    place = stream.Place(tmp_path / "stream")
    place.directory.mkdir()
    (tmp_path / "shard").mkdir()
    with ServedShard(tmp_path / "shard", PATIENT) as shard:
        shard.start_flusher()
        shard.cluster.create_topic(stream.TOPIC, queues=2)
        ended = SimpleNamespace(isActive=False)
        with closing(shard.cluster.producer(linger_ms=0)) as producer:
            for carriers in (["AA", "UA", "AA"], ["UA", "B6"]):
                for number, carrier in enumerate(carriers):
                    producer.send(stream.TOPIC, b"x", tag=carrier, queue_id=number % 2).result(60)
                # What a driver that was killed in the middle of a step may leave.
                place.counts.with_suffix(".new").write_text('{"offsets": {"0":')
                stream.count_all(shard.cluster, place, ended)
    offsets, counts = stream.load_counts(place.counts)
    assert counts == {"AA": 2, "UA": 2, "B6": 1}
    assert offsets == {0: 3, 1: 2}


def test_another_run_counts_neither_the_rows_nor_the_files_of_the_one_before(
    stream: Any, tmp_path: Path
) -> None:
    flights = tmp_path / "flights.csv"
    flights.write_text("row,carrier,flight,origin\n0,UA,1545,EWR\n")
    left = stream.Place(tmp_path / "stream")
    left.incoming.mkdir(parents=True)
    left.complete.touch()
    (tmp_path / "shard").mkdir()
    with ServedShard(tmp_path / "shard", PATIENT) as shard:
        shard.start_flusher()
        shard.cluster.create_topic(stream.TOPIC, queues=2)
        with closing(shard.cluster.producer(linger_ms=0)) as producer:
            producer.send(stream.TOPIC, b"x", tag="AA", queue_id=1).result(60)
            run = stream.Run(shard.cluster, flights, left.directory)
            assert not run.place.complete.exists()
            assert run._look()[1:] == (0, 0)

            producer.send(stream.TOPIC, b"x", tag="UA", queue_id=1).result(60)
            stream.count_all(shard.cluster, run.place, SimpleNamespace(isActive=False))
            assert run._look()[1:] == (1, 1)


def test_a_count_without_a_file_begins_with_nothing(stream: Any, tmp_path: Path) -> None:
    assert stream.load_counts(tmp_path / "counts.json") == ({}, Counter())


@pytest.mark.parametrize(
    "changed",
    [
        {"counts": Counter({"AA": 3, "<UA>": 1})},
        {"counts": Counter({"AA": 3, "<UA>": 2, "B6": 1})},
        {"stored": 6},
        {"kills": 1},
    ],
)
def test_a_lost_or_repeated_flight_or_a_missing_kill_is_not_exact(
    stream: Any, changed: dict[str, Any]
) -> None:
    assert outcome(stream).exact
    assert not outcome(stream, **changed).exact


def test_the_page_marks_each_kill_and_draws_both_lines_inside_its_frame(stream: Any) -> None:
    samples = [stream.Sample(0.0, 0, 0), stream.Sample(2.0, 4, 1), stream.Sample(4.0, 5, 5)]
    page = stream.draw(samples, [1.0, 3.0], outcome(stream))
    svg = re.search(r"<svg.*?</svg>", page, re.DOTALL)
    assert svg is not None
    drawing = ElementTree.fromstring(svg[0])
    kills = drawing.findall("line[@class='kill']")
    middle = (stream.LEFT + stream.WIDTH - stream.RIGHT) / 2
    at = [float(kill.attrib["x1"]) for kill in kills]
    assert at[0] < middle < at[1]
    assert [text.text for text in drawing.findall("text")].count("kill -9") == 2
    lines = drawing.findall("polyline")
    assert len(lines) == 2
    for line in lines:
        points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        assert len(points) == len(samples)
        assert all(0 <= x <= stream.WIDTH and 0 <= y <= stream.HEIGHT for x, y in points)
        assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)


def test_the_page_needs_nothing_from_elsewhere_and_says_whether_counts_are_exact(
    stream: Any,
) -> None:
    samples = [stream.Sample(1.0, 5, 5)]
    page = stream.draw(samples, [], outcome(stream))
    assert not re.search(r"<script|<link|src=|url\(|https?:", page)
    assert "All counts are exact." in page
    assert "<td>&lt;UA&gt;</td><td>2</td><td>2</td>" in page
    assert "The counts DIFFER." in stream.draw(samples, [], outcome(stream, stored=4))


def test_the_first_flights_of_a_file_are_streamed(stream: Any, tmp_path: Path) -> None:
    path = tmp_path / "flights.csv"
    path.write_text("row,year,carrier,flight,origin\n0,2013,UA,1545,EWR\n1,2013,AA,7,JFK\n")
    assert stream.first_rows(path) == [["0", "UA", "1545", "EWR"], ["1", "AA", "7", "JFK"]]
