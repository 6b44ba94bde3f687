"""Equality of mathematical answers, by math-verify. It runs in a killable worker, so math-verify's own alarm is off."""

import functools
import logging
import re
from dataclasses import dataclass
from typing import Any

import sympy
from math_verify import parse, verify
from sympy.core.relational import Relational

from rollout_server.rewards.final_answer import FinalAnswer, final_answer
from rollout_server.rewards.outcome import RewardItem

# Each parse would warn that nothing bounds it: the pool does.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_TEXT = re.compile(r"[^\W\d_]*[^\W\d_]{3,}[^\W\d_]*(?:[\s'-]+[^\W\d_]+)*")
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_STATEMENT = re.compile(r"answer(?:\s+is)?\s*[:=]?\s*\**\s*([^\n.]+)", re.IGNORECASE)
_TOKEN = re.compile(r"\d+(?:\.\d+)?|[A-Za-z]+|[-+*/^()=]|\s+|.", re.DOTALL)
# To evaluate these takes for ever or all memory; nobody writes them as a final value.
_LARGE = re.compile(r"\^\s*\{?\s*\(?\s*-?\d{5,}|\d{4,}\s*\)?\s*!|\^[^!]{0,20}[)}]\s*!|!\s*!|!\s*\)\s*!")
_UNEVALUATED = re.compile(r"\\(?:int|sum|prod|lim|i+nt|oint)(?![a-z])")
_SEGMENT = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)
_MINUS = "\u2212"
TOWER_MAX = 2
FORMULA_CHARACTERS_MAX = 2000


@dataclass(frozen=True)
class Label:
    """`forms` as math-verify parses it; `equation` where it states a relation of unknowns, not the value of one."""

    text: str
    forms: list[Any]
    equation: Any
    is_text: bool


def math_answer(item: RewardItem) -> float:
    """1 if the response's final answer equals the label as mathematics.

    A label that cannot be read is an error, not a wrong answer. Sets and relations are compared as such: an equation
    equals its multiples, "x \\neq 2" is the set without 2. A word or one letter as label is compared as text. An answer
    that leaves an integral, sum or limit unevaluated where the label does not is wrong, and so is one too large to
    evaluate.
    """
    if item.label is None:
        raise ValueError("reward 'math' needs a label, the data row has none")
    label = read_label(item.label)
    answer = final_answer(item.response.replace(_MINUS, "-"))
    return float(answer is not None and _equal(label, answer))


@functools.lru_cache(maxsize=4096)
def read_label(text: str) -> Label:
    text = text.replace(_MINUS, "-")
    stripped = _strip(text)
    if _TEXT.fullmatch(stripped) or (len(stripped) == 1 and stripped.isalpha()):
        return Label(stripped, [], None, is_text=True)
    delimited = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    forms = [] if _too_large(text) else _parse(text if delimited else f"${text}$")
    if not any(not isinstance(form, str) for form in forms):
        raise ValueError(f"reward 'math' cannot read the label {text!r:.60}")
    return Label(stripped, forms, next((form for form in forms if _is_equation(form)), None), is_text=False)


def _equal(label: Label, answer: FinalAnswer) -> bool:
    stated = _strip(answer.text)
    if answer.stated and stated == label.text:
        return True
    if label.is_text:
        return _same_text(label.text, answer)
    if answer.stated and (_too_large(stated) or len(stated) > FORMULA_CHARACTERS_MAX):
        return False
    if answer.stated and _UNEVALUATED.search(stated) and not _UNEVALUATED.search(label.text):
        return False
    if label.equation is not None:
        return any(_same_equation(label.equation, each) for each in _equations(label.equation, answer))
    forms = _parse(f"\\boxed{{{stated}}}") if answer.stated else _parse_prose(answer.text)
    return bool(verify(label.forms, forms, timeout_seconds=None)) or _same_set(label.forms, forms)


def _parse(text: str) -> list[Any]:
    forms: list[Any] = parse(text, parsing_timeout=None)
    return forms


def _parse_prose(text: str) -> list[Any]:
    """What math-verify takes for the final answer of a text, in which nothing may take for ever to evaluate."""
    calm = _SEGMENT.sub(lambda segment: "" if _endless(segment[0]) else segment[0], text)
    calm = re.sub(r"\S+", lambda word: "" if _too_large(word[0]) else word[0], calm)
    return _parse("\n".join(line for line in calm.split("\n") if not _too_large(line)))


