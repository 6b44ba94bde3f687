"""Does a put match the schema, and what does the broker have to know of its rows?"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

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
    return tuple(dict.fromkeys(sample for _, sample, _ in rows))


def check_put(spec: RunSpec, columns: Mapping[str, Column], rows: Sequence[RowKey], group: str) -> None:
    """Whole samples of one group, with every field that the producer writes and no other."""
    if any(key[0] != group for key in rows):
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
    if LOSS_MASK not in columns or columns[LOSS_MASK].offsets is None:
        return tuple(RowFacts(key[1], key[2], n, 0, ()) for key, n in zip(rows, lengths, strict=True))
    mask = columns[LOSS_MASK].values.astype(bool)
    offsets = columns[LOSS_MASK].offsets
    trained = np.diff(np.concatenate([[0], np.cumsum(mask)])[offsets]).tolist()
    versions = _versions(columns, rows, mask, trained)
    return tuple(
        RowFacts(key[1], key[2], n, n_trained, tuple(sampled), tuple(sampled.values()))
        for key, n, n_trained, sampled in zip(rows, lengths, trained, versions, strict=True)
    )


def _row_lengths(columns: Mapping[str, Column], n_rows: int) -> list[int]:
    per_row = [c.lengths() for c in columns.values() if c.scope == "row" and c.offsets is not None]
    if TOKENS in columns and columns[TOKENS].offsets is not None:
        per_row = [columns[TOKENS].lengths()]
    return np.max(per_row, axis=0).tolist() if per_row else [0] * n_rows


def _versions(
    columns: Mapping[str, Column], rows: Sequence[RowKey], mask: npt.NDArray[np.bool_], trained: Sequence[int]
) -> list[dict[int, int]]:
    """Versions of each row's trained tokens, in order, and how many tokens each has."""
    if VERSIONS not in columns:
        return [{}] * len(rows)
    sampled = columns[VERSIONS].values[mask].tolist()
    versions, start = [], 0
    for key, count in zip(rows, trained, strict=True):
        of_row = dict(sorted(Counter(sampled[start : start + count]).items()))
        start += count
        if any(v < 0 for v in of_row):
            raise InvalidInput(f"row {key}: a token with loss mask 1 has no policy version")
        versions.append(of_row)
    return versions


def sample_facts(columns: Mapping[str, Column], rows: Sequence[RowKey]) -> tuple[SampleFacts, ...]:
    """Which samples count: reward status 0."""
    samples = samples_in_order(rows)
    if REWARD_STATUS not in columns:
        return tuple(SampleFacts(s, True) for s in samples)
    valid = columns[REWARD_STATUS].values == 0
    rewards = columns[REWARD].values if REWARD in columns else None
    if rewards is not None and not np.isfinite(rewards[valid]).all():
        raise InvalidInput("a sample with reward_status 0 has a reward that is not finite; give it another status")
    return tuple(
        SampleFacts(s, bool(valid[i]), float(rewards[i]) if rewards is not None and valid[i] else None)
        for i, s in enumerate(samples)
    )
