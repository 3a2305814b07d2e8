"""A client on the machine of a leader that is about to be cut off: it sends all the time, to that leader.

Its arguments: the endpoint of the leader, the token, the topic, and its number among the producers of the history.
It prints a line when it has a receipt. A line on its standard input says that the leader is cut off from then on. It
sends some more messages, waits for what becomes of all of them, and prints it as JSON:

    sent: how many
    late: the number of the first message that was sent after that line
    acked: number -> offset
    unknown: the numbers that may be stored
    refused: the numbers that are certainly not stored
"""

from __future__ import annotations

import json
import sys
import threading

import raymq
from raymq.store.base.errors import DeliveryUnknown, Unavailable
from tests.support.history import body

QUEUE = 0
PACE_S = 0.02
#: after the cut
LATE = 5
#: shorter than the isolation lasts: the cut ends only after the answers
DELIVERY_MS = 2_500


def main() -> None:
    """Send, and print what became of it."""
    endpoint, token, topic, producer = sys.argv[1:]
    is_cut = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), is_cut.set()), daemon=True).start()
    sent = []
    with (
        raymq.connect(f"raymq://{endpoint}", token=token) as cluster,
        cluster.producer(acks="quorum", delivery_timeout_ms=DELIVERY_MS, linger_ms=0) as sender,
    ):

        def send() -> None:
            text = body(int(producer), QUEUE, len(sent))
            sent.append(sender.send(topic, text, queue_id=QUEUE))

        send()
        sent[0].result(60.0)
        print("has a receipt", flush=True)
        while not is_cut.wait(PACE_S):
            send()
        late = len(sent)
        for _ in range(LATE):
            send()
            threading.Event().wait(PACE_S)

        acked, unknown, refused = {}, [], []
        for number, future in enumerate(sent):
            try:
                acked[number] = future.result(60.0).offset
            except DeliveryUnknown:
                unknown.append(number)
            except Unavailable:
                refused.append(number)
    outcomes = {"acked": acked, "unknown": unknown, "refused": refused}
    print(json.dumps({"sent": len(sent), "late": late, **outcomes}))


if __name__ == "__main__":
    main()
