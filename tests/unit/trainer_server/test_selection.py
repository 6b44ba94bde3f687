"""Which tokens M2PO, KL-Cov and Clip-Cov select: over the whole update, however its rows are split."""

import numpy as np
import pytest

from trainer_server.maths.selection import (
    covariances,
    drawn_covariances,
    highest_covariances,
    within_second_moment,
)

LOG_PROBS = np.array([-1, -0.2, -2, -0.6, -0.3, -2.5, -0.4, -0.1], np.float32)
ADVANTAGES = np.array([0.2, 0.4, -0.3, 0.1, 1, -1.5, 0.5, 0.6], np.float32)


def test_the_second_moment_of_the_whole_update_decides() -> None:
    log_ratio = np.array([0.5] + [0.1] * 8, np.float32)
    assert within_second_moment(log_ratio, np.ones(9), 0.04).all(), ".036667 is within the bound"
    alone = within_second_moment(log_ratio[:3], np.ones(3), 0.04)
    assert alone.tolist() == [False, True, True]


@pytest.mark.parametrize("seed", range(20))
def test_tokens_leave_furthest_first_and_only_in_the_direction_of_their_advantage(seed: int) -> None:
    random = np.random.default_rng(seed)
    log_ratio, advantages = random.normal(0, 0.4, 50), random.normal(0, 1, 50)
    keep = within_second_moment(log_ratio, advantages, 0.05)
    moving = log_ratio * advantages > 0
    assert keep[~moving].all()
    if moving.any() and not keep.all():
        assert np.abs(log_ratio[~keep]).min() >= np.abs(log_ratio[keep & moving]).max(initial=0)
        last = np.flatnonzero(~keep)[np.abs(log_ratio[~keep]).argmin()]
        before = keep.copy()
        before[last] = True
        assert np.square(log_ratio[before]).mean() > 0.05, "one token fewer would not have been enough"
    if (keep & moving).any():
        assert np.square(log_ratio[keep]).mean() <= 0.05


def test_covariances_on_vectors() -> None:
    expected = [-0.0084, 0.1891, 0.4728, -0.0072, 0.5141, 2.6203, 0.1828, 0.3741]
    np.testing.assert_allclose(covariances(LOG_PROBS, ADVANTAGES), expected, atol=6e-5)
    assert np.flatnonzero(highest_covariances(LOG_PROBS, ADVANTAGES, 1 / 8)).tolist() == [5]
    halves = [highest_covariances(LOG_PROBS[h], ADVANTAGES[h], 1 / 8) for h in (slice(4), slice(4, 8))]
    assert [np.flatnonzero(half).tolist() for half in halves] == [[2], [1]], "what a split would wrongly select"


def test_the_drawn_tokens_lie_between_the_bounds_and_were_not_clipped() -> None:
    random = np.random.default_rng(0)
    log_probs, advantages = -random.random(1000) * 4, random.normal(0, 1.5, 1000)
    clipped = random.random(1000) < 0.3
    chosen = drawn_covariances(log_probs, advantages, clipped, 0.05, 1.0, 5.0, seed=3)
    values = covariances(log_probs, advantages)
    assert chosen.sum() == 50
    assert ((values[chosen] > 1) & (values[chosen] < 5) & ~clipped[chosen]).all()
    again = drawn_covariances(log_probs, advantages, clipped, 0.05, 1.0, 5.0, seed=3)
    other = drawn_covariances(log_probs, advantages, clipped, 0.05, 1.0, 5.0, seed=4)
    assert (again == chosen).all()
    assert (other != chosen).any()


def test_nothing_can_be_selected_from_nothing() -> None:
    empty = np.zeros(0, np.float32)
    assert len(within_second_moment(empty, empty, 0.04)) == 0
    assert len(highest_covariances(empty, empty, 0.1)) == 0
