"""The dashboard: valid, about every metric, and put where Grafana looks."""

from __future__ import annotations

import io
import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.leader.metrics import METRICS as LEADER_METRICS
from raymq.cluster.cli import grafana
from raymq.cluster.cli.console import Console
from raymq.cluster.cli.main import main
from raymq.cluster.controller.controller_metrics import CONTROLLER_METRICS
from raymq.cluster.deploy.ray_host import RayTarget
from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files

METRICS = (*LEADER_METRICS, *CONTROLLER_METRICS)
#: as Ray 2.60 writes it
PROVIDER = """
apiVersion: 1

providers:
  - name: Ray    # Default dashboards provided by OSS Ray
    folder: Ray
    type: file
    options:
      path: {folder}
"""
#: what every series has, beside its own: what the dashboard filters by
FILTERS = {"ray_io_cluster"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(grafana.dashboard())
    return parsed


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYMQ_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


def run(*words: str) -> tuple[int, bytes, str]:
    out, err = io.BytesIO(), io.StringIO()
    code = main(words, console=Console(stdin=io.BytesIO(), stdout=out, stderr=err))
    return code, out.getvalue(), err.getvalue()


# --- the file -------------------------------------------------------------------------------------


def test_the_dashboard_asks_for_every_exported_series_and_for_no_other(
    dashboard: dict[str, Any],
) -> None:
    reported = {f"ray_{name}" for metric in METRICS for name, _ in metric.series()}
    asked = set(re.findall(r"\bray_raymq_\w+", json.dumps(dashboard)))
    assert asked == reported


def test_counters_are_asked_for_their_rate_and_gauges_for_their_value(
    dashboard: dict[str, Any],
) -> None:
    rated = {
        f"ray_{name}"
        for metric in METRICS
        for name, _ in metric.series()
        if metric.kind in ("counter", "latency")
    }
    for query in queries(dashboard):
        asked = set(re.findall(r"(?:rate|increase)\((ray_raymq_\w+)", query))
        assert asked == set(re.findall(r"ray_raymq_\w+", query)) & rated


def test_queries_name_only_labels_that_there_are(dashboard: dict[str, Any]) -> None:
    tags = {f"ray_{name}": set(keys) for metric in METRICS for name, keys in metric.series()}
    for query in queries(dashboard):
        for name, selectors in re.findall(r"(ray_raymq_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=~", selectors)) <= tags[name] | FILTERS
            assert 'ray_io_cluster=~"$Cluster",cluster=~"$RayMQ"' in selectors
        asked = [tags[name] for name in re.findall(r"ray_raymq_\w+", query)]
        for by in re.findall(r"by \(([^)]*)\)", query):
            assert all(set(by.split(", ")) <= keys | FILTERS for keys in asked)
        assert query.count("(") == query.count(")")


def test_panels_have_places_of_their_own_and_say_what_they_show(dashboard: dict[str, Any]) -> None:
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])

    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells
        assert panel["title"]

    for panel in panels(dashboard):
        assert panel["description"]
        assert panel["datasource"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names) > 0


def test_it_has_the_variables_of_rays_dashboards_and_one_for_the_cluster(
    dashboard: dict[str, Any],
) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "Cluster", "RayMQ"]
    assert variables["datasource"]["query"] == "prometheus"
    # With several of Prometheus, or none of them the default, the user has to choose one.
    assert not any(variable["hide"] for variable in variables.values())
    assert variables["Cluster"]["allValue"] == variables["RayMQ"]["allValue"] == ".*"
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard)))
    assert used - set(variables) == {"__rate_interval", "__all"}


# --- where it goes --------------------------------------------------------------------------------


def session_with(tmp_path: Path, folder: Path) -> Path:
    provider = tmp_path / "session" / "metrics/grafana/provisioning/dashboards/default.yml"
    provider.parent.mkdir(parents=True)
    provider.write_text(PROVIDER.format(folder=folder), encoding="utf-8")
    return tmp_path / "session"


def test_the_folder_is_the_one_in_the_configuration_of_grafana(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    session = session_with(tmp_path, folder)
    assert grafana.dashboards_folder(session, Files()) == folder


def test_a_session_without_such_a_folder_says_what_to_do(tmp_path: Path) -> None:
    for session in (tmp_path / "none", session_with(tmp_path, tmp_path / "gone")):
        with pytest.raises(Rejected, match="--directory") as refusal:
            grafana.dashboards_folder(session, Files())
        assert str(session) in str(refusal.value)


def test_it_is_copied_so_that_grafana_can_read_it(tmp_path: Path) -> None:
    code, out, _ = run("grafana", "install", "--directory", str(tmp_path), "--json")
    path = tmp_path / grafana.FILE_NAME
    assert code == 0
    assert json.loads(out) == {"file": str(path)}
    assert path.read_bytes() == grafana.dashboard()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [entry for entry in tmp_path.iterdir() if entry.is_file()] == [path]
    # Again, over the older one.
    path.write_text("{}", encoding="utf-8")
    code, out, _ = run("grafana", "install", "--directory", str(tmp_path))
    assert code == 0
    assert out.decode().startswith(f"{path}: ")
    assert path.read_bytes() == grafana.dashboard()


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    code, out, err = run("grafana", "install", "--directory", str(tmp_path / "none"))
    assert (code, out) == (2, b"")
    assert "is not a directory" in err


def test_without_a_ray_and_a_directory_it_says_what_to_name() -> None:
    code, _, err = run("grafana", "install")
    assert code == 2
    assert "--directory" in err


def test_a_cluster_that_is_not_known_is_refused_and_ray_address_is_taken_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert grafana.ray_of(None, files=Files()) == RayTarget(address="10.0.0.1:6379")
    with pytest.raises(Rejected):
        grafana.ray_of("orders", files=Files())


def test_show_prints_the_dashboard_as_it_is(dashboard: dict[str, Any]) -> None:
    code, out, _ = run("grafana", "show")
    assert code == 0
    assert json.loads(out) == dashboard