def _endless(formula: str) -> bool:
    return _too_large(formula) or (_UNEVALUATED.search(formula) is not None and "=" not in formula)


def _strip(text: str) -> str:
    return _TEXT_COMMAND.sub(r"\1", text).strip().strip("$").strip()


def _same_text(label: str, answer: FinalAnswer) -> bool:
    text = answer.text
    if not answer.stated:
        statements = _STATEMENT.findall(text)
        text = statements[-1] if statements else text
    return _folded(_TEXT_COMMAND.sub(r"\1", text)) == _folded(label)


def _folded(text: str) -> str:
    return " ".join(text.strip().strip("*$.()\"' ").casefold().split())


def _too_large(text: str) -> bool:
    return _LARGE.search(text) is not None or _tower(text) > TOWER_MAX


def _tower(text: str) -> int:
    """The highest stack of exponents: 2 in e^{x^2}, 3 in 9^9^9^9."""
    highest = depth = 0
    open_groups: list[int] = []
    for letter in text:
        if letter == "^":
            depth += 1
            highest = max(highest, depth)
        elif letter in "{(":
            open_groups.append(depth)
        elif letter in "})":
            depth = open_groups.pop() if open_groups else 0
            depth = max(0, depth - 1) if letter == "}" else depth
        elif letter in "+-*/=,;<> \n":
            depth = open_groups[-1] if open_groups else 0
    return highest


def _is_equation(form: Any) -> bool:
    """Not "x = 5", whose answer may be given as 5."""
    if not isinstance(form, sympy.Equality):
        return False
    names_a_value = isinstance(form.lhs, sympy.Symbol) and not form.rhs.free_symbols
    return not names_a_value and bool(form.free_symbols)


def _same_equation(one: Any, other: Any) -> bool:
    """Whether the one is a multiple of the other."""
    if not isinstance(other, sympy.Equality):
        return False
    left, right = (sympy.expand(each.lhs - each.rhs) for each in (one, other))
    if left == 0 or right == 0:
        return bool(left == right)
    ratio = sympy.cancel(left / right)
    return bool(ratio.is_number and ratio != 0 and ratio.is_finite)


def _equations(label: Any, answer: FinalAnswer) -> list[Any]:
    if answer.stated:
        return _parse(f"\\boxed{{{_strip(answer.text)}}}")
    delimited = [each for each in _parse_prose(answer.text) if isinstance(each, sympy.Equality)]
    plain = _plain_equation(answer.text, label)
    return delimited or ([] if _too_large(plain) else _parse(f"${plain}$"))


def _plain_equation(prose: str, label: Any) -> str:
    """The last equation in prose without delimiters: what around "=" is numbers, operators and the label's symbols."""
    symbols = {str(each).casefold() for each in label.free_symbols}
    tokens = _TOKEN.findall(prose)
    fits = [_belongs(token, symbols) for token in tokens]
    at = next((i for i in range(len(tokens) - 1, -1, -1) if tokens[i] == "="), None)
    if at is None:
        return ""
    first = last = at
    while first > 0 and fits[first - 1] and tokens[first - 1] != "=":
        first -= 1
    while last + 1 < len(tokens) and fits[last + 1]:
        last += 1
    return "".join(tokens[first : last + 1]).strip()


def _belongs(token: str, symbols: set[str]) -> bool:
    if token.isalpha():
        return set(token.casefold()) <= symbols
    return token[0].isdigit() or token.isspace() or token in "-+*/^()="


def _same_set(label: list[Any], forms: list[Any]) -> bool:
    """math-verify knows inequalities as intervals, but not "not equal"."""
    sets = [form for form in label if isinstance(form, sympy.Set)]
    unequal = [form for form in forms if isinstance(form, sympy.Unequality) and len(form.free_symbols) == 1]
    return any(_as_set(form) == each for form in unequal for each in sets)


def _as_set(form: Relational) -> sympy.Set:
    real = sympy.Symbol("x", real=True)
    return form.subs({next(iter(form.free_symbols)): real}).as_set()
