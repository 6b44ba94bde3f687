"""The rows that decode together: a left-padded table of tokens, and their key/value cache.

All rows end in the last column, so a decode step appends one column to every table and the cache, rows leave by
selection, and two batches merge by padding the shorter one on the left. Column j of the tables is column j of the
cache; the cache lacks the last column, whose token is the next input. Without a cache the next step feeds whole rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from relax_common.versions import NOT_SAMPLED, PackedVersion


@dataclass
class Batch:
    """Tables are [rows, columns]; vectors are [rows]. A row belongs to the request `owner` and is drawn from `seed`."""

    tokens: Tensor
    mask: Tensor
    log_probs: Tensor
    versions: Tensor
    temperature: Tensor
    n_new: Tensor
    max_new: Tensor
    owner: Tensor
    sample: Tensor
    seed: Tensor
    cache: DynamicCache | None

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]


def prompt_batch(
    prompts: Sequence[Sequence[int]], temperatures: Sequence[float], max_new: Sequence[int], owners: Sequence[int]
) -> Batch:
    """One row per prompt, nothing generated yet."""
    rows, width = len(prompts), max(len(prompt) for prompt in prompts)
    padding = [width - len(prompt) for prompt in prompts]
    return Batch(
        tokens=torch.tensor([[0] * left + list(prompt) for left, prompt in zip(padding, prompts, strict=True)]),
        mask=(torch.arange(width) >= torch.tensor(padding)[:, None]).to(torch.int64),
        log_probs=torch.zeros(rows, width),
        versions=torch.full((rows, width), NOT_SAMPLED),
        temperature=torch.tensor(temperatures, dtype=torch.float32),
        n_new=torch.zeros(rows, dtype=torch.int64),
        max_new=torch.tensor(max_new),
        owner=torch.tensor(owners),
        sample=torch.zeros(rows, dtype=torch.int64),
        seed=torch.zeros(rows, dtype=torch.int64),
        cache=None,
    )


def select(batch: Batch, rows: Tensor) -> Batch:
    """The batch with these rows, in this order; a row may be taken several times. Takes over the cache."""
    if batch.cache is not None:
        batch.cache.batch_select_indices(rows)
    return Batch(
        tokens=batch.tokens[rows],
        mask=batch.mask[rows],
        log_probs=batch.log_probs[rows],
        versions=batch.versions[rows],
        temperature=batch.temperature[rows],
        n_new=batch.n_new[rows],
        max_new=batch.max_new[rows],
        owner=batch.owner[rows],
        sample=batch.sample[rows],
        seed=batch.seed[rows],
        cache=batch.cache,
    )


def repeat_rows(batch: Batch, counts: Sequence[int], seeds: Sequence[int]) -> Batch:
    """Row i `counts[i]` times, numbered by `sample`, with seeds: a group's prompt is computed once and shared."""
    repeats = torch.tensor(counts)
    repeated = select(batch, torch.arange(batch.rows).repeat_interleave(repeats))
    repeated.sample = torch.cat([torch.arange(count) for count in counts])
    repeated.seed = torch.tensor(seeds)
    return repeated


def append_column(batch: Batch, tokens: Tensor, log_probs: Tensor, version: PackedVersion) -> None:
    """Add one sampled token to every row."""
    batch.tokens = torch.cat([batch.tokens, tokens[:, None]], 1)
    batch.mask = functional.pad(batch.mask, (0, 1), value=1)
    batch.log_probs = torch.cat([batch.log_probs, log_probs[:, None]], 1)
    batch.versions = functional.pad(batch.versions, (0, 1), value=version)
    batch.n_new = batch.n_new + 1


def merge(first: Batch, second: Batch) -> Batch:
    """Both batches' rows in one; if either lacks its cache, the merged one is computed again by the next step."""
    width = max(first.tokens.shape[1], second.tokens.shape[1])
    left, right = _widen(first, width), _widen(second, width)
    cache = None
    if left.cache is not None and right.cache is not None:
        cache = DynamicCache()
        for index, (one, other) in enumerate(zip(_layers(left.cache), _layers(right.cache), strict=True)):
            cache.update(torch.cat([one.keys, other.keys]), torch.cat([one.values, other.values]), index)
    return Batch(
        tokens=torch.cat([left.tokens, right.tokens]),
        mask=torch.cat([left.mask, right.mask]),
        log_probs=torch.cat([left.log_probs, right.log_probs]),
        versions=torch.cat([left.versions, right.versions]),
        temperature=torch.cat([left.temperature, right.temperature]),
        n_new=torch.cat([left.n_new, right.n_new]),
        max_new=torch.cat([left.max_new, right.max_new]),
        owner=torch.cat([left.owner, right.owner]),
        sample=torch.cat([left.sample, right.sample]),
        seed=torch.cat([left.seed, right.seed]),
        cache=cache,
    )


def _widen(batch: Batch, width: int) -> Batch:
    """Masked columns on the left of every table and of the cache, up to `width` columns."""
    missing = width - batch.tokens.shape[1]
    if missing == 0:
        return batch
    batch.tokens = functional.pad(batch.tokens, (missing, 0))
    batch.mask = functional.pad(batch.mask, (missing, 0))
    batch.log_probs = functional.pad(batch.log_probs, (missing, 0))
    batch.versions = functional.pad(batch.versions, (missing, 0), value=NOT_SAMPLED)
    if batch.cache is not None:
        for layer in _layers(batch.cache):
            layer.keys = functional.pad(layer.keys, (0, 0, missing, 0))
            layer.values = functional.pad(layer.values, (0, 0, missing, 0))
    return batch


def _layers(cache: DynamicCache) -> list[Any]:
    """The attention layers: keys and values [rows, heads, columns, head_dim] each."""
    return list(cache.layers)
