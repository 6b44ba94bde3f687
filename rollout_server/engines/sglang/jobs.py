"""Requests as the adapter keeps them: what each sample has so far, over all the times it entered the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollout_server.engines.contract import Completion, EngineError, FinishReason, GenerateRequest
from rollout_server.engines.sglang.sampling import SampleOutput


class ForeignWeights(EngineError):
    """The engine sampled under weights that this server did not load."""


@dataclass
class Job:
    """`aborted`: its samples end with what they have. `void`: what they have came from weights that were refused."""

    request: GenerateRequest
    aborted: bool = False
    void: bool = False


@dataclass
class Sample:
    """One continuation, in as many pieces as it was interrupted by swaps."""

    prompt_ids: list[int]
    max_new_tokens: int
    pieces: list[Completion] = field(default_factory=list)
    finish: FinishReason = FinishReason.ABORT

    @property
    def n_new(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces)

    @property
    def ended(self) -> bool:
        return self.finish is not FinishReason.ABORT

    def so_far(self) -> list[int]:
        return [*self.prompt_ids, *(token for piece in self.pieces for token in piece.token_ids.tolist())]

    def take(self, output: SampleOutput, known_versions: Sequence[int]) -> None:
        piece = completion(output, known_versions)
        self.pieces.append(piece)
        full = self.n_new >= self.max_new_tokens
        self.finish = FinishReason.LENGTH if full and piece.finish_reason is FinishReason.ABORT else piece.finish_reason

    def completion(self) -> Completion:
        return Completion(
            token_ids=np.concatenate([np.empty(0, np.int32), *(piece.token_ids for piece in self.pieces)]),
            log_probs=np.concatenate([np.empty(0, np.float32), *(piece.log_probs for piece in self.pieces)]),
            versions=np.concatenate([np.empty(0, np.int64), *(piece.versions for piece in self.pieces)]),
            finish_reason=self.finish,
        )


def completion(output: SampleOutput, known_versions: Sequence[int]) -> Completion:
    """The tokens, each with its version. Raises ForeignWeights for a version that this server did not load."""
    versions = np.empty(len(output.token_ids), np.int64)
    covered = 0
    for span in output.spans:
        if span.start == span.end:
            continue
        if not span.version.isdigit() or int(span.version) not in known_versions or span.start != covered:
            raise ForeignWeights(
                f"the engine sampled tokens {span.start} to {span.end} under weights {span.version!r}, which this "
                "server did not load; does another run update the same engine?"
            )
        versions[span.start : span.end] = int(span.version)
        covered = span.end
    if covered != len(versions):
        raise ForeignWeights(f"the engine names the weights of {covered} of {len(versions)} tokens")
    return Completion(output.token_ids, output.log_probs, versions, FinishReason(output.finish))


def nothing() -> Completion:
    return Completion(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int64), FinishReason.ABORT)
