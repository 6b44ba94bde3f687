"""Equality of mathematical answers, by math-verify. It runs in a killable worker, so math-verify's own alarm is off."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass

import sympy
from math_verify import LatexExtractionConfig, parse

from rollout_server.rewards.final_answer import FinalAnswer, final_answer
from rollout_server.rewards.math_values import Reading, Value, same_value
from rollout_server.rewards.number_text import ascii_numbers, parse_number, without_currency
from rollout_server.rewards.outcome import RewardItem

# Each parse would warn that it has no time limit; the pool sets one.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_TEXT = re.compile(r"[^\W\d_]*[^\W\d_]{3,}[^\W\d_]*(?:[\s'-]+[^\W\d_]+)*")
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textrm|textit|mbox|operatorname)\s*\{([^{}]*)\}")
_UPRIGHT_CONSTANT = re.compile(r"\\(?:text|mathrm|textrm|operatorname)\s*\{\s*(e|i|\\pi|\u03c0)\s*\}")
_STATEMENT = re.compile(r"answer(?:\s+is)?\s*[:=]?\s*\**\s*([^\n.]+)", re.IGNORECASE)
_TOKEN = re.compile(r"\d+(?:\.\d+)?|[A-Za-z]+|[-+*/^()=]|\s+|.", re.DOTALL)
# Evaluating these takes unbounded time or memory; nobody writes them as a final value.
_LARGE = re.compile(r"\^\s*\{?\s*\(?\s*-?\d{5,}|\d{4,}\s*\)?\s*!|\^[^!]{0,20}[)}]\s*!|!\s*!|!\s*\)\s*!")
_UNEVALUATED = re.compile(r"\\(?:int|sum|prod|lim|i+nt|oint)(?![a-z])")
_SEGMENT = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}", re.DOTALL)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{\w+\*?\}")
_CONNECTIVE = re.compile(r"\b(?:and|or)\b")
_WORD = re.compile(r"[^\W\d_]+")
_BARE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_UNICODE_MATHS = {
    "\u03c0": "\\pi ",
    "\u221e": "\\infty ",
    "\u00d7": "\\times ",
    "\u00b7": "\\cdot ",
    "\u2264": "\\le ",
    "\u2265": "\\ge ",
    "\u2260": "\\ne ",
    "\u00b0": "^\\circ ",
    "\u222a": "\\cup ",
    "\u2208": "\\in ",
}
_FUNCTIONS = re.compile(r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|exp|min|max|gcd|lcm|mod|det|sqrt|frac")
_UNITS = re.compile(
    r"[mcdk]?m|in|inche?|ft|foot|feet|yd|yard|mi|mile|[mk]?g|gram|kilogram|lb|pound|oz|ounce|ton|m?s|sec|second|min|minute"
    r"|hr?|hour|day|week|month|yr|year|ml|l|liter|litre|gal|gallon|sq|square|cu|cubic|unit|per|deg|degree|rad|radian|mph"
    r"|kmh|cent|dollar|euro|rupee|percent|meter|metre"
)
"""Units in singular. math-verify's own table of units to ignore also contains words like "more" and "less"."""
TOWER_MAX = 2
FORMULA_CHARACTERS_MAX = 2000


@dataclass(frozen=True)
class Label:
    """`equation` where the label states a relation of unknowns, not the value of one. `is_text`: compared as words."""

    text: str
    reading: Reading
    equation: sympy.Equality | None = None
    is_text: bool = False


def math_answer(item: RewardItem) -> float:
    """1 if the response's final answer is mathematically equal to the label.

    A label that cannot be read as a whole is an error, not a wrong answer. Sets and relations are compared as such: an
    equation equals its multiples, "x \\neq 2" is the set without 2. A word or one letter as label is compared as text.
    An answer that leaves an integral, sum or limit unevaluated where the label does not is wrong, and so is one too
    large to evaluate. Where one side is a decimal of at least six significant digits it may round or cut off the other
    side; every other number must be equal.
    """
    if item.label is None:
        raise ValueError("reward 'math' needs a label, the data row has none")
    label = read_label(item.label)
    answer = final_answer(ascii_numbers(item.begun + item.response))
    return float(answer is not None and _equal(label, answer))


@functools.lru_cache(maxsize=4096)
def read_label(text: str) -> Label:
    """Raises ValueError unless the whole text is a word, a number or a formula."""
    stated = _mathematics(text)
    if _TEXT.fullmatch(stated) or (len(stated) == 1 and stated.isalpha()):
        return Label(stated, Reading([]), is_text=True)
    reading = None if _too_large(stated) else _read(stated)
    if reading is None or not (reading.number or reading.expressions):
        raise ValueError(f"reward 'math' cannot read the label {text!r:.60}")
    unread = _unread_words(stated, reading)
    if unread:
        raise ValueError(f"reward 'math' cannot read the label {text!r:.60}: it does not understand {unread!r}")
    return Label(stated, reading, next((form for form in reading.expressions if _is_equation(form)), None))


