"""What `.ci/release.py` asks for before it builds a release."""

from __future__ import annotations

import datetime
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import raymq

ROOT = Path(__file__).resolve().parent.parent
TODAY = datetime.date(2026, 12, 1)


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changelog(heading: str, body: str = "- Something new.\n") -> str:
    return f"# Changelog\n\n## {heading}\n\n{body}\n## 0.0.9 (2026-01-01)\n\n- The one before.\n"


def test_the_version_stands_in_one_place(release):
    source = (ROOT / "raymq" / "__init__.py").read_text(encoding="utf-8")
    assert release.version_of(source) == raymq.__version__
    assert f'"{raymq.__version__}"' not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_a_dated_entry_of_the_version_is_ready(release):
    release.check_changelog(changelog("1.2.3 (2026-12-01)"), "1.2.3", TODAY, trial=False)


def test_a_trial_takes_the_changelog_of_today(release):
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    release.check_changelog(text, raymq.__version__, datetime.date.today(), trial=True)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            changelog("1.2.3 (unreleased)"),
            r"calls 1\.2\.3 'unreleased': make it '## 1\.2\.3 \(2026",
        ),
        (changelog("1.2.2 (2026-11-01)"), r"begins with '## 1\.2\.2 .*make its newest entry"),
        (changelog("1.2.3"), r"begins with '## 1\.2\.3'"),
        (changelog("1.2.3 (2026-12-02)"), r"dates 1\.2\.3 2026-12-02, and today is 2026-12-01"),
        (changelog("1.2.3 (2026-12-01)", body=""), "is empty: say what changed"),
        ("", "begins with '## '"),
    ],
)
def test_any_other_changelog_is_refused_with_what_to_write(release, text, fault):
    with pytest.raises(release.NotReady, match=fault):
        release.check_changelog(text, "1.2.3", TODAY, trial=False)


def test_a_version_that_is_not_found_is_named(release):
    with pytest.raises(release.NotReady, match="has no line __version__"):
        release.version_of("version = 1\n")


def test_a_tree_with_changes_and_a_tagged_version_are_refused(release, monkeypatch):
    said = {"status": " M README.md\n", "tag": ""}
    monkeypatch.setattr(release, "run", lambda words, place: said[words[1]])
    with pytest.raises(release.NotReady, match=r"commit or remove .*\nM README\.md"):
        release.check_git("1.2.3")
    said.update(status="", tag="v1.2.3\n")
    with pytest.raises(release.NotReady, match=r"has the tag v1\.2\.3"):
        release.check_git("1.2.3")


def test_a_command_that_fails_is_shown_with_its_words(release, tmp_path):
    with pytest.raises(release.NotReady, match=r"(?s)ls --wrong ended with \d:.*wrong"):
        release.run(["ls", "--wrong"], tmp_path)
