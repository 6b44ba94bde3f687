"""The measurements of a step, as sums that may be added in any order and over any ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_server.algorithms import Objective
from trainer_server.maths.policy_loss import log_ratio
from trainer_server.packing.pack import Pack
from trainer_server.publish.publisher import PublishSeconds
from trainer_server.step.training import TrainedStep

_SUMS = (
    "tokens",
    "loss",
    "ratio",
    "clipped_low",
    "clipped_high",
    "dual_clipped",
    "entropy",
    "k1",
    "k3",
    "importance",
    "importance_squared",
    "current_tokens",
    "current_abs_diff",
    "other_abs_diff",
    "kl",
    "kl_tokens",
    "correction",
    "correction_tokens",
)
_MAXIMA = ("current_abs_diff", "other_abs_diff", "ratio", "staleness")
STALENESS_BUCKETS = 32  # the last one counts everything beyond


@dataclass
class StepStatistics:
    """Token sums, maxima over tokens, and samples by staleness, of the step so far on this rank."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(len(_SUMS), dtype=torch.float64))
    maxima: Tensor = field(default_factory=lambda: torch.zeros(len(_MAXIMA), dtype=torch.float64))
    staleness: Tensor = field(default_factory=lambda: torch.zeros(STALENESS_BUCKETS, dtype=torch.float64))

    def add(
        self, pack: Pack, log_probs: Tensor, entropy: Tensor, result: Objective, loss_sum: Tensor, version: int
    ) -> None:
        """`version` is the packed policy version being trained."""
        mask = pack.mask
        if not bool(mask.any()):
            return
        loss = result.tokens
        log_probs = log_probs.detach()
        log_rho = log_ratio(log_probs, pack.rollout, mask)[mask].double()
        rho = log_rho.exp()
        difference = (log_probs - pack.rollout)[mask].abs().double()
        current = pack.row_versions[mask] == version
        ratio = loss.ratio.detach()[mask].double()
        values = (
            mask.sum(),
            loss_sum.detach(),
            ratio.sum(),
            loss.clipped_low.sum(),
            loss.clipped_high.sum(),
            loss.dual_clipped.sum(),
            entropy.detach()[mask].double().sum(),
            -log_rho.sum(),
            (rho - 1 - log_rho).sum(),
            rho.sum(),
            rho.square().sum(),
            current.sum(),
            difference[current].sum(),
            difference[~current].sum(),
            *_sum_and_count(result.kl, mask),
            *_sum_and_count(result.correction, mask),
        )
        self.sums += torch.stack([value.double() for value in values]).cpu()
        highest = torch.stack([_top(difference[current]), _top(difference[~current]), _top(ratio), _top(ratio[:0])])
        self.maxima = torch.maximum(self.maxima, highest.cpu())

    def add_staleness(self, samples: Sequence[int]) -> None:
        """Count samples by their staleness in versions."""
        if samples:
            values = torch.tensor(samples)
            buckets = values.clamp(max=STALENESS_BUCKETS - 1)
            self.staleness += torch.bincount(buckets, minlength=STALENESS_BUCKETS)
            self.maxima[-1] = torch.maximum(self.maxima[-1], values.max().double())

    def reduced(self, group: dist.ProcessGroup) -> "StepStatistics":
        """Over the data-parallel ranks."""
        device = torch.device(torch.cuda.current_device())
        added = torch.cat([self.sums, self.staleness]).to(device)
        highest = self.maxima.to(device)
        dist.all_reduce(added, group=group)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        return StepStatistics(added[: len(_SUMS)].cpu(), highest.cpu(), added[len(_SUMS) :].cpu())

    @property
    def trained_tokens(self) -> int:
        return int(self.sums[0])

    def as_metrics(self) -> dict[str, float]:
        """Means over the trained tokens. The log-prob difference to the engine is measured separately for two kinds of
        rows: in rows sampled entirely by the version being trained it must vanish; in the others it is policy lag (and,
        after a swap in the middle of a row, the effect of the kept key-value cache of older weights)."""
        total = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        top = dict(zip(_MAXIMA, self.maxima.tolist(), strict=True))
        n = max(total["tokens"], 1.0)
        current = total["current_tokens"]
        other = total["tokens"] - current
        metrics = {
            "staleness_max": top["staleness"],
            "tokens_of_current_version": current,
            "ratio_mean": total["ratio"] / n,
            "ratio_max": top["ratio"],
            "clip_fraction_low": total["clipped_low"] / n,
            "clip_fraction_high": total["clipped_high"] / n,
            "dual_clip_fraction": total["dual_clipped"] / n,
            "entropy": total["entropy"] / n,
            "mismatch_k1": total["k1"] / n,
            "mismatch_k3": total["k3"] / n,
            "effective_sample_size": total["importance"] ** 2 / (n * max(total["importance_squared"], 1e-300)),
        }
        for name, metric in (("kl", "kl_reference"), ("correction", "correction_weight_mean")):
            if total[f"{name}_tokens"]:
                metrics[metric] = total[name] / total[f"{name}_tokens"]
        if current:
            metrics["logprob_abs_diff_mean"] = total["current_abs_diff"] / current
            metrics["logprob_abs_diff_max"] = top["current_abs_diff"]
        if other:
            metrics["stale_logprob_abs_diff_mean"] = total["other_abs_diff"] / other
            metrics["stale_logprob_abs_diff_max"] = top["other_abs_diff"]
        for bucket, samples in enumerate(self.staleness.tolist()):
            if samples:
                metrics[f"staleness_samples_{bucket}"] = samples
        return metrics


def _sum_and_count(values: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Both are 0 if the algorithm does not compute them."""
    if values is None:
        nothing = torch.zeros((), device=mask.device)
        return nothing, nothing
    return values.detach()[mask].double().sum(), mask.sum()


def _top(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())


def step_metrics(trained: TrainedStep, previous: PublishSeconds) -> dict[str, float]:
    """Metrics of a step; finite numbers only. A commit cannot contain its own duration, nor that of the snapshot after
    it, so these two are those of the step before."""
    updates, seconds, closing = trained.updates, trained.seconds, trained.closing
    metrics = trained.statistics.as_metrics() | {
        "loss": fmean(update.loss for update in updates),
        "grad_norm": max(update.grad_norm for update in updates),
        "learning_rate": updates[-1].learning_rate,
        "updates": float(sum(update.made for update in updates)),
        "update_skipped": float(any(update.skipped_rows for update in updates)),
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
