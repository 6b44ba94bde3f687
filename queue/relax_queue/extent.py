"""Columnar extents: the columns of many rows in one block of bytes.

    header   magic "RLXE", version u16, columns u16, total bytes u64, xxh3-64 over all other bytes
    table    per column: name, dtype, trailing shape, scope, ragged or not, units, position and size of its parts
    data     every part starts at a multiple of 64 bytes

A ragged column holds its values one after another along axis 0 and units + 1 int64 offsets; `[n, 1176]` has trailing
shape (1176,), `[3, n]` is stored as (n, 3) and marked as transposed. Decoding makes views of the buffer, no copies.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

Array = npt.NDArray[np.generic]
T = TypeVar("T", bound=np.generic)

MAGIC = b"RLXE"
FORMAT_VERSION = 1
ALIGN_BYTES = 64
SCOPES = ("row", "sample", "group")
DTYPES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
)

# By dtype and not by name: numpy writes a name anew each time it is asked for one.
_DTYPES = tuple(np.dtype(name) for name in DTYPES)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_OFFSET_TYPE = np.dtype("int64")

_HEADER = struct.Struct("<4sHHQQ")
_ENTRY = struct.Struct(
    "<BBBBBxxxQQQQQ"
)  # name length, dtype, scope, flags, dims, units, values at/size, offsets at/size
_DIGEST_AT = _HEADER.size - 8
_PIECE_BYTES = 256 << 10
_PADDING = bytes(ALIGN_BYTES)
_INDEXED_BYTES_MAX = 4 << 20
_SHARED_OFFSETS_BYTES = 64 << 10
_RAGGED = 1
_TRANSPOSED = 2


class ExtentError(ValueError):
    """The bytes or columns are no valid extent; the message says where."""


class Column(NamedTuple):
    """One column; `values` has one entry a unit, or all units' entries one after another if there are `offsets`.

    values: [units, *shape], or [sum of lengths, *shape] with offsets int64 [units + 1] from 0 to the number of values.
    transposed: the ragged dimension is the last one of the value a reader sees ([3, n] kept as [n, 3]).
    """

    scope: str
    values: Array
    offsets: npt.NDArray[np.int64] | None = None
    transposed: bool = False

    @property
    def units(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def unit(self, i: int) -> Array:
        """Value of unit i as the schema describes it; a view."""
        if self.offsets is None:
            return np.asarray(self.values[i])
        part = self.values[self.offsets[i] : self.offsets[i + 1]]
        return part.T if self.transposed else part

    def lengths(self) -> npt.NDArray[np.int64]:
        """Entries per unit of a ragged column."""
        if self.offsets is None:
            raise ExtentError("a column without offsets has no lengths")
        return self.offsets[1:] - self.offsets[:-1]


def ragged(scope: str, units: Sequence[Array], transposed: bool = False) -> Column:
    """A ragged column from one array a unit."""
    parts = [u.T if transposed else u for u in units]
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(p) for p in parts], out=offsets[1:])
    if not parts:
        raise ExtentError("a ragged column needs at least one unit")
    return Column(scope, np.concatenate(parts), offsets, transposed)


def _aligned(n: int) -> int:
    return -(-n // ALIGN_BYTES) * ALIGN_BYTES


def _check(name: str, column: Column) -> None:
    if column.scope not in SCOPES:
        raise ExtentError(f"column {name}: scope {column.scope!r} is none of {', '.join(SCOPES)}")
    if column.values.dtype not in _CODES:
        raise ExtentError(f"column {name}: dtype {column.values.dtype} is not supported")
    if column.values.ndim < 1 or column.values.ndim > 8:
        raise ExtentError(f"column {name}: {column.values.ndim} dimensions, 1 to 8 are supported")
    o = column.offsets
    if o is None:
        return
    if o.dtype != _OFFSET_TYPE or o.ndim != 1 or len(o) < 1:
        raise ExtentError(f"column {name}: offsets are not an int64 vector")
    _check_offsets(name, o, len(column.values))


def _check_offsets(name: str, offsets: npt.NDArray[np.int64], count: int) -> None:
    if offsets[0] != 0 or offsets[-1] != count or _falls(offsets):
        raise ExtentError(f"column {name}: offsets do not run from 0 to {count} without falling")


def _falls(offsets: npt.NDArray[np.int64]) -> bool:
    if len(offsets) > 256:
        return bool(np.minimum.reduce(offsets[1:] - offsets[:-1]) < 0)
    few: list[int] = offsets.tolist()  # for these a list costs a tenth of what numpy asks for a call
    return few != sorted(few)


@dataclass(frozen=True, slots=True)
class Layout:
    """An extent that is not put together yet: `head` (header and table, the digest still 0) and what follows it."""

    head: bytearray
    body: list[memoryview]
    size: int

    def buffers(self) -> list[memoryview]:
        """All bytes in order, with the digest. No copies."""
        state = xxhash.xxh3_64(self.head[:_DIGEST_AT])
        state.update(self.head[_HEADER.size :])
        for part in self.body:
            state.update(part)
        return [memoryview(self._sealed(state.intdigest())), *self.body]

    def joined(self) -> bytes:
        """All bytes in one piece."""
        if self.size > _PIECE_BYTES:
            return b"".join(self.buffers())
        # Few bytes cost less to hash when they are together.
        whole = bytearray().join((self.head, *self.body))
        struct.pack_into("<Q", whole, _DIGEST_AT, _digest(memoryview(whole)))
        return bytes(whole)

    def write(self, target: memoryview) -> int:
        """Copy everything to `target` and return the digest; each piece is hashed while the cache has it."""
        state = xxhash.xxh3_64(self.head[:_DIGEST_AT])
        state.update(self.head[_HEADER.size :])
        at = len(self.head)
        for part in self.body:
            for start in range(0, len(part), _PIECE_BYTES):
                piece = part[start : start + _PIECE_BYTES]
                target[at : at + len(piece)] = piece
                state.update(piece)
                at += len(piece)
        digest = state.intdigest()
        target[: len(self.head)] = self._sealed(digest)
        return digest

    def _sealed(self, digest: int) -> bytearray:
        sealed = bytearray(self.head)
        struct.pack_into("<Q", sealed, _DIGEST_AT, digest)
        return sealed


def layout(columns: Mapping[str, Column]) -> Layout:
    """Where everything of an extent will lie. Raises ExtentError."""
    table_size = 0
    for name, column in columns.items():
        _check(name, column)
        table_size += _ENTRY.size + 8 * (column.values.ndim - 1) + len(name.encode())
    head = bytearray(_aligned(_HEADER.size + table_size))
    table: list[bytes] = []
    body: list[memoryview] = []
    at = len(head)

    def place(array: Array) -> int:
        nonlocal at
        start, size = at, array.nbytes
        if size:
            view = array.data
            if not view.c_contiguous:
                view = np.ascontiguousarray(array).data
            body.append(view.cast("B"))
            at = _aligned(at + size)
            if at - start - size:
                body.append(memoryview(_PADDING[: at - start - size]))
        return start

    for name, column in columns.items():
        values, offsets = column.values, column.offsets
        values_at = place(values)
        offsets_at, offsets_size = (0, 0) if offsets is None else (place(offsets), offsets.nbytes)
        flags = (_RAGGED if offsets is not None else 0) | (_TRANSPOSED if column.transposed else 0)
        shape, data = values.shape[1:], name.encode()
        kind = (len(data), _CODES[values.dtype], SCOPES.index(column.scope), flags, len(shape))
        entry = _ENTRY.pack(*kind, column.units, values_at, values.nbytes, offsets_at, offsets_size)
        table += (entry, struct.pack(f"<{len(shape)}Q", *shape), data) if shape else (entry, data)
    head[_HEADER.size : _HEADER.size + table_size] = b"".join(table)
    _HEADER.pack_into(head, 0, MAGIC, FORMAT_VERSION, len(columns), at, 0)
    return Layout(head, body, at)


def encode(columns: Mapping[str, Column]) -> bytes:
    """Bytes of an extent; one copy of the data. Raises ExtentError."""
    return layout(columns).joined()


def digest_of(buffer: bytes | bytearray | memoryview) -> int:
    """The digest that an extent says it has. Raises ExtentError where there is no header."""
    if len(buffer) < _HEADER.size:
        raise ExtentError(f"{len(buffer)} bytes are too few for the header of an extent")
    digest: int = _HEADER.unpack_from(buffer)[4]
    return digest


def size_of(buffer: memoryview) -> int:
    """Bytes of the extent at the beginning of a buffer. Raises ExtentError where it is longer than that."""
    size: int = _HEADER.unpack_from(buffer)[3] if len(buffer) >= _HEADER.size else _HEADER.size
    if size > len(buffer):
        raise ExtentError(f"an extent of {size} bytes does not lie in {len(buffer)}")
    return size


class Digest:
    """Digest of an extent whose bytes come in pieces; the first piece holds the whole header."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self._begun = False

    def update(self, piece: memoryview) -> None:
        if self._begun:
            self._state.update(piece)
            return
        self._begun = True
        self._state.update(piece[:_DIGEST_AT])
        self._state.update(piece[_HEADER.size :])

    def value(self) -> int:
        return self._state.intdigest()


