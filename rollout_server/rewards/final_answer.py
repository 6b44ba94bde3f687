"""Finds the final answer in a response. Plain text in and out; the whole response is searched, not only its end."""

import re
from dataclasses import dataclass

BOXES = ("\\boxed", "\\fbox")
MARKER = "####"
_BEGUN_BOX = re.compile(r"\\(?:b|bo|box|boxe|f|fb|fbo)$")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname)\s*\{[^{}]*\}")


@dataclass(frozen=True)
class FinalAnswer:
    """`text` is the answer alone if it was `stated` (in a box or after a marker), else the prose that contains it."""

    text: str
    stated: bool


def final_answer(response: str) -> FinalAnswer | None:
    """The last box or "####" line; without either, all prose. None: there is no answer.

    If the last box is empty or was never closed, the answer was withdrawn or cut off, and earlier boxes were drafts.
    Everything in an open <think> is a draft too; after a closed one only the rest counts.
    """
    spoken = after_thinking(response)
    if spoken is None or not spoken.strip() or _BEGUN_BOX.search(spoken.rstrip()):
        return None
    box = max(spoken.rfind(name) for name in BOXES)
    marker = _last_marker(spoken)
    if marker is not None and marker[0] > box:
        return FinalAnswer(marker[1], stated=True)
    if box >= 0:
        content = _box_content(spoken, box)
        return FinalAnswer(content, stated=True) if content else None
    return FinalAnswer(spoken, stated=False)


def after_thinking(response: str) -> str | None:
    """The text after the last thinking block; None if the text ends inside one."""
    rest = response.rpartition("</think>")[2]
    return None if "<think>" in rest else rest


def _last_marker(text: str) -> tuple[int, str] | None:
    """Position and line of the last "####" that is followed by an answer; in front of words it is a heading."""
    for found in reversed(list(re.finditer(re.escape(MARKER) + r"(?!#)[ \t]*([^\n]*)", text))):
        line = found[1].strip().removesuffix(".").strip("*$ ")
        if line and not _WORD.search(_TEXT_COMMAND.sub("", line)):
            return found.start(), line
    return None


def _box_content(text: str, start: int) -> str:
    """Between the braces of the box at `start`, or the one token after a box without; empty if never closed."""
    opening = re.match(r"\\[a-z]+\s*", text[start:])
    at = start + (opening.end() if opening else 0)
    if text[at : at + 1] != "{":
        token = re.match(r"\\?\w+", text[at:])
        return token[0] if token else ""
    depth, escaped = 0, False
    for position in range(at, len(text)):
        letter = text[position]
        if not escaped and letter in "{}":
            depth += 1 if letter == "{" else -1
            if not depth:
                return text[at + 1 : position].strip().strip("$").strip()
        escaped = letter == "\\" and not escaped
    return ""
