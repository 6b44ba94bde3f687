"""What a workflow gets and gives back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from relax_common.json_types import JsonMapping
from relax_common.rows.prompt import Chat
from rollout_server.trajectory.samples import SampleRows


@dataclass(frozen=True)
class GroupTask:
    """A leased group; `samples` are the indices still to be generated (kept ones are not among them)."""

    group: str
    request_id: str
    prompt: str | Chat
    label: str | None
    metadata: JsonMapping
    samples: Sequence[int]


@dataclass(frozen=True)
class GroupResult:
    """Finished samples; fewer than asked for when the request was aborted. Wall-clock seconds since 1970."""

    rows: SampleRows
    reward_reasons: Sequence[str]
    generation_start_unix_seconds: float
    generation_end_unix_seconds: float


class Workflow(Protocol):
    async def run(self, task: GroupTask) -> GroupResult:
        """Raises PromptError or RequestRefused if the prompt can never be answered."""
