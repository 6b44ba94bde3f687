"""Columns of rows: made from plain values, checked against the schema, and what the broker must know of them."""

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, compress, pairwise
from math import isfinite, nan

import numpy as np
import numpy.typing as npt

from relax_common.errors import BadBlock, InvalidInput, Oversize
from relax_common.rows import PRODUCER, Field, RewardStatus, fields_written_by
from relax_queue.rows.column_block import Array, BlockError, Column, Entry, Form, Table, ragged, read_table
from relax_queue.rows.facts import NO_ROWS, NO_SAMPLES, RowFacts, SampleFacts
from relax_queue.rows.row_keys import RowKeys
from relax_queue.rows.spec import LOSS_MASK, REWARD, REWARD_STATUS, TOKENS, VERSIONS, RunSpec

PER_TOKEN = (TOKENS, LOSS_MASK, VERSIONS, "log_probs")
FEW_TOKENS = 2048
"""Up to this many, a set of Python integers costs less than numpy calls."""

ROW_FIELDS = fields_written_by((PRODUCER,))


def to_columns(
    values: Mapping[str, Sequence[npt.ArrayLike]], fields: Sequence[Field] = ROW_FIELDS
) -> dict[str, Column]:
    """Columns from one value per unit: arrays for ragged fields, scalars (or arrays of the field's shape) for
    others."""
    known = {f.name: f for f in fields}
    columns = {}
    for name, units in values.items():
        field = known[name]
        arrays = [np.asarray(u, field.dtype) for u in units]
        if field.ragged:
            columns[name] = ragged(field.scope, arrays, field.transposed)
        else:
            columns[name] = Column(field.scope, np.stack(arrays))
    return columns


def decode_block(payload: bytes | bytearray | memoryview, what: str, *, digest: int | None = None) -> Table:
    """Columns as views of the payload; a broken block is INVALID_ARGUMENT. `digest`: as read_table."""
    try:
        return read_table(payload, digest=digest)
    except BlockError as error:
        raise BadBlock(f"{what}: {error}") from error


def check_column(spec: RunSpec, field: Field, column: Entry, units: int) -> None:
    """Raises InvalidInput that names the field and both sides of the mismatch."""
    form = spec.forms[field.name]
    if column.form != form:
        raise InvalidInput(f"field {field.name}: {_mismatch(field, form, column)}")
    if column.units != units:
        raise InvalidInput(f"field {field.name}: {column.units} values came for {units} units of scope {field.scope}")
    allowed = field.value_bytes_max(spec.tokens_per_row_max)
    if column.bounds is not None and units and len(column.content) > allowed:
        longest = max(column.bounds.lengths) * field.entry_bytes
        if longest > allowed:
            raise Oversize(f"field {field.name}: a value has {longest} bytes, at most {allowed} are allowed")


def _mismatch(field: Field, form: Form, column: Entry) -> str:
    dtype, scope, ragged, transposed, shape = column.form
    if dtype != form.dtype:
        return f"dtype {dtype} came, the schema says {field.dtype}"
    if scope != field.scope:
        return f"scope {scope} came, the schema says {field.scope}"
    if (ragged, transposed) != (field.ragged, field.transposed):
        return f"ragged or not does not match the schema's shape {list(field.shape)}"
    return f"entries of shape {list(shape)} came, not {list(field.shape)}"


def check_put(spec: RunSpec, columns: Mapping[str, Entry], rows: RowKeys, group: str) -> None:
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
    units = {"row": len(rows), "sample": len(rows.sample_numbers()), "group": 1}
    for name, field in fields.items():
        if name in columns:
            check_column(spec, field, columns[name], units[field.scope])
        elif field.scope != "group" and rows:
            raise InvalidInput(f"field {name} is missing in a put for group {group}")
    per_token = [(n, o) for n in PER_TOKEN if n in columns and (o := columns[n].bounds) is not None]
    for name, bounds in per_token:
        first, expected = per_token[0]
        if bounds is not expected and bounds != expected:
            raise InvalidInput(f"fields {first} and {name} of group {group} differ in length within a row")


def row_facts(columns: Mapping[str, Entry], rows: RowKeys) -> RowFacts:
    """Lengths and versions of checked rows."""
    if not rows:
        return NO_ROWS
    n_tokens, mask = _row_lengths(columns, len(rows)), columns.get(LOSS_MASK)
    if mask is None or mask.bounds is None:
        return RowFacts(rows, n_tokens, bytes(4 * len(rows)))
    flags = _flags(mask)
    trained = [end - begin - flags.count(0, begin, end) for begin, end in pairwise(mask.bounds.offsets)]
    n_loss_tokens = array("i", trained).tobytes()
    if VERSIONS not in columns or not any(trained):
        return RowFacts(rows, n_tokens, n_loss_tokens)
    return RowFacts(rows, n_tokens, n_loss_tokens, *_versions(rows, columns[VERSIONS], flags, trained))


