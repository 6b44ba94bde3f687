"""The one interface every engine has. Nothing here imports torch."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from relax_common.json_types import JsonMapping
from relax_common.versions import PackedVersion


class EngineError(RuntimeError):
    """The engine refused or failed; the message says why and what to do."""


class EngineUnusable(EngineError):
    """The engine can never work with this setup, however often it is started: wrong release, model, interpreter,
    address."""


class RequestRefused(EngineError):
    """This request can never be answered; others can."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class PauseMode(StrEnum):
    """What happens to requests in flight.

    IN_PLACE: they stay and keep their cache. RETRACT: they stay and are prefilled again. ABORT: at a pause they are
    returned as they are; at a swap they leave the engine and are submitted again as prompts, and their tokens keep
    their versions.
    """

    IN_PLACE = "in_place"
    RETRACT = "retract"
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """Temperature 0 is greedy (its log-probs are those of temperature 1); training refuses it earlier."""

    temperature: float
    max_new_tokens: int


@dataclass(frozen=True)
class GenerateRequest:
    """`n_samples` continuations of one prompt; `request_id` is what `abort` names.

    seeds: one per sample. An engine that supports it draws the sample from the seed alone, whatever else it computes;
    empty: any.
    """

    request_id: str
    prompt_ids: Sequence[int]
    n_samples: int
    sampling: SamplingParams
    seeds: Sequence[int] = ()


@dataclass(frozen=True)
class Completion:
    """One continuation; the three arrays have one entry per sampled token (a sampled end token included).

    `log_probs` are log_softmax(logits / temperature) under the weights named by `versions`.
    """

    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Tolerance:
    """Bounds of |log-prob - publisher's| over the tokens of a probe."""

    largest: float
    mean: float


@dataclass(frozen=True)
class Probe:
    """Sequences with the publisher's log-probs of all their tokens but the first, which has no context."""

    sequences: Sequence[Sequence[int]]
    log_probs: Sequence[npt.NDArray[np.float32]]
    temperature: float
    tolerance: Tolerance

    def check(self, scored: Sequence[npt.NDArray[np.float32]], version: PackedVersion) -> float:
        """Returns the largest difference. Raises EngineError if these are not the weights that were published."""
        pairs = zip(scored, self.log_probs, strict=True)
        differences = np.concatenate([np.abs(ours - theirs) for ours, theirs in pairs])
        if not differences.size:
            return 0.0
        for name, found in (("largest", float(differences.max())), ("mean", float(differences.mean()))):
            allowed = getattr(self.tolerance, name)
            if not found <= allowed:
                raise EngineError(
                    f"version {version}: probe log-probs differ by {found:.2e} ({name}), allowed {allowed:.2e}"
                )
        return float(differences.max())


@dataclass(frozen=True)
class StagedWeights:
    """A whole, hash-checked shadow copy of one version: Hugging Face name -> tensor of the engine's kind."""

    version: PackedVersion
    tensors: JsonMapping
    probe: Probe | None


@dataclass(frozen=True)
class SwapReport:
    version: PackedVersion
    pause_seconds: float
    probe_max_difference: float


@dataclass(frozen=True)
class EngineHealth:
    """`version` is None while no verified weights are loaded; then nothing is generated."""

    alive: bool
    paused: bool
    version: PackedVersion | None
    running_samples: int
    waiting_samples: int
    restarts: int = 0
    """How often the engine recovered by itself, with a new process or because its URL answers again."""
    detail: str = ""
    """A description for people: kind, release, process or URL."""


class Engine(Protocol):
    """All calls may come from any thread. Futures fail with EngineError, also when the engine stops."""

    def ready(self) -> Future[None]:
        """Resolves when weights can be loaded; fails when the engine cannot start."""

    def when_lost(self, callback: Callable[[str], None]) -> None:
        """`callback(why)` runs, on any thread, whenever weights are lost without a swap.

        The engine then has no version, and its requests end with the tokens they had, FinishReason.ABORT.
        """

    def generate(self, request: GenerateRequest) -> Future[list[Completion]]:
        """One completion per sample, in order; tokens keep the version that sampled them across a swap."""

    def abort(self, request_id: str) -> None:
        """Resolve the request with the tokens it has: unfinished samples end with FinishReason.ABORT."""

    def pause(self, mode: PauseMode) -> Future[None]:
        """Resolves when no decode step runs any more."""

    def resume(self) -> None: ...

    def swap(self, staged: StagedWeights, mode: PauseMode) -> Future[SwapReport]:
        """Load between two decode steps and check the probe.

        If it fails half-way or the probe disagrees, the engine has no version and all its requests are aborted.
        """

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Future[list[npt.NDArray[np.float32]]]:
        """Log-probs of all tokens but the first of each sequence, between two decode steps."""

    def health(self) -> EngineHealth: ...

    def close(self) -> None: ...
