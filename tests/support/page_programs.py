"""The Python programs of the documentation's pages. `python page_programs.py DATA_DIR` runs those that need Ray.

A block that is fenced with ```python runs, after those before it on its page. Blocks that start a cluster of their own
are run by the test of README. A block that is fenced with ```py needs what is not here (Spark, another machine) and
must only compile.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCK = re.compile(r"^( *)```(python|py)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, program) of each block of a page. One that is part of a list or a tab is indented."""
    for _, language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        yield language, textwrap.dedent(text)


def programs() -> dict[str, list[str]]:
    """Page -> its programs that run, in order."""
    found = {
        page.relative_to(DOCS).as_posix(): [
            text
            for language, text in blocks(page)
            if language == "python" and "raymq.start(" not in text
        ]
        for page in sorted(DOCS.rglob("*.md"))
    }
    return {page: texts for page, texts in found.items() if texts}


def needs_ray(texts: list[str]) -> bool:
    """Whether the programs of a page need more of a cluster than its shards."""
    return any(
        re.search(r"^ *(?:import ray$|from ray\b)|raymq\.Queue\(", text, re.MULTILINE)
        for text in texts
    )


def run(page: str, texts: list[str], cluster: Any) -> None:
    """Run the programs of one page in order, in one namespace."""
    names: dict[str, Any] = {"cluster": cluster, "__name__": "__main__"}
    for text in texts:
        exec(compile(text, page, "exec"), names)


def main() -> None:
    """Run the pages that need Ray, on one cluster. Print how long each took and what went wrong, as JSON."""
    import ray

    import raymq

    failed: dict[str, str] = {}
    seconds: dict[str, float] = {}
    said = sys.stdout
    with raymq.start(sys.argv[1]) as cluster, open(os.devnull, "w") as nowhere:
        ray.init(cluster.ray_address, ignore_reinit_error=True, log_to_driver=False)
        sys.stdout = nowhere
        for page, texts in programs().items():
            if not needs_ray(texts):
                continue
            begin = time.monotonic()
            try:
                run(page, texts, cluster)
            except BaseException:
                failed[page] = traceback.format_exc()
            seconds[page] = round(time.monotonic() - begin, 1)
        sys.stdout = said
        ray.shutdown()
    print(json.dumps({"seconds": seconds, "failed": failed}))


if __name__ == "__main__":
    main()
