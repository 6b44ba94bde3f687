"""The `[algorithm]` section: one class per algorithm, told apart by `name`. The maths of the trainer uses it as it is.

A new algorithm is a class here, in `KINDS`, and a file in trainer_server/algorithms/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import Discriminator, Field, Tag, model_validator

from relax_common.recipe.base import Real, Section

OldPolicy = Literal["rollout", "actor_fwd"]
Normalizer = Literal["group_mean_std", "group_mean", "leave_one_out"]
Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean", "token_sum"]
Correction = Literal["none", "tis", "icepop"]
Kl = Literal["k1", "abs", "k2", "k3", "k3+"]
Scope = Literal["sample", "batch"]


class AlgorithmConfig(Section):
    """Options of every algorithm: which log-probs anchor its ratio, how it corrects for the engine, its KL penalty, how
    token losses become one number, and which roles it needs."""

    scope: ClassVar[Scope] = "sample"
    """Whether chunks may be trained as they come, or only when the step has closed (whitening over the batch)."""

    name: str
    aggregation: Aggregation = "token_mean"
    aggregation_constant: Annotated[Real, Field(ge=0)] = 0.0
    """C of aggregation = "seq_mean_token_sum_norm", at least 1; 0: not set."""
    old_policy: OldPolicy = "rollout"
    """Whose log-probs anchor the ratio: the engine's, or those that the role actor_fwd computes with the weights that
    the step starts from."""
    correction: Correction = "none"
    """Weight of a token by old / rollout: cut at correction_high (tis), or 0 outside the bounds (icepop)."""
    correction_low: Annotated[Real, Field(ge=0)] = 0.5
    correction_high: Annotated[Real, Field(gt=0)] = 2.0
    kl_coef: Annotated[Real, Field(ge=0)] = 0.0
    """Weight of the KL to the reference in the loss; 0: no reference role is started."""
    kl: Kl = "k3"

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that write a column before a row can be trained."""
        old = ("actor_fwd",) if self.old_policy == "actor_fwd" else ()
        return (*old, "reference") if self.kl_coef else old

    @model_validator(mode="after")
    def _fits_together(self) -> AlgorithmConfig:
        needs_constant = self.aggregation == "seq_mean_token_sum_norm"
        if needs_constant and self.aggregation_constant < 1:
            raise ValueError(
                f"aggregation = 'seq_mean_token_sum_norm' divides by aggregation_constant, which must be at least 1; "
                f"found {self.aggregation_constant:g}"
            )
        if self.aggregation_constant and not needs_constant:
            raise ValueError(
                f"aggregation_constant = {self.aggregation_constant:g} belongs to aggregation = "
                f"'seq_mean_token_sum_norm'; the aggregation is {self.aggregation!r}"
            )
        if self.correction != "none" and self.old_policy == "rollout":
            raise ValueError(
                f"correction = {self.correction!r} compares old with rollout log-probs, which are the same under "
                "old_policy = 'rollout'; set old_policy = 'actor_fwd' or correction = 'none'"
            )
        if self.correction_low >= self.correction_high:
            raise ValueError(
                f"correction_low = {self.correction_low} must lie below correction_high = {self.correction_high}"
            )
        return self


class GrpoConfig(AlgorithmConfig):
    """Group-relative advantages, clipped ratio."""

    name: Literal["grpo"] = "grpo"
    normalizer: Normalizer = "group_mean_std"
    """Advantages of a group's samples from their rewards."""
    eps_low: Annotated[Real, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped to [1 - eps_low, 1 + eps_high]."""
    eps_high: Annotated[Real, Field(gt=0)] = 0.28
    dual_clip: Annotated[Real, Field(ge=0)] = 0.0
    """Bounds the loss of tokens with a negative advantage to -A times this; 0: off, else > 1."""

    @model_validator(mode="after")
    def _dual_clip_is_off_or_above_1(self) -> GrpoConfig:
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError(f"dual_clip = {self.dual_clip}: must be above 1, or 0 for off")
        return self


KINDS: tuple[type[AlgorithmConfig], ...] = (GrpoConfig,)


def name_of(kind: type[AlgorithmConfig]) -> str:
    return str(kind.model_fields["name"].default)


def one_of(*kinds: type[AlgorithmConfig]) -> Any:
    """The type of a section that is one of these classes, chosen by `name`; without a name, the first."""

    def tag_of(value: Any) -> str:
        if isinstance(value, AlgorithmConfig):
            return value.name
        return str(value.get("name", name_of(kinds[0]))) if isinstance(value, dict) else ""

    tagged = tuple(Annotated[kind, Tag(name_of(kind))] for kind in kinds)
    # pydantic does not accept a union of one type.
    return Annotated[Union[(*tagged, Annotated[_Nothing, Tag("")])], Discriminator(tag_of)]


class _Nothing(Section):
    """No algorithm at all."""


if TYPE_CHECKING:
    Algorithm = AlgorithmConfig
else:
    Algorithm = one_of(*KINDS)
