"""The numbers of a step, as they travel with its commit record."""

import math

from trainer_server.publish.publisher import PublishSeconds
from trainer_server.step.training import TrainedStep


def step_metrics(trained: TrainedStep, previous: PublishSeconds) -> dict[str, float]:
    """Finite numbers only. A commit cannot carry its own duration, nor that of the snapshot behind it: these two are
    of the step before."""
    report, seconds, closing = trained.report, trained.seconds, trained.closing
    metrics = report.statistics.as_metrics() | {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "update_skipped": float(bool(report.skipped_rows)),
        "reward_mean": trained.reward_mean,
        "groups": float(len(closing.groups)),
        "samples": float(closing.n_samples),
        "tokens": float(closing.n_tokens),
        "seconds_wait": seconds.wait,
        "seconds_train": seconds.train,
        "seconds_commit": previous.commit,
        "seconds_snapshot": previous.snapshot,
        "train_start_unix_seconds": seconds.train_start,
        "train_end_unix_seconds": seconds.train_end,
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
