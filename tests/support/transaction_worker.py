"""A program that reads messages, and commits a result of each together with its progress, in a process of its own.

    python -m tests.support.transaction_worker KIND URL TOPIC OUT GROUP FILE [BATCH]

KIND is "workers" or "members". Each result is the queue and the offset of its message. FILE gets a line for each
transaction: `committed ROWS`, `fenced`, or `failed`. BATCH: messages of one transaction at most.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

import raymq
from raymq.client.produce.transaction import Transaction
from raymq.errors import CommitUnknown, Fenced, RayMQError

#: messages of one transaction, unless the command says so
BATCH = 7
LEASE_S, SESSION_S = 3.0, 3.0


def commit(txn: Transaction, rows: int, lines: TextIO) -> bool:
    """Commit, and write down what became of it. Returns: whether it counts."""
    while True:
        try:
            txn.commit()
            print("committed", rows, file=lines)
            return True
        except CommitUnknown:
            continue
        except Fenced:
            print("fenced", file=lines)
            return False


def run_workers(
    cluster: raymq.Cluster, topic: str, out: str, group: str, lines: TextIO, batch_rows: int
) -> None:
    with (
        cluster.producer() as producer,
        cluster.workers(topic, group=group, lease_s=LEASE_S, backoff=(0,)) as workers,
    ):
        while True:
            batch = workers.get_batch(batch_rows, 1.0)
            if not len(batch):
                continue
            txn = producer.transaction()
            places = zip(
                batch.columns["queue_id"].to_pylist(),
                batch.columns["offset"].to_pylist(),
                strict=True,
            )
            for place in places:
                txn.send(out, b"%d %d" % place)
            txn.ack(batch)
            if not commit(txn, len(batch), lines):
                # Some may be held still, and would be for as long as the program runs.
                with contextlib.suppress(Fenced):
                    batch.release()


def run_members(
    cluster: raymq.Cluster, topic: str, out: str, group: str, lines: TextIO, batch_rows: int
) -> None:
    with cluster.producer() as producer:
        while True:
            with cluster.consumer(
                topic, group=group, start="earliest", session_timeout_s=SESSION_S
            ) as consumer:
                while True:
                    messages = consumer.poll(batch_rows, 1.0)
                    if not messages:
                        continue
                    txn = producer.transaction()
                    for message in messages:
                        txn.send(out, b"%d %d" % (message.queue_id, message.offset))
                    try:
                        txn.commit_offsets(consumer)
                    except Fenced:
                        txn.abort()
                        print("fenced", file=lines)
                        break
                    if not commit(txn, len(messages), lines):
                        # It begins again where the group's last commit was.
                        break


def main() -> None:
    kind, url, topic, out, group, path, *rest = sys.argv[1:]
    batch_rows = int(rest[0]) if rest else BATCH
    run = {"workers": run_workers, "members": run_members}[kind]
    with open(path, "a", buffering=1) as lines, raymq.connect(url) as cluster:
        while True:
            try:
                run(cluster, topic, out, group, lines, batch_rows)
            except RayMQError as error:
                if not error.retriable:
                    raise
                print("failed", error, file=lines)


main()
