"""The checks by name: `nox` runs lint, types, contract and tests; `nox -s NAME -- ARGS` runs one.

In an environment that has the extras already (`python3 run.py setup`): `nox --no-venv`.
"""

from __future__ import annotations

import os
import tempfile

import nox

nox.needs_version = ">=2024.3.2"
nox.options.sessions = ["lint", "types", "contract", "tests"]
nox.options.reuse_existing_virtualenvs = True


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and its format."""
    session.install("ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict."""
    session.install("-e", ".[dev,demo]")
    session.run("mypy")
    session.run("mypy", "--strict", "run.py", "noxfile.py")


@nox.session
def contract(session: nox.Session) -> None:
    """Imports go one way."""
    session.install("-e", ".[dev]")
    session.run("lint-imports")


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that needs no Java."""
    session.install("-e", ".[dev]")
    session.run("python", "-m", "pytest", "-m", "not spark and not interop", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation site, into build/site; a warning, such as a broken link, fails it."""
    session.install("-e", ".[docs]")
    # Else Material advertises its successor at every build.
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def crash(session: nox.Session) -> None:
    """The crash states of the engine alone, four hundred thousand or as many as RAYMQ_CRASH_DEPTH says."""
    session.install("-e", ".[dev]")
    session.run(
        *("python", "-m", "pytest", "tests/crash", "--timeout", "3600", *session.posargs),
        env={"RAYMQ_CRASH_DEPTH": os.environ.get("RAYMQ_CRASH_DEPTH", "4")},
    )


@nox.session
def fuzz(session: nox.Session) -> None:
    """New random cases for everything that hypothesis tests; a failed one prints how to make it again."""
    session.install("-e", ".[dev]")
    session.run(
        *("python", "-m", "pytest", "--timeout", "3600", "tests/store", "tests/replication"),
        *("tests/crash/test_store_model.py", *session.posargs),
        env={"RAYMQ_FUZZ_EXAMPLES": "3000"},
    )


@nox.session
def spark(session: nox.Session) -> None:
    """The tests on Spark; needs Java 17 first on PATH."""
    session.install("-e", ".[dev,demo]")
    session.run("python", "-m", "pytest", "-m", "spark", *session.posargs)


@nox.session
def spark4(session: nox.Session) -> None:
    """The format "raymq" on the newest Spark 4, or on RAYMQ_SPARK4; needs a JDK 17 or newer first on PATH."""
    wanted = os.environ.get("RAYMQ_SPARK4", "pyspark>=4.1,<5")
    with tempfile.TemporaryDirectory() as folder:
        # Beside the environment's own PySpark 3.5, with the py4j that it needs: pip says that RayDP does not want it.
        session.run("python", "-m", "pip", "install", "-q", "--target", folder, wanted)
        session.run(
            *("python", "-m", "pytest", "tests/spark4", *session.posargs),
            env={"PYTHONPATH": folder},
        )


@nox.session
def interop(session: nox.Session) -> None:
    """Apache RocketMQ opens our stores and we open its; needs a JDK (17 or newer) and Maven, else it fails."""
    session.install("-e", ".[dev]")
    session.run(
        *("python", "-m", "pytest", "-m", "interop", "tests/interop", *session.posargs),
        env={
            "RAYMQ_INTEROP": "required",
            "RAYMQ_DAMAGED_STORES": os.environ.get("RAYMQ_DAMAGED_STORES", "500"),
        },
    )


@nox.session
def simulate(session: nox.Session) -> None:
    """Replicas under random faults, 150 times as many runs as CI makes: three hundred million steps.

    And all schedules of seven exchanges instead of five.
    """
    session.install("-e", ".[dev]")
    session.run(
        # With -s it prints how often everything happened.
        *("python", "-m", "pytest", "-s"),
        "tests/replication/test_simulation.py",
        "tests/replication/test_starved.py",
        *("--timeout", "36000", *session.posargs),
        env={
            "RAYMQ_SIMULATED_STEPS": os.environ.get("RAYMQ_SIMULATED_STEPS", "150"),
            "RAYMQ_SEARCH_DEPTH": os.environ.get("RAYMQ_SEARCH_DEPTH", "7"),
        },
    )


@nox.session
def simulate_groups(session: nox.Session) -> None:
    """Consumer groups under random faults: fifty million steps, and searches with each fault and each pair, an hour.

    It goes on where the last one ended, `-- --minutes 10` at most for so long: build/simulated_groups.json has what
    was done.
    """
    session.install("-e", ".[dev]")
    session.run("python", "-m", "tests.groups.simulate", *session.posargs)


