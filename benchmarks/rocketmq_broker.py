"""Apache RocketMQ 5.3.3 as `benchmarks.compare` drives it: name server and broker from Maven, and its Java client.

Its Python clients need more servers or another library than its own. So benchmarks/java/RocketBench.java has the loads.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.compared import BACKLOG, BATCH_ROWS, MESSAGE, ONE, WAITING, Loads
from benchmarks.kafka import await_port
from benchmarks.limits import cleared
from raymq.cluster.deploy.owned_ray import free_ports
from tests.support import oracle

#: the last two lines let a consumer have as many messages in an answer as it asks for; the two before are for a broker
#: that has more to do than its threads can, and would refuse messages
CONFIG = """
bindAddress=127.0.0.1
brokerIP1=127.0.0.1
brokerIP2=127.0.0.1
namesrvAddr={names}
listenPort={port}
haListenPort={ha_port}
storePathRootDir={directory}
storePathCommitLog={directory}/commitlog
flushDiskType={flush}
waitTimeMillsInSendQueue=5000
osPageCacheBusyTimeOutMills=5000
maxTransferCountOnMessageInMemory={rows}
maxTransferBytesOnMessageInMemory=4194304
"""
JAVA = Path(__file__).parent / "java"
SOURCES = (JAVA / "RocketBench.java", JAVA / "PopBench.java")
#: a client gives up a batch after so long
TIMEOUT_S = 300


def is_installed() -> bool:
    """Whether Java and Maven are there."""
    return all(map(shutil.which, ("java", "javac", "mvn")))


class Servers(NamedTuple):
    """A running name server and broker. Made by `servers`."""

    java: list[str]
    names: str
    #: of the name server and of the broker
    pids: list[int]

    def figures(self, loads: Loads) -> dict[str, float]:
        """All figures, of a JVM of its own."""
        words = [*self.java, "-Xmx2g", "RocketBench", self.names, ONE, BACKLOG]
        words += map(str, (len(MESSAGE), WAITING, BATCH_ROWS, *loads))
        done = subprocess.run(
            words, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S
        )
        lines = (line.split() for line in done.stdout.splitlines())
        return {words[0]: float(words[1]) for words in lines if len(words) == 2}

    def popped_rate(self, count: int, *, threads: int, body_bytes: int) -> float:
        """Messages a second that a push consumer pops and acknowledges, each by itself, with so many threads."""
        words = [*self.java, "-Xmx2g", "PopBench", self.names]
        words += map(str, (count, threads, body_bytes))
        done = subprocess.run(
            words, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S
        )
        return float(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def servers(directory: Path, durable: bool) -> Iterator[Servers]:
    """Name server and broker, ended on exit. `durable`: SYNC_FLUSH. Raises: oracle.Missing, oracle.Failed."""
    cache = directory / "rocketmq-jars"
    cache.mkdir(exist_ok=True)
    classes, program = _compiled(cache)
    data = cleared(directory / "rocketmq")
    data.mkdir()

    java = [program.java, f"-Duser.home={data}", f"-Drocketmq.home.dir={data}"]
    java += [f"-Drmq.logback.configurationFile={oracle.SOURCES / 'logback.xml'}"]
    java += ["-cp", f"{classes}{os.pathsep}{program.class_path}"]
    names_port, port, ha_port = free_ports(3)
    names = f"127.0.0.1:{names_port}"
    (data / "names").write_text(f"bindAddress=127.0.0.1\nlistenPort={names_port}\n")
    flush = "SYNC_FLUSH" if durable else "ASYNC_FLUSH"
    text = CONFIG.format(
        names=names, port=port, ha_port=ha_port, directory=data, flush=flush, rows=BATCH_ROWS
    )
    (data / "broker").write_text(text)

    package = "org.apache.rocketmq"
    pids: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.callback(cleared, data)
        for memory, name, config, ready in (
            ("-Xmx256m", f"{package}.namesrv.NamesrvStartup", "names", names_port),
            ("-Xmx1g", f"{package}.broker.BrokerStartup", "broker", port),
        ):
            output = stack.enter_context((data / f"{config}.out").open("w", encoding="utf-8"))
            words = [java[0], memory, *java[1:], name, "-c", str(data / config)]
            process = subprocess.Popen(words, stdout=output, stderr=output)
            stack.callback(_end, process)
            await_port(ready, process, data / f"{config}.out")
            pids.append(process.pid)
        yield Servers(java, names, pids)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _compiled(cache: Path) -> tuple[Path, oracle.Program]:
    program = oracle.prepare(cache)
    classes = cache / "bench"
    classes.mkdir(exist_ok=True)
    words = [oracle.find("javac"), "--release", "17", "-XDsuppressNotes", "-proc:none"]
    words += ["-d", str(classes), "-cp", program.class_path, *map(str, SOURCES)]
    subprocess.run(words, check=True)
    return classes, program
