"""Choosing the next token. One function defines the log-prob that rows carry."""

import torch
from torch import Tensor

_GOLDEN, _MIX_1, _MIX_2 = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def rollout_log_probs(logits: Tensor, temperature: Tensor, vocab_size: int) -> Tensor:
    """log_softmax(logits / temperature) over the true vocabulary, fp32 [rows, vocab_size].

    Columns from `vocab_size` on exist only because some layout padded the embedding: they have probability 0.
    Temperature 0 (greedy) reports the distribution at temperature 1. torch's own log_softmax is not used: on a CPU it
    adds up a row's terms one by one, and over a vocabulary of 50,000 every log-prob comes out 1e-5 too large.
    """
    divisor = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    scaled = logits[:, :vocab_size].float() / divisor[:, None]
    return scaled - scaled.logsumexp(-1, keepdim=True)


def sample_tokens(logits: Tensor, temperature: Tensor, vocab_size: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [rows] and their log-probs fp32 [rows] from logits [rows, width >= vocab_size].

    uniforms: float64 [rows] in [0, 1), one draw per row; it selects the token whose interval of the cumulative
    distribution contains it.
    """
    log_probs = rollout_log_probs(logits, temperature, vocab_size)
    cumulative = log_probs.double().exp_().cumsum(-1)
    sampled = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True).squeeze(1)
    tokens = torch.where(temperature > 0, sampled.clamp_max(vocab_size - 1), log_probs.argmax(-1))
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Draws in [0, 1), float64 [rows], as functions of a row's seed and of how many tokens it has: splitmix64."""
    mixed = seeds + (positions + 1) * _GOLDEN
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 11).double() * 2.0**-53


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 values."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
