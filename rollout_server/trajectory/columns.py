"""Between a group's rows and the queue's columns."""

from relax.queue.v1 import queue_pb2
from relax_queue.client import Column, decode
from rollout_server.trajectory.samples import SampleRows, Scored, scored


def row_columns(rows: SampleRows) -> dict[str, Column]:
    """One column a field of `relax_queue.rows.schema.ROW_FIELDS`, without copies; empty without rows."""
    if not rows:
        return {}
    return {
        "tokens": Column("row", rows.tokens, rows.offsets),
        "loss_mask": Column("row", rows.loss_mask, rows.offsets),
        "log_probs": Column("row", rows.log_probs, rows.offsets),
        "versions": Column("row", rows.versions, rows.offsets),
        "temperature": Column("sample", rows.temperatures),
        "reward": Column("sample", rows.rewards),
        "reward_status": Column("sample", rows.statuses),
    }


def kept_scores(kept: queue_pb2.KeptSamples) -> dict[int, Scored]:
    """Scores of the samples that an earlier lease left complete, by sample; the queue holds their rows."""
    if not kept.rows:
        return {}
    columns = decode(kept.extent)
    samples = dict.fromkeys(row.sample for row in kept.rows)
    scores = scored(columns["reward"].values, columns["reward_status"].values)
    return dict(zip(samples, scores, strict=True))
