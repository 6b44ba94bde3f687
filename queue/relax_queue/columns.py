"""Does a put match the schema, and what does the broker have to know of its rows?"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, compress, pairwise
from math import isfinite, nan
from operator import sub

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


def check_column(field: Field, column: Column, units: int, tokens_per_row_max: int) -> None:
    """Raises InvalidInput that names the field and both sides of the mismatch."""
    values, ragged = column.values, column.offsets is not None
    if (values.dtype, column.scope, ragged, column.transposed, values.shape[1:]) != field.form:
        raise InvalidInput(f"field {field.name}: {_mismatch(field, column)}")
    if column.units != units:
        raise InvalidInput(f"field {field.name}: {column.units} values came for {units} units of scope {field.scope}")
    allowed = field.value_bytes_max(tokens_per_row_max)
    if ragged and units and values.nbytes > allowed:
        longest = max(_lengths(column)) * field.entry_bytes
        if longest > allowed:
            raise InvalidInput(
                f"field {field.name}: a value of {longest} bytes came, at most {allowed} may", reason="OVERSIZE"
            )


def _mismatch(field: Field, column: Column) -> str:
    form, values = field.form, column.values
    if values.dtype != form.dtype:
        return f"dtype {values.dtype} came, the schema says {field.dtype}"
    if column.scope != form.scope:
        return f"scope {column.scope} came, the schema says {field.scope}"
    if (column.offsets is not None, column.transposed) != (form.ragged, form.transposed):
        return f"ragged or not does not match the schema's shape {list(field.shape)}"
    return f"entries of shape {list(values.shape[1:])} came, not {list(field.shape)}"


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
    mask = columns[LOSS_MASK].values != 0
    trained = _counts(mask, columns[LOSS_MASK])
    n_loss_tokens = array("i", trained).tobytes()
    if VERSIONS not in columns or not any(trained):
        return RowFacts(rows, n_tokens, n_loss_tokens)
    return RowFacts(rows, n_tokens, n_loss_tokens, *_versions(rows, columns[VERSIONS].values[mask], trained))


def _counts(mask: npt.NDArray[np.bool_], column: Column) -> list[int]:
    """Of each value of a ragged column, entries where `mask` is set."""
    assert column.offsets is not None
    bounds: list[int] = column.offsets.tolist()
    content = mask.tobytes()
    return [content.count(1, begin, end) for begin, end in pairwise(bounds)]


def _lengths(column: Column) -> list[int]:
    assert column.offsets is not None
    bounds: list[int] = column.offsets.tolist()  # a group has few rows: numpy asks more for each call than a list
    return list(map(sub, bounds[1:], bounds))


def _row_lengths(columns: Mapping[str, Column], n_rows: int) -> bytes:
    """As RowFacts has them."""
    if TOKENS in columns and columns[TOKENS].offsets is not None:
        return array("i", _lengths(columns[TOKENS])).tobytes()
    per_row = [_lengths(c) for c in columns.values() if c.scope == "row" and c.offsets is not None]
    return array("i", map(max, zip(*per_row, strict=True))).tobytes() if per_row else bytes(4 * n_rows)


def _versions(rows: RowKeys, sampled: Array, trained: list[int]) -> tuple[bytes, bytes, bytes]:
    """Rows, versions and tokens as RowFacts has them. `sampled`: of all trained tokens; `trained`: tokens a row."""
    oldest = int(np.minimum.reduce(sampled))
    if oldest < 0:
        at = bisect_right(list(accumulate(trained)), int(sampled.argmin()))
        raise InvalidInput(f"row {rows[at]}: a token with loss mask 1 has no policy version")
    if oldest == np.maximum.reduce(sampled):
        some = [row for row, n in enumerate(trained) if n]
        versions, counts = [oldest] * len(some), filter(None, trained)
        return array("i", some).tobytes(), array("q", versions).tobytes(), array("i", counts).tobytes()
    row_of = np.repeat(np.arange(len(trained), dtype="<i4"), trained)
    # A row's tokens are few stretches of one version: sorted are only these.
    begins = np.flatnonzero(np.concatenate([[True], (np.diff(sampled) != 0) | (np.diff(row_of) != 0)]))
    of_row, version, tokens = row_of[begins], sampled[begins], np.diff(begins, append=len(sampled))
    order = np.lexsort((version, of_row))
    of_row, version, tokens = of_row[order], version[order], tokens[order]
    first = np.flatnonzero(np.concatenate([[True], (np.diff(version) != 0) | (np.diff(of_row) != 0)]))
    sums = np.add.reduceat(tokens, first)
    return of_row[first].tobytes(), version[first].astype("<i8").tobytes(), sums.astype("<i4").tobytes()


def sample_facts(columns: Mapping[str, Column], rows: RowKeys) -> SampleFacts:
    """Which samples count: reward status 0."""
    if not rows:
        return NO_SAMPLES
    samples = array("i", [sample for sample, _ in rows.samples().segments()]).tobytes()
    if REWARD_STATUS not in columns:
        return SampleFacts(samples, b"\1" * (len(samples) // 4))
    valid = [status == 0 for status in columns[REWARD_STATUS].values.tolist()]
    if REWARD not in columns:
        return SampleFacts(samples, bytes(valid))
    rewards: list[float] = columns[REWARD].values.tolist()
    if not all(map(isfinite, compress(rewards, valid))):
        raise InvalidInput("a sample with reward_status 0 has a reward that is not finite; give it another status")
    known = [reward if ok else nan for reward, ok in zip(rewards, valid, strict=True)]
    return SampleFacts(samples, bytes(valid), array("d", known).tobytes())
