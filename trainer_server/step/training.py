"""One step: read its chunks as the queue plans them, accumulate, update once. Publishes nothing."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from relax_common.errors import DataLoss, PlanLost
from relax_common.failpoints import failpoint
from relax_common.process.telemetry import get_logger
from relax_common.rows import PRODUCER, fields_read_by
from relax_common.versions import PolicyVersion
from relax_queue.client import LoadedChunk, StepClosing, Wanted
from trainer_server.algorithms import AnyAlgorithm
from trainer_server.context import RankContext
from trainer_server.maths.aggregation import StepCounts
from trainer_server.megatron.trainer import Trainer, UpdateReport
from trainer_server.packing.rows import RowLimits, TrainRow
from trainer_server.step.batch import REWARD_FIELDS, ChunkRows, chunk_rows
from trainer_server.step.reader import StepReader

CONSUMER = "actor"


@dataclass
class StepSeconds:
    """Phases of a step; `train_start` and `train_end` are wall-clock seconds since 1970."""

    wait: float = 0.0
    train: float = 0.0
    train_start: float = 0.0
    train_end: float = 0.0


@dataclass
class TrainedStep:
    """A step that is trained in memory and not yet committed."""

    generation: int
    closing: StepClosing
    report: UpdateReport
    reward_mean: float
    probe_rows: list[TrainRow]
    seconds: StepSeconds


@dataclass
class _Progress:
    """Totals over the chunks of one plan on this rank."""

    reward_sum: float = 0.0
    reward_count: int = 0
    refused_tokens: int = 0
    refused_samples: int = 0
    probe_rows: list[TrainRow] = field(default_factory=list)
    seconds: StepSeconds = field(default_factory=StepSeconds)


class Line(Protocol):
    """Callbacks from a step to its actor; both are called on all ranks together."""

    def on_tick(self) -> None:
        """Called periodically while the queue has nothing."""

    def still_counts(self, lineage: int) -> bool:
        """Whether the lineage still counts: no rollback has ended it."""


class StepTraining:
    def __init__(self, context: RankContext, trainer: Trainer, algorithm: AnyAlgorithm) -> None:
        roles = (PRODUCER, CONSUMER, *algorithm.config.roles)
        fields = tuple(f.name for f in fields_read_by(CONSUMER, roles) if f.name not in REWARD_FIELDS)
        wanted = Wanted(CONSUMER, trainer.parallel.dp_rank, fields, REWARD_FIELDS)
        self._reader = StepReader(context.queue, wanted, context.group, context.status)
        self._group = context.group
        self._status = context.status
        self._trainer = trainer
        self._algorithm = algorithm
        self._probe_rows = context.recipe.actor.probe_rows
        shape = trainer.names.shape
        self._limits = RowLimits(shape.vocab_size, shape.max_positions)

    def train(self, version: PolicyVersion, lineage: int, line: Line) -> TrainedStep | None:
        """Train step `version.number`; None if the run has no such step.

        If the plan is lost, the step starts again, as long as no rollback has ended the lineage.
        """
        while True:
            try:
                return self._train_once(version, lineage, line.on_tick)
            except PlanLost as error:
                if not line.still_counts(lineage):
                    raise
                get_logger().warning("plan_lost", step=version.number, error=error.message)

    def _train_once(self, version: PolicyVersion, lineage: int, on_tick: Callable[[], None]) -> TrainedStep | None:
        self._trainer.begin_step()
        progress = _Progress()
        self._reader.open(lineage, version.number)
        while True:
            started = time.monotonic()
            loaded = self._reader.next(lineage, version.number, on_tick)
            if isinstance(loaded, LoadedChunk):
                self._train_chunk(loaded, version, progress, started)
                continue
            if loaded.close is None:
                return None
            progress.seconds.wait += time.monotonic() - started
            trained = self._finish(loaded.close, loaded.plan.generation, progress)
            # While this step is published the queue can have the next one ready.
            self._reader.open(lineage, version.number + 1)
            return trained

    def _train_chunk(self, loaded: LoadedChunk, version: PolicyVersion, progress: _Progress, started: float) -> None:
        trainer = self._trainer
        rows: ChunkRows = self._group.agree(
            lambda: chunk_rows(loaded, trainer.parallel.dp_rank, self._algorithm, self._limits)
        )
        seconds = progress.seconds
        seconds.wait += time.monotonic() - started
        begun = time.monotonic()
        seconds.train_start = seconds.train_start or time.time()
        self._status.enter("train")
        trainer.accumulate(rows.micro_batches, version.pack(), rows.micro_batch_count)
        progress.reward_sum += rows.reward_sum
        progress.reward_count += rows.reward_count
        progress.refused_tokens += rows.refused_tokens
        progress.refused_samples += rows.refused_samples
        flat = (row for batch in rows.micro_batches for row in batch)
        progress.probe_rows += [row for row, _ in zip(flat, range(self._probe_rows), strict=False)]
        seconds.train += time.monotonic() - begun

    def _finish(self, closing: StepClosing, generation: int, progress: _Progress) -> TrainedStep:
        begun = time.monotonic()
        counts = self._counts(closing, progress)
        report = self._trainer.finish_step(counts)
        if report.statistics.trained_tokens != counts.tokens:
            raise DataLoss(
                f"the queue planned {counts.tokens} trained tokens, the ranks saw {report.statistics.trained_tokens}"
            )
        failpoint("actor.after_optimizer_step")
        seconds = progress.seconds
        seconds.train += time.monotonic() - begun
        seconds.train_end = time.time()
        if report.skipped_rows:
            get_logger().error("update_skipped", rows=[str(key) for key in report.skipped_rows[:8]])
        mean = progress.reward_sum / progress.reward_count if progress.reward_count else 0.0
        return TrainedStep(generation, closing, report, mean, progress.probe_rows[: self._probe_rows], seconds)

    def _counts(self, closing: StepClosing, progress: _Progress) -> StepCounts:
        """The denominators of the closing, less what any rank had to refuse."""
        refused = torch.tensor([progress.refused_tokens, progress.refused_samples], device=self._trainer.device)
        torch.distributed.all_reduce(refused, group=self._trainer.data_group)
        tokens, samples = refused.tolist()
        return StepCounts(closing.n_tokens - tokens, closing.n_samples - samples)
