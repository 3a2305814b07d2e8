#!/usr/bin/env python3
"""A release of RayMQ on this machine: checked, built and tried, as far as an upload.

    .ci/release.py            what `raymq/__init__.py` calls the version, into dist/
    .ci/release.py --trial    the same of the last commit, at any time; leaves nothing

The changelog must begin with the version and its date, and Git must know no change and no such tag; a trial asks for
neither date nor tag, and leaves changes out. The source package and the wheel are built from the commit alone. Each is
installed in an environment of its own, and the wheel's command starts a cluster, sends a message and reads it.
Environments are made by uv (of `.venv`, or on PATH).
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: of a command of the trial
TIMEOUT_S = 300
BODY = "a message of the release"


class NotReady(Exception):
    """What must be mended before the release."""


def version_of(source: str) -> str:
    """The version in the text of `raymq/__init__.py`, the one place that has it."""
    found = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if found is None:
        raise NotReady('raymq/__init__.py has no line __version__ = "..."')
    return found[1]


def check_changelog(text: str, version: str, today: datetime.date, *, trial: bool) -> None:
    """Raises: NotReady unless the newest entry is of this version, has a date of the past and says something."""
    entries = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    heading, _, body = (entries or [""])[0].partition("\n")
    wanted = f"## {version} ({today})"
    found = re.fullmatch(r"(\S+) \((.+)\)", heading)
    if found is None or found[1] != version:
        raise NotReady(f"CHANGELOG.md begins with '## {heading}': make its newest entry '{wanted}'")
    if not re.search("^- ", body, re.MULTILINE):
        raise NotReady(f"the entry '## {heading}' of CHANGELOG.md is empty: say what changed")
    if trial and found[2] == "unreleased":
        return
    try:
        date = datetime.date.fromisoformat(found[2])
    except ValueError:
        raise NotReady(f"CHANGELOG.md calls {version} '{found[2]}': make it '{wanted}'") from None
    if date > today:
        raise NotReady(f"CHANGELOG.md dates {version} {date}, and today is {today}")


def check_git(version: str) -> None:
    """Raises: NotReady for changes that no commit has, and for a version that is tagged already."""
    changes = run(["git", "status", "--porcelain"], ROOT).strip()
    if changes:
        raise NotReady(f"commit or remove what Git does not know:\n{changes}")
    if run(["git", "tag", "--list", f"v{version}"], ROOT).strip():
        raise NotReady(f"Git has the tag v{version}: give raymq/__init__.py the next version")


def run(words: Sequence[str | Path], place: Path, *, text: str = "") -> str:
    """What a command prints. Raises: NotReady with its words, if it fails."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "RAY", "VIRTUAL_ENV"))
    }
    # Not of this user: what is tried leaves no trace.
    clean |= {"RAYMQ_HOME": f"{place}/home", "RAY_AUTH_TOKEN_PATH": f"{place}/ray-token"}
    try:
        done = subprocess.run(
            list(map(str, words)),
            cwd=place,
            env=clean,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise NotReady(f"no end after {TIMEOUT_S} s: {' '.join(map(str, words))}") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-2000:]
        raise NotReady(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{said}")
    return done.stdout


def build(place: Path) -> list[Path]:
    """Build the source package of the commit, and the wheel from it. Returns: both."""
    tree, out = place / "tree", place / "dist"
    tree.mkdir()
    run(["git", "archive", "--output", place / "tree.tar", "HEAD"], ROOT)
    run(["tar", "-xf", place / "tree.tar"], tree)
    run([sys.executable, "-m", "build", "--outdir", out, tree], place)
    return sorted(out.iterdir())


def install(package: Path, place: Path, uv: str) -> Path:
    """Install a package alone, with what it needs. Returns: the folder of its commands."""
    run([uv, "venv", "-q", "--no-project", "--python", sys.executable, place], ROOT)
    run([uv, "pip", "install", "-q", "--python", place / "bin" / "python", package], ROOT)
    run([uv, "pip", "check", "-q", "--python", place / "bin" / "python"], ROOT)
    return place / "bin"


def try_it(commands: Path, version: str, place: Path) -> None:
    """A cluster's life by the installed command alone. Raises: NotReady."""
    raymq, data = commands / "raymq", place / "data"
    if (said := run([raymq, "--version"], place).strip()) != f"raymq {version}":
        raise NotReady(f"raymq --version says {said!r}, and the release is {version}")
    run([raymq, "start", data, "--ephemeral"], place)
    try:
        run([raymq, "topic", "create", "t", "--cluster", data], place)
        run([raymq, "produce", "t", "--cluster", data], place, text=f"{BODY}\n")
        if BODY not in run([raymq, "consume", "t", "--cluster", data], place):
            raise NotReady("the message that was sent was not read")
    finally:
        run([raymq, "stop", data], place)


def main(arguments: Sequence[str]) -> int:
    """Returns: 0 when the release is in dist/, or when the trial went well."""
    if list(arguments) not in ([], ["--trial"]):
        print(__doc__, file=sys.stderr)
        return 2
    trial = bool(arguments)
    own = ROOT / ".venv" / "bin" / "uv"
    uv = str(own) if own.exists() else shutil.which("uv")
    try:
        if uv is None:
            raise NotReady("uv is missing: python3 run.py setup, or pip install uv")
        version = version_of((ROOT / "raymq" / "__init__.py").read_text(encoding="utf-8"))
        changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        check_changelog(changelog, version, datetime.date.today(), trial=trial)
        if not trial:
            check_git(version)
        with tempfile.TemporaryDirectory(prefix="raymq-release-") as name:
            place = Path(name)
            print(f"raymq {version}: building", flush=True)
            packages = build(place)
            for package in packages:
                print(f"  {package.name}: installing and trying it", flush=True)
                kind = package.suffix.strip(".")
                (place / kind).mkdir()
                try_it(install(package, place / f"env-{kind}", uv), version, place / kind)
            kept = [] if trial else keep(packages)
    except NotReady as error:
        print(f"not released: {error}", file=sys.stderr)
        return 1
    for package in kept:
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        print(f"  {package.relative_to(ROOT)}  sha256 {digest}")
    print("the trial went well" if trial else f"next: git tag v{version}, and upload dist/")
    return 0


def keep(packages: Sequence[Path]) -> list[Path]:
    """Put the packages into dist/, alone. Returns: them there."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    (ROOT / "dist").mkdir()
    return [Path(shutil.copy2(package, ROOT / "dist")) for package in packages]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
