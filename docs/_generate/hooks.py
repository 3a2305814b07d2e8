"""MkDocs hooks: pages for files beside docs/ (examples, changelog), and links that lead out of docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
#: file beside docs/ -> page that shows it; files that are no Markdown are shown as they are
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{
        f"examples/{path.name}": f"examples/{path.stem.replace('_', '-')}.md"
        for path in sorted((ROOT / "examples").iterdir())
        if path.suffix in (".py", ".yaml")
    },
}
DESIGN = ("design", "glossary", "format", "recovery", "reliability")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the files of folders: a new example or decision needs no line in mkdocs.yml."""
    docs = Path(config.docs_dir)
    decisions = [f"decisions/{path.name}" for path in sorted((docs / "decisions").glob("*.md"))]
    examples = [page for page in OUTSIDE.values() if page.startswith("examples/")]
    config.nav = [
        *(config.nav or []),
        {"Examples": examples},
        {
            "Design": [
                *(f"{name}.md" for name in DESIGN if (docs / f"{name}.md").is_file()),
                {"Decisions": sorted(decisions, key=lambda path: not path.endswith("README.md"))},
            ]
        },
        {"Project": [{"Contributing": "contributing.md"}, {"Changelog": "changelog.md"}]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages for the files beside docs/."""
    for source, page in OUTSIDE.items():
        if page != "index.md":
            files.append(File.generated(config, page, content=outside_page(source)))
    return files


def outside_page(source: str) -> str:
    """A file of the project that is not in docs/, as a page."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".md"):
        return text
    language = "python" if source.endswith(".py") else "yaml"
    return f'# {posixpath.basename(source)}\n\n```{language} title="{source}"\n{text}```\n'


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Links to files outside docs/ lead to their pages; to a source file none leads, its name stays."""
    place = page.file.src_uri
    by_page = {shown: source for source, shown in OUTSIDE.items() if shown != "index.md"}
    source = by_page.get(place, f"docs/{place}")
    parts = _FENCE.split(markdown)
    return "".join(
        part if part.startswith("```") else _LINK.sub(lambda m: _link(m, source, place), part)
        for part in parts
    )


def _link(match: re.Match[str], source: str, place: str) -> str:
    text, target, anchor = match[1], match[2], match[3] or ""
    if "://" in target or target.startswith("mailto:"):
        return match[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    shown = OUTSIDE.get(path)
    if shown is None and path.startswith("docs/"):
        shown = path.removeprefix("docs/")
    if shown is None and path == "examples":
        shown = "index.md"
    if shown is None:
        return text if (ROOT / path).exists() else match[0]
    return f"[{text}]({posixpath.relpath(shown, posixpath.dirname(place) or '.')}{anchor})"
