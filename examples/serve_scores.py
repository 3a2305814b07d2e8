"""A Serve deployment fed by a topic: a replica that dies is replaced by one with the same state.

    pip install "ray[serve]"; python examples/serve_scores.py [DATA_DIR]

A thread of the deployment follows the topic `scores`, and HTTP requests are answered from memory. The state is a
function of the log, so a new replica reads the topic from the beginning. A larger state would be kept in a checkpoint
together with its offsets (see resume_training.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import urllib.request
from typing import Any

import ray
from ray import serve

import raymq

PLAYERS, GAMES = 20, 2_000


@serve.deployment(ray_actor_options={"num_cpus": 0.2})
class Scores:
    """The sum of each player's points in the messages read so far."""

    def __init__(self, cluster: raymq.Cluster) -> None:
        self._cluster = cluster
        self._points: dict[str, int] = {}
        self._read = 0
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        with self._cluster.consumer("scores", start="earliest") as consumer:
            for message in consumer:
                player = (message.key or b"").decode()
                self._points[player] = self._points.get(player, 0) + message.value["points"]
                self._read += 1

    def __call__(self, request: Any) -> dict[str, Any]:
        """`/` answers {replica, read, points}."""
        return {"replica": os.getpid(), "read": self._read, "points": dict(self._points)}


def ask(port: int, messages: int, *, but: int = 0) -> dict[str, Any]:
    """Ask until a replica with another process id than `but` has read so many messages."""
    while True:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as reply:
                answer: dict[str, Any] = json.load(reply)
            if answer["read"] == messages and answer["replica"] != but:
                return answer
        time.sleep(0.1)


def free_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Play, ask, kill the replica, ask again."""
    with raymq.start(sys.argv[1] if len(sys.argv) > 1 else "raymq-scores") as cluster:
        cluster.create_topic("scores", queues=2)
        ray.init(cluster.ray_address, ignore_reinit_error=True)
        with cluster.producer(codec="json") as producer:
            for game in range(GAMES):
                key = f"player-{game % PLAYERS}".encode()
                producer.send("scores", {"points": game % 7}, key=key)
        # Those of earlier runs are there, too.
        messages = cluster.describe_topic("scores")["messages"]

        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(Scores.bind(cluster))

        before = ask(port, messages)
        for replica in ray.util.list_named_actors(all_namespaces=True):
            if replica["name"].startswith("SERVE_REPLICA::"):
                ray.kill(ray.get_actor(**replica), no_restart=False)
        after = ask(port, messages, but=before["replica"])
        serve.shutdown()

    same = before["points"] == after["points"]
    print(json.dumps({"messages": messages, "read": after["read"], "same": same}))
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
