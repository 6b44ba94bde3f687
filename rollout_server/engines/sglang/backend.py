"""What the adapter needs of an SGLang, wherever it runs. All methods are coroutines of one event loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from relax_common.versions import PackedVersion
from rollout_server.engines.contract import EngineError
from rollout_server.engines.sglang.sampling import SampleOutput


class BackendLost(EngineError):
    """The process or server is gone or silent: the state of its weights and requests is unknown."""


@dataclass(frozen=True)
class SampleCall:
    """`salt` prevents the prefix cache of one version from being used under another."""

    rid: str
    prompt_ids: Sequence[int]
    temperature: float
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    salt: str


class Backend(Protocol):
    """Every method but `start` and `close` raises BackendLost when the engine is lost, else EngineError."""

    async def start(self, incarnation: int) -> str:
        """Returns a description of what runs. Raises EngineUnusable, or EngineError if another try may help."""

    async def lost(self) -> str:
        """Returns the reason once the engine is gone, silent, or no longer the one that was started."""

    async def sample(self, call: SampleCall) -> SampleOutput: ...

    async def abort(self, rids: Sequence[str]) -> None:
        """Returns when none of them runs any more."""

    async def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Log-probs at temperature 1 of all tokens but the first."""

    async def stage(self, version: PackedVersion, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors next to the live weights and check them; generation goes on."""

    async def pause(self, mode: str) -> None:
        """No decode step runs from here to `resume`; mode is in_place or retract."""

    async def load(self, version: PackedVersion, *, flush: bool) -> None:
        """The staged tensors become the live ones. While it runs, and after a failure, they are mixed."""

    async def resume(self) -> None: ...

    async def discard(self, why: str) -> None:
        """The weights cannot be trusted: kill what can be killed, so that `lost` returns."""

    async def close(self) -> None: ...
