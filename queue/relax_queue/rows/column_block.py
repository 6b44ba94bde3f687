"""Column blocks: the columns of many rows as one piece of memory.

    header   magic "RLXE", version u16, columns u16, total bytes u64, xxh3-64 over all other bytes
    table    per column: name, dtype, trailing shape, scope, ragged or not, units, position and size of its parts
    data     every part starts at a multiple of 64 bytes

A ragged column holds its values one after another along axis 0 and units + 1 int64 offsets; `[n, 1176]` has trailing
shape (1176,), `[3, n]` is stored as (n, 3) and marked as transposed. Decoding makes views of the buffer, no copies.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

Array = npt.NDArray[np.generic]

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

# By dtype and not by name: numpy builds the name each time it is asked for it.
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
_RAGGED = 1
_TRANSPOSED = 2


class BlockError(ValueError):
    """The bytes or columns make no valid column block; the message says where."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column; `values` has one entry per unit, or all units' entries one after another if there are `offsets`.

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
            raise BlockError("a column without offsets has no lengths")
        return self.offsets[1:] - self.offsets[:-1]


def ragged(scope: str, units: Sequence[Array], transposed: bool = False) -> Column:
    """A ragged column from one array per unit."""
    parts = [u.T if transposed else u for u in units]
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(p) for p in parts], out=offsets[1:])
    if not parts:
        raise BlockError("a ragged column needs at least one unit")
    return Column(scope, np.concatenate(parts), offsets, transposed)


