"""Flights stream into a topic, a second query counts them per carrier, and their driver is killed and started again.

    python examples/flight_stream.py FLIGHTS_CSV [DATA_DIR]

`python3 run.py demo` runs it last. The driver is a process of its own with a Spark of its own, and runs both queries.
Each survives kill -9:

    the stream   Spark's checkpoint says which files belong to a batch. `stream_sink` stores a batch that is run again
                 once.
    the count    Counts and offsets are in one file, which is replaced at once after each step.

It draws rows over time, with the kills, as an HTML page beside DATA_DIR.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import raymq
from raymq.spark import stream_sink, use_java

TOPIC, QUEUES = "flights-stream", 4
#: the flights arrive as so many files, one after the other
FILES, ROWS_MAX, PAUSE_S = 8, 40_000, 0.5
#: the driver is killed when these parts of all rows are stored
KILL_AT = (0.25, 0.6)
TIMEOUT_S = 240.0


class Place:
    """The files of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: flights to be read; each appears whole
        self.incoming = directory / "incoming"
        #: is there when no more flights come
        self.complete = directory / "complete"
        self.checkpoint = directory / "checkpoint"
        self.counts = directory / "counts.json"


class Sample(NamedTuple):
    """How far both queries are."""

    seconds: float
    stored: int
    counted: int


class Outcome(NamedTuple):
    """What a run found."""

    counts: Counter[str]
    expected: Counter[str]
    stored: int
    kills: int
    page: Path

    @property
    def exact(self) -> bool:
        """Whether nothing was lost, nothing came twice, and the driver was killed as often as it should."""
        right = self.counts == self.expected and self.stored == self.expected.total()
        return right and self.kills == len(KILL_AT)


# --- the driver, which is killed ------------------------------------------------------------------


def drive(url: str, directory: Path) -> None:
    """Run both queries from their checkpoints until all flights are stored and counted."""
    use_java()
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    place = Place(directory)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        # Each of these JVMs lives for seconds: it compiles as little as it can.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.sql.codegen.wholeStage", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    with raymq.connect(url) as cluster:
        query = start_stream(spark, cluster, place)
        counting = threading.Thread(target=count_all, args=(cluster, place, query))
        counting.start()

        while not place.complete.exists():
            time.sleep(0.1)
        query.processAllAvailable()
        query.stop()
        counting.join()
        # No thread of Spark may be at work when the interpreter ends: it would abort the process.
        spark.stop()


def start_stream(spark: Any, cluster: raymq.Cluster, place: Place) -> Any:
    """The query that stores the flights. Returns: it, started."""
    from pyspark.sql import functions as f

    source = spark.readStream.schema("row long, carrier string, flight string, origin string")
    arriving = source.option("maxFilesPerTrigger", 1).csv(str(place.incoming))
    flights = arriving.select(
        f.concat_ws("-", "carrier", "flight").alias("key"),
        f.to_json(f.struct("*")).alias("value"),
        f.col("carrier").alias("tag"),
    )

    writer = flights.writeStream.foreachBatch(stream_sink(cluster, topic=TOPIC))
    return writer.option("checkpointLocation", str(place.checkpoint)).start()


def count_all(cluster: raymq.Cluster, place: Place, query: Any) -> None:
    """The query that counts, until the stream has ended and nothing is left to count."""
    offsets, counts = load_counts(place.counts)
    with cluster.consumer(TOPIC, start=offsets or "earliest") as consumer:
        while True:
            is_last = not query.isActive
            batch = consumer.poll_batch(timeout=0.5)
            if batch.num_rows:
                counts.update(batch.column("tag").to_pylist())
                save_counts(place.counts, consumer.positions(), counts)
            elif is_last:
                return


def load_counts(path: Path) -> tuple[dict[int, int], Counter[str]]:
    """The next offset of each queue, and the flights of each carrier before it."""
    if not path.exists():
        return {}, Counter()
    state = json.loads(path.read_text(encoding="utf-8"))
    offsets = {int(queue): offset for queue, offset in state["offsets"].items()}
    return offsets, Counter(state["counts"])


