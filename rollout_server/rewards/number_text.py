"""Numbers as people and models write them: one reading for all rewards."""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

DIGITS_COMPARED_MIN = 6
"""A decimal with at least this many significant digits equals a value that it abbreviates; a shorter one must be
exact."""

# The exact value of "1e999999999", or of a million digits, would take all memory to build.
CHARACTERS_MAX = 100
EXPONENT_DIGITS_MAX = 3

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_MINUS_SIGNS = dict.fromkeys(map(ord, "\u2212\ufe63\u207b\u2796\ufe58\u2011"), "-")
# A dash of any kind in front of a number is its sign, unless a word or a number comes before it ("pages 10-20").
_DASH_AS_SIGN = re.compile(r"(?<!\w)[\u2010\u2012\u2013\u2014\u2015](?=\s?[\d.\\$\u20ac\u00a3\u00a5(])")
_THIN_SPACE = re.compile(r"(?<=\d)[\u00a0\u2004-\u200a\u202f](?=\d{3}(?!\d))")
_LATEX_SPACE = re.compile(r"(?<=\d)(?:\\[,!;: ]|~|\{,\})(?=\d{3}(?!\d))")
_LEADING_POINT = re.compile(r"(?<![\d.\w)}])\.(?=\d)")
_CURRENCY = r"(?:\\?\$|\\?[\u20ac\u00a3\u00a5\u20b9]|\\text\{\s*\\?\$\s*\})"
_MONEY = re.compile(rf"(?P<sign>[-+]?)\s*{_CURRENCY}\s*(?P<number>[-+]?\d[\d,]*(?:\.\d+)?)(?P<rest>.*)", re.DOTALL)
_POWER_OF_TEN = re.compile(
    r"\s*(?:\\times|\\cdot|\u00d7|\u00b7|\*)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d))\s*"
)

CANDIDATE = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+|/\d+)?")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


@dataclass(frozen=True)
class PlainNumber:
    """`value` is exact. `step` is one unit in the last place where the number is a decimal, else None: it is exact."""

    value: Fraction
    step: Fraction | None = None
    digits: int = 0
    """Significant digits of a decimal."""

    def scaled(self, factor: Fraction) -> "PlainNumber":
        return PlainNumber(self.value * factor, None if self.step is None else self.step * factor, self.digits)


def ascii_numbers(text: str) -> str:
    """The same text with ASCII digits, signs and points, and without the spaces that only group digits."""
    text = text.translate(_FULL_WIDTH).translate(_MINUS_SIGNS)
    text = "".join(str(unicodedata.decimal(c)) if not c.isascii() and c.isdecimal() else c for c in text)
    text = _LATEX_SPACE.sub("", _THIN_SPACE.sub("", text))
    return _LEADING_POINT.sub("0.", _DASH_AS_SIGN.sub("-", text))


def without_currency(text: str) -> str:
    """ "$20", "-\\$3.50" and "20" are the same number; any other text stays as it is."""
    found = _MONEY.fullmatch(text.strip())
    return f"{found['sign']}{found['number']}{found['rest']}" if found else text


def parse_number(text: str) -> PlainNumber | None:
    """One number and nothing else; None for anything else, absurdly long numbers included."""
    stripped = _POWER_OF_TEN.sub(lambda found: f"e{found[1] or found[2]}", text.strip(), count=1)
    if len(stripped) > CHARACTERS_MAX or not CANDIDATE.fullmatch(stripped):
        return None
    if "," in stripped and not _GROUPED.fullmatch(stripped):
        return None
    plain = stripped.replace(",", "").lower()
    mantissa, has_exponent, exponent = plain.partition("e")
    if has_exponent and len(exponent.lstrip("+-")) > EXPONENT_DIGITS_MAX:
        return None
    if "/" in plain:
        numerator, _, denominator = plain.partition("/")
        return PlainNumber(Fraction(numerator) / int(denominator)) if int(denominator) else None
    if "." not in mantissa and not has_exponent:
        return PlainNumber(Fraction(plain))
    places = len(mantissa.partition(".")[2])
    digits = mantissa.lstrip("+-").replace(".", "").lstrip("0")
    return PlainNumber(Fraction(plain), Fraction(10) ** (int(exponent or 0) - places), len(digits))


def same_number(one: PlainNumber, other: PlainNumber) -> bool:
    """Exact, except that a decimal of six or more significant digits may round or cut off the other value."""
    return one.value == other.value or abbreviates(one, other.value) or abbreviates(other, one.value)


def abbreviates(decimal: PlainNumber, value: Fraction) -> bool:
    """Whether `decimal` is `value` rounded or cut off after at least six significant digits."""
    if decimal.step is None or decimal.digits < DIGITS_COMPARED_MIN:
        return False
    return abs(decimal.value - value) < decimal.step
