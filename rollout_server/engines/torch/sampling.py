"""Choosing the next token. One function defines the log-prob that rows carry."""

import torch
from torch import Tensor


def behaviour_log_probs(logits: Tensor, temperature: Tensor, vocab_size: int) -> Tensor:
    """log_softmax(logits / temperature) over the true vocabulary, fp32 [rows, vocab_size].

    Columns from `vocab_size` on exist only because some layout padded the embedding: they have probability 0.
    Temperature 0 (greedy) reports the distribution at temperature 1. Not by torch's own log_softmax: on a CPU that adds
    up a row's terms one by one, and over a vocabulary of 50,000 every log-prob comes out 1e-5 too large.
    """
    divisor = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    scaled = logits[:, :vocab_size].float() / divisor[:, None]
    return scaled - scaled.logsumexp(-1, keepdim=True)


def sample_tokens(
    logits: Tensor, temperature: Tensor, vocab_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [rows] and their log-probs fp32 [rows] from logits [rows, width >= vocab_size]."""
    log_probs = behaviour_log_probs(logits, temperature, vocab_size)
    sampled = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
    tokens = torch.where(temperature > 0, sampled, log_probs.argmax(-1))
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)
