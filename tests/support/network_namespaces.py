"""Network namespaces: may this process make them? And machines at a switch, whose links break."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

#: the address of a card that no machine has
NOWHERE = "02:00:00:00:00:01"
#: of setns(2): a network namespace
CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    """The command `ip`. Raises: RuntimeError with what it says; FileNotFoundError."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def can_make_namespaces() -> bool:
    """Whether two of them can be joined by a pair of virtual cards: tried, and undone."""
    mark = f"rq{secrets.token_hex(3)}"
    with contextlib.ExitStack() as undo:
        try:
            ip("netns", "add", mark)
            undo.callback(ip, "netns", "del", mark)
            ip("-n", mark, "link", "add", f"{mark}a", "type", "veth", "peer", "name", f"{mark}b")
        except (RuntimeError, FileNotFoundError):
            return False
    return True


class Network(NamedTuple):
    """A namespace for each machine, one for the switch between them, and the ways to break the links."""

    #: the namespace of the switch
    switch: str
    #: machine -> its namespace, which is also the name of its card in it
    names: Mapping[str, str]
    #: machine -> its port at the switch
    ports: Mapping[str, str]
    #: machine -> its address
    hosts: Mapping[str, str]

    def unplug(self, machine: str) -> None:
        """Carry nothing to this machine and nothing from it."""
        ip("-n", self.switch, "link", "set", self.ports[machine], "down")

    def plug(self, machine: str) -> None:
        """The end of `unplug`."""
        ip("-n", self.switch, "link", "set", self.ports[machine], "up")

    def lose(self, sender: str, receiver: str) -> None:
        """Lose what one machine sends to another one, unnoticed: it goes to a card that no machine has.

        What the other one sends arrives. A route to nowhere would lose that, too, where a kernel checks that it could
        answer to the sender (rp_filter).
        """
        card = self.names[sender]
        ip(
            *("-n", card, "neighbour", "replace", self.hosts[receiver]),
            *("lladdr", NOWHERE, "nud", "permanent", "dev", card),
        )

    def deliver(self, sender: str, receiver: str) -> None:
        """The end of `lose`."""
        card = self.names[sender]
        ip("-n", card, "neighbour", "del", self.hosts[receiver], "dev", card)

    def socket_at(self, machine: str) -> socket.socket:
        """A socket for datagrams of a machine, bound to its address."""

        def make() -> socket.socket:
            with open(f"/run/netns/{self.names[machine]}", "rb") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.bind((self.hosts[machine], 0))
            return made

        # A thread enters the namespace and ends there. The socket stays in it.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(make).result()


@contextlib.contextmanager
def joined_machines(hosts: Mapping[str, str], switch_host: str) -> Iterator[Network]:
    """Machines with these addresses at a switch, which has an address, too."""
    mark = secrets.token_hex(2)
    switch = f"rq{mark}s"
    network = Network(
        switch,
        {machine: f"rq{mark}{machine}" for machine in hosts},
        {machine: f"rq{mark}{machine}s" for machine in hosts},
        dict(hosts),
    )
    with contextlib.ExitStack() as undo:
        for name in (switch, *network.names.values()):
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
        ip("-n", switch, "link", "add", "hub", "type", "bridge")
        ip("-n", switch, "address", "add", f"{switch_host}/24", "dev", "hub")
        ip("-n", switch, "link", "set", "lo", "up")
        ip("-n", switch, "link", "set", "hub", "up")
        for machine, name in network.names.items():
            port = network.ports[machine]
            ip(
                *("-n", switch, "link", "add", port, "type", "veth"),
                *("peer", "name", name, "netns", name),
            )
            ip("-n", switch, "link", "set", port, "master", "hub", "up")
            ip("-n", name, "address", "add", f"{hosts[machine]}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")
        yield network
