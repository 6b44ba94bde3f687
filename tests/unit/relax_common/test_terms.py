"""I8: the fence that queue, dcs and relaxd share."""

import pytest

from relax_common.errors import InvalidInput, StaleTerm
from relax_common.terms import TERM_STEP_MAX, Terms


def test_I8_a_newer_term_wins_and_the_same_one_is_no_news() -> None:
    terms = Terms()
    assert terms.check("actor", 1)
    assert terms.of("actor") == 0, "checking changes nothing"
    terms.register("actor", 1)
    assert not terms.check("actor", 1)
    assert terms.check("actor", 2)
    terms.register("actor", 2)
    with pytest.raises(StaleTerm, match="term 1 of actor is over, term 2 has registered"):
        terms.check("actor", 1)
    assert terms.check("critic", 1), "each holder has terms of its own"


def test_I8_a_registered_term_never_goes_back() -> None:
    terms = Terms({"actor": 5})
    terms.register("actor", 3)
    assert terms.of("actor") == 5


@pytest.mark.parametrize(("known", "term"), [(0, 0), (0, TERM_STEP_MAX + 1), (7, 8 + TERM_STEP_MAX), (7, 2**64 - 1)])
def test_I8_a_term_is_at_least_1_and_only_the_next_few_above_the_known_one(known: int, term: int) -> None:
    terms = Terms({"actor": known} if known else {})
    with pytest.raises(InvalidInput):
        terms.check("actor", term)
    assert terms.of("actor") == known
    assert terms.check("actor", known + TERM_STEP_MAX)


@pytest.mark.parametrize("holder", ["", "a b", "a\n", "../a", "x" * 129])
def test_I8_a_term_whose_holder_has_no_name_is_refused(holder: str) -> None:
    with pytest.raises(InvalidInput, match="holder of a term"):
        Terms().check(holder, 1)
