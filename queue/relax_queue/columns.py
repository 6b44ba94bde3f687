"""Does a put match the schema, and what does the broker have to know of its rows?"""

import math
from collections.abc import Mapping, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from relax_common.errors import InvalidInput
from relax_queue.events import RowFacts, RowKey, SampleFacts
from relax_queue.extent import Column, ExtentError, decode
from relax_queue.spec import LOSS_MASK, PRODUCER, REWARD, REWARD_STATUS, TOKENS, VERSIONS, Field, RunSpec

PER_TOKEN = (TOKENS, LOSS_MASK, VERSIONS, "log_probs")


def decode_extent(payload: bytes | bytearray, what: str) -> dict[str, Column]:
    """Columns as views of the payload; a broken extent is INVALID_ARGUMENT."""
    try:
        return decode(payload)
    except ExtentError as error:
        raise InvalidInput(f"{what}: {error}", reason="BAD_EXTENT") from error


def check_column(field: Field, column: Column, units: int, tokens_per_row_max: int) -> None:
    """Raises InvalidInput that names the field and both sides of the mismatch."""
    where = f"field {field.name}"
    if column.values.dtype != np.dtype(field.dtype):
        raise InvalidInput(f"{where}: dtype {column.values.dtype} came, the schema says {field.dtype}")
    if column.scope != field.scope:
        raise InvalidInput(f"{where}: scope {column.scope} came, the schema says {field.scope}")
    if (column.offsets is not None) != field.ragged or column.transposed != field.transposed:
        raise InvalidInput(f"{where}: ragged or not does not match the schema's shape {list(field.shape)}")
    if column.values.shape[1:] != field.stored_shape:
        raise InvalidInput(f"{where}: entries of shape {list(column.values.shape[1:])} came, not {list(field.shape)}")
    if column.units != units:
        raise InvalidInput(f"{where}: {column.units} values came for {units} units of scope {field.scope}")
    if column.offsets is None or not units:
        return
    entry_bytes = column.values.itemsize * math.prod(field.stored_shape)
    longest = int(column.lengths().max()) * entry_bytes
    allowed = field.value_bytes_max(tokens_per_row_max)
    if longest > allowed:
        raise InvalidInput(f"{where}: a value of {longest} bytes came, at most {allowed} may", reason="OVERSIZE")


def samples_in_order(rows: Sequence[RowKey]) -> tuple[int, ...]:
    """Samples by first appearance: the order of sample-scoped values."""
    return tuple(dict.fromkeys([sample for _, sample, _ in rows]))


def check_put(spec: RunSpec, columns: Mapping[str, Column], rows: Sequence[RowKey], group: str) -> None:
    """Whole samples of one group, with every field that the producer writes and no other."""
    if {key[0] for key in rows} - {group}:
        raise InvalidInput(f"a put for the lease of group {group} has rows of another group")
    if len(set(rows)) != len(rows):
        raise InvalidInput(f"a put for group {group} names a row twice")
    fields = {f.name: f for f in spec.written_by(PRODUCER)}
    for name in columns:
        if name not in fields:
            writer = spec.field(name).writer
            raise InvalidInput(f"field {name} is written by {writer}, not by {PRODUCER}")
    units = {"row": len(rows), "sample": len(samples_in_order(rows)), "group": 1}
    for name, field in fields.items():
        if name in columns:
            check_column(field, columns[name], units[field.scope], spec.tokens_per_row_max)
        elif field.scope != "group" and rows:
            raise InvalidInput(f"field {name} is missing in a put for group {group}")
    per_token = {n: columns[n].lengths() for n in PER_TOKEN if n in columns and columns[n].offsets is not None}
    for name, lengths in per_token.items():
        first, expected = next(iter(per_token.items()))
        if not np.array_equal(lengths, expected):
            raise InvalidInput(f"fields {first} and {name} of group {group} differ in length within a row")


def row_facts(columns: Mapping[str, Column], rows: Sequence[RowKey]) -> tuple[RowFacts, ...]:
    """Lengths and versions of checked rows."""
    if not rows:
        return ()
    lengths = _row_lengths(columns, len(rows))
    _, samples, segments = zip(*rows, strict=True)
    if LOSS_MASK not in columns or columns[LOSS_MASK].offsets is None:
        return tuple(map(RowFacts, samples, segments, lengths, repeat(0), repeat(())))
    mask = columns[LOSS_MASK].values.astype(bool)
    offsets = columns[LOSS_MASK].offsets
    trained = np.diff(np.concatenate([[0], np.cumsum(mask)])[offsets])
    versions = _versions(columns, rows, mask, trained)
    return tuple(
        map(RowFacts, samples, segments, lengths, trained.tolist(), map(tuple, versions), map(_counts, versions))
    )


def _counts(versions: dict[int, int]) -> tuple[int, ...]:
    return tuple(versions.values())


def _row_lengths(columns: Mapping[str, Column], n_rows: int) -> list[int]:
    per_row = [c.lengths() for c in columns.values() if c.scope == "row" and c.offsets is not None]
    if TOKENS in columns and columns[TOKENS].offsets is not None:
        per_row = [columns[TOKENS].lengths()]
    return np.max(per_row, axis=0).tolist() if per_row else [0] * n_rows


def _versions(
    columns: Mapping[str, Column], rows: Sequence[RowKey], mask: npt.NDArray[np.bool_], trained: npt.NDArray[np.int64]
) -> list[dict[int, int]]:
    """Versions of each row's trained tokens, in order, and how many tokens each has."""
    found: list[dict[int, int]] = [{} for _ in rows]
    some = np.flatnonzero(trained)
    if VERSIONS not in columns or not len(some):
        return found
    sampled = columns[VERSIONS].values[mask]
    begins = (np.cumsum(trained) - trained)[some]
    least, most = np.minimum.reduceat(sampled, begins), np.maximum.reduceat(sampled, begins)
    if least.min() < 0:
        row = rows[some[int(least.argmin())]]
        raise InvalidInput(f"row {row}: a token with loss mask 1 has no policy version")
    counts = trained[some]
    for i, begin, count, first, last in zip(
        some.tolist(), begins.tolist(), counts.tolist(), least.tolist(), most.tolist(), strict=True
    ):
        if first == last:
            found[i] = {first: count}
        else:
            values, times = np.unique(sampled[begin : begin + count], return_counts=True)
            found[i] = dict(zip(values.tolist(), times.tolist(), strict=True))
    return found


def sample_facts(columns: Mapping[str, Column], rows: Sequence[RowKey]) -> tuple[SampleFacts, ...]:
    """Which samples count: reward status 0."""
    samples = samples_in_order(rows)
    if REWARD_STATUS not in columns:
        return tuple(map(SampleFacts, samples, repeat(True)))
    valid = columns[REWARD_STATUS].values == 0
    if REWARD not in columns:
        return tuple(map(SampleFacts, samples, valid.tolist()))
    rewards = columns[REWARD].values
    if not np.isfinite(rewards[valid]).all():
        raise InvalidInput("a sample with reward_status 0 has a reward that is not finite; give it another status")
    return tuple(
        SampleFacts(sample, counts, float(reward) if counts else None)
        for sample, counts, reward in zip(samples, valid.tolist(), rewards.tolist(), strict=True)
    )