@nox.session
def workers(session: nox.Session) -> None:
    """Workers and transactions in bad cases on real Ray: a million messages with 50 kills, twice; 200 workers stop."""
    session.install("-e", ".[dev]")
    session.run(
        *("python", "-m", "pytest", "-s"),
        *("tests/ray/test_exactly_once.py", "tests/ray/test_worker_faults.py"),
        *("--timeout", "3600", *session.posargs),
        env={
            "RAYMQ_ONCE_MESSAGES": os.environ.get("RAYMQ_ONCE_MESSAGES", "1000000"),
            "RAYMQ_ONCE_KILLS": os.environ.get("RAYMQ_ONCE_KILLS", "50"),
            "RAYMQ_WORKER_STOPS": os.environ.get("RAYMQ_WORKER_STOPS", "200"),
            "RAYMQ_WORKER_LEASED": os.environ.get("RAYMQ_WORKER_LEASED", "1000000"),
        },
    )


@nox.session
def groups(session: nox.Session) -> None:
    """Consumer groups in bad cases on real Ray, and a filter that never matches over ten million messages.

    200 members are stopped and killed.
    """
    session.install("-e", ".[dev]")
    session.run(
        # With -s it prints how long queues had no owner.
        *("python", "-m", "pytest", "-s"),
        *("tests/ray/test_groups.py", "tests/ray/test_group_faults.py"),
        "tests/client/test_filtered_groups.py",
        *("--timeout", "3600", *session.posargs),
        env={
            "RAYMQ_GROUP_KILLS": os.environ.get("RAYMQ_GROUP_KILLS", "200"),
            "RAYMQ_FILTERED_MESSAGES": os.environ.get("RAYMQ_FILTERED_MESSAGES", "10000000"),
        },
    )


@nox.session
def failover(session: nox.Session) -> None:
    """Leaders of three replicas, killed 500 times, 20 power losses, and 50 partitions. Network namespaces need root."""
    session.install("-e", ".[dev]")
    session.run(
        *(
            "python",
            "-m",
            "pytest",
            "tests/ray/test_failover.py",
            "tests/ray/test_three_replicas.py",
        ),
        "tests/ray/test_partitions.py",
        *("--timeout", "36000", *session.posargs),
        env={
            "RAYMQ_FAILOVERS": os.environ.get("RAYMQ_FAILOVERS", "500"),
            "RAYMQ_PARTITIONS": os.environ.get("RAYMQ_PARTITIONS", "50"),
            "RAYMQ_POWER_LOSSES": os.environ.get("RAYMQ_POWER_LOSSES", "20"),
        },
    )


@nox.session
def flights(session: nox.Session) -> None:
    """20 staged writes of all flights by Spark, with a plan that differs each time, each with faults of its own."""
    session.install("-e", ".[dev,demo]")
    session.run(
        *("python", "-m", "pytest", "-s", "tests/spark/test_flight_faults.py", *session.posargs),
        env={
            "RAYMQ_FLIGHT_RUNS": os.environ.get("RAYMQ_FLIGHT_RUNS", "20"),
            "RAYMQ_FLIGHT_ROWS": os.environ.get("RAYMQ_FLIGHT_ROWS", "336776"),
        },
    )


@nox.session
def faults(session: nox.Session) -> None:
    """Each mode with every fault five times over, and the mirror with the pool in both flush modes."""
    session.install("-e", ".[dev]")
    session.run(
        *("python", "-m", "pytest", "tests/ray/test_modes.py", *session.posargs),
        env={"RAYMQ_FAULT_ROUNDS": "5"},
    )


@nox.session
@nox.parametrize(
    "name",
    [
        "put",
        "modes",
        "ray_client",
        "queue",
        "queues",
        "idle",
        "groups",
        "workers",
        "store",
        "small",
        "replicate",
        "read",
        "spark",
        "start",
        "compare",
    ],
)
def bench(session: nox.Session, name: str) -> None:
    """Benchmarks with this machine's own limits beside them: all, or `nox -s 'bench(name="put")'`."""
    session.install("-e", ".[dev,spark]" if name == "spark" else ".[dev]")
    session.run("python", "-m", f"benchmarks.{name}", *session.posargs)


@nox.session
def bench_spark4(session: nox.Session) -> None:
    """`benchmarks.spark` on the newest Spark 4, or on RAYMQ_SPARK4."""
    wanted = os.environ.get("RAYMQ_SPARK4", "pyspark>=4.1,<5")
    with tempfile.TemporaryDirectory() as folder:
        session.run("python", "-m", "pip", "install", "-q", "--target", folder, wanted)
        env = {"PYTHONPATH": folder}
        session.run("python", "-m", "benchmarks.spark", *session.posargs, env=env)


@nox.session
def network(session: nox.Session) -> None:
    """A mirror with TLS over two network namespaces whose link is cut; fails where none can be made."""
    session.install("-e", ".[dev]")
    session.run("python", "-m", "pytest", "-m", "network", "tests/ray", *session.posargs)


@nox.session
def release(session: nox.Session) -> None:
    """A release, checked, built and tried, into dist/; with `-- --trial` before it is dated, and nothing is left."""
    session.install("build", "uv")
    session.run("python", ".ci/release.py", *session.posargs)


@nox.session
def aarch64(session: nox.Session) -> None:
    """The processes of a replica on an emulated aarch64; needs root, debootstrap and qemu-user-static."""
    session.run("python", ".ci/aarch64.py", *session.posargs)
