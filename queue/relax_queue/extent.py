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

# By dtype and not by name: numpy writes a name anew each time it is asked for one.
_CODES = {np.dtype(name): code for code, name in enumerate(DTYPES)}

_HEADER = struct.Struct("<4sHHQQ")
_ENTRY = struct.Struct(
    "<BBBBBxxxQQQQQ"
)  # name length, dtype, scope, flags, dims, units, values at/size, offsets at/size
_RAGGED = 1
_TRANSPOSED = 2


class ExtentError(ValueError):
    """The bytes or columns are no valid extent; the message says where."""


@dataclass(frozen=True, slots=True)
class Column:
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
    if o.dtype != np.int64 or o.ndim != 1 or len(o) < 1:
        raise ExtentError(f"column {name}: offsets are not an int64 vector")
    if o[0] != 0 or o[-1] != len(column.values) or bool((o[1:] < o[:-1]).any()):
        raise ExtentError(f"column {name}: offsets do not run from 0 to {len(column.values)} without falling")


def encode(columns: Mapping[str, Column]) -> bytes:
    """Bytes of an extent; one copy of the data. Raises ExtentError."""
    table_size = 0
    for name, column in columns.items():
        _check(name, column)
        table_size += _ENTRY.size + 8 * (column.values.ndim - 1) + len(name.encode())
    at = _aligned(_HEADER.size + table_size)
    table, parts = [], []
    for name, column in columns.items():
        values = np.ascontiguousarray(column.values)
        values_at, at = at, _aligned(at + values.nbytes)
        parts.append((values_at, values))
        offsets_at, offsets_size = 0, 0
        if column.offsets is not None:
            offsets_at, offsets_size = at, column.offsets.nbytes
            at = _aligned(at + offsets_size)
            parts.append((offsets_at, np.ascontiguousarray(column.offsets)))
        flags = (_RAGGED if column.offsets is not None else 0) | (_TRANSPOSED if column.transposed else 0)
        shape, data = values.shape[1:], name.encode()
        kind = (len(data), _CODES[values.dtype], SCOPES.index(column.scope), flags, len(shape))
        entry = _ENTRY.pack(*kind, column.units, values_at, values.nbytes, offsets_at, offsets_size)
        table.append(entry + struct.pack(f"<{len(shape)}Q", *shape) + data)
    out = bytearray(at)
    out[_HEADER.size : _HEADER.size + table_size] = b"".join(table)
    view = memoryview(out)
    for part_at, array in parts:
        if array.nbytes:
            view[part_at : part_at + array.nbytes] = array.reshape(-1).view(np.uint8).data
    _HEADER.pack_into(out, 0, MAGIC, FORMAT_VERSION, len(columns), at, 0)
    _HEADER.pack_into(out, 0, MAGIC, FORMAT_VERSION, len(columns), at, _digest(view))
    return bytes(out)


def _digest(data: memoryview) -> int:
    state = xxhash.xxh3_64(data[: _HEADER.size - 8])
    state.update(data[_HEADER.size :])
    return state.intdigest()


def _part(data: memoryview, name: str, at: int, size: int, dtype: str) -> Array:
    if at % ALIGN_BYTES or at + size > len(data):
        raise ExtentError(f"column {name}: its data lies at {at}+{size} in an extent of {len(data)} bytes")
    item = np.dtype(dtype).itemsize
    if size % item:
        raise ExtentError(f"column {name}: {size} bytes are no whole number of {dtype}")
    array: Array = np.frombuffer(data, dtype=dtype, count=size // item, offset=at)
    array.flags.writeable = False
    return array


def _column(data: memoryview, name: str, entry: tuple[int, ...], shape: tuple[int, ...]) -> Column:
    _, dtype, scope, flags, _, units, values_at, values_size, offsets_at, offsets_size = entry
    if dtype >= len(DTYPES) or scope >= len(SCOPES):
        raise ExtentError(f"column {name}: unknown dtype {dtype} or scope {scope}")
    flat = _part(data, name, values_at, values_size, DTYPES[dtype])
    width = 1
    for extent in shape:
        width *= extent
    offsets: npt.NDArray[np.int64] | None = None
    if flags & _RAGGED:
        raw = _part(data, name, offsets_at, offsets_size, "int64")
        offsets = raw.view(np.int64)
        if len(offsets) != units + 1:
            raise ExtentError(f"column {name}: {len(offsets)} offsets for {units} units")
        count = int(offsets[-1])
    else:
        count = units
    if count < 0 or count * width != flat.size:
        raise ExtentError(f"column {name}: {flat.size} values do not make {count} entries of shape {list(shape)}")
    column = Column(SCOPES[scope], flat.reshape(count, *shape), offsets, bool(flags & _TRANSPOSED))
    _check(name, column)
    return column


def decode(buffer: bytes | bytearray | memoryview) -> dict[str, Column]:
    """Columns as read-only views of `buffer`. Raises ExtentError for anything that is no whole, unchanged extent."""
    data = memoryview(buffer)
    if len(data) < _HEADER.size:
        raise ExtentError(f"{len(data)} bytes are too few for the header of an extent")
    magic, version, count, total, digest = _HEADER.unpack_from(data)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise ExtentError(f"not an extent of version {FORMAT_VERSION}: it begins with {bytes(data[:6]).hex()}")
    if total != len(data):
        raise ExtentError(f"the extent says {total} bytes, {len(data)} came")
    if _digest(data) != digest:
        raise ExtentError("the checksum of the extent does not match its bytes")
    columns: dict[str, Column] = {}
    at = _HEADER.size
    for i in range(count):
        if at + _ENTRY.size > len(data):
            raise ExtentError(f"the column table ends before column {i}")
        entry = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        dims, name_size = entry[4], entry[0]
        if at + 8 * dims + name_size > len(data):
            raise ExtentError(f"the column table ends within column {i}")
        shape = struct.unpack_from(f"<{dims}Q", data, at)
        at += 8 * dims
        try:
            name = bytes(data[at : at + name_size]).decode()
        except UnicodeDecodeError as e:
            raise ExtentError(f"the name of column {i} is no UTF-8") from e
        at += name_size
        if name in columns:
            raise ExtentError(f"column {name} occurs twice")
        columns[name] = _column(data, name, entry, shape)
    return columns


def take(column: Column, units: Sequence[int]) -> Column:
    """The units named, in this order; a copy."""
    if column.offsets is None:
        return Column(column.scope, column.values[list(units)], None, column.transposed)
    offsets = np.zeros(len(units) + 1, np.int64)
    np.cumsum(column.lengths()[list(units)], out=offsets[1:])
    parts = [column.values[column.offsets[i] : column.offsets[i + 1]] for i in units]
    return Column(column.scope, np.concatenate(parts), offsets, column.transposed)
