"""The log of frames: what is whole is read back, a torn end is cut off, damage is refused."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_common.errors import DataLoss
from relax_common.storage.framed_log import FramedLog


@given(st.lists(st.binary(max_size=200), max_size=8), st.sampled_from([0, 300]), st.data())
def test_a_log_gives_back_every_whole_frame_wherever_it_was_cut(
    frames: list[bytes], ahead: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        log = FramedLog(path, ahead)
        assert list(log.replay()) == []
        ends = [0]
        for frame in frames:
            log.append(frame)
            ends.append(log.end)
        asyncio.run(log.sync())
        content = path.read_bytes()
        log.close()
        assert path.stat().st_size == ends[-1], "zeros ahead are cut off"
        cut = data.draw(st.integers(0, ends[-1]))
        torn = content[:cut] + bytes(len(content) - cut if ahead else 0)
        path.write_bytes(torn)
        whole = max(i for i, end in enumerate(ends) if torn[:end] == content[:end])
        again = FramedLog(path, ahead)
        assert list(again.replay()) == frames[:whole]
        again.append(b"next")
        again.close()
        final = FramedLog(path)
        assert list(final.replay()) == [*frames[:whole], b"next"]
        final.close()


def test_a_damaged_frame_with_good_ones_after_it_is_never_cut_off(tmp_path: Path) -> None:
    log = FramedLog(tmp_path / "log")
    list(log.replay())
    log.append(b"one", b"two", b"three")
    log.close()
    raw = bytearray((tmp_path / "log").read_bytes())
    raw[raw.index(b"two")] ^= 1
    (tmp_path / "log").write_bytes(raw)
    again = FramedLog(tmp_path / "log")
    with pytest.raises(DataLoss, match="the frame at byte 11 is damaged and good ones follow"):
        list(again.replay())
    again.close()
    assert (tmp_path / "log").read_bytes() == raw