def _aligned(n: int) -> int:
    return -(-n // ALIGN_BYTES) * ALIGN_BYTES


def _check(name: str, column: Column) -> None:
    if column.scope not in SCOPES:
        raise BlockError(f"column {name}: scope {column.scope!r} is not one of {', '.join(SCOPES)}")
    if column.values.dtype not in _CODES:
        raise BlockError(f"column {name}: dtype {column.values.dtype} is not supported")
    if column.values.ndim < 1 or column.values.ndim > 8:
        raise BlockError(f"column {name}: {column.values.ndim} dimensions, 1 to 8 are supported")
    o = column.offsets
    if o is None:
        return
    if o.dtype != _OFFSET_TYPE or o.ndim != 1 or len(o) < 1:
        raise BlockError(f"column {name}: offsets are not an int64 vector")
    _check_offsets(name, o, len(column.values))


def _check_offsets(name: str, offsets: npt.NDArray[np.int64], count: int) -> None:
    if offsets[0] != 0 or offsets[-1] != count or _falls(offsets):
        raise BlockError(f"column {name}: offsets must begin with 0, end with {count} and never fall")


def _falls(offsets: npt.NDArray[np.int64]) -> bool:
    if len(offsets) > 256:
        return bool(np.minimum.reduce(offsets[1:] - offsets[:-1]) < 0)
    few: list[int] = offsets.tolist()  # for few units a list costs a tenth of a numpy call
    return few != sorted(few)


@dataclass(frozen=True, slots=True)
class Layout:
    """A block that is not assembled yet: `head` (header and table, the digest still 0) and the parts after it."""

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
    """The layout of a block from its columns. Raises BlockError."""
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
    """Bytes of a block; one copy of the data. Raises BlockError."""
    return layout(columns).joined()


def digest_of(buffer: bytes | bytearray | memoryview) -> int:
    """The digest in the header of a block. Raises BlockError if there is no header."""
    if len(buffer) < _HEADER.size:
        raise BlockError(f"{len(buffer)} bytes are too few for the header of a column block")
    digest: int = _HEADER.unpack_from(buffer)[4]
    return digest


def size_of(buffer: memoryview) -> int:
    """Bytes of the block at the beginning of a buffer. Raises BlockError if it is longer than the buffer."""
    size: int = _HEADER.unpack_from(buffer)[3] if len(buffer) >= _HEADER.size else _HEADER.size
    if size > len(buffer):
        raise BlockError(f"a column block of {size} bytes does not fit into {len(buffer)}")
    return size


class Digest:
    """Digest of a block whose bytes come in pieces; the first piece holds the whole header."""

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


class Form(NamedTuple):
    """The form of a column, independent of its length."""

    dtype: np.dtype[np.generic]
    scope: str
    ragged: bool
    transposed: bool
    stored_shape: tuple[int, ...]


class Bounds(NamedTuple):
    """The offsets of a ragged column, and its entries per unit."""

    offsets: list[int]
    lengths: list[int]


class Entry(NamedTuple):
    """A column inside a block, as the table describes it: checked against the block, without reading values.

    bounds: of a ragged column.
    """

    form: Form
    units: int
    content: memoryview
    bounds: Bounds | None
    offsets_at: int

    def values(self) -> list[Any]:
        """Only for a column without trailing shape."""
        found: list[Any] = np.frombuffer(self.content, self.form.dtype).tolist()
        return found


class Table(Mapping[str, Column]):
    """The columns of a block as read-only views, each made when it is first asked for."""

    def __init__(self, data: memoryview, entries: dict[str, Entry]) -> None:
        self.entries = entries
        self._data = data
        self._made: dict[str, Column] = {}

    def __getitem__(self, name: str) -> Column:
        if name not in self._made:
            self._made[name] = self._column(self.entries[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def _column(self, entry: Entry) -> Column:
        dtype, scope, _, transposed, shape = entry.form
        values: Array = np.frombuffer(entry.content, dtype)
        if shape:
            values = values.reshape(entry.units if entry.bounds is None else entry.bounds.offsets[-1], *shape)
        if entry.bounds is None:
            return Column(scope, values, None, transposed)
        offsets = np.frombuffer(self._data, _OFFSET_TYPE, entry.units + 1, entry.offsets_at)
        return Column(scope, values, offsets, transposed)


NO_COLUMNS = Table(memoryview(b""), {})


def _within(data: memoryview, name: str, at: int, size: int) -> memoryview:
    if at % ALIGN_BYTES or at + size > len(data):
        raise BlockError(f"column {name}: its data lies at {at}+{size} in a block of {len(data)} bytes")
    return data[at : at + size]


def _bounds(data: memoryview, name: str, at: int, size: int, known: dict[bytes, Bounds]) -> Bounds:
    """Checked offsets. Columns of equal lengths, such as those with one value per token, share them."""
    part = _within(data, name, at, size)
    if not size or size % _OFFSET_TYPE.itemsize:
        raise BlockError(f"column {name}: {size} bytes are not a vector of offsets")
    content = bytes(part)
    if content not in known:
        offsets: list[int] = part.cast("q").tolist()
        lengths = list(map(sub, offsets[1:], offsets))
        if offsets[0] != 0 or min(lengths, default=0) < 0:
            raise BlockError(f"column {name}: offsets must begin with 0, end with {offsets[-1]} and never fall")
        known[content] = Bounds(offsets, lengths)
    return known[content]


def _entry(
    data: memoryview, name: str, fields: tuple[int, ...], shape: tuple[int, ...], known: dict[bytes, Bounds]
) -> Entry:
    _, code, scope, flags, _, units, values_at, values_size, offsets_at, offsets_size = fields
    if code >= len(DTYPES) or scope >= len(SCOPES):
        raise BlockError(f"column {name}: unknown dtype {code} or scope {scope}")
    if len(shape) > 7:
        raise BlockError(f"column {name}: {len(shape) + 1} dimensions, 1 to 8 are supported")
    bounds, count = None, units
    if flags & _RAGGED:
        bounds = _bounds(data, name, offsets_at, offsets_size, known)
        if len(bounds.lengths) != units:
            raise BlockError(f"column {name}: {len(bounds.offsets)} offsets for {units} units")
        count = bounds.offsets[-1]
    dtype, content = _DTYPES[code], _within(data, name, values_at, values_size)
    if count * dtype.itemsize * math.prod(shape) != values_size:
        raise BlockError(f"column {name}: {values_size} bytes do not make {count} entries of {dtype} {list(shape)}")
    form = Form(dtype, SCOPES[scope], bounds is not None, bool(flags & _TRANSPOSED), shape)
    return Entry(form, units, content, bounds, offsets_at)


def read_table(buffer: bytes | bytearray | memoryview, *, digest: int | None = None) -> Table:
    """The columns in `buffer`. Raises BlockError for anything that is not a whole, unchanged block.

    `digest`: the hash of the bytes if it was computed already; they are then not read again.
    """
    data = memoryview(buffer).toreadonly()
    if len(data) < _HEADER.size:
        raise BlockError(f"{len(data)} bytes are too few for the header of a column block")
    magic, version, count, total, said = _HEADER.unpack_from(data)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise BlockError(f"not a column block of version {FORMAT_VERSION}: it begins with {bytes(data[:6]).hex()}")
    if total != len(data):
        raise BlockError(f"the column block says that it has {total} bytes, but {len(data)} arrived")
    if (_digest(data) if digest is None else digest) != said:
        raise BlockError("the checksum of the column block does not match its bytes")
    entries: dict[str, Entry] = {}
    known: dict[bytes, Bounds] = {}
    at = _HEADER.size
    for i in range(count):
        if at + _ENTRY.size > len(data):
            raise BlockError(f"the column table ends before column {i}")
        fields = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        dims, name_size = fields[4], fields[0]
        if at + 8 * dims + name_size > len(data):
            raise BlockError(f"the column table ends within column {i}")
        shape = struct.unpack_from(f"<{dims}Q", data, at) if dims else ()
        at += 8 * dims
        try:
            name = str(data[at : at + name_size], "utf-8")
        except UnicodeDecodeError as e:
            raise BlockError(f"the name of column {i} is not UTF-8") from e
        at += name_size
        if name in entries:
            raise BlockError(f"column {name} occurs twice")
        entries[name] = _entry(data, name, fields, shape, known)
    return Table(data, entries)


def decode(buffer: bytes | bytearray | memoryview, *, digest: int | None = None) -> dict[str, Column]:
    """Columns as read-only views of `buffer`; as read_table."""
    return dict(read_table(buffer, digest=digest))


def take(column: Column, units: Sequence[int]) -> Column:
    """The named units, in this order; a copy unless they are consecutive."""
    spans = [(column, i, i + 1) for i in units]
    if units and list(units) == list(range(units[0], units[0] + len(units))):
        spans = [(column, units[0], units[0] + len(units))]
    return join(spans) or _cut(column, 0, 0)


def join(spans: Sequence[tuple[Column, int, int]]) -> Column | None:
    """Units [start, end) of each column one after another; a view if there is one span, None if there is none."""
    if not spans:
        return None
    if len(spans) == 1:
        return _cut(*spans[0])
    columns = list({id(column): column for column, _, _ in spans}.values())
    # Many short spans are faster by index than by slice; an index costs a copy of whole columns, though.
    if len(spans) > 2 * len(columns) and sum(c.values.nbytes for c in columns) <= _INDEXED_BYTES_MAX:
        return _by_index(columns, spans)
    first = columns[0]
    if first.offsets is None:
        return Column(first.scope, np.concatenate([c.values[start:end] for c, start, end in spans]))
    cut = [_cut(*span) for span in spans]
    offsets = np.zeros(sum(c.units for c in cut) + 1, np.int64)
    np.cumsum(np.concatenate([c.lengths() for c in cut]), out=offsets[1:])
    return Column(first.scope, np.concatenate([c.values for c in cut]), offsets, first.transposed)


def _by_index(columns: Sequence[Column], spans: Sequence[tuple[Column, int, int]]) -> Column:
    first, values = columns[0], np.concatenate([c.values for c in columns])
    before = dict(zip(map(id, columns), np.cumsum([0, *(c.units for c in columns)]).tolist(), strict=False))
    shift = [(before[id(column)], start, end) for column, start, end in spans]
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
