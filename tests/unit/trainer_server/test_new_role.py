"""What a new role takes: one class, here one that writes the length of each row as a column."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from relax.common.v1 import common_pb2
from relax_common.errors import InvalidInput
from relax_common.recipe import Recipe
from relax_common.rows import RowKey
from trainer_server.config import TrainerConfig
from trainer_server.context import RankContext
from trainer_server.daemon import TrainerDaemon
from trainer_server.megatron.parallel import Parallel
from trainer_server.roles import ROLES, Role


class Lengths:
    name = "lengths"
    kind = common_pb2.ROLE_REFERENCE
    trainable = False
    reads: tuple[str, ...] = ("tokens",)
    writes: tuple[str, ...] = ("length",)
    needs_version: Literal["step", "any"] = "any"

    def parallel(self, recipe: Recipe, rank: int, world_size: int) -> Parallel:
        return Parallel(rank, world_size, 1)

    def run(self, context: RankContext) -> None:
        queue: Any = context.queue
        while (rows := queue.next_rows(self.reads)) is not None:
            context.status.enter("count")
            values = np.array([len(tokens) for _, tokens in rows], np.int32)
            queue.write_field(self.name, context.assignment.term, self.writes[0], [key for key, _ in rows], values)


class FakeQueue:
    def __init__(self) -> None:
        self.steps = [[(RowKey("g", 0, 0), [1, 2, 3]), (RowKey("g", 1, 0), [4])]]
        self.written: list[object] = []

    def next_rows(self, fields: tuple[str, ...]) -> object:
        return self.steps.pop() if self.steps else None

    def write_field(self, role: str, term: int, field: str, keys: list[RowKey], values: np.ndarray) -> None:
        self.written.append((role, term, field, keys, values.tolist()))


def test_a_new_role_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    role: Role = Lengths()
    monkeypatch.setitem(ROLES, role.name, role)
    TrainerDaemon(TrainerConfig(role="lengths", controller="127.0.0.1:1"))
    queue = FakeQueue()
    context: Any = SimpleNamespace(
        queue=queue, status=SimpleNamespace(enter=lambda phase: None), assignment=SimpleNamespace(term=7)
    )
    ROLES["lengths"].run(context)
    keys = [RowKey("g", 0, 0), RowKey("g", 1, 0)]
    assert queue.written == [("lengths", 7, "length", keys, [3, 1])]


def test_an_unknown_role_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="known roles are actor, critic, reference, teacher, actor_fwd"):
        TrainerDaemon(TrainerConfig(role="actr", controller="127.0.0.1:1"))


@pytest.mark.parametrize(
    ("name", "trainable", "writes", "needs_version"),
    [
        ("actor", True, (), "step"),
        ("reference", False, ("ref_log_probs",), "any"),
        ("actor_fwd", False, ("old_log_probs",), "step"),
    ],
)
def test_a_role_says_what_it_reads_and_writes(
    name: str, trainable: bool, writes: tuple[str, ...], needs_version: str
) -> None:
    role = ROLES[name]
    assert (role.trainable, role.writes, role.needs_version) == (trainable, writes, needs_version)
    assert "tokens" in role.reads
    assert not set(role.writes) & set(role.reads)
