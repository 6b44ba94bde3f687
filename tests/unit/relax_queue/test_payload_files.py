"""Payload on disk: flushed blocks are read back bit by bit, freed ones go, and damage loses only the damaged block."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from relax_queue.storage.payload_files import PayloadFiles


def content(block: int, n_bytes: int = 1000) -> bytes:
    return random.Random(block).randbytes(n_bytes)


def reopened(folder: Path, named: Any) -> tuple[PayloadFiles, dict[int, bytes]]:
    files = PayloadFiles(folder)
    return files, {block: bytes(c) for block, c in files.recover(named)}


def test_blocks_come_back_and_freed_files_go(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path, 5000)
    for block in range(30):
        files.write(block, content(block))
    files.flush()
    live = {3, 4, 17, 28, 29}
    files.free(live)
    assert files.disk_bytes <= 4 * len(live) * 1100 + 5000
    files.close()
    files, found = reopened(tmp_path, live)
    assert found == {block: content(block) for block in live}
    files.write(30, memoryview(content(30)))
    files.free({30})
    files.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"payload-{files._files[-1].number:012d}"]
    assert reopened(tmp_path, {30})[1] == {30: content(30)}


def test_a_file_held_by_one_old_block_gives_it_away(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path, 10_000)
    for block in range(200):
        files.write(block, content(block))
        files.free({0, *range(block - 3, block + 1)})
    files.flush()
    assert files.disk_bytes < 40_000
    files.close()
    assert reopened(tmp_path, {0})[1] == {0: content(0)}


def test_a_torn_tail_and_a_flipped_bit_lose_only_themselves(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path)
    for block in range(4):
        files.write(block, content(block))
    files.close()
    path = next(tmp_path.iterdir())
    whole = bytearray(path.read_bytes())
    whole[1100] ^= 1
    path.write_bytes(whole[:-10])
    assert sorted(reopened(tmp_path, {0, 1, 2, 3})[1]) == [0, 2]


def test_a_write_that_the_disk_refuses_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = PayloadFiles(tmp_path)
    files.write(1, content(1))
    write, left = os.write, [600]

    def full(fd: int, data: Any) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        n = write(fd, bytes(data[: left[0]]))
        left[0] -= n
        return n

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(2, content(2))
    monkeypatch.undo()
    files.write(3, content(3))
    files.close()
    assert reopened(tmp_path, {1, 2, 3})[1] == {1: content(1), 3: content(3)}


def test_the_newest_frame_of_a_block_counts(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path)
    files.write(1, content(7))
    files.write(1, content(1))
    files.close()
    assert reopened(tmp_path, {1})[1] == {1: content(1)}


def test_flushes_of_two_threads_beside_writes_close_each_file_once(tmp_path: Path) -> None:
    files, over = PayloadFiles(tmp_path, 3000), threading.Event()
    failures: list[BaseException] = []

    def flush_on() -> None:
        try:
            while not over.is_set():
                files.flush()
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=flush_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    for block in range(60):
        files.write(block, content(block))
    over.set()
    for thread in threads:
        thread.join(10)
    files.close()
    assert failures == []
    assert len(reopened(tmp_path, set(range(60)))[1]) == 60
