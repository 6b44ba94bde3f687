"""The client of the bus, the only part that other packages import."""

from relax_common.rows import Field, RowKey
from relax_queue.client.client import AioQueueClient
from relax_queue.client.connection import TransportName
from relax_queue.client.loader import Loaded, LoadedChunk, StepEnd, StreamingLoader, Wanted
from relax_queue.client.plans import PlanAnswer, PlannedChunk, PlannedMicrobatch, StepClosing
from relax_queue.client.threads import QueueClient
from relax_queue.rows.column_block import Column, decode, encode, layout, ragged
from relax_queue.rows.columns import ROW_FIELDS, to_columns
from relax_queue.rows.row_keys import RowKeys, block_to, join_keys, keys_of, keys_of_samples

__all__ = [
    "ROW_FIELDS",
    "AioQueueClient",
    "Column",
    "Field",
    "Loaded",
    "LoadedChunk",
    "PlanAnswer",
    "PlannedChunk",
    "PlannedMicrobatch",
    "QueueClient",
    "RowKey",
    "RowKeys",
    "StepClosing",
    "StepEnd",
    "StreamingLoader",
    "TransportName",
    "Wanted",
    "block_to",
    "decode",
    "encode",
    "join_keys",
    "keys_of",
    "keys_of_samples",
    "layout",
    "ragged",
    "to_columns",
]
