"""The unit of docs/operating/boot.md, run as systemd runs it: by a service user who has no home."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raymq.cluster.deploy.owned_ray import stop_owned
from raymq.cluster.deploy.ray_host import load_owned
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files
from tests.support.lean_ray import LEAN
from tests.support.leftovers import VAR_TMP, claim
from tests.support.workers import end_with_parent

UNIT = Path(__file__).resolve().parents[2] / "docs" / "operating" / "boot.md"
#: the user `nobody`, as whom root runs the unit. Another user runs it as itself
NOBODY = 65_534


class Service:
    """Runs the commands of the unit, and others, as its user. What they print is JSON."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "data"
        #: systemd gives a service no more
        self.environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "HOME": "/nonexistent",
            "RAYMQ_LOG_LEVEL": "debug",
            **LEAN,
        }
        self.user: dict[str, Any] = {}
        nobody: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        if os.geteuid() == 0 and self._can_import(nobody):
            self.user = nobody
            os.chown(directory, NOBODY, NOBODY)
        else:
            # Under /proc not even root can make a directory.
            self.environment["HOME"] = "/proc/nonexistent"

    def command(self, name: str) -> Any:
        """Run a command of the unit, such as ExecStart."""
        found = re.search(f"^{name}=(.+)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE)
        assert found is not None, name
        program, *words = shlex.split(found[1].replace("/data/raymq", str(self.data)))
        assert program == "/opt/raymq/bin/raymq"
        return self(*words)

    def __call__(self, *words: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "raymq", *words, "--json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env=self.environment,
            timeout=120,
            preexec_fn=end_with_parent,
            **self.user,
        )
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    def _can_import(self, user: dict[str, Any]) -> bool:
        """Whether that user may read this tree and run its Python."""
        try:
            done = subprocess.run(
                [sys.executable, "-c", "import raymq"],
                check=False,
                cwd="/",
                env=self.environment,
                capture_output=True,
                **user,
            )
        except OSError:
            # The interpreter is in a directory of another user.
            return False
        return done.returncode == 0


@pytest.fixture
def service() -> Iterator[Service]:
    directory = Path(tempfile.mkdtemp(prefix=".raymq-test-", dir=VAR_TMP))
    claim(directory)
    made = Service(directory)
    try:
        yield made
    finally:
        stop_owned(ClusterPaths(made.data), files=Files(), clock=Clock())
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_unit_of_the_page_starts_reloads_and_stops_for_a_user_without_a_home(
    service: Service,
) -> None:
    service.command("ExecStart")
    assert service("topic", "create", "t")["created"]
    # by the name that the list of clusters has
    assert service("status")["state"] == "RUNNING"
    token = ClusterPaths(service.data).ray_token
    assert token.stat().st_mode & 0o777 == 0o600
    owned = load_owned(ClusterPaths(service.data), Files())
    assert owned is not None
    assert owned.auth_token_path == str(token)
    logs = Path(owned.temp_dir).glob("session_*/logs/worker-*.err")
    assert any("raymq.satellite: group_commit: synced up to" in log.read_text() for log in logs)
    service.command("ExecReload")
    assert service.command("ExecStop")["clean"]
