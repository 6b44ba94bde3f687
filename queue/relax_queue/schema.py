"""The columns of a training row."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from relax_queue.extent import Column, ragged
from relax_queue.spec import Field

ROW_FIELDS = (
    Field("tokens", "int32", (-1,), "row", "rollout"),
    Field("loss_mask", "uint8", (-1,), "row", "rollout"),
    Field("log_probs", "float32", (-1,), "row", "rollout"),
    Field("versions", "int64", (-1,), "row", "rollout"),
    Field("temperature", "float32", (), "sample", "rollout"),
    Field("reward", "float32", (), "sample", "rollout"),
    Field("reward_status", "uint8", (), "sample", "rollout"),
)
"""Ragged ones have one value a token, prompt and response; `versions` are packed, -1 where nothing was sampled."""


def to_columns(
    values: Mapping[str, Sequence[npt.ArrayLike]], fields: Sequence[Field] = ROW_FIELDS
) -> dict[str, Column]:
    """Columns from one value a unit: arrays for ragged fields, scalars (or arrays of the field's shape) for others."""
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
