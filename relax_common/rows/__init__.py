"""What a row of training data consists of: its key, its fields, and how many bytes they may take."""

from relax_common.rows.schema import (
    FIELDS,
    ITEM_BYTES,
    PRODUCER,
    Field,
    RewardStatus,
    RowKey,
    Scope,
    bytes_per_group,
    fields_read_by,
    fields_written_by,
)

__all__ = [
    "FIELDS",
    "ITEM_BYTES",
    "PRODUCER",
    "Field",
    "RewardStatus",
    "RowKey",
    "Scope",
    "bytes_per_group",
    "fields_read_by",
    "fields_written_by",
]
