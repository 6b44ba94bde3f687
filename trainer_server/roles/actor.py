"""The actor: train step s under version s, commit version s + 1, and come back from any crash to the same line.

recover   newest state F (or the base checkpoint) -> replay F..head-1 from kept rows, publishing nothing
each step plan -> rows -> gradients -> one update -> begin, push, COMMIT -> snapshot
the end   export the head
"""

import time
from pathlib import Path
from typing import Literal

from prometheus_client import Counter

from dcs.client import Head
from relax.common.v1 import common_pb2
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import DataLoss, NotFound, PlanLost, RowsFreed
from relax_common.process.telemetry import get_logger
from relax_common.recipe import Recipe, derive
from relax_common.rows import FIELDS
from relax_common.versions import PolicyVersion
from trainer_server.algorithms import make_algorithm
from trainer_server.context import RankContext
from trainer_server.megatron.model import dtype_of
from trainer_server.megatron.optimizer import optimizer_of
from trainer_server.megatron.parallel import Parallel
from trainer_server.megatron.state import state_from_bytes
from trainer_server.megatron.trainer import Trainer
from trainer_server.model.load import read_name_map
from trainer_server.publish.export import export_folder
from trainer_server.publish.probe import first_probe_rows, probe_of
from trainer_server.publish.publisher import Publisher
from trainer_server.status import HeadReporter
from trainer_server.step.loss import PolicyLoss
from trainer_server.step.reader import RoleStopped
from trainer_server.step.statistics import step_metrics
from trainer_server.step.training import CONSUMER, StepTraining, TrainedStep

REPLAY_DIVERGENCE = Counter("relax_replay_divergence", "Replays that ended on other bits than were committed")


class ReplayLine:
    """During a replay the weights in memory are not the head's, so the head cannot be pushed again."""

    def __init__(self, actor: "Actor") -> None:
        self._actor = actor

    def on_tick(self) -> None:
        return None

    def still_counts(self, lineage: int) -> bool:
        return self._actor.still_counts(lineage)


class ActorRole:
    """The policy that is trained."""

    name = CONSUMER
    kind = common_pb2.ROLE_ACTOR
    trainable = True
    writes: tuple[str, ...] = ()
    needs_version: Literal["step", "any"] = "step"

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(field.name for field in FIELDS if self.name in field.readers)

    def parallel(self, recipe: Recipe, rank: int, world_size: int) -> Parallel:
        actor = recipe.actor
        return Parallel(rank, world_size, actor.tensor_parallel_size, actor.expert_parallel_size)

    def run(self, context: RankContext) -> None:
        Actor(context).run(context.assignment.run_dir / "export")


