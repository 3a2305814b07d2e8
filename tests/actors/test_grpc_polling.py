"""Which threads of a process read its Flight sockets."""

from __future__ import annotations

import os
import subprocess
import sys

import pyarrow as pa

from raymq.actors.protocol.grpc_polling import PYARROW_MIN, VARIABLE

CALLS = 1000

#: prints how often gRPC's own threads slept during the calls, and what a child process would inherit
PROGRAM = f"""
import os
from pathlib import Path
from raymq.client.transport.flight_client import ShardConnection
from raymq.actors.server.flight.flight_server import serve
from tests.support.fake_backend import FakeBackend

def sleeps():
    count = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            status = (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
        if status.startswith("Name:\\tevent_engine\\n"):
            count += int(status.partition("\\nvoluntary_ctxt_switches:")[2].split()[0])
    return count

server = serve(FakeBackend(), host="127.0.0.1", port=0, token="t")
connection = ShardConnection(f"127.0.0.1:{{server.port}}", "t")
connection.call("describe", {{}})
before = sleeps()
for _ in range({CALLS}):
    connection.call("describe", {{}})
print(sleeps() - before, os.environ.get("{VARIABLE}"), flush=True)
os._exit(0)
"""


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_a_message_wakes_the_thread_that_waits_for_it_and_none_of_grpc() -> None:
    # Else they sleep once a call or more. Their timers wake them, too, the more often the slower the machine is.
    for _ in range(3):
        done = run()
        sleeps, inherited = done.stdout.split()
        if int(sleeps) < 0.8 * CALLS:
            break
    assert int(sleeps) < 0.8 * CALLS
    assert inherited == "None"
    # gRPC names there what it does not know.
    assert VARIABLE not in done.stderr
    assert "Unknown experiment" not in done.stderr


def test_a_program_that_sets_grpcs_variable_keeps_its_choice() -> None:
    choice = "event_engine_client,event_engine_listener"
    sleeps, inherited = run(**{VARIABLE: choice}).stdout.split()
    has_event_engine = int(pa.__version__.partition(".")[0]) >= PYARROW_MIN
    assert (int(sleeps) > CALLS) == has_event_engine
    assert inherited == choice
