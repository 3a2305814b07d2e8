"""Sessions of Spark 4 on Ray whose processes are killed. Prints what is found, a line of JSON each.

    python -m tests.support.spark_on_ray DATA_DIR

PySpark 4 may be beside the environment: its directory is in RAYMQ_TEST_PYSPARK. The driver is a process of its own,
because it is killed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import raymq
from tests.support.listening import listening
from tests.support.waiting import until

ROWS, PARTS = 4_000, 4
#: in the environment of the driver, and of what it starts
MARK = "RAYMQ_TEST_SPARK_ON_RAY"
PLACES = "raymq-spark-"
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def with_variable(text: str) -> dict[int, str]:
    """Pid and command line of every process that has this text in its environment."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().decode()
    return found


def of_daemons() -> dict[int, str]:
    """The guards, the Master, the Workers, and what these started."""
    return with_variable(f"SPARK_CONF_DIR={tempfile.gettempdir()}/{PLACES}")


def java_of(name: str) -> list[int]:
    """The JVMs of a class of daemons."""
    return [
        pid
        for pid, command in of_daemons().items()
        if name in command and command.partition("\0")[0].endswith("/java")
    ]


def places() -> list[Path]:
    """The private directories."""
    return sorted(Path(tempfile.gettempdir()).glob(f"{PLACES}*"))


def modes(paths: list[Path]) -> list[str]:
    return sorted({oct(stat.S_IMODE(path.stat().st_mode)) for path in paths})


def answers_to_a_stranger(pids: list[int]) -> list[int]:
    """The HTTP statuses of the web pages of processes. Their other ports speak no HTTP."""
    found = set()
    for each in listening(pids):
        connection = http.client.HTTPConnection("127.0.0.1", each.port, timeout=2)
        none = contextlib.suppress(OSError, http.client.HTTPException)
        with contextlib.closing(connection), none:
            connection.request("GET", "/")
            found.add(connection.getresponse().status)
    return sorted(found)


def kill_worker_once(flag: str) -> Any:
    """A function for mapInArrow. The first task of partition 0 kills the Worker of Spark to which it belongs."""

    def die(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        for batch in batches:
            yield batch
            if TaskContext.get().partitionId() == 0 and not Path(flag).exists():
                Path(flag).touch()
                pid, program, name = os.getpid(), "", ""
                while not (program.endswith("/java") and name == WORKER):
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    pid = int(fields[1])
                    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                    program, name = words[0], next(filter(WORKER.__eq__, words), "")
                os.kill(pid, signal.SIGKILL)

    return die


def connect(data_dir: str) -> tuple[raymq.Cluster, dict[str, str]]:
    """The cluster, and the options of the format. This process is connected to its Ray then."""
    import ray

    cluster = raymq.connect(data_dir)
    ray.init(cluster.ray_address, namespace="spark-on-ray", log_to_driver=False)
    address = f"raymq://{cluster.endpoints[0]}"
    return cluster, {"raymq.address": address, "raymq.token": cluster.token}


def use_first_session(cluster: raymq.Cluster, options: dict[str, str], flag: Path) -> None:
    """It is stopped in the end. A Worker is killed while the session writes."""
    from raymq.spark import standalone_session

    cluster.create_topic("numbers", queues=2)
    with standalone_session("first", executors=2, cores=1, memory="512MB") as spark:
        spark.sparkContext.setLogLevel("OFF")
        numbers = spark.range(0, ROWS, 1, PARTS).selectExpr("cast(id as string) as value")
        numbers = numbers.mapInArrow(kill_worker_once(str(flag)), "value string")
        writer = numbers.write.format("raymq").mode("append").options(**options)
        writer.option("topic", "numbers").save()
        say(worker_was_killed=flag.exists())

        reader = spark.read.format("raymq").options(**options).option("subscribe", "numbers")
        rows = reader.load().select("value").collect()
        say(came_back=sorted(int(bytes(row["value"])) for row in rows) == list(range(ROWS)))

        secret = spark.conf.get("spark.authenticate.secret")
        commands = {**of_daemons(), **with_variable(MARK)}
        say(secret_is_in_a_command=any(secret in each for each in commands.values()))
        say(addresses=sorted({each.address for each in listening(commands)}))
        say(pages=answers_to_a_stranger(java_of(MASTER) + java_of(WORKER)))
        say(directories=modes([path for each in places() for path in (each, each / "conf")]))
        say(files=modes([each / "conf/spark-defaults.conf" for each in places()]))
    say(left_by_stop=[*of_daemons().values(), *map(str, places())])


def use_second_session() -> None:
    """Its Master and its actor are killed. It is never stopped."""
    from raymq.spark import standalone_session

    spark = standalone_session("second", executors=1, cores=1, memory="512MB")
    spark.sparkContext.setLogLevel("OFF")
    (master,) = java_of(MASTER)
    os.kill(master, signal.SIGKILL)
    host, _, port = spark.sparkContext.master.removeprefix("spark://").partition(":")

    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return master not in java_of(MASTER)
        return False

    until(listens, lambda: time.sleep(0.1))
    say(counted_after_the_master=spark.range(100).repartition(2).count())

    (worker,) = java_of(WORKER)
    (actor,) = [
        int(command.split("\0")[4])
        for command in of_daemons().values()
        if "guard.py" in command and WORKER in command
    ]
    os.kill(actor, signal.SIGKILL)
    until(lambda: worker not in of_daemons(), lambda: time.sleep(0.02))
    say(counted_after_the_actor=spark.range(100).repartition(2).count())


def drive(data_dir: str) -> None:
    """The driver of both sessions. It waits for its end."""
    cluster, options = connect(data_dir)
    use_first_session(cluster, options, Path(f"{data_dir}.killed"))
    use_second_session()
    say(waits=True)
    signal.pause()


def main(data_dir: str) -> None:
    """Start a cluster and the driver, and kill the driver when it waits."""
    cluster = raymq.start(data_dir)
    try:
        words = [sys.executable, "-m", __spec__.name, data_dir, "drive"]
        driver = subprocess.Popen(words, env={**os.environ, MARK: "1"}, stdout=subprocess.PIPE)
        with driver, driver.stdout as lines:
            for line in lines:
                print(line.decode(), end="", flush=True)
                if b"waits" in line:
                    driver.kill()
        until(
            lambda: not of_daemons() and not with_variable(MARK) and not places(),
            lambda: time.sleep(0.05),
        )
        say(nothing_is_left_by_a_killed_driver=driver.returncode == -signal.SIGKILL)
    finally:
        cluster.stop()


if __name__ == "__main__":
    # Before the environment's own, which may be PySpark 3.5.
    sys.path[:0] = filter(None, [os.environ.get("RAYMQ_TEST_PYSPARK")])
    # Of the processes that begin here.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    place = str(Path(sys.argv[1]).absolute())
    if len(sys.argv) == 2:
        main(place)
    else:
        drive(place)
