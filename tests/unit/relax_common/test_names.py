"""Names and folders from outside, before anything is written under them."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_common.errors import InvalidInput
from relax_common.names import check_name, folder_below


@pytest.mark.parametrize("name", ["a", "rollout-0.run_1", "9", "x" * 128])
def test_a_name_that_may_be_in_paths_and_labels_is_returned(name: str) -> None:
    assert check_name(name, "run") == name


@pytest.mark.parametrize("name", ["", "-a", ".", "..", "a/b", "a b", "run\n", "\nrun", "ü", "a\0", "x" * 129])
def test_any_other_name_is_refused_in_one_short_line(name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_name(name, "run")
    assert caught.value.message.startswith("run '")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300


def test_a_folder_lies_below_its_root_links_followed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    (root / "out").symlink_to(tmp_path)
    assert folder_below(root, "a/b", "run_dir") == root / "a" / "b"
    assert folder_below(root, str(root / "c"), "run_dir") == root / "c"
    for given in ("..", ".", "", "../runs", "a/../..", str(tmp_path), "out/x", "/etc", "a\0b"):
        with pytest.raises(InvalidInput, match="run_dir"):
            folder_below(root, given, "run_dir")
