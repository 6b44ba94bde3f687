"""Process groups of one trainer: every rank of (role, term), split over tensor, expert and data parallelism."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import PrefixStore, Store

from trainer_server.model.hf_config import ModelError
from trainer_server.model.layouts import GroupRank, Place


@dataclass(frozen=True)
class Parallel:
    """This rank's place. Tensor-parallel ranks are neighbours: rank = dp_rank * tensor_parallel + tp_rank.
    `expert_parallel` data-parallel neighbours share out the experts, each holding all else."""

    rank: int
    world_size: int
    tensor_parallel: int
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.tensor_parallel:
            raise ModelError(
                f"{self.world_size} ranks cannot be divided into tensor-parallel groups of {self.tensor_parallel}"
            )
        if self.data_parallel % self.expert_parallel:
            raise ModelError(
                f"{self.data_parallel} data-parallel ranks cannot be divided into expert-parallel groups of "
                f"{self.expert_parallel}"
            )

    @property
    def data_parallel(self) -> int:
        return self.world_size // self.tensor_parallel

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tensor_parallel

    @property
    def copy(self) -> int:
        """Which whole copy of the model this rank holds a part of."""
        return self.dp_rank // self.expert_parallel

    @property
    def place(self) -> Place:
        return Place(
            tensor=GroupRank(self.rank % self.tensor_parallel, self.tensor_parallel),
            expert=GroupRank(self.dp_rank % self.expert_parallel, self.expert_parallel),
        )

    def holder(self, *, replicated: bool, of_expert: bool) -> GroupRank:
        """This rank's place among the ranks that hold the same slice of a parameter."""
        if of_expert:
            return GroupRank(self.copy, self.data_parallel // self.expert_parallel)
        return GroupRank(self.rank, self.world_size) if replicated else GroupRank(self.dp_rank, self.data_parallel)


@dataclass(frozen=True)
class CopyGroups:
    """The ranks that together hold one copy of the model: `tensor` for split tensors, `expert` for experts."""

    tensor: dist.ProcessGroup
    expert: dist.ProcessGroup


def claim_device() -> torch.device:
    """With CUDA, make cuda:LOCAL_RANK the current device and return it; else return the CPU. A process that was given
    one device sees no other and needs no LOCAL_RANK."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_groups(parallel: Parallel, store: Store, group_name: str, timeout_seconds: float) -> Iterator[None]:
    """All groups for the life of the block. A collective that waits longer than the timeout raises, so one
    lost rank ends the others."""
    dist.init_process_group(
        "nccl" if claim_device().type == "cuda" else "gloo",
        store=PrefixStore(group_name, store),
        rank=parallel.rank,
        world_size=parallel.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        parallel_state.initialize_model_parallel(
            parallel.tensor_parallel, expert_model_parallel_size=parallel.expert_parallel
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
