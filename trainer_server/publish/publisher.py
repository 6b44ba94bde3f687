"""From weights in memory to a committed version: begin, push, commit; then the state that recovery loads."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from dcs.client import POLICY, Head, SliceData
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import AttemptGone, NotFound, SnapshotMissing
from relax_common.failpoints import failpoint
from relax_common.process.telemetry import get_logger
from relax_common.torch_tensors import safetensors_name
from relax_common.versions import PolicyVersion
from trainer_server.context import RankContext
from trainer_server.megatron.state import state_parts
from trainer_server.megatron.trainer import Trainer


@dataclass
class PublishSeconds:
    """Seconds that the last commit took, by phase."""

    publish: float = 0.0
    snapshot: float = 0.0
    commit: float = 0.0


class Publisher:
    def __init__(self, context: RankContext, trainer: Trainer) -> None:
        self._dcs = context.dcs
        self._group = context.group
        self._status = context.status
        self._snapshot_every = context.recipe.snapshot_every
        self._trainer = trainer
        self.seconds = PublishSeconds()

    def commit(self, version: PolicyVersion, make_record: Callable[[int], dcs_pb2.CommitRecord]) -> None:
        """Publish the weights in memory as `version`; `make_record` fills in the record for an attempt.

        If dcs has restarted, it has forgotten the attempt: publishing begins again from memory, and nothing is trained
        again. The state follows the commit, so that engines can swap at the same time; until the state has arrived, a
        crash costs one replayed step.
        """
        snapshot_first = False
        while True:
            try:
                attempt = self._one_attempt(version, make_record, snapshot_first)
                break
            except AttemptGone as error:
                get_logger().warning("attempt_gone", version=str(version), error=error.message)
            except SnapshotMissing:
                if snapshot_first:
                    raise
                snapshot_first = True  # an earlier snapshot was lost with dcs; the one of this version replaces it
        if version.number and version.number % self._snapshot_every == 0 and not snapshot_first:
            self._snapshot_of_head(version, attempt)

    def restore_head(self, head: Head) -> None:
        """dcs lost the head's bytes: push them again, and the state that belongs to them.

        Raises DataLoss if the weights in memory are not those that were committed.
        """
        if head.head is None:
            raise NotFound("there is no head to push again")
        version, attempt = head.head, head.record.attempt
        if not head.holds_head_bytes:
            self._status.enter("publish", f"dcs to take version {version} again")
            self._push(version, attempt)
        if version.number > head.recovery.number:
            self._put_snapshot(version, attempt)

    def diverges_from(self, version: PolicyVersion) -> bool:
        """Whether the weights after a replay differ bitwise from those that dcs holds for `version`."""
        held = {(entry.name, tuple(entry.start)): entry.hash for entry in self._dcs.manifest(version)}
        own = self._owned_slices()
        return any(held[entry.name, entry.start] != xxhash.xxh3_64_intdigest(entry.data) for entry in own)

    def _one_attempt(
        self, version: PolicyVersion, make_record: Callable[[int], dcs_pb2.CommitRecord], snapshot_first: bool
    ) -> int:
        term, group = self._status.term, self._group
        self._status.enter("publish", f"dcs to take version {version}")
        started = time.monotonic()
        answer = group.patiently(
            lambda: group.share(lambda: str(self._dcs.begin(POLICY, version, term)).encode()), "begin"
        )
        attempt = int(answer)
        self._push(version, attempt)
        failpoint("actor.after_last_push")
        if snapshot_first:
            self._put_snapshot(version, attempt)
        pushed = time.monotonic()
        self.seconds.publish = pushed - started
        self._status.enter("commit", f"dcs to commit version {version}")
        record = make_record(attempt)
        failpoint("actor.before_commit_sent")
        group.patiently(lambda: group.share(lambda: self._send_commit(record)), "commit")
        failpoint("actor.after_commit_heard")
        self.seconds.commit = time.monotonic() - pushed
        return attempt

    def _snapshot_of_head(self, version: PolicyVersion, attempt: int) -> None:
        started = time.monotonic()
        self._status.enter("snapshot", f"dcs to take the state of version {version}")
        try:
            self._put_snapshot(version, attempt)
        except AttemptGone as error:
            # A rollback has cut the version off; the next plan says so.
            get_logger().warning("snapshot_off_the_line", version=str(version), error=error.message)
        failpoint("actor.after_snapshot")
        self.seconds.snapshot = time.monotonic() - started

    def _send_commit(self, record: dcs_pb2.CommitRecord) -> bytes:
        stored = self._dcs.commit(record)
        failpoint("actor.after_commit_sent_before_answer")
        return stored.SerializeToString()

    def _push(self, version: PolicyVersion, attempt: int) -> None:
        slices = self._owned_slices()
        term, group = self._status.term, self._group

        def push() -> None:
            if slices:
                self._dcs.push(version, attempt, term, slices)

        group.patiently(lambda: group.agree(push), "push")

    def _put_snapshot(self, version: PolicyVersion, attempt: int) -> None:
        state = state_parts(self._trainer, {"lineage": version.lineage, "number": version.number})
        rank, term, group = self._group.rank, self._status.term, self._group

        def put() -> None:
            self._dcs.put_snapshot(version, attempt, POLICY, rank, term, state)

        group.patiently(lambda: group.agree(put), "snapshot")

    def _owned_slices(self) -> list[SliceData]:
        """Each slice has one owner among the ranks that hold it; owners take turns."""
        parallel = self._trainer.parallel
        owned = []
        for index, entry in enumerate(self._trainer.slices()):
            holder = parallel.holder(replicated=entry.replicated, of_expert=entry.of_expert)
            if index % holder.size == holder.rank:
                piece, tensor = entry.piece, entry.tensor().contiguous().cpu()
                data = memoryview(tensor.view(torch.uint8).numpy().data).cast("B")
                owned.append(
                    SliceData(
                        entry.hf_name, piece.full_shape, piece.start, piece.extent, safetensors_name(tensor.dtype), data
                    )
                )
        return owned
