"""A training reads a topic through Ray Data's `iter_torch_batches`, is killed, and resumes with what it has not seen.

    python examples/resume_training.py [DATA_DIR] [--without-torch]

A checkpoint is one file of numpy: the arrays of the model and, as JSON, the offsets up to which the model has learnt.
It is replaced at once. So a trainer that is killed at any moment resumes with exactly the messages after its last
checkpoint. `--without-torch` trains the same model with numpy, for a machine without PyTorch (`pip install torch
'ray[train]'`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import raymq
from raymq.data import read_topic

TOPIC, SAMPLES, FEATURES, BATCH = "samples", 4_096, 16, 128
#: samples of a queue between two checkpoints
STEP = 512
RATE = 0.05

Array = np.ndarray[Any, np.dtype[np.float32]]


class TorchModel:
    """A linear model of PyTorch."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._layer = torch.nn.Linear(FEATURES, 1)
        self._optimizer = torch.optim.SGD(self._layer.parameters(), lr=RATE)

    def learn(self, dataset: Any) -> Iterator[Array]:
        """One step for each batch. Yields: the batches, after their steps."""
        for batch in dataset.iter_torch_batches(batch_size=BATCH):
            samples = batch["sample"]
            self._optimizer.zero_grad()
            found = self._layer(samples[:, :FEATURES])
            self._torch.nn.functional.mse_loss(found, samples[:, FEATURES:]).backward()
            self._optimizer.step()
            yield samples.numpy()

    def state_dict(self) -> dict[str, Array]:
        return {name: tensor.numpy() for name, tensor in self._layer.state_dict().items()}

    def load_state_dict(self, state: dict[str, Array]) -> None:
        self._layer.load_state_dict({n: self._torch.from_numpy(a) for n, a in state.items()})


class NumpyModel:
    """The same model without PyTorch."""

    def __init__(self) -> None:
        self._weights = np.zeros((FEATURES, 1), dtype=np.float32)

    def learn(self, dataset: Any) -> Iterator[Array]:
        """One step for each batch. Yields: the batches, after their steps."""
        for batch in dataset.iter_batches(batch_size=BATCH, batch_format="numpy"):
            samples = batch["sample"]
            features = samples[:, :FEATURES]
            error = features @ self._weights - samples[:, FEATURES:]
            self._weights -= RATE * 2 / len(samples) * features.T @ error
            yield samples

    def state_dict(self) -> dict[str, Array]:
        return {"weights": self._weights}

    def load_state_dict(self, state: dict[str, Array]) -> None:
        self._weights = state["weights"]


def to_samples(batch: dict[str, Any]) -> dict[str, Any]:
    """Messages as float32[n, FEATURES + 1]; the last column is what the model is to find."""
    data = np.frombuffer(b"".join(batch["value"]), dtype=np.float32)
    return {"sample": data.reshape(-1, FEATURES + 1)}


def next_offsets(cluster: raymq.Cluster, offsets: dict[int, int]) -> dict[int, int]:
    """Where the next part of the topic ends: up to STEP messages of each queue."""
    queues = cluster.describe_topic(TOPIC)["queues"]
    return {
        each["queue_id"]: min(offsets.get(each["queue_id"], 0) + STEP, each["max_offset"])
        for each in queues
    }


def save(checkpoint: Path, model: dict[str, Array], progress: dict[str, Any]) -> None:
    """Replace the checkpoint. The arrays of a model are named as its layers are; none is named `progress`."""
    new = checkpoint.with_suffix(".new")
    with new.open("wb") as file:
        np.savez(file, progress=np.array(json.dumps(progress)), **model)
    new.replace(checkpoint)


