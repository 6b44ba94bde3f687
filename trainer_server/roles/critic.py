"""The critic: writes the value of every token of step s, is trained on step s, and puts its state at dcs as part of
version s + 1.

recover   state of F -> train F..head-1 again on the kept rows and on the values that were written then
each step plan -> values -> rows with values -> gradients -> the actor's commit -> updates -> state
the end   export

Its states complete those of the actor: F is a version of which dcs holds both. A state is put before the values of the
next step are written, so the actor cannot get further ahead of it than `snapshot_every` steps. The state in memory is
that of a committed version throughout, so a dcs that has lost its memory can be given it again.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from dcs.client import Head
from relax.common.v1 import common_pb2
from relax_common.errors import (
    AlreadyExists,
    AttemptGone,
    DataLoss,
    InvalidInput,
    NotFound,
    PlanLost,
    RowsFreed,
)
from relax_common.failpoints import failpoint
from relax_common.process.telemetry import get_logger
from relax_common.recipe import Recipe, derive
from relax_common.recipe.algorithms import PpoConfig
from relax_common.rows import RowKey, fields_read_by
from relax_common.versions import PolicyVersion
from relax_queue.client import LoadedChunk, Wanted, ragged
from trainer_server.algorithms.ppo import Ppo
from trainer_server.context import RankContext
from trainer_server.megatron.model import dtype_of
from trainer_server.megatron.optimizer import optimizer_of
from trainer_server.megatron.parallel import Parallel
from trainer_server.megatron.state import state_from_bytes, state_parts
from trainer_server.megatron.trainer import Trainer
from trainer_server.model.load import read_name_map
from trainer_server.model.value_head import with_value_head
from trainer_server.publish.export import export_folder
from trainer_server.roles.scorer import rows_of
from trainer_server.status import HeadReporter
from trainer_server.step.critic_rows import critic_rows
from trainer_server.step.reader import StepReader
from trainer_server.step.updates import counts_of, divided
from trainer_server.step.value_loss import ValueLoss

CRITIC = "critic"
_POLL_SECONDS = 0.02
_PLAN_SECONDS = 10.0


class CriticRole:
    """Estimates values for PPO."""

    name = CRITIC
    kind = common_pb2.ROLE_CRITIC
    trainable = True
    writes: tuple[str, ...] = ("values",)
    needs_version: Literal["step", "any"] = "step"

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields_read_by(CRITIC, ("rollout", CRITIC)))

    def parallel(self, recipe: Recipe, rank: int, world_size: int) -> Parallel:
        _section(recipe)
        return Parallel(rank, world_size, recipe.critic.tensor_parallel_size)

    def run(self, context: RankContext) -> None:
        Critic(context).run(context.assignment.run_dir / f"export-{CRITIC}")


def _section(recipe: Recipe) -> PpoConfig:
    if not isinstance(recipe.algorithm, PpoConfig):
        raise InvalidInput(f"--role {CRITIC}: algorithm.name = {recipe.algorithm.name!r} has no critic")
    return recipe.algorithm


class Critic:
    def __init__(self, context: RankContext) -> None:
        recipe, assignment = context.recipe, context.assignment
        self._recipe = recipe
        self._algorithm = Ppo(_section(recipe))
        self._folder = Path(recipe.critic.path) if recipe.critic.path else recipe.model.path
        self._dcs = context.dcs
        self._head = context.head
        self._queue = context.queue
        self._group = context.group
        self._status = context.status
        self._trainer = Trainer(
            context.parallel,
            with_value_head(read_name_map(self._folder)),
            ValueLoss(self._algorithm.config.value_clip),
            optimizer_of(recipe, derive(recipe), recipe.critic.lr),
            recipe.optimizer.bad_updates_max,
            recipe.seed,
            dtype_of(recipe),
            recompute=recipe.actor.recompute == "full",
        )
        shared = self._algorithm.config.shared_fields
        asked = {"tokens": ("tokens", "temperature"), "train": (*shared, "tokens", "temperature")}
        self._to_value, self._to_train = (
            StepReader(
                context.queue, Wanted(CRITIC, 0, (), tuple(dict.fromkeys(fields))), context.group, context.status
            )
            for fields in asked.values()
        )
        self._reporter = HeadReporter(assignment.controller, assignment.run, assignment.instance, assignment.term)
        self._lineage = 0
        self._number = 0
        """Version that the state in memory belongs to."""

    def run(self, export_to: Path) -> None:
        """Runs until the queue says that the run has no more steps."""
        self._recover()
        while True:
            try:
                if not self._one_step():
                    break
            except (PlanLost, AttemptGone) as error:
                get_logger().warning("plan_lost", step=self._number, error=error.message)
                self._recover()
            except (RowsFreed, NotFound) as error:
                # The rows that would lead from F to the head are gone: only a rollback helps.
                self._give_up_unless_newer(self._head(), error.message)
                self._recover()
        self._export(export_to)

    def _one_step(self) -> bool:
        """Bring the state in memory one version on; False if the run has no more steps."""
        head = self._head()
        self._status.step = self._number
        self._check_lineage(head)
        if head.head is None or head.head.number == self._number:
            self._settle(head)
            if not self._write_values():
                return False
        self._train()
        return True

    def _check_lineage(self, head: Head) -> None:
        if head.lineage != self._lineage:
            raise PlanLost(f"the run has rolled back to version {head.head}")

    def _settle(self, head: Head) -> None:
        """dcs holds the state of the head: after each step that keeps one, and again if dcs has lost it."""
        if head.head is None:
            return
        number, every = head.head.number, self._recipe.snapshot_every
        due = number % every == 0 or number - head.recovery.number >= every
        if not number or not due or head.recovery.number >= number:
            return
        self._status.enter("snapshot", f"dcs to take the state of version {head.head}")
        self._put_state(head.head, head.record.attempt)
        failpoint("critic.after_snapshot")

    def _put_state(self, version: PolicyVersion, attempt: int) -> None:
        state = state_parts(self._trainer, {"lineage": version.lineage, "number": version.number})
        rank, term, group = self._group.rank, self._status.term, self._group

        def put() -> None:
            self._dcs.put_snapshot(version, attempt, CRITIC, rank, term, state)

        group.patiently(lambda: group.agree(put), "snapshot")

    def _write_values(self) -> bool:
        """Values of every chunk up to the closing; False if the run has no such step."""
        self._to_value.open(self._lineage, self._number)
        while True:
            loaded = self._to_value.next(self._lineage, self._number)
            if not isinstance(loaded, LoadedChunk):
                return loaded.close is not None
            self._status.enter("forward")
            rows = rows_of(loaded)
            values: list[np.ndarray] = []
            for batch in (batch for rank in loaded.chunk.ranks for batch in rank if batch.rows):
                values += self._trainer.outputs(rows[len(values) : len(values) + len(batch.rows)])
            self._group.share(lambda keys=loaded.everyone, found=values: self._write(keys, found))  # type: ignore[misc]
            failpoint("critic.after_write")

    def _write(self, keys: Sequence[RowKey], values: Sequence[np.ndarray]) -> bytes:
        try:
            self._queue.write_field(CRITIC, self._status.term, "values", keys, ragged("row", values))
        except AlreadyExists as error:
            # An earlier incarnation wrote them, and the actor may have seen them: training uses what was written.
            get_logger().info("column_kept", error=error.message)
        return b""

    def _train(self) -> None:
        """Train the next step. Its gradients are computed beside the actor, but the state changes only once the actor
        has committed: until then it is that of the head, and can be given to dcs again."""
        chunks: list[LoadedChunk] = []
        self._to_train.open(self._lineage, self._number)
        while isinstance(loaded := self._to_train.next(self._lineage, self._number), LoadedChunk):
            chunks.append(loaded)
        if loaded.close is None:
            raise NotFound(f"step {self._number} cannot be trained again: the run is over")
        config, trainer = self._algorithm.config, self._trainer
        batches = self._group.agree(lambda: critic_rows(self._algorithm, chunks))
        budget = self._recipe.actor.tokens_per_microbatch
        parts = divided(batches, loaded.close.groups, config.updates_per_step, budget) * config.passes_per_step
        trainer.begin_step()
        for number, part in enumerate(parts):
            self._status.enter("train", f"step {self._number}")
            counts, count = counts_of(part, trainer)
            trainer.accumulate(part, self._number, count)
            if not number:
                self._wait_for_commit(loaded.plan.generation, loaded.close.plan_digest)
            report = trainer.finish_update(counts)
            if report.skipped_rows:
                get_logger().error("update_skipped", rows=[str(key) for key in report.skipped_rows[:8]])
        measured = {name: round(value, 6) for name, value in trainer.statistics().as_metrics().items()}
        get_logger().info("critic_trained", step=self._number, **measured)
        self._number += 1
        failpoint("critic.after_update")

    def _wait_for_commit(self, generation: int, digest: str) -> None:
        """Returns once the step is committed as it was planned in `generation`. Raises PlanLost if it never will be."""
        while True:
            head = self._head()
            self._check_lineage(head)
            if head.head is not None and head.head.number > self._number:
                break
            self._settle(head)
            self._status.enter("wait", f"the actor to commit version {self._number + 1}")
            self._to_value.check_stop()
            # If the step is planned again, the actor waits for values of its new rows.
            self._group.share(lambda: self._check_planned(generation))
            time.sleep(_POLL_SECONDS)
        committed = head.record.plan_generation, head.record.plan_digest
        if head.head.number == self._number + 1 and committed != (generation, digest):
            raise PlanLost(f"step {self._number} was planned again before it was committed")

    def _check_planned(self, generation: int) -> bytes:
        self._queue.get_plan(CRITIC, self._status.term, self._lineage, self._number, 0, generation, _PLAN_SECONDS)
        return b""

    def _recover(self) -> None:
        """Load the state of F; what follows it is trained again step by step."""
        while True:
            head = self._head()
            self._lineage = head.lineage
            try:
                self._load(head)
                return
            except (RowsFreed, NotFound, DataLoss) as error:
                self._give_up_unless_newer(head, error.message)

    def _give_up_unless_newer(self, head: Head, reason: str) -> None:
        again = self._head()
        if (again.recovery, again.head) == (head.recovery, head.head):
            get_logger().error("head_lost", head=str(head.head), reason=reason)
            self._group.share(lambda: self._reporter.report(head.head, reason))

    def _load(self, head: Head) -> None:
        self._status.enter("load", f"state of version {head.recovery}")
        self._number = head.recovery.number
        if not head.recovery.number and not head.recovery_in_memory:
            self._trainer.reset(self._folder)
            return
        state = self._group.agree(lambda: self._dcs.get_snapshot(head.recovery, CRITIC, self._group.rank))
        labels = state_from_bytes(self._trainer, state)
        if labels != {"lineage": head.recovery.lineage, "number": head.recovery.number}:
            raise DataLoss(f"the state given for version {head.recovery} says that it is of {labels}")

    def _export(self, folder: Path) -> None:
        self._status.enter("export")
        trainer = self._trainer
        if self._group.share(lambda: b"1" if folder.exists() else b"0") == b"0" and trainer.parallel.copy == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            place = trainer.parallel.place
            export_folder(trainer.names, trainer.module, place, trainer.copy_groups, self._folder, folder)
        self._group.share(lambda: b"")  # no rank exits before rank 0 has written
        get_logger().info("exported", folder=str(folder))
