"""A repeated write uses the queues of its first run, also when the topic has more by now."""

from __future__ import annotations

from typing import Any

from raymq.spark.sink import _queues_of_write, _run_producer_id


class Shard:
    """A cluster that knows the epochs of producers."""

    def __init__(self) -> None:
        self.epochs: dict[int, int] = {}

    def call(self, shard: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        assert (shard, op) == (0, "producer_epoch")
        return {"epoch": self.epochs.get(args["producer_id"])}

    def run(self, write_id: str, facts: dict[str, Any]) -> int:
        """A run of a write. Returns: the queues that it uses."""
        queues = _queues_of_write(self, write_id, facts)  # type: ignore[arg-type]
        self.epochs[_run_producer_id(write_id, queues, facts)] = 0
        return queues


def test_a_repeated_write_uses_the_queues_of_its_first_run() -> None:
    shard = Shard()
    young = {"queues": 2}
    grown = {"queues": 4, "former_queues": [2]}
    again = {"queues": 6, "former_queues": [2, 4]}
    assert shard.run("early", young) == 2
    assert shard.run("early", grown) == 2
    assert shard.run("late", grown) == 4
    assert [shard.run(each, again) for each in ("early", "late", "new")] == [2, 4, 6]
