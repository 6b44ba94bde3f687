"""What commands print: columns that are never cut, or JSON for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Literal

Format = Literal["text", "json"]


def print_columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned by spaces. A terminal may wrap a long line; a value is always whole, so that scripts can read it."""
    table = [list(header), *([str(value) or "-" for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    for line in table:
        print("  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip())


def print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2, sort_keys=True)
    print()


def print_table(output: Format, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """The same as columns, or as a list of objects."""
    if output == "json":
        print_json([dict(zip(header, row, strict=True)) for row in rows])
    else:
        print_columns(header, rows)
