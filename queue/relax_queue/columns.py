"""Does a put match the schema, and what does the broker have to know of its rows?"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_common.errors import InvalidInput
from relax_queue.extent import Array, Column, ExtentError, decode
from relax_queue.facts import NO_ROWS, NO_SAMPLES, RowFacts, SampleFacts
from relax_queue.row_keys import RowKeys
from relax_queue.spec import LOSS_MASK, PRODUCER, REWARD, REWARD_STATUS, TOKENS, VERSIONS, Field, RunSpec

PER_TOKEN = (TOKENS, LOSS_MASK, VERSIONS, "log_probs")


def decode_extent(payload: bytes | bytearray, what: str) -> dict[str, Column]:
    """Columns as views of the payload; a broken extent is INVALID_ARGUMENT."""
    try:
        return decode(payload)
    except ExtentError as error:
        raise InvalidInput(f"{what}: {error}", reason="BAD_EXTENT") from error


class _Form(NamedTuple):
    """What a field's column must look like."""

    dtype: np.dtype[np.generic]
    ragged: bool
    transposed: bool
    stored_shape: tuple[int, ...]
    value_bytes_max: int


@lru_cache(maxsize=1024)
def _form(field: Field, tokens_per_row_max: int) -> _Form:
    most = field.value_bytes_max(tokens_per_row_max)
    return _Form(np.dtype(field.dtype), field.ragged, field.transposed, field.stored_shape, most)


def check_column(field: Field, column: Column, units: int, tokens_per_row_max: int) -> None:
    """Raises InvalidInput that names the field and both sides of the mismatch."""
    where, form = f"field {field.name}", _form(field, tokens_per_row_max)
    if column.values.dtype != form.dtype:
        raise InvalidInput(f"{where}: dtype {column.values.dtype} came, the schema says {field.dtype}")
    if column.scope != field.scope:
        raise InvalidInput(f"{where}: scope {column.scope} came, the schema says {field.scope}")
    if (column.offsets is not None, column.transposed) != (form.ragged, form.transposed):
        raise InvalidInput(f"{where}: ragged or not does not match the schema's shape {list(field.shape)}")
    if column.values.shape[1:] != form.stored_shape:
        raise InvalidInput(f"{where}: entries of shape {list(column.values.shape[1:])} came, not {list(field.shape)}")
    if column.units != units:
        raise InvalidInput(f"{where}: {column.units} values came for {units} units of scope {field.scope}")
    if column.offsets is None or not units or column.values.nbytes <= form.value_bytes_max:
        return
    longest = int(np.maximum.reduce(column.lengths())) * column.values.itemsize * math.prod(form.stored_shape)
    allowed = form.value_bytes_max
    if longest > allowed:
        raise InvalidInput(f"{where}: a value of {longest} bytes came, at most {allowed} may", reason="OVERSIZE")


def check_put(spec: RunSpec, columns: Mapping[str, Column], rows: RowKeys, group: str) -> None:
    """Whole samples of one group, with every field that the producer writes and no other."""
    if set(rows.groups) - {group}:
        raise InvalidInput(f"a put for the lease of group {group} has rows of another group")
    if not rows.ascending and len(set(rows)) != len(rows):
        raise InvalidInput(f"a put for group {group} names a row twice")
    fields = spec.put_fields
    for name in columns:
        if name not in fields:
            writer = spec.field(name).writer
            raise InvalidInput(f"field {name} is written by {writer}, not by {PRODUCER}")
    units = {"row": len(rows), "sample": len(rows.samples()), "group": 1}
    for name, field in fields.items():
        if name in columns:
            check_column(field, columns[name], units[field.scope], spec.tokens_per_row_max)
        elif field.scope != "group" and rows:
            raise InvalidInput(f"field {name} is missing in a put for group {group}")
    per_token = [(n, o) for n in PER_TOKEN if n in columns and (o := columns[n].offsets) is not None]
    for name, offsets in per_token:
        first, expected = per_token[0]
        if offsets is not expected and not np.array_equal(offsets, expected):
            raise InvalidInput(f"fields {first} and {name} of group {group} differ in length within a row")


