#!/usr/bin/env python3
"""What RayMQ does on aarch64, emulated: a Debian for arm64, whose programs qemu runs, and our tests in it.

    .ci/aarch64.py [--root DIRECTORY] [WORDS OF PYTEST ...]     `TESTS`, or those in tests/ that the words name

It needs root, the packages `debootstrap` and `qemu-user-static`, and 1 GB in /var/tmp, where the system is until the
end. With --root the system is in DIRECTORY and stays: the next run begins with its tests. Remove it when the
requirements change.

It shows function alone: emulation keeps the order of x86_64 (docs/decisions/0033-aarch64.md). Mounts and processes are
in namespaces of their own, and end with them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pythons import copy_tree

#: what tells the kernel of qemu, of the package
BINFMT = "/usr/lib/binfmt.d/qemu-aarch64.conf"
#: what tests need beside RayMQ's own requirements
NEEDED = ("pytest", "pytest-timeout", "hypothesis", "grpcio")
#: the words in shared memory, and the processes that use them: wakeups, satellites, deaths, failovers
TESTS = tuple(
    f"tests/actors/test_{name}.py"
    for name in (
        *("memory_order", "control_block", "ring", "wakeup", "append_wakeups", "processes"),
        *("satellite", "commit_service", "supervisor", "commit_log_host", "put_acks"),
        *("replicator", "follower", "failover", "elections", "failures"),
    )
)
#: of one test
TIMEOUT_S = 600

#: Args: the directory of the system, then a command to run in it.
SCRIPT = f"""
set -e
root=$1
shift
[ -e /proc/sys/fs/binfmt_misc/register ] || mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || cat {BINFMT} > /proc/sys/fs/binfmt_misc/register
[ -e "$root/venv/bin/pytest" ] ||
    debootstrap --arch=arm64 --variant=minbase --include=python3-venv,ca-certificates bookworm "$root"

mount --rbind /dev "$root/dev"
mount -t tmpfs none "$root/dev/shm"
mount --rbind /sys "$root/sys"
mount -t proc none "$root/proc"

if [ ! -e "$root/venv/bin/pytest" ]; then
    # Its pip reaches what this machine's pip reaches.
    for file in /etc/resolv.conf /etc/ssl/certs/ca-certificates.crt /etc/pip.conf; do
        [ ! -e $file ] || cp "$file" "$root$file"
    done
    chroot "$root" python3 -m venv /venv
    printf '%s' "$SITECUSTOMIZE" > "$root/etc/python3.11/sitecustomize.py"
    chroot "$root" /venv/bin/pip install -q --no-compile -e /raymq {" ".join(f"'{each}'" for each in NEEDED)}
fi
exec chroot "$root" /usr/bin/env -C /raymq "$@"
"""
#: qemu makes up /proc/<own pid>/stat, with a start time of its own and no threads. A satellite would not be taken for
#: the process that it says it is. The main thread's file is the kernel's
SITECUSTOMIZE = """
import builtins
import os

kernels_open = open


def open_kernels(file, *args, **kwargs):
    pid = os.getpid()
    own = file in ("/proc/self/stat", f"/proc/{pid}/stat")
    return kernels_open(f"/proc/self/task/{pid}/stat" if own else file, *args, **kwargs)


builtins.open = open_kernels
"""


def run_tests(system: Path, words: Sequence[str]) -> int:
    """Make the system if it is not there, and run pytest in it. Returns: its exit code."""
    tree = system / "raymq"
    shutil.rmtree(tree, ignore_errors=True)
    copy_tree(tree)
    pips = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") or name.lower().endswith("_proxy")
    }
    clean = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    pytest = ["/venv/bin/python", "-m", "pytest", "--timeout", str(TIMEOUT_S)]
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    return subprocess.run(
        [*alone, "sh", "-c", SCRIPT, "sh", str(system), *pytest, *words],
        env={**clean, **pips, "SITECUSTOMIZE": SITECUSTOMIZE},
        check=False,
    ).returncode


def main(arguments: Sequence[str]) -> int:
    """Returns: pytest's exit code, or 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path)
    parsed, words = parser.parse_known_args(arguments)
    if not any(each.startswith("tests") for each in words):
        words += TESTS
    if os.geteuid() != 0 or shutil.which("debootstrap") is None or not Path(BINFMT).exists():
        print("aarch64.py: run it as root, with debootstrap and qemu-user-static", file=sys.stderr)
        return 2
    if parsed.root is not None:
        return run_tests(parsed.root.resolve(), words)
    with tempfile.TemporaryDirectory(prefix="raymq-aarch64-", dir="/var/tmp") as name:
        return run_tests(Path(name), words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
