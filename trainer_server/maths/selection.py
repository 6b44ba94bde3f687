"""Which tokens of an update take part: decided over all of its trained tokens, whatever rank or pack they are in.

Arrays are [tokens of the update] in the order of their keys, so that ties and draws do not depend on the split.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]


def within_second_moment(log_ratio: Array, advantages: Array, most: float) -> NDArray[np.bool_]:
    """Tokens that stay, so that the mean of (log ratio)^2 over them is at most `most`. Only tokens that have moved in
    the direction their advantage asks for can leave, those that moved furthest first (M2PO, Zheng et al. 2025)."""
    squares = np.square(log_ratio.astype(np.float64))
    keep = np.ones(len(squares), np.bool_)
    total, count = squares.sum(), len(squares)
    leaving = np.flatnonzero(log_ratio * advantages > 0)
    for token in leaving[np.argsort(-squares[leaving], kind="stable")]:
        if not count or total / count <= most:
            break
        keep[token] = False
        total, count = total - squares[token], count - 1
    return keep


def covariances(log_probs: Array, advantages: Array) -> NDArray[np.float64]:
    """(log p - mean log p) (A - mean A) per token."""
    p, a = log_probs.astype(np.float64), advantages.astype(np.float64)
    result: NDArray[np.float64] = (p - p.mean()) * (a - a.mean()) if len(p) else p
    return result


def highest_covariances(log_probs: Array, advantages: Array, share: float) -> NDArray[np.bool_]:
    """The `share` of tokens with the highest covariance, at least one (KL-Cov, Cui et al. 2025)."""
    chosen = np.zeros(len(log_probs), np.bool_)
    if len(chosen):
        order = np.argsort(-covariances(log_probs, advantages), kind="stable")
        chosen[order[: max(1, int(share * len(order)))]] = True
    return chosen


def drawn_covariances(
    log_probs: Array, advantages: Array, clipped: NDArray[np.bool_], share: float, low: float, high: float, seed: int
) -> NDArray[np.bool_]:
    """A `share` of all tokens, at least one, drawn from those that the clip leaves alone and whose covariance lies
    between the bounds (Clip-Cov, Cui et al. 2025)."""
    chosen = np.zeros(len(log_probs), np.bool_)
    values = covariances(log_probs, advantages)
    candidates = np.flatnonzero((values > low) & (values < high) & ~clipped)
    count = min(len(candidates), max(1, int(share * len(values))))
    chosen[np.random.default_rng(seed).permutation(candidates)[:count]] = True
    return chosen
