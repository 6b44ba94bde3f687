"""All prompts of a run, the order in which it visits them, and the ids of their groups."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from relax_common.errors import InvalidInput, Precondition
from relax_common.recipe.data import Data
from relaxd.data.folders import read_files
from relaxd.data.generated import generate_rows
from relaxd.data.row import PromptRow, prompt_row

_GROUP = re.compile(r"([0-9]{1,18})/([0-9]{1,18})/[0-9]{1,18}", re.ASCII)


@dataclass(frozen=True)
class Prompts:
    """The rows to train on, and how many were left out, by reason."""

    rows: list[PromptRow]
    dropped: Mapping[str, int] = field(default_factory=dict)

    def line(self) -> str:
        """For people."""
        left_out = "".join(f", {count} left out: {reason}" for reason, count in self.dropped.items())
        return f"{len(self.rows)} prompts{left_out}"


def source_name(data: Data) -> str:
    """How an error about the data as a whole names it."""
    return f"data.generator {data.generator}" if data.generator else f"data {', '.join(map(str, data.path))}"


def read_prompts(data: Data) -> list[PromptRow]:
    """Raises InvalidInput with file and line of the first bad row, or if there are no rows at all."""
    rows = list(generate_rows(data) if data.generator else _from_files(data))
    if not rows:
        raise InvalidInput(f"{source_name(data)}: no rows")
    return rows


def _from_files(data: Data) -> Iterator[PromptRow]:
    for where, values in read_files(data.path, data.split, keep_latex=data.latex_escapes == "keep"):
        yield prompt_row(data, where, values)


def visit_order(rows: int, seed: int, pass_: int, shuffle: bool) -> list[int]:
    """Row indices of one pass; a pure function, so a restarted feeder continues where it was."""
    order = list(range(rows))
    if shuffle:
        random.Random(f"{seed}/{pass_}").shuffle(order)
    return order


def group_id(pass_: int, position: int, repeat: int = 0) -> str:
    return f"{pass_}/{position}/{repeat}"


def parse_group_id(group: str, rows: int) -> tuple[int, int]:
    """(pass, position). Raises Precondition for a group that is not of data with so many rows."""
    found = _GROUP.fullmatch(group)
    if found is None or int(found[2]) >= rows:
        raise Precondition(
            f"group {group!r} at the queue is not of this run's {rows} rows of data: another program offers groups in "
            f"the name of relaxd"
        )
    return int(found[1]), int(found[2])
