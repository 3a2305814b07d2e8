"""A name server and a broker of RocketMQ as processes, for clients of their own."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from raymq.cluster.deploy.owned_ray import free_ports
from raymq.doors.rocketmq.codes import RequestCode, ResponseCode

from .oracle import JAVA_OPTIONS, SOURCES, Program
from .remoting_client import RemotingClient
from .waiting import until

PACKAGE = "org.apache.rocketmq"
CONFIG = """
bindAddress=127.0.0.1
brokerIP1=127.0.0.1
brokerIP2=127.0.0.1
namesrvAddr={names}
brokerName={broker}
listenPort={port}
haListenPort={ha_port}
storePathRootDir={directory}/store
storePathCommitLog={directory}/store/commitlog
mappedFileSizeCommitLog=16777216
enablePropertyFilter=true
waitTimeMillsInSendQueue=5000
osPageCacheBusyTimeOutMills=5000
diskMaxUsedSpaceRatio=99
"""


@contextlib.contextmanager
def rocketmq_servers(program: Program, directory: Path, *, broker: str) -> Iterator[str]:
    """Run both until the end of the block. Yields: host:port of the name server.

    Args: `broker`: its name, which clients see.
    """
    names_port, port, ha_port = free_ports(3)
    names = f"127.0.0.1:{names_port}"
    (directory / "names").write_text(f"bindAddress=127.0.0.1\nlistenPort={names_port}\n")
    text = CONFIG.format(
        names=names, broker=broker, port=port, ha_port=ha_port, directory=directory
    )
    (directory / "broker").write_text(text)
    java = [
        program.java,
        *JAVA_OPTIONS,
        f"-Duser.home={directory}",
        f"-Drocketmq.home.dir={directory}",
        f"-Drmq.logback.configurationFile={SOURCES / 'logback.xml'}",
        *("-cp", program.class_path),
    ]
    with contextlib.ExitStack() as stack:
        for name, config, ready in (
            (f"{PACKAGE}.namesrv.NamesrvStartup", "names", names_port),
            (f"{PACKAGE}.broker.BrokerStartup", "broker", port),
        ):
            output = stack.enter_context((directory / f"{config}.out").open("wb"))
            words = [*java, name, "-c", str(directory / config)]
            process = subprocess.Popen(words, stdout=output, stderr=output, cwd=directory)
            stack.callback(process.wait)
            stack.callback(process.kill)
            until(lambda ready=ready: _listens(ready), lambda: threading.Event().wait(0.1))
        until(lambda: _has_route(names), lambda: threading.Event().wait(0.1))
        yield names


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _has_route(names: str) -> bool:
    """Whether the broker has said to the name server that it makes topics."""
    with RemotingClient(names) as client:
        found = client.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"})
        return found.code == ResponseCode.SUCCESS