def row_facts(columns: Mapping[str, Column], rows: RowKeys) -> RowFacts:
    """Lengths and versions of checked rows."""
    if not rows:
        return NO_ROWS
    n_tokens = _row_lengths(columns, len(rows))
    if LOSS_MASK not in columns or columns[LOSS_MASK].offsets is None:
        return RowFacts(rows, n_tokens, bytes(4 * len(rows)))
    mask = columns[LOSS_MASK].values.astype(bool)
    before = np.zeros(len(mask) + 1, np.int64)
    mask.cumsum(out=before[1:])
    at_offsets = before[columns[LOSS_MASK].offsets]
    trained = at_offsets[1:] - at_offsets[:-1]
    n_loss_tokens = trained.astype("<i4").tobytes()
    if VERSIONS not in columns or not before[-1]:
        return RowFacts(rows, n_tokens, n_loss_tokens)
    return RowFacts(rows, n_tokens, n_loss_tokens, *_versions(rows, columns[VERSIONS].values[mask], trained))


def _row_lengths(columns: Mapping[str, Column], n_rows: int) -> bytes:
    """As RowFacts has them."""
    if TOKENS in columns and columns[TOKENS].offsets is not None:
        return columns[TOKENS].lengths().astype("<i4").tobytes()
    per_row = [c.lengths() for c in columns.values() if c.scope == "row" and c.offsets is not None]
    return np.max(per_row, axis=0).astype("<i4").tobytes() if per_row else bytes(4 * n_rows)


def _versions(rows: RowKeys, sampled: Array, trained: npt.NDArray[np.int64]) -> tuple[bytes, bytes, bytes]:
    """Rows, versions and tokens as RowFacts has them. `sampled`: of all trained tokens; `trained`: tokens a row."""
    oldest = np.minimum.reduce(sampled)
    if oldest < 0:
        at = int(np.searchsorted(np.cumsum(trained), int(sampled.argmin()), side="right"))
        raise InvalidInput(f"row {rows[at]}: a token with loss mask 1 has no policy version")
    if oldest == np.maximum.reduce(sampled):
        some = trained.nonzero()[0]
        versions = np.full(len(some), oldest, "<i8")
        return some.astype("<i4").tobytes(), versions.tobytes(), trained[some].astype("<i4").tobytes()
    row_of = np.repeat(np.arange(len(trained), dtype="<i4"), trained)
    # A row's tokens are few stretches of one version: sorted are only these.
    begins = np.flatnonzero(np.concatenate([[True], (np.diff(sampled) != 0) | (np.diff(row_of) != 0)]))
    of_row, versions, tokens = row_of[begins], sampled[begins], np.diff(begins, append=len(sampled))
    order = np.lexsort((versions, of_row))
    of_row, versions, tokens = of_row[order], versions[order], tokens[order]
    first = np.flatnonzero(np.concatenate([[True], (np.diff(versions) != 0) | (np.diff(of_row) != 0)]))
    counts = np.add.reduceat(tokens, first)
    return of_row[first].tobytes(), versions[first].astype("<i8").tobytes(), counts.astype("<i4").tobytes()


def sample_facts(columns: Mapping[str, Column], rows: RowKeys) -> SampleFacts:
    """Which samples count: reward status 0."""
    if not rows:
        return NO_SAMPLES
    samples = rows.samples().columns()[0].tobytes()
    if REWARD_STATUS not in columns:
        return SampleFacts(samples, b"\1" * (len(samples) // 4))
    valid = columns[REWARD_STATUS].values == 0
    if REWARD not in columns:
        return SampleFacts(samples, valid.tobytes())
    rewards = columns[REWARD].values.astype("<f8")
    known = np.where(valid, rewards, np.nan)
    if np.count_nonzero(np.isfinite(known)) != np.count_nonzero(valid):
        raise InvalidInput("a sample with reward_status 0 has a reward that is not finite; give it another status")
    return SampleFacts(samples, valid.tobytes(), known.tobytes())