def _flags(mask: Entry) -> bytes:
    """One byte per entry; 0 if the entry is 0."""
    dtype = mask.form.dtype
    if dtype.itemsize == 1:
        return bytes(mask.content)
    flags: bytes = (np.frombuffer(mask.content, dtype) != 0).tobytes()
    return flags


def _row_lengths(columns: Mapping[str, Entry], n_rows: int) -> bytes:
    """In the form that RowFacts has."""
    tokens = columns.get(TOKENS)
    if tokens is not None and tokens.bounds is not None:
        return array("i", tokens.bounds.lengths).tobytes()
    per_row = [c.bounds.lengths for c in columns.values() if c.form.scope == "row" and c.bounds is not None]
    return array("i", map(max, zip(*per_row, strict=True))).tobytes() if per_row else bytes(4 * n_rows)


def _versions(rows: RowKeys, column: Entry, flags: bytes, trained: list[int]) -> tuple[bytes, bytes, bytes]:
    """Rows, versions and tokens in the form of RowFacts. `flags`: which tokens are trained; `trained`: how many per
    row."""
    if len(flags) <= FEW_TOKENS:
        found = set(compress(column.values(), flags))
        if len(found) > 1 or min(found) < 0:
            return _several_versions(rows, column, flags, trained)
        oldest = found.pop()
    else:
        sampled = _sampled(column, flags)
        oldest = int(np.minimum.reduce(sampled))
        if oldest < 0 or oldest != np.maximum.reduce(sampled):
            return _several_versions(rows, column, flags, trained)
    some = [row for row, n in enumerate(trained) if n]
    versions, counts = [oldest] * len(some), filter(None, trained)
    return array("i", some).tobytes(), array("q", versions).tobytes(), array("i", counts).tobytes()


def _sampled(column: Entry, flags: bytes) -> Array:
    sampled: Array = np.frombuffer(column.content, column.form.dtype)[np.frombuffer(flags, np.uint8) != 0]
    return sampled


def _several_versions(rows: RowKeys, column: Entry, flags: bytes, n_trained: list[int]) -> tuple[bytes, bytes, bytes]:
    sampled = _sampled(column, flags)
    if np.minimum.reduce(sampled) < 0:
        at = bisect_right(list(accumulate(n_trained)), int(sampled.argmin()))
        raise InvalidInput(f"row {rows[at]}: a token with loss mask 1 has no policy version")
    trained = np.array(n_trained)
    row_of = np.repeat(np.arange(len(trained), dtype="<i4"), trained)
    # The tokens of a row form few stretches of one version; only the stretches are sorted.
    begins = np.flatnonzero(np.concatenate([[True], (np.diff(sampled) != 0) | (np.diff(row_of) != 0)]))
    of_row, version, tokens = row_of[begins], sampled[begins], np.diff(begins, append=len(sampled))
    order = np.lexsort((version, of_row))
    of_row, version, tokens = of_row[order], version[order], tokens[order]
    first = np.flatnonzero(np.concatenate([[True], (np.diff(version) != 0) | (np.diff(of_row) != 0)]))
    sums = np.add.reduceat(tokens, first)
    return of_row[first].tobytes(), version[first].astype("<i8").tobytes(), sums.astype("<i4").tobytes()


def sample_facts(columns: Mapping[str, Entry], rows: RowKeys) -> SampleFacts:
    """Which samples are valid: those with reward status OK."""
    if not rows:
        return NO_SAMPLES
    samples = array("i", rows.sample_numbers()).tobytes()
    statuses = columns[REWARD_STATUS].values() if REWARD_STATUS in columns else []
    all_valid = not any(statuses)  # OK is 0
    valid = b"\1" * (len(samples) // 4) if all_valid else bytes([status == RewardStatus.OK for status in statuses])
    if REWARD_STATUS not in columns or REWARD not in columns:
        return SampleFacts(samples, valid)
    rewards: list[float] = columns[REWARD].values()
    if not all(map(isfinite, compress(rewards, valid))):
        raise InvalidInput("a sample with reward_status 0 has a reward that is not finite; give it another status")
    known = rewards if all_valid else [r if ok else nan for r, ok in zip(rewards, valid, strict=True)]
    return SampleFacts(samples, valid, array("d", known).tobytes())
