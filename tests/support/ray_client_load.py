"""Producers and a consumer that reach a cluster through the port of Ray Client alone, while a test kills its leaders.

Arguments: the URL (`ray://`), the topic, and the count of its queues. It prints a line when each queue has a receipt.
For each line of its standard input it waits until all producers have receipts for what they send from then on, and
prints a line. The end of its input ends the load. Then it waits until the consumer has all that is acknowledged, and
prints JSON:

    transport: of the connection
    sent: [producer, queue, how many] of each sequence
    acked: [producer, queue, number, offset] of each receipt
    got: [queue, offset, body] of each message of the consumer
"""

from __future__ import annotations

import json
import sys
import threading

import raymq
from tests.support.history import History, Load, Reader
from tests.support.waiting import until

PRODUCERS = 2


def wait_a_moment() -> None:
    """Let the consumer read."""
    threading.Event().wait(Load.PACE_S)


def main() -> None:
    """Send and read, and print what became of it."""
    url, topic, queues = sys.argv[1], sys.argv[2], int(sys.argv[3])
    history = History()
    with raymq.connect(url) as cluster:
        with (
            Load(cluster, topic, history, producers=PRODUCERS, queues=queues) as load,
            Reader(cluster, topic) as reader,
        ):
            until(lambda: len(history.acked()) == PRODUCERS * queues, load.pause)
            print("writes", flush=True)
            while sys.stdin.readline():
                sent = history.sent()
                until(lambda: history.acked_beyond(sent), load.pause)  # noqa: B023
                print("writes again", flush=True)
            load.stop()
            # All that was sent is acknowledged.
            until(lambda: len(reader.got) >= history.count() or reader.failed, wait_a_moment)
            reader.stop()
        outcome = {
            "transport": cluster.transport,
            "sent": [[*key, count] for key, count in history.sent().items()],
            "acked": [
                [*key, number, offset]
                for key, numbers in history.acked().items()
                for number, offset in numbers.items()
            ],
            "got": [[read.queue, read.offset, read.body.decode()] for read in reader.got],
        }
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
