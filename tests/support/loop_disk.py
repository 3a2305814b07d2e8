"""A small disk of its own for one directory: a file with ext4, mounted by a loop device. It can be full, or hang."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


def run(*words: str | Path) -> None:
    """A command. Raises: RuntimeError with what it says; FileNotFoundError."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr.strip()}")


def can_mount() -> bool:
    """Whether this process can mount such a disk: tried, and undone."""
    with tempfile.TemporaryDirectory() as place:
        try:
            with LoopDisk(Path(place) / "image", Path(place) / "disk", mib=8) as disk:
                disk.freeze()
                disk.thaw()
        except (RuntimeError, FileNotFoundError):
            return False
    return True


class LoopDisk:
    """A disk while it is mounted."""

    def __init__(self, image: Path, place: Path, *, mib: int) -> None:
        """Args: `image`: a new file. `place`: a directory, whose files are moved to the disk."""
        self._image = image
        self._place = place
        self._mib = mib
        self._filling = place / "filling"
        self._frozen = False

    def __enter__(self) -> LoopDisk:
        before = self._place.with_name(self._place.name + ".before")
        if self._place.exists():
            self._place.rename(before)
        self._place.mkdir()
        with self._image.open("wb") as image:
            image.truncate(self._mib << 20)
        run("mkfs.ext4", "-q", "-m", "0", self._image)
        run("mount", "-o", "loop", self._image, self._place)
        try:
            (self._place / "lost+found").rmdir()
            self._place.chmod(0o700)
            if before.exists():
                shutil.copytree(before, self._place, dirs_exist_ok=True)
                shutil.rmtree(before)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(RuntimeError):
            self.thaw()
        run("umount", self._place)

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """No byte is free."""
        descriptor = os.open(self._filling, os.O_CREAT | os.O_WRONLY)
        try:
            piece = bytes(1 << 20)
            while piece:
                try:
                    os.write(descriptor, piece)
                except OSError:
                    piece = piece[: len(piece) // 2]
            yield
        finally:
            os.close(descriptor)
            self._filling.unlink()

    def freeze(self) -> None:
        """From now on no write and no sync returns."""
        run("fsfreeze", "-f", self._place)
        self._frozen = True

    def thaw(self) -> None:
        """The disk goes on."""
        if self._frozen:
            self._frozen = False
            run("fsfreeze", "-u", self._place)