class Actor:
    def __init__(self, context: RankContext) -> None:
        recipe, assignment = context.recipe, context.assignment
        algorithm = make_algorithm(recipe.algorithm, tuple(recipe.reward.parts.values()))
        self._recipe = recipe
        self._dcs = context.dcs
        self._head = context.head
        self._group = context.group
        self._status = context.status
        self._trainer = Trainer(
            context.parallel,
            read_name_map(recipe.model.path),
            PolicyLoss(algorithm),
            optimizer_of(recipe, derive(recipe)),
            recipe.optimizer.bad_updates_max,
            recipe.seed,
            dtype_of(recipe),
            recompute=recipe.actor.recompute == "full",
        )
        self._training = StepTraining(context, self._trainer, algorithm)
        self._publisher = Publisher(context, self._trainer)
        self._reporter = HeadReporter(assignment.controller, assignment.run, assignment.instance, assignment.term)
        self._lineage = 0
        self._last_step_ended = time.monotonic()
        self._last_cpu_seconds = time.process_time()

    def run(self, export_to: Path) -> None:
        """Train until the queue says that the run has no more steps; then export the head."""
        try:
            self._train_all(self._recover())
        except RoleStopped:
            self._leave_state()
            raise
        self._leave_state()
        self._export(export_to)

    def _train_all(self, version: PolicyVersion) -> None:
        while True:
            self._hold_while_paused()
            self._status.step, self._status.version = version.number, version
            try:
                trained = self._training.train(version, self._lineage, self)
            except PlanLost:
                version = self._recover()  # relaxd has rolled the run back
                continue
            if trained is None:
                return
            version = self._commit(version, trained)

    def _leave_state(self) -> None:
        """If checkpoints are kept, the last one must be the head's, so its state must not wait for `snapshot_every`."""
        head = self._head()
        if self._recipe.checkpoint.every_steps and head.head == self._status.version:
            self._publisher.restore_head(head)

    def _commit(self, version: PolicyVersion, trained: TrainedStep) -> PolicyVersion:
        made = PolicyVersion(self._lineage, version.number + 1)
        now, cpu_seconds = time.monotonic(), time.process_time()
        metrics = step_metrics(trained, self._publisher.seconds) | {
            "seconds_step": now - self._last_step_ended,
            "cpu_seconds": self._group.total(cpu_seconds - self._last_cpu_seconds),
        }
        self._last_step_ended, self._last_cpu_seconds = now, cpu_seconds
        probe = self._probe(trained)

        def record(attempt: int) -> dcs_pb2.CommitRecord:
            phases = {"seconds_publish": self._publisher.seconds.publish}
            return dcs_pb2.CommitRecord(
                step=version.number,
                version=made.to_proto(),
                term=self._status.term,
                attempt=attempt,
                plan_digest=trained.closing.plan_digest,
                plan_generation=trained.generation,
                groups=trained.closing.groups,
                optimizer_updates=self._trainer.counters.updates,
                probe=probe,
                metrics=metrics | phases,
            )

        self._publisher.commit(made, record)
        get_logger().info("committed", step=version.number, version=str(made), reward_mean=trained.reward_mean)
        return made

    def _probe(self, trained: TrainedStep) -> dcs_pb2.Probe:
        # Rows differ between data-parallel ranks, and rank 0 sends the record.
        return probe_of(self._trainer, trained.probe_rows if self._trainer.parallel.dp_rank == 0 else [])

    def _recover(self) -> PolicyVersion:
        """Bring the head's weights into memory on every rank. Returns the head."""
        while True:
            head = self._head()
            self._lineage = head.lineage
            if head.head is None:
                return self._first_version()
            try:
                self._load(head)
                self._replay(head)
                self._settle(head)
                return head.head
            except (RowsFreed, PlanLost, NotFound, DataLoss) as error:
                self._give_up_unless_newer(head, error.message)

    def _first_version(self) -> PolicyVersion:
        self._trainer.reset(self._recipe.model.path)
        first = PolicyVersion(self._lineage, 0)
        probe = probe_of(
            self._trainer, first_probe_rows(self._trainer, self._recipe.actor.probe_rows, self._recipe.seed)
        )
        self._publisher.commit(
            first,
            lambda attempt: dcs_pb2.CommitRecord(
                version=first.to_proto(), term=self._status.term, attempt=attempt, probe=probe
            ),
        )
        return first

    def _load(self, head: Head) -> None:
        self._status.enter("load", f"state of version {head.recovery}")
        if not head.recovery.number and not head.recovery_in_memory:
            self._trainer.reset(self._recipe.model.path)
            return
        state = self._group.agree(lambda: self._dcs.get_snapshot(head.recovery, CONSUMER, self._group.rank))
        labels = state_from_bytes(self._trainer, state)
        if labels != {"lineage": head.recovery.lineage, "number": head.recovery.number}:
            raise DataLoss(f"the state given for version {head.recovery} says that it is of {labels}")

    def _replay(self, head: Head) -> None:
        for number in range(head.recovery.number, len(head.line) - 1):
            version = head.line[number]
            self._status.enter("replay", f"rows of step {version.number}")
            get_logger().info("replay", step=version.number)
            if self._training.train(version, self._lineage, ReplayLine(self)) is None:
                raise NotFound(f"step {version.number} cannot be replayed: the run is over")

    def _settle(self, head: Head) -> None:
        """Make sure that dcs holds the bytes and state of the head, and that they equal what this actor has in
        memory."""
        if head.head is None:
            raise NotFound("there is no head")
        version = head.head
        self._publisher.restore_head(head)
        if self._group.agree(lambda: self._publisher.diverges_from(version)):
            REPLAY_DIVERGENCE.inc()
            get_logger().error("replay_divergence", version=str(version))

    def _give_up_unless_newer(self, head: Head, reason: str) -> None:
        again = self._head()
        if (again.recovery, again.head) == (head.recovery, head.head):
            get_logger().error("head_lost", head=str(head.head), reason=reason)
            self._group.share(lambda: self._reporter.report(head.head, reason))

    def still_counts(self, lineage: int) -> bool:
        return self._head().lineage == lineage

    def on_tick(self) -> None:
        """Called while there is nothing to train: check whether dcs has lost the head's bytes or state."""
        head = self._head()
        if head.head is None or head.head != self._status.version:
            return
        if head.holds_head_bytes and head.head.number - head.recovery.number < self._recipe.snapshot_every:
            return
        get_logger().warning("head_pushed_again", version=str(head.head))
        self._publisher.restore_head(head)

    def _hold_while_paused(self) -> None:
        while self._group.share(lambda: b"1" if self._status.pause.is_set() else b"0") == b"1":
            self._status.enter("paused", "Resume")
            if self._status.stop.wait(1.0):
                return

    def _export(self, folder: Path) -> None:
        self._status.enter("export")
        trainer = self._trainer
        started = time.monotonic()
        if self._group.share(lambda: b"1" if folder.exists() else b"0") == b"0" and trainer.parallel.copy == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            base = self._recipe.model.path
            export_folder(trainer.names, trainer.module, trainer.parallel.place, trainer.copy_groups, base, folder)
        self._group.share(lambda: b"")  # no rank exits before rank 0 has written
        get_logger().info("exported", folder=str(folder), seconds=round(time.monotonic() - started, 3))