def load(checkpoint: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The model and the progress of a checkpoint. Numpy unpickles nothing here: a file of others runs no code."""
    with np.load(checkpoint, allow_pickle=False) as arrays:
        model = {name: arrays[name] for name in arrays.files}
    return model, json.loads(str(model.pop("progress")))


def train(data_dir: str, checkpoint: Path, model: TorchModel | NumpyModel) -> None:
    """Go on from the checkpoint to the end of the topic. Prints a line after each checkpoint."""
    import ray

    cluster = raymq.connect(data_dir)
    ray.init(cluster.ray_address, namespace="training", log_to_driver=False)
    # The parts are small: Ray Data would cut each into a hundred blocks.
    ray.data.DataContext.get_current().read_op_min_num_blocks = 1
    ray.data.DataContext.get_current().enable_progress_bars = False
    offsets: dict[int, int] = {}
    seen, total = 0, 0.0
    if checkpoint.exists():
        arrays, progress = load(checkpoint)
        model.load_state_dict(arrays)
        seen, total = progress["seen"], progress["total"]
        offsets = {int(queue): offset for queue, offset in progress["offsets"].items()}

    while (ends := next_offsets(cluster, offsets)) != offsets:
        begins = {queue: offsets.get(queue, 0) for queue in ends}
        messages = read_topic(cluster, TOPIC, start_offset=begins, end_offset=ends)
        for samples in model.learn(messages.select_columns(["value"]).map_batches(to_samples)):
            seen += len(samples)
            total += float(samples.sum(dtype=np.float64))

        # What was learnt and how far it was read: both or neither.
        offsets = ends
        save(checkpoint, model.state_dict(), {"offsets": offsets, "seen": seen, "total": total})
        print(json.dumps({"seen": seen, "total": total}), flush=True)


def watch(words: Sequence[str], kill_at: int | None) -> dict[str, float]:
    """Run a trainer, and kill it once it has seen so many samples. Returns: what it printed last."""
    with subprocess.Popen(words, stdout=subprocess.PIPE) as trainer:
        last: dict[str, float] = {}
        for line in trainer.stdout or ():
            if not line.startswith(b"{"):
                # A line of Ray.
                continue
            last = json.loads(line)
            if kill_at is not None and last["seen"] >= kill_at:
                trainer.kill()
    if trainer.returncode != (0 if kill_at is None else -signal.SIGKILL):
        sys.exit(f"a trainer ended with {trainer.returncode}")
    return last


def main(arguments: list[str]) -> None:
    """Send samples if there are none, train, kill, resume, and check that every sample was learnt once."""
    with_torch = "--without-torch" not in arguments
    words = [word for word in arguments if not word.startswith("--")]
    data_dir = words[0] if words else "raymq-training"
    checkpoint = Path(f"{data_dir}.checkpoint").absolute()
    if "--train" in arguments:
        train(data_dir, checkpoint, TorchModel() if with_torch else NumpyModel())
        return

    checkpoint.unlink(missing_ok=True)
    random = np.random.default_rng(7)
    features = random.random((SAMPLES, FEATURES), dtype=np.float32)
    samples = np.hstack([features, features.mean(axis=1, keepdims=True)])
    with raymq.start(data_dir) as cluster:
        cluster.create_topic(TOPIC, queues=2)
        # An earlier run may have sent them.
        if not cluster.describe_topic(TOPIC)["messages"]:
            with cluster.producer() as producer:
                for queue, half in enumerate(np.split(samples, 2)):
                    rows = pa.record_batch({"body": pa.array([row.tobytes() for row in half])})
                    producer.send_batch(TOPIC, rows, queue_id=queue)

        trainer = [sys.executable, __file__, *arguments, "--train"]
        killed = watch(trainer, kill_at=SAMPLES // 3)
        resumed = watch(trainer, kill_at=None)

    right = bool(np.isclose(resumed["total"], samples.sum(dtype=np.float64)))
    was_killed = 0 < killed["seen"] < SAMPLES
    found = {"samples": SAMPLES, "seen": resumed["seen"], "sums_equal": right, "killed": was_killed}
    print(json.dumps(found))
    if resumed["seen"] != SAMPLES or not right or not was_killed:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
