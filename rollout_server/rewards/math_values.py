"""Whether two mathematical values are the same. Exact values are compared exactly; only decimals have a tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import sympy
from math_verify import verify
from sympy.core.relational import Relational

from rollout_server.rewards.number_text import PlainNumber, abbreviates, same_number

# math-verify rounds to this many places; numbers are compared here instead.
PLACES_OF_OTHER_FORMS = 12
PRECISION_DIGITS = 60
_EXACT = sympy.Float(10) ** -40
_ONE_DECIMAL, _TWO_DECIMALS = 5e-6, 1e-6
"""Relative differences that an expression with a decimal in it may have from an exact one, and from another such."""


Value: TypeAlias = Any
"""A PlainNumber, or what sympy (which has no types) makes of a formula."""

_ONE = Fraction(1)
_PLAIN, _PERCENT = (_ONE,), (_ONE, Fraction(1, 100), Fraction(100))
"""Factors by which two sides may differ: one of them in percent may have been meant either way."""


@dataclass(frozen=True)
class Reading:
    """A text as a value: a plain number where the whole text is one, and what math-verify makes of it."""

    forms: Sequence[Value]
    number: PlainNumber | None = None
    percent: bool = False

    @property
    def expressions(self) -> list[Value]:
        return [form for form in self.forms if not isinstance(form, str)]


def same_value(label: Reading, answer: Reading) -> bool:
    """Numbers by value, "50 %" as both 50 and 0.5; everything else part by part, and as math-verify compares it."""
    scales = _PERCENT if label.percent != answer.percent else _PLAIN
    for one in [label.number] if label.number is not None else label.expressions:
        for other in [answer.number] if answer.number is not None else answer.expressions:
            if any(_same(one, other, scale) for scale in scales):
                return True
    return False


def _same(one: Value, other: Value, scale: Fraction = _ONE) -> bool:
    if isinstance(one, PlainNumber) and isinstance(other, PlainNumber):
        return same_number(one, other.scaled(scale))
    if _is_number(one) and _is_number(other):
        return _same_numbers(one, other, scale)
    one, other = _expression(one), _expression(other)
    parts = _parts(one, other)
    if parts is not None:
        return all(_same(*each) for each in parts)
    if isinstance(one, sympy.FiniteSet) and isinstance(other, sympy.FiniteSet):
        return _same_sets(list(one.args), list(other.args))
    if _is_number(one) != _is_number(other) and not isinstance(one, Relational) and not isinstance(other, Relational):
        return False
    return bool(verify(one, other, float_rounding=PLACES_OF_OTHER_FORMS, timeout_seconds=None)) or _same_as_set(
        one, other
    )


def _is_number(value: Value) -> bool:
    return isinstance(value, PlainNumber) or (isinstance(value, sympy.Expr) and bool(value.is_number))


def _expression(value: Value) -> sympy.Basic:
    return sympy.Rational(value.value.numerator, value.value.denominator) if isinstance(value, PlainNumber) else value


def _same_numbers(one: Value, other: Value, scale: Fraction) -> bool:
    if isinstance(other, PlainNumber):
        one, other = other, one
        scale = 1 / scale
    if isinstance(one, PlainNumber):
        exact = _fraction(other)
        if exact is not None:
            return one.value == exact * scale or abbreviates(one, exact * scale)
        if one.step is not None and not other.has(sympy.Float):
            value = other.evalf(PRECISION_DIGITS)
            return bool(value.is_real) and abbreviates(one, Fraction(str(value)) * scale)
        one = _expression(one)
    return _close(one, other * sympy.Rational(scale.numerator, scale.denominator))


def _fraction(value: Value) -> Fraction | None:
    """Exact rational value, else None; an unevaluated one is evaluated."""
    done = value.doit() if not value.has(sympy.Float) else value
    return Fraction(int(done.p), int(done.q)) if isinstance(done, sympy.Rational) else None


def _close(one: Value, other: Value) -> bool:
    """Two expressions without a decimal must agree in forty digits."""
    decimals = one.has(sympy.Float) + other.has(sympy.Float)
    allowed = (_EXACT, _ONE_DECIMAL, _TWO_DECIMALS)[decimals]
    left, right = one.evalf(PRECISION_DIGITS), other.evalf(PRECISION_DIGITS)
    if not (left.is_finite and right.is_finite):
        return bool(left == right)
    return bool(abs(left - right) <= allowed * max(abs(left), abs(right)))


def _parts(one: Value, other: Value) -> list[tuple[Value, Value]] | None:
    """Pairs that must agree one by one; None where the two are not of one such kind and shape."""
    if isinstance(one, sympy.Tuple) and isinstance(other, sympy.Tuple) and len(one) == len(other):
        return list(zip(one, other, strict=True))
    if isinstance(one, sympy.MatrixBase) and isinstance(other, sympy.MatrixBase) and one.shape == other.shape:
        return list(zip(one, other, strict=True))
    both_intervals = isinstance(one, sympy.Interval) and isinstance(other, sympy.Interval)
    if both_intervals and (one.left_open, one.right_open) == (other.left_open, other.right_open):
        return [(one.start, other.start), (one.end, other.end)]
    return None


def _same_sets(ones: list[Value], others: list[Value]) -> bool:
    if len(ones) != len(others):
        return False
    left = list(others)
    for one in ones:
        found = next((other for other in left if _same(one, other)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _same_as_set(one: Value, other: Value) -> bool:
    """math-verify knows inequalities as intervals, but not "not equal"."""
    unequal = isinstance(other, sympy.Unequality) and len(other.free_symbols) == 1
    return unequal and isinstance(one, sympy.Set) and bool(_as_set(other) == one)


def _as_set(form: Relational) -> sympy.Set:
    real = sympy.Symbol("x", real=True)
    return form.subs({next(iter(form.free_symbols)): real}).as_set()
