"""One step: read its chunks as the queue plans them, accumulate, update. Publishes nothing.

Most algorithms train each chunk as it comes and update once. Those whose scope is "batch" hold the rows until the step
has closed.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from trainer_server.megatron.trainer import Statistics, Trainer, UpdateReport
from trainer_server.packing.rows import RowLimits, TrainRow
from trainer_server.step.advantages import advantages_of
from trainer_server.step.batch import ROW_FIELDS, ChunkRows, chunk_rows
from trainer_server.step.reader import StepReader
from trainer_server.step.updates import counts_of, divided, draw_seed, with_selection

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
    updates: tuple[UpdateReport, ...]
    statistics: Statistics
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
    held: list[LoadedChunk] = field(default_factory=list)
    probe_rows: list[TrainRow] = field(default_factory=list)
    seconds: StepSeconds = field(default_factory=StepSeconds)

    def add(self, rows: ChunkRows, probe_rows: int) -> None:
        self.reward_sum += rows.reward_sum
        self.reward_count += rows.reward_count
        self.refused_tokens += rows.refused_tokens
        self.refused_samples += rows.refused_samples
        flat = (row for batch in rows.micro_batches for row in batch)
        self.probe_rows += [row for row, _ in zip(flat, range(probe_rows), strict=False)]


class Line(Protocol):
    """Callbacks from a step to its actor; both are called on all ranks together."""

    def on_tick(self) -> None:
        """Called periodically while the queue has nothing."""

    def still_counts(self, lineage: int) -> bool:
        """Whether the lineage still counts: no rollback has ended it."""


class StepTraining:
    def __init__(self, context: RankContext, trainer: Trainer, algorithm: AnyAlgorithm) -> None:
        roles = (PRODUCER, CONSUMER, *algorithm.config.roles)
        shared = algorithm.config.shared_fields
        fields = fields_read_by(CONSUMER, roles, algorithm.config.optional_fields)
        own = tuple(f.name for f in fields if f.name not in shared or f.name in ROW_FIELDS)
        wanted = Wanted(CONSUMER, trainer.parallel.dp_rank, own, shared)
        self._reader = StepReader(context.queue, wanted, context.group, context.status)
        self._group = context.group
        self._status = context.status
        self._trainer = trainer
        self._algorithm = algorithm
        self._recipe = context.recipe
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
                self._take_chunk(loaded, version, progress, started)
                continue
            if loaded.close is None:
                return None
            progress.seconds.wait += time.monotonic() - started
            trained = self._finish(loaded.close, loaded.plan.generation, version, progress)
            # While this step is published the queue can have the next one ready.
            self._reader.open(lineage, version.number + 1)
            return trained

    def _take_chunk(self, loaded: LoadedChunk, version: PolicyVersion, progress: _Progress, started: float) -> None:
        if self._algorithm.config.scope == "batch":
            progress.held.append(loaded)
            progress.seconds.wait += time.monotonic() - started
            return
        rows = self._rows_of([loaded], progress)[0]
        progress.seconds.wait += time.monotonic() - started
        with self._training(progress):
            self._trainer.accumulate(rows.micro_batches, version.pack(), rows.micro_batch_count)

    def _rows_of(self, chunks: list[LoadedChunk], progress: _Progress) -> list[ChunkRows]:
        """The rows of chunks whose advantages are computed together."""
        rank = self._trainer.parallel.dp_rank

        def read() -> list[ChunkRows]:
            advantages = advantages_of(self._algorithm, chunks)
            return [chunk_rows(loaded, rank, self._algorithm, self._limits, advantages) for loaded in chunks]

        found = self._group.agree(read)
        for rows in found:
            progress.add(rows, self._recipe.actor.probe_rows)
        return found

    @contextmanager
    def _training(self, progress: _Progress) -> Iterator[None]:
        begun = time.monotonic()
        progress.seconds.train_start = progress.seconds.train_start or time.time()
        self._status.enter("train")
        yield
        progress.seconds.train += time.monotonic() - begun

    def _finish(
        self, closing: StepClosing, generation: int, version: PolicyVersion, progress: _Progress
    ) -> TrainedStep:
        with self._training(progress):
            if self._algorithm.config.scope == "batch":
                reports = self._train_held(closing, version, progress)
                counts, passes = self._counts(closing, progress), self._algorithm.config.passes_per_step
            else:
                counts, passes = self._counts(closing, progress), 1
                reports = [self._trainer.finish_update(counts)]
            statistics = self._trainer.statistics()
        if statistics.trained_tokens != counts.tokens * passes:
            raise DataLoss(
                f"the queue planned {counts.tokens} trained tokens, the ranks saw {statistics.trained_tokens}"
                f"{f' in {passes} passes' if passes > 1 else ''}"
            )
        failpoint("actor.after_optimizer_step")
        progress.seconds.train_end = time.time()
        for report in reports:
            if report.skipped_rows:
                get_logger().error("update_skipped", rows=[str(key) for key in report.skipped_rows[:8]])
        mean = progress.reward_sum / progress.reward_count if progress.reward_count else 0.0
        probe_rows = progress.probe_rows[: self._recipe.actor.probe_rows]
        return TrainedStep(generation, closing, tuple(reports), statistics, mean, probe_rows, progress.seconds)

    def _train_held(self, closing: StepClosing, version: PolicyVersion, progress: _Progress) -> list[UpdateReport]:
        """All updates of a step that had to close first."""
        config, trainer = self._algorithm.config, self._trainer
        batches = [batch for rows in self._rows_of(progress.held, progress) for batch in rows.micro_batches]
        budget = self._recipe.actor.tokens_per_microbatch
        parts = divided(batches, closing.groups, config.updates_per_step, budget)
        reports = []
        for number, part in enumerate(parts * config.passes_per_step):
            counts, count = counts_of(part, trainer)
            if config.surveys:
                seed = draw_seed(self._recipe.seed, version.number, number)
                part = with_selection(self._algorithm, trainer, part, count, seed)
            trainer.accumulate(part, version.pack(), count)
            begins = version.number >= config.actor_starts_at_step
            reports.append(trainer.finish_update(counts if begins else StepCounts(0, 0)))
        return reports

    def _counts(self, closing: StepClosing, progress: _Progress) -> StepCounts:
        """The denominators of the closing, less what any rank had to refuse."""
        refused = torch.tensor([progress.refused_tokens, progress.refused_samples], device=self._trainer.device)
        torch.distributed.all_reduce(refused, group=self._trainer.data_group)
        tokens, samples = refused.tolist()
        return StepCounts(closing.n_tokens - tokens, closing.n_samples - samples)
