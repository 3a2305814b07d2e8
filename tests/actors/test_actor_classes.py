"""The actors around a replica: their start, its failures, and their exit."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from raymq.actors.ray import actor_classes, replica_files

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from raymq.actors.ray.process_setup import keep_pandas_out
keep_pandas_out()
import pyarrow
assert pyarrow.array([b"x"]).to_pylist() == [b"x"]
assert "pandas" not in sys.modules
import pandas
assert pandas.__file__.startswith(sys.argv[1])
"""


def test_arrow_does_not_import_pandas_and_the_program_still_can(tmp_path):
    (tmp_path / "pandas.py").write_text("__version__ = '9.0'", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


SATELLITE = """
import errno, sys, threading
from raymq.actors.ray import actor_classes
from raymq.actors.satellites import satellite

printed = threading.Event()

def refuse(files):
    # The end of the process must not overtake the line that the test reads.
    printed.wait(60)
    raise OSError(errno.EMFILE, "Too many open files")

satellite.Files.boot_id_hash = refuse
spec = {"data_dir": sys.argv[1], "generation": 0, "role": "group_commit", "flush": "sync", "options": {}}
actor = actor_classes.FlushActor(spec)
print("constructed", flush=True)
printed.set()
threading.Event().wait(60)
"""

GIVE_UP = """
import sys, threading
from pathlib import Path
from raymq.actors.ray import actor_classes
actor_classes.END_PAUSE_S = 0.0
actor_classes._exit_soon(Path(sys.argv[1]), "the disk said no")
threading.Event().wait(60)
"""


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_satellite_without_descriptors_ends_its_process_and_not_its_actor(tmp_path):
    # An exception in the constructor of an actor that is restarted would end it for good.
    done = run(SATELLITE, str(tmp_path))
    assert done.stdout == "constructed\n"
    assert done.returncode == 70
    assert "Too many open files" in done.stderr


def test_a_process_that_gives_up_leaves_the_reason_to_the_next_one(tmp_path):
    (tmp_path / "raymq").mkdir()
    assert replica_files.read_last_end(tmp_path) is None
    assert run(GIVE_UP, str(tmp_path)).returncode == actor_classes.EXIT_GAVE_UP
    found = replica_files.read_last_end(tmp_path)
    assert found is not None
    assert found["reason"] == "the disk said no"


START = """
import errno, socket, sys, threading
from types import SimpleNamespace
from raymq.actors.ray import actor_classes
from tests.support.waiting import until

ports = []
def prepare(spec, *, restarted):
    return SimpleNamespace(bind="127.0.0.1", advertised="127.0.0.1")

def write_endpoint(root, host, port, **more):
    ports.append(port)
    if len(ports) == 1:
        raise OSError(errno.EMFILE, "Too many open files")
    real(root, host, port, **more)

real, actor_classes.write_endpoint = actor_classes.write_endpoint, write_endpoint
actor_classes.RETRY_S = 0.01
actor_classes._was_restarted = lambda: False
actor = actor_classes.CommitLogActor({
    "cluster": "c", "cluster_id": "c", "shard": 0, "shards": 1, "replica": 0,
    "generation": 0, "generations": (), "least_epoch": 0,
    "data_dir": sys.argv[1], "replicas": 2, "candidates": (int(sys.argv[2]),), "voters": (0, 1), "flush": "sync",
    "peers": {1: (sys.argv[1], "peer")}, "node": None, "formed": False, "joining": False,
    "options": {"segment_size_bytes": 262144, "prewrite_window_bytes": 65536}, "satellites": ("group_commit",),
    "token": "secret", "tls": False, "version": "1", "prepare": "__main__:prepare",
})
until(lambda: actor._error is not None, lambda: threading.Event().wait(0.01))
print(actor._error)
until(lambda: actor.ready()["state"] == "RUNNING", lambda: threading.Event().wait(0.01))
with socket.socket() as probe:
    print(probe.connect_ex(("127.0.0.1", ports[0])) == errno.ECONNREFUSED or ports[0] == ports[1])
print(actor.endpoint() == f"127.0.0.1:{ports[1]}", len(ports))
print(actor._host.log.store_host == ("127.0.0.1", ports[1]))
actor.close(0.0)
"""


@pytest.mark.parametrize("leader", [0, 1])
def test_a_start_whose_endpoint_cannot_be_written_releases_everything_and_the_next_one_serves(
    tmp_path, leader
):
    done = run(START, str(tmp_path), str(leader))
    # The first try's server is closed.
    assert done.stdout.splitlines() == [
        "OSError: [Errno 24] Too many open files",
        "True",
        "True 2",
        # Records name the address of the server that serves.
        "True",
    ], done.stderr


def test_a_call_of_an_actor_by_itself_that_ray_loses_is_made_again(monkeypatch):
    has_begun, calls = threading.Event(), []

    def remote():
        calls.append(len(calls))
        if len(calls) == 3:
            has_begun.set()
        return calls[-1]

    actor = SimpleNamespace(occupy=SimpleNamespace(remote=remote))
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        get_runtime_context=lambda: SimpleNamespace(current_actor=actor),
        # both calls before the third one end with an error
        wait=lambda calls, timeout: (calls, []),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(actor_classes, "LOST_CALL_S", 0.0)
    begun = []
    monkeypatch.setattr(
        actor_classes, "start_thread", lambda target, *words: begun.append((target, words))
    )
    actor_classes._call_self("occupy", has_begun)
    ((target, words),) = begun
    target(*words)
    assert calls == [0, 1, 2]
