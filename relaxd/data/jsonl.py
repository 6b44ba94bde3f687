"""Rows of a JSONL file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_common.errors import InvalidInput
from relax_common.json_types import JsonObject
from relaxd.data.row import DecimalText

Raw = tuple[str, JsonObject]
"""Where a row is, for people, and its fields."""

# LaTeX commands whose backslash JSON reads as the start of an escape. Commands whose rest is a word that may well begin
# a line of text ("\\nor", "\\to", "\\ni") are left out.
_COMMANDS = (
    r"b(?:ar|eta|egin|ecause|inom|igcup|igcap|ig[lr]?|ot|oxed|oldsymbol|mod|ullet)",
    r"f(?:rac|orall|box|lat)",
    r"n(?:abla|eg|eq|eqq?|mid|otin|parallel|subseteq|u)",
    r"r(?:angle|brace|ceil|floor|ho|ight(?:arrow)?|vert)",
    r"t(?:au|ext(?:bf|it|rm|sf|tt)?|frac|heta|ilde|imes|riangle)",
)
_MEANT_AS_LATEX = re.compile(rf"(?<!\\)(?:\\\\)*(\\(?:{'|'.join(_COMMANDS)})(?![A-Za-z]))")


def read_jsonl(path: Path, *, keep_latex: bool = False) -> Iterator[Raw]:
    """A byte-order mark, CRLF, blank lines and a missing final newline are fine; anything else is refused."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"data {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"data {path}: not UTF-8 at byte {error.start}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip(" \t\r\n"):
            where = f"data {path}, line {number}"
            yield where, _row(line, where, keep_latex)


def _row(line: str, where: str, keep_latex: bool) -> JsonObject:
    found = None if keep_latex else _MEANT_AS_LATEX.search(line)
    if found:
        raise InvalidInput(
            f"{where}: {found[1]} has a single backslash, which JSON reads as the escape \\{found[1][1]}: write "
            f"\\{found[1]}, or set data.latex_escapes = 'keep'"
        )
    try:
        value = json.loads(
            line,
            object_pairs_hook=lambda pairs: _object(pairs, where),
            parse_constant=_refuse_constant,
            parse_float=DecimalText.read,
        )
    except (ValueError, RecursionError) as error:
        remedy = "; a backslash in a text is written \\\\" if "escape" in str(error) else ""
        raise InvalidInput(f"{where}: not valid JSON: {error}{remedy}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: expected an object, found {type(value).__name__}")
    return value


def _object(pairs: list[tuple[str, Any]], where: str) -> JsonObject:
    result: JsonObject = {}
    for key, value in pairs:
        if key in result:
            raise InvalidInput(f"{where}: key {key!r} occurs twice")
        result[key] = value
    return result


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