def save_counts(path: Path, offsets: dict[int, int], counts: Counter[str]) -> None:
    """Replace both at once: a killed driver leaves the old ones or the new ones."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"offsets": offsets, "counts": counts}), encoding="utf-8")
    new.replace(path)


# --- the process that kills it --------------------------------------------------------------------


class Run:
    """One run: flights that arrive, a driver that is killed, and what was seen of both queries."""

    def __init__(self, cluster: raymq.Cluster, flights: Path, directory: Path) -> None:
        """Args: `flights`: a CSV with a header and the columns row and carrier."""
        self._cluster = cluster
        self.place = Place(directory)
        # What an earlier run has left. Its rows stay in the topic, and are not counted.
        shutil.rmtree(directory, ignore_errors=True)
        self.place.incoming.mkdir(parents=True)
        topic = cluster.describe_topic(TOPIC)
        self._earlier = topic["messages"]
        ends = {queue["queue_id"]: queue["max_offset"] for queue in topic["queues"]}
        save_counts(self.place.counts, ends, Counter())

        self.rows = first_rows(flights)
        self.samples: list[Sample] = []
        self.kills: list[float] = []
        self._began_s = time.monotonic()

    def watch(self) -> None:
        """Start the driver, kill it, start it again, and note what is stored and counted, to the end.

        Raises: RuntimeError if a driver fails, or if they take too long.
        """
        arriving = threading.Thread(target=self._arrive, daemon=True)
        arriving.start()
        driver = self._start_driver()
        try:
            while driver.poll() is None:
                sample = self._look()
                marks = KILL_AT[len(self.kills) :]
                if marks and sample.stored >= marks[0] * len(self.rows):
                    driver.send_signal(signal.SIGKILL)
                    driver.wait()
                    self.kills.append(time.monotonic() - self._began_s)
                    driver = self._start_driver()
                if sample.seconds > TIMEOUT_S:
                    raise RuntimeError(f"the stream did not end within {TIMEOUT_S:g} s")
                time.sleep(0.1)
            if driver.returncode != 0:
                raise RuntimeError(f"the driver of the stream failed with {driver.returncode}")
        finally:
            driver.kill()
            driver.wait()
        arriving.join()
        self._look()

    def _arrive(self) -> None:
        size = -(-len(self.rows) // FILES)
        for number in range(FILES):
            part = self.place.directory / f"part-{number}.csv"
            with part.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(self.rows[number * size : (number + 1) * size])
            part.replace(self.place.incoming / part.name)
            time.sleep(PAUSE_S)
        self.place.complete.touch()

    def _start_driver(self) -> subprocess.Popen[bytes]:
        url = f"raymq://{self._cluster.endpoints[0]}"
        words = [sys.executable, __file__, "--drive", url, str(self.place.directory)]
        # The token is not among the words: every user sees those.
        return subprocess.Popen(words, env={**os.environ, "RAYMQ_TOKEN": self._cluster.token})

    def _look(self) -> Sample:
        stored = self._cluster.describe_topic(TOPIC)["messages"] - self._earlier
        _, counts = load_counts(self.place.counts)
        sample = Sample(time.monotonic() - self._began_s, stored, counts.total())
        self.samples.append(sample)
        return sample


def first_rows(flights: Path) -> list[list[str]]:
    """Row, carrier, flight and origin of the first flights."""
    with flights.open(newline="", encoding="utf-8") as file:
        chosen = itertools.islice(csv.DictReader(file), ROWS_MAX)
        return [[row[name] for name in ("row", "carrier", "flight", "origin")] for row in chosen]


def run(cluster: raymq.Cluster, flights: Path, directory: Path, page: Path) -> Outcome:
    """Stream the flights through the cluster, and write the page."""
    cluster.create_topic(TOPIC, queues=QUEUES)
    done = Run(cluster, flights, directory)
    done.watch()
    _, counts = load_counts(done.place.counts)
    expected = Counter(carrier for _, carrier, *_ in done.rows)
    outcome = Outcome(counts, expected, done.samples[-1].stored, len(done.kills), page)
    page.write_text(draw(done.samples, done.kills, outcome), encoding="utf-8")
    return outcome


# --- the page -------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 860, 380, 76, 40, 28, 20
STYLE = """
:root { color-scheme: light dark; --ink: #222; --grid: #ddd; --stored: #1f6fb4; --counted: #c2571a; --kill: #b3261e;
  --paper: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --grid: #444; --stored: #6cb2ee; --counted: #f0975c;
  --kill: #ff8a80; --paper: #1b1b1b } }
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem }
svg { height: auto; width: 100% } text { fill: var(--ink); font-size: 13px }
td, th { padding: .1rem 1.2rem .1rem 0; text-align: right } td:first-child, th:first-child { text-align: left }
"""


def draw(samples: Sequence[Sample], kills: Sequence[float], outcome: Outcome) -> str:
    """The page: rows over time with the kills, and the counts beside those of the file."""
    end_s = max(samples[-1].seconds, 1.0)
    top = max(outcome.expected.total(), *(sample.stored for sample in samples), 1)

    def x(seconds: float) -> float:
        return LEFT + seconds / end_s * (WIDTH - LEFT - RIGHT)

    def y(rows: float) -> float:
        return HEIGHT - BOTTOM - rows / top * (HEIGHT - BOTTOM - TOP)

    parts = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(rows):.1f}" y2="{y(rows):.1f}" stroke="var(--grid)"/>'
        f'<text x="{LEFT - 8}" y="{y(rows) + 4:.1f}" text-anchor="end">{rows:,.0f}</text>'
        for rows in (top * step / 4 for step in range(5))
    ]
    parts += [
        f'<text x="{x(seconds):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{seconds:.0f} s</text>'
        for seconds in (end_s * step / 5 for step in range(6))
    ]
    parts += [
        f'<line class="kill" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
        'stroke="var(--kill)" stroke-dasharray="5 4" stroke-width="2"/>'
        f'<text x="{x(at):.1f}" y="{TOP - 8}" text-anchor="middle">kill -9</text>'
        for at in kills
    ]
    # The wider one below: the other one often covers it.
    for name, width in (("stored", 7), ("counted", 2.5)):
        points = " ".join(f"{x(each.seconds):.1f},{y(getattr(each, name)):.1f}" for each in samples)
        parts.append(
            f'<polyline fill="none" stroke="var(--{name})" stroke-width="{width}" points="{points}"/>'
        )

    rows = "".join(
        f"<tr><td>{escape(carrier)}</td><td>{outcome.counts[carrier]:,}</td><td>{count:,}</td></tr>"
        for carrier, count in sorted(outcome.expected.items())
    )
    verdict = "All counts are exact." if outcome.exact else "The counts DIFFER."
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>RayMQ: flights that stream in</title><style>{STYLE}</style>
<h1>Flights that stream in</h1>
<p>{outcome.expected.total():,} flights were streamed into a topic, and a second query counted them per carrier. The
driver of both queries was killed with kill -9 {outcome.kills} times, and started again from its checkpoints.
<strong>{verdict}</strong></p>
<p><b style="color: var(--stored)">&#9632;</b> rows stored
<b style="color: var(--counted)">&#9632;</b> rows counted</p>
<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Rows stored and counted over time">{"".join(parts)}</svg>
<table><tr><th>carrier</th><th>counted</th><th>in the file</th></tr>{rows}</table>
</html>
"""


def main(arguments: Sequence[str]) -> int:
    """Run a driver, or everything on a cluster of its own. Returns: the exit code."""
    if arguments[:1] == ["--drive"]:
        drive(arguments[1], Path(arguments[2]))
        return 0
    data_dir = Path(arguments[1] if arguments[1:] else "raymq-stream").absolute()
    page = data_dir.with_name(f"{data_dir.name}.html")
    with raymq.start(data_dir) as cluster:
        outcome = run(cluster, Path(arguments[0]), data_dir / "stream.tmp", page)
    word = "exact" if outcome.exact else "WRONG"
    print(f"{outcome.stored:,} flights, {outcome.kills} kills: counts are {word}; see {page}")
    return 0 if outcome.exact else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
