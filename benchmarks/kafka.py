"""A broker of Apache Kafka 4 from Maven Central, the peer of `benchmarks.spark`. Needs Java 17 and Maven."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from benchmarks.limits import cleared
from raymq.cluster.deploy.owned_ray import free_ports
from tests.support import oracle

POMS = Path(__file__).parent / "java"
CONFIG = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={logs}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""


def class_path(name: str, cache: Path, **properties: str) -> str:
    """The class path of a pom of `benchmarks/java`, fetched by Maven.

    Args: `properties`: of the pom, with "_" for each "." of a name. Raises: oracle.Missing.
    """
    listed = cache / f"{'-'.join([name, *properties.values()])}.classpath"
    if not listed.exists():
        maven = oracle.find("mvn")
        words = [maven, "-q", "-B", "-f", str(POMS / name / "pom.xml"), oracle.MAVEN_GOAL]
        words += [f"-Dmdep.outputFile={listed}", "-Dmdep.includeScope=runtime"]
        words += [f"-D{key.replace('_', '.')}={value}" for key, value in properties.items()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            raise oracle.Missing(f"Maven could not fetch {name}:\n{done.stdout[-2000:]}")
    return listed.read_text(encoding="utf-8").strip()


def connector(cache: Path) -> str:
    """The class path of the connector of the Spark that is installed. Raises: oracle.Missing."""
    version = metadata.version("pyspark")
    scala = "2.12" if version.startswith("3.") else "2.13"
    return class_path("connector", cache, spark_version=version, scala_version=scala)


class Broker(NamedTuple):
    """A running broker. Made by `broker`."""

    jars: str
    address: str

    def run(self, program: str, *words: str) -> str:
        """Run a program of Kafka's. Returns: what it printed."""
        command = [oracle.find("java"), "-cp", self.jars, program, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.strip()

    def create_topic(self, name: str, partitions: int, options: Mapping[str, str]) -> None:
        """Create a topic with options of its own."""
        words = ["--bootstrap-server", self.address, "--create", "--topic", name]
        words += ["--partitions", str(partitions), "--replication-factor", "1"]
        for option, value in options.items():
            words += ["--config", f"{option}={value}"]
        self.run("org.apache.kafka.tools.TopicCommand", *words)


@contextlib.contextmanager
def broker(directory: Path, *, version: str | None = None, options: str = "") -> Iterator[Broker]:
    """A broker with its log in `directory`, ended on exit. Raises: oracle.Missing without Java, Maven or jars.

    Args: `version`: None: that of the pom. `options`: more lines of its configuration.
    """
    directory.mkdir(parents=True, exist_ok=True)
    chosen = {} if version is None else {"kafka_version": version}
    jars = class_path("kafka", directory, **chosen)
    data = cleared(directory / "data")
    data.mkdir()

    port, controller = free_ports(2)
    config = data / "server.properties"
    text = CONFIG.format(port=port, controller=controller, logs=data / "log")
    config.write_text(text + options)
    found = Broker(jars, f"127.0.0.1:{port}")
    cluster_id = found.run("kafka.tools.StorageTool", "random-uuid").splitlines()[-1]
    found.run("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(config))

    # Kafka's own default heap of a broker.
    words = [oracle.find("java"), "-Xmx1g", "-cp", jars, "kafka.Kafka", str(config)]
    with (data / "output").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env=dict(os.environ))
    try:
        await_port(port, process, data / "output")
        yield found
    finally:
        process.kill()
        process.wait()
        cleared(data)


def await_port(port: int, process: subprocess.Popen[bytes], output: Path) -> None:
    """Wait until a server listens. Raises: oracle.Failed, with its output, after 60 s or when it ended."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise oracle.Failed(f"a server did not start:\n{output.read_text()[-2000:]}")
