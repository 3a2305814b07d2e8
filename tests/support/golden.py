"""The store that Apache RocketMQ 5.3.3 wrote, which the tests keep as an archive."""

from __future__ import annotations

import tarfile
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden"
ARCHIVE = GOLDEN / "rocketmq-5.3.3-clean.tar.xz"
#: what RocketMQ reads of it, a JSON object for each message
LINES = GOLDEN / "rocketmq-5.3.3-clean.jsonl"


def unpack_golden(directory: Path) -> Path:
    """Unpack the store into a directory. Returns: the store's root."""
    # Python 3.11.2, which Debian has, knows no filters; newer ones warn without one.
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, **options)
    return directory / "golden"
