"""Between sample rows and the queue's columns."""

from collections.abc import Sequence

from relax.queue.v1 import queue_pb2
from relax_queue.client import Column, decode, to_columns
from rollout_server.rewards.outcome import RewardStatus
from rollout_server.samples import SampleRow, Scored


def row_columns(rows: Sequence[SampleRow]) -> dict[str, Column]:
    """One column a field, in the order of the rows; empty without rows."""
    if not rows:
        return {}
    return to_columns(
        {
            "tokens": [row.tokens for row in rows],
            "loss_mask": [row.loss_mask for row in rows],
            "log_probs": [row.log_probs for row in rows],
            "versions": [row.versions for row in rows],
            "temperature": [row.temperature for row in rows],
            "reward": [row.reward for row in rows],
            "reward_status": [int(row.reward_status) for row in rows],
        }
    )


def kept_scores(kept: queue_pb2.KeptSamples) -> dict[int, Scored]:
    """Scores of the samples that an earlier lease left complete, by sample; the queue holds their rows."""
    if not kept.rows:
        return {}
    columns = decode(kept.extent)
    samples = dict.fromkeys(row.sample for row in kept.rows)
    return {
        sample: Scored(float(reward), RewardStatus(int(status)))
        for sample, reward, status in zip(
            samples, columns["reward"].values, columns["reward_status"].values, strict=True
        )
    }
