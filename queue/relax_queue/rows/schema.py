"""Makes columns from plain values."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from relax_common.rows import PRODUCER, Field, fields_written_by
from relax_queue.rows.column_block import Column, ragged

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