def _mathematics(text: str) -> str:
    """The formula alone: no delimiters, no box, no currency; numbers, constants and signs as LaTeX writes them."""
    inner = ascii_numbers(text).strip()
    while True:
        found = _BOX.fullmatch(inner)
        bare: str = found[1] if found else _without_delimiters(inner)
        if bare == inner:
            break
        inner = str(bare)
    inner = without_currency(_UPRIGHT_CONSTANT.sub(r"\1", inner))
    for sign, command in _UNICODE_MATHS.items():
        inner = inner.replace(sign, command)
    whole = _TEXT_COMMAND.fullmatch(inner)
    return str(whole[1] if whole else inner).strip()


def _without_delimiters(text: str) -> str:
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = text[len(opening) : -len(closing)]
        is_whole = text.startswith(opening) and text.endswith(closing) and not text.endswith("\\" + closing)
        if is_whole and len(text) >= len(opening) + len(closing) and opening not in inner.replace("\\$", ""):
            return inner.strip()
    return text


def _read(stated: str) -> Reading | None:
    """The whole text as a value; None where a part of it is not understood."""
    percent = stated.rstrip("} ").endswith("%")
    number = parse_number(stated.rstrip("\\% ") if percent else stated)
    if number is not None:
        return Reading([], number, percent)
    forms = parse(f"\\boxed{{{stated}}}", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return Reading(forms, None, percent) if forms else None


def _unread_words(stated: str, reading: Reading) -> str:
    """The first words that the parser silently left aside, or ""; units and the names of unknowns are read."""
    if any(isinstance(form, sympy.FiniteSet) for form in reading.expressions):
        stated = _CONNECTIVE.sub(",", stated)
    stated = _ENVIRONMENT.sub("", stated)
    symbols = {letter for form in reading.expressions for each in form.free_symbols for letter in str(each).casefold()}
    for content in _TEXT_COMMAND.findall(stated):
        for word in _WORD.findall(content):
            if not _is_known(word) and not (len(word) == 1 and word.casefold() in symbols):
                return str(content).strip()
    for word in _BARE_WORD.findall(_TEXT_COMMAND.sub("", stated)):
        if not _is_known(word) and not set(word.casefold()) <= symbols:
            return str(word)
    return ""


def _is_known(word: str) -> bool:
    """A function, or a unit in singular or plural."""
    small = word.casefold()
    return _FUNCTIONS.fullmatch(small) is not None or _UNITS.fullmatch(small.removesuffix("s") or small) is not None


def _equal(label: Label, answer: FinalAnswer) -> bool:
    if label.is_text:
        return _same_text(label.text, answer)
    if not answer.stated:
        if label.equation is not None:
            return any(_same_equation(label.equation, each) for each in _equations(label.equation, answer.text))
        return same_value(label.reading, _read_prose(answer.text))
    stated = _mathematics(answer.text)
    if stated == label.text:
        return True
    if _too_large(stated) or len(stated) > FORMULA_CHARACTERS_MAX:
        return False
    if _UNEVALUATED.search(stated) and not _UNEVALUATED.search(label.text):
        return False
    reading = _read(stated)
    if reading is None:
        return False
    if label.equation is not None:
        return any(_same_equation(label.equation, each) for each in reading.expressions)
    return same_value(label.reading, reading)


def _read_prose(text: str) -> Reading:
    forms = _parse_prose(text)
    plain = next((number for form in forms if isinstance(form, str) and (number := parse_number(form))), None)
    return Reading([], plain) if plain else Reading(forms)


def _parse(text: str) -> list[Value]:
    forms: list[Value] = parse(text, parsing_timeout=None)
    return forms


def _parse_prose(text: str) -> list[Value]:
    """What math-verify considers the final answer of a text, without formulas that would take too long to evaluate."""
    calm = _SEGMENT.sub(lambda segment: "" if _endless(segment[0]) else segment[0], text)
    calm = re.sub(r"\S+", lambda word: "" if _too_large(word[0]) else word[0], calm)
    return _parse("\n".join(line for line in calm.split("\n") if not _too_large(line)))


def _endless(formula: str) -> bool:
    return _too_large(formula) or (_UNEVALUATED.search(formula) is not None and "=" not in formula)


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


def _is_equation(form: object) -> bool:
    """Whether it is an equation, but not one like "x = 5", whose answer may be given as 5."""
    if not isinstance(form, sympy.Equality):
        return False
    names_a_value = isinstance(form.lhs, sympy.Symbol) and not form.rhs.free_symbols
    return not names_a_value and bool(form.free_symbols)


def _same_equation(one: sympy.Equality, other: object) -> bool:
    """Whether the one is a multiple of the other."""
    if not isinstance(other, sympy.Equality):
        return False
    left, right = (sympy.expand(each.lhs - each.rhs) for each in (one, other))
    if left == 0 or right == 0:
        return bool(left == right)
    ratio = sympy.cancel(left / right)
    return bool(ratio.is_number and ratio != 0 and ratio.is_finite)


def _equations(label: sympy.Equality, prose: str) -> list[Value]:
    delimited = [each for each in _parse_prose(prose) if isinstance(each, sympy.Equality)]
    plain = _plain_equation(prose, label)
    return delimited or ([] if _too_large(plain) else _parse(f"${plain}$"))


def _plain_equation(prose: str, label: Value) -> str:
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