def _digest(data: memoryview) -> int:
    digest = Digest()
    digest.update(data)
    return digest.value()


def _part(data: memoryview, name: str, at: int, size: int, dtype: "np.dtype[T]") -> npt.NDArray[T]:
    """A read-only view: `data` is read-only."""
    if at % ALIGN_BYTES or at + size > len(data):
        raise ExtentError(f"column {name}: its data lies at {at}+{size} in an extent of {len(data)} bytes")
    if size % dtype.itemsize:
        raise ExtentError(f"column {name}: {size} bytes are no whole number of {dtype}")
    return np.frombuffer(data, dtype, size // dtype.itemsize, at)


def _offsets(
    data: memoryview, name: str, at: int, size: int, known: dict[bytes, npt.NDArray[np.int64]]
) -> npt.NDArray[np.int64]:
    """Checked. Columns of equal lengths, as those with a value a token are, share one array."""
    content = bytes(data[at : at + size]) if size <= _SHARED_OFFSETS_BYTES else b""
    if content in known:
        return known[content]
    offsets = _part(data, name, at, size, _OFFSET_TYPE)
    if not len(offsets):
        raise ExtentError(f"column {name}: no offsets")
    _check_offsets(name, offsets, int(offsets[-1]))
    if content:
        known[content] = offsets
    return offsets


def _column(
    data: memoryview,
    name: str,
    entry: tuple[int, ...],
    shape: tuple[int, ...],
    known_offsets: dict[bytes, npt.NDArray[np.int64]],
) -> Column:
    _, dtype, scope, flags, _, units, values_at, values_size, offsets_at, offsets_size = entry
    if dtype >= len(DTYPES) or scope >= len(SCOPES):
        raise ExtentError(f"column {name}: unknown dtype {dtype} or scope {scope}")
    if len(shape) > 7:
        raise ExtentError(f"column {name}: {len(shape) + 1} dimensions, 1 to 8 are supported")
    flat: Array = _part(data, name, values_at, values_size, _DTYPES[dtype])
    width = 1
    for extent in shape:
        width *= extent
    offsets: npt.NDArray[np.int64] | None = None
    if flags & _RAGGED:
        offsets = _offsets(data, name, offsets_at, offsets_size, known_offsets)
        if len(offsets) != units + 1:
            raise ExtentError(f"column {name}: {len(offsets)} offsets for {units} units")
        count = int(offsets[-1])
    else:
        count = units
    if count < 0 or count * width != flat.size:
        raise ExtentError(f"column {name}: {flat.size} values do not make {count} entries of shape {list(shape)}")
    return Column(SCOPES[scope], flat.reshape(count, *shape) if shape else flat, offsets, bool(flags & _TRANSPOSED))


def decode(buffer: bytes | bytearray | memoryview, *, digest: int | None = None) -> dict[str, Column]:
    """Columns as read-only views of `buffer`. Raises ExtentError for anything that is no whole, unchanged extent.

    `digest`: what the bytes have been found to hash to already; they are not read again.
    """
    data = memoryview(buffer).toreadonly()
    if len(data) < _HEADER.size:
        raise ExtentError(f"{len(data)} bytes are too few for the header of an extent")
    magic, version, count, total, said = _HEADER.unpack_from(data)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise ExtentError(f"not an extent of version {FORMAT_VERSION}: it begins with {bytes(data[:6]).hex()}")
    if total != len(data):
        raise ExtentError(f"the extent says {total} bytes, {len(data)} came")
    if (_digest(data) if digest is None else digest) != said:
        raise ExtentError("the checksum of the extent does not match its bytes")
    columns: dict[str, Column] = {}
    offsets: dict[bytes, npt.NDArray[np.int64]] = {}
    at = _HEADER.size
    for i in range(count):
        if at + _ENTRY.size > len(data):
            raise ExtentError(f"the column table ends before column {i}")
        entry = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        dims, name_size = entry[4], entry[0]
        if at + 8 * dims + name_size > len(data):
            raise ExtentError(f"the column table ends within column {i}")
        shape = struct.unpack_from(f"<{dims}Q", data, at) if dims else ()
        at += 8 * dims
        try:
            name = str(data[at : at + name_size], "utf-8")
        except UnicodeDecodeError as e:
            raise ExtentError(f"the name of column {i} is no UTF-8") from e
        at += name_size
        if name in columns:
            raise ExtentError(f"column {name} occurs twice")
        columns[name] = _column(data, name, entry, shape, offsets)
    return columns


def take(column: Column, units: Sequence[int]) -> Column:
    """The units named, in this order; a copy where they are not all in a row."""
    runs = [(column, i, i + 1) for i in units]
    if units and list(units) == list(range(units[0], units[0] + len(units))):
        runs = [(column, units[0], units[0] + len(units))]
    return join(runs) or _cut(column, 0, 0)


def join(runs: Sequence[tuple[Column, int, int]]) -> Column | None:
    """Units [start, end) of each column one after another; a view where one run is all, None where there is none."""
    if not runs:
        return None
    if len(runs) == 1:
        return _cut(*runs[0])
    columns = list({id(column): column for column, _, _ in runs}.values())
    # Many short runs are faster by index than by slice; an index costs a copy of whole columns, though.
    if len(runs) > 2 * len(columns) and sum(c.values.nbytes for c in columns) <= _INDEXED_BYTES_MAX:
        return _by_index(columns, runs)
    first = columns[0]
    if first.offsets is None:
        return Column(first.scope, np.concatenate([c.values[start:end] for c, start, end in runs]))
    cut = [_cut(*run) for run in runs]
    offsets = np.zeros(sum(c.units for c in cut) + 1, np.int64)
    np.cumsum(np.concatenate([c.lengths() for c in cut]), out=offsets[1:])
    return Column(first.scope, np.concatenate([c.values for c in cut]), offsets, first.transposed)


def _by_index(columns: Sequence[Column], runs: Sequence[tuple[Column, int, int]]) -> Column:
    first, values = columns[0], np.concatenate([c.values for c in columns])
    before = dict(zip(map(id, columns), np.cumsum([0, *(c.units for c in columns)]).tolist(), strict=False))
    shift = [(before[id(column)], start, end) for column, start, end in runs]
    units = np.array([base + i for base, start, end in shift for i in range(start, end)], np.int64)
    if first.offsets is None:
        return Column(first.scope, values[units])
    values_before = np.cumsum([0, *(len(c.values) for c in columns)])
    begins = np.concatenate(
        [c.offsets[:-1] + base for c, base in zip(columns, values_before, strict=False) if c.offsets is not None]
    )
    lengths = np.concatenate([c.lengths() for c in columns])[units]
    offsets = np.zeros(len(units) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    at = np.repeat(begins[units] - offsets[:-1], lengths) + np.arange(offsets[-1])
    return Column(first.scope, values[at], offsets, first.transposed)


def _cut(column: Column, start: int, end: int) -> Column:
    if column.offsets is None:
        return Column(column.scope, column.values[start:end], None, column.transposed)
    if (start, end) == (0, column.units):
        return column
    offsets = column.offsets[start : end + 1]
    return Column(column.scope, column.values[offsets[0] : offsets[-1]], offsets - offsets[0], column.transposed)
