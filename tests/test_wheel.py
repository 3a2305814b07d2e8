"""The wheel holds every module of the folders, under one name, and works without installation."""

from __future__ import annotations

import email.parser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("store", "actors", "replication", "client", "cluster", "spark", "doors")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from a source package made from a copy of the tree."""
    tree = tmp_path_factory.mktemp("tree") / "raymq"
    caches = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("raymq", *PARTS):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=caches)
    for name in ("pyproject.toml", "README.md", "LICENSE", "pyspark_raymq.py"):
        shutil.copy(ROOT / name, tree / name)
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_exactly_the_modules_of_the_tree(names):
    expected = {
        f"raymq/{path.relative_to(ROOT).as_posix()}"
        for part in PARTS
        for path in (ROOT / part).rglob("*.py")
    }
    expected |= {f"raymq/{path.name}" for path in (ROOT / "raymq").glob("*.py")}
    expected.add("pyspark_raymq.py")
    assert {name for name in names if name.endswith(".py")} == expected
    assert any(name.startswith("raymq/spark/") for name in names)


def test_the_wheel_has_one_top_level_name_and_the_module_that_spark_looks_for(names):
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"raymq", "pyspark_raymq.py"}


@pytest.mark.parametrize("folder", ["raymq", *(f"raymq/{part}" for part in PARTS)])
def test_every_package_says_that_it_is_typed(names, folder):
    assert f"{folder}/py.typed" in names


def test_the_wheel_carries_its_licence_and_its_command(wheel, names):
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    with zipfile.ZipFile(wheel) as archive:
        entry = next(name for name in names if name.endswith("/entry_points.txt"))
        assert b"raymq = raymq.cluster.cli.main:main" in archive.read(entry)


def test_spark_java_and_plots_are_extras(wheel, names):
    metadata = next(name for name in names if name.endswith("/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        headers = email.parser.BytesParser().parsebytes(archive.read(metadata))
    needs = [str(value) for value in headers.get_all("Requires-Dist", [])]
    plain = {re.split("[<>=; ]", need)[0] for need in needs if "extra ==" not in need}
    assert plain == {
        *("ray", "pyarrow", "numpy", "crcmod", "google-crc32c", "isal", "typing_extensions")
    }
    assert set(headers.get_all("Provides-Extra", [])) == {
        "spark",
        "spark4",
        "demo",
        "bench",
        "client",
        "data",
        "serve",
        "trace",
        "rocketmq",
        "docs",
        "dev",
    }
    assert headers["Requires-Python"] == ">=3.10"


def test_the_wheel_works_as_a_zip_file_as_spark_ships_it(wheel, tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import raymq.store.base.errors as e;"
        "print(e.__file__.startswith(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(wheel)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "True", done.stderr
