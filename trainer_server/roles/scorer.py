"""A role that only computes: for each planned row it writes the log-probs of the row's tokens as one column.

`reference` and `teacher` keep the weights of a folder; `actor_fwd` takes those of version s before it serves step s. It
follows the plan of the actor, chunk by chunk, so it finds the same rows after a restart; a repeated write changes
nothing.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from dcs.client import FULL, Pulled
from relax.common.v1 import common_pb2
from relax_common.errors import AlreadyExists, BytesLost, DataLoss, InvalidInput, PlanLost, RowsFreed
from relax_common.failpoints import failpoint
from relax_common.process.telemetry import get_logger
from relax_common.recipe import ColumnRole, Recipe, derive
from relax_common.rows import PRODUCER, RowKey, fields_read_by, fields_written_by
from relax_common.tensors import region
from relax_common.torch_tensors import as_tensor
from relax_common.versions import PolicyVersion
from relax_queue.client import LoadedChunk, StepEnd, Wanted, ragged
from trainer_server.context import RankContext
from trainer_server.megatron.forward import ForwardModel
from trainer_server.megatron.model import dtype_of
from trainer_server.megatron.parallel import Parallel
from trainer_server.model.load import read_name_map
from trainer_server.packing.rows import TrainRow, plain_row
from trainer_server.step.reader import StepReader

_BYTES_SECONDS = 600.0
_RETRY_SECONDS = 0.2


_KINDS = {
    "reference": common_pb2.ROLE_REFERENCE,
    "teacher": common_pb2.ROLE_TEACHER,
    "actor_fwd": common_pb2.ROLE_ACTOR_FWD,
}


class ScorerRole:
    """`reference`, `teacher` or `actor_fwd`."""

    trainable = False

    def __init__(self, name: Literal["reference", "teacher", "actor_fwd"]) -> None:
        self.name = name
        self.kind = _KINDS[name]
        self.needs_version: Literal["step", "any"] = "step" if name == "actor_fwd" else "any"

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields_read_by(self.name, (PRODUCER, self.name)))

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields_written_by((self.name,)))

    def parallel(self, recipe: Recipe, rank: int, world_size: int) -> Parallel:
        return Parallel(rank, world_size, self._settings(recipe).tensor_parallel_size)

    def run(self, context: RankContext) -> None:
        Scorer(context, self._settings(context.recipe), self.reads).run()

    def _settings(self, recipe: Recipe) -> ColumnRole:
        for role in derive(recipe).column_roles:
            if role.name == self.name:
                return role
        raise InvalidInput(f"--role {self.name}: the recipe's algorithm does not ask for it")


class Scorer:
    def __init__(self, context: RankContext, role: ColumnRole, reads: tuple[str, ...]) -> None:
        self._role = role
        self._dcs = context.dcs
        self._head = context.head
        self._queue = context.queue
        self._group = context.group
        self._status = context.status
        self._reader = StepReader(context.queue, Wanted(role.name, 0, (), reads), context.group, context.status)
        self._model = _model_of(context, role)
        self._loaded: PolicyVersion | None = None

    def run(self) -> None:
        """Runs until the queue says that the run has no more steps."""
        if self._role.model_path:
            self._model.load(Path(self._role.model_path))
        lineage, step = self._position()
        while True:
            self._status.step = step
            try:
                if not self._serve_step(lineage, step):
                    return
                step += 1
            except (PlanLost, RowsFreed) as error:
                get_logger().warning("plan_lost", step=step, error=error.message)
                lineage, step = self._position()

    def _position(self) -> tuple[int, int]:
        """Lineage and step that are being trained."""
        head = self._head()
        return head.lineage, head.head.number if head.head else 0

    def _serve_step(self, lineage: int, step: int) -> bool:
        """Score every chunk up to the closing; False if the run has no such step."""
        self._reader.open(lineage, step)
        while True:
            loaded = self._reader.next(lineage, step)
            if isinstance(loaded, StepEnd):
                return loaded.close is not None
            if not self._role.model_path:
                self._take_version_of(step)
            self._status.enter("forward")
            self._serve_chunk(loaded)

    def _take_version_of(self, step: int) -> None:
        """Load the weights that the step starts from."""
        line = self._head().line
        if step >= len(line):
            raise DataLoss(f"step {step} is planned, but version {step} is not on the line of dcs")
        version = line[step]
        if version == self._loaded:
            return
        self._status.enter("load", f"dcs to send version {version}")
        whole = self._group.agree(lambda: FULL.decode(self._pull(version)))
        for entry in self._model.slices():
            entry.fill(as_tensor(whole[entry.hf_name])[region(entry.piece.start, entry.piece.extent)])
        self._loaded, self._status.version = version, version

    def _pull(self, version: PolicyVersion) -> Pulled:
        """Repeat while a restarted dcs lacks the bytes; the actor pushes them again."""
        end = time.monotonic() + _BYTES_SECONDS
        while True:
            try:
                return self._dcs.pull(version)
            except BytesLost:
                if time.monotonic() > end:
                    raise
            time.sleep(_RETRY_SECONDS)

    def _serve_chunk(self, loaded: LoadedChunk) -> None:
        rows = rows_of(loaded)
        values: list[np.ndarray] = []
        for batch in (batch for rank in loaded.chunk.ranks for batch in rank if batch.rows):
            values += self._model.log_probs(rows[len(values) : len(values) + len(batch.rows)])
        self._group.share(lambda: self._write(loaded.everyone, values))
        failpoint(f"{self._role.name}.after_write")

    def _write(self, keys: Sequence[RowKey], values: Sequence[np.ndarray]) -> bytes:
        column = ragged("row", values)
        try:
            self._queue.write_field(self._role.name, self._status.term, self._role.field, keys, column)
        except AlreadyExists as error:
            # An earlier incarnation wrote them, perhaps with a different last bit. A reader may have seen them, so they
            # stay.
            get_logger().info("column_kept", error=error.message)
        return b""


def rows_of(loaded: LoadedChunk) -> list[TrainRow]:
    """Rows for which only a forward pass is needed."""
    tokens, temperatures = loaded.shared["tokens"], iter(loaded.shared["temperature"].values.tolist())
    by_sample = {sample: next(temperatures) for sample in dict.fromkeys(key[:2] for key in loaded.everyone)}
    return [plain_row(tokens.unit(index), by_sample[key[:2]], key) for index, key in enumerate(loaded.everyone)]


def _model_of(context: RankContext, role: ColumnRole) -> ForwardModel:
    recipe = context.recipe
    names = read_name_map(Path(role.model_path) if role.model_path else recipe.model.path)
    wanted = read_name_map(recipe.model.path).shape.vocab_size
    if names.shape.vocab_size != wanted:
        raise InvalidInput(
            f"{role.name}.path = {role.model_path}: its vocabulary has {names.shape.vocab_size} ids, that of the "
            f"policy has {wanted}"
        )
    return ForwardModel(context.parallel, names, dtype_of(recipe))
