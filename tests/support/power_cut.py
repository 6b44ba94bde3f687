"""A power cut: what a disk holds when everything that was not fsynced is lost.

While it is installed, each fsync is noted: of a file the content it has then, of a folder the names it has then. A cut
writes down what those fsyncs guarantee and nothing else: a file whose content was never fsynced is empty, a name whose
folder was not fsynced is missing, a rename or a removal that was not fsynced has not happened.

    cut = PowerCut(root)
    with cut.installed(monkeypatch):
        ... code under test; `cut.on_fsync` is called after each fsync: a kill point
        cut.write_to(another_folder)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Image:
    """What is durable at one moment: folders by inode as name -> inode, files by inode as content."""

    root: int
    folders: dict[int, dict[str, int]]
    files: dict[int, bytes]

    def write_to(self, target: Path) -> None:
        self._write(self.root, target)

    def _write(self, folder: int, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for name, inode in self.folders[folder].items():
            if inode in self.folders:
                self._write(inode, target / name)
            else:
                (target / name).write_bytes(self.files.get(inode, b""))


@dataclass
class PowerCut:
    """Notes fsyncs below `root`, which is durable itself. `removals_early`: a removed name is lost at once, as on a
    file system that writes removals before anything else."""

    root: Path
    removals_early: bool = False
    on_fsync: Callable[[], None] | None = None
    _folders: dict[int, dict[str, int]] = field(default_factory=dict)
    _files: dict[int, bytes] = field(default_factory=dict)
    _held: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self._note_folder(self.root)

    @contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[PowerCut]:
        fsync, fdatasync, unlink = os.fsync, os.fdatasync, os.unlink

        def noted(real: Callable[[int], None]) -> Callable[[int], None]:
            def call(fd: int) -> None:
                real(fd)
                self._note(fd)

            return call

        def removed(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> None:
            unlink(path, dir_fd=dir_fd)
            if self.removals_early:
                self._forget(Path(path))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", noted(fsync))
            patch.setattr(os, "fdatasync", noted(fdatasync))
            patch.setattr(os, "unlink", removed)
            yield self
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()

    def image(self) -> Image:
        folders = {inode: dict(names) for inode, names in self._folders.items()}
        return Image(self.root.stat().st_ino, folders, dict(self._files))

    def write_to(self, target: Path) -> None:
        self.image().write_to(target)

    def _note(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if not path.is_relative_to(self.root):
            return
        if path.is_dir():
            self._note_folder(path)
        else:
            stat = os.fstat(fd)
            self._hold(stat.st_ino, f"/proc/self/fd/{fd}")
            with open(f"/proc/self/fd/{fd}", "rb") as file:
                self._files[stat.st_ino] = file.read()
        if self.on_fsync is not None:
            self.on_fsync()

    def _note_folder(self, path: Path) -> None:
        names = {}
        for entry in os.scandir(path):
            inode = entry.inode()
            names[entry.name] = inode
            if entry.is_dir():
                self._folders.setdefault(inode, {})
            else:
                self._hold(inode, entry.path)
        self._folders[path.stat().st_ino] = names

    def _hold(self, inode: int, path: str) -> None:
        """Keep a removed file's inode from being given to another file."""
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _forget(self, path: Path) -> None:
        if path.is_relative_to(self.root) and path.parent.exists():
            self._folders.get(path.parent.stat().st_ino, {}).pop(path.name, None)
