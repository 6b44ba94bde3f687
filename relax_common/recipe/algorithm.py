"""What every algorithm of the `[algorithm]` section has: the words, the shared keys, and what contradicts what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from relax_common.recipe.base import Count, Real, Section

OldPolicy = Literal["rollout", "actor_fwd"]
Normalizer = Literal["group_mean_std", "group_mean", "leave_one_out", "maxrl"]
Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean", "token_sum"]
Correction = Literal["none", "tis", "icepop"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
Rejection = Literal["none", "k1", "k2", "k3"]
RejectionLevel = Literal["sum", "mean", "max"]
Kl = Literal["k1", "abs", "k2", "k3", "k3+"]
Scope = Literal["sample", "batch"]


@dataclass(frozen=True)
class Refused:
    """A combination of keys that would do nothing, or not what its name says. `why` may show values of the section as
    `{c.key}`."""

    when: Callable[[AlgorithmConfig], bool]
    why: str


class AlgorithmConfig(Section):
    """Options of every algorithm: which log-probs anchor its ratio, how it corrects for the engine, its KL penalty, how
    token losses become one number, and which roles it needs."""

    samples_min: ClassVar[int] = 2
    """Samples of a prompt without which nothing can be learned: two where they are compared with each other."""
    drops_equal_rewards: ClassVar[bool] = True
    """Whether a group whose rewards are all equal teaches nothing, so that another takes its place."""
    whole_step: ClassVar[bool] = False
    """Whether advantages or the selection of tokens depend on all rows of an update."""
    surveys: ClassVar[bool] = False
    """Whether tokens are selected by their log-probs before an update, over all of its rows: one more forward pass."""
    reads_step: ClassVar[tuple[str, ...]] = ()
    """Fields that the advantages need of every row of the step, beside the rewards."""
    optional_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that rollout servers write only for this algorithm."""
    critic: ClassVar[bool] = False
    """Whether advantages need the values of a critic."""
    teacher: ClassVar[bool] = False
    """Whether a teacher's log-probs are needed."""
    refused: ClassVar[tuple[Refused, ...]] = ()

    name: str
    aggregation: Aggregation = "token_mean"
    aggregation_constant: Annotated[Real, Field(ge=0)] = 0.0
    """C of aggregation = "seq_mean_token_sum_norm", at least 1; 0: not set."""
    old_policy: OldPolicy = "rollout"
    """Whose log-probs anchor the ratio: the engine's, or those that the role actor_fwd computes with the weights that
    the step starts from."""
    correction: Correction = "none"
    """Weight by rho = old / rollout: cut at correction_high (tis), or 0 outside the bounds (icepop)."""
    correction_level: CorrectionLevel = "token"
    """Whose rho: each token's own, or one per sample, the product or the geometric mean of its tokens'."""
    correction_low: Annotated[Real, Field(ge=0)] = 0.5
    correction_high: Annotated[Real, Field(gt=0)] = 2.0
    rejection: Rejection = "none"
    """Samples are trained with weight 0 where this divergence of old from rollout leaves the bounds; they stay in the
    denominator."""
    rejection_level: RejectionLevel = "mean"
    """The divergence of a sample from those of its tokens."""
    rejection_low: Annotated[Real, Field(ge=0)] = 0.0
    """Bounds as values of rho. Only k1 has a sign, and so a lower bound; 0: none."""
    rejection_high: Annotated[Real, Field(gt=1)] = 2.0
    kl_loss_coef: Annotated[Real, Field(ge=0)] = 0.0
    """Weight of the KL to the reference in the loss; 0: none. No reference role is started without a coefficient."""
    kl_reward_coef: Annotated[Real, Field(ge=0)] = 0.0
    """Weight of the KL to the reference that is subtracted from the reward, with the log-probs of the anchor."""
    kl: Kl = "k3"
    """The estimator of the KL."""
    kl_unbiased: bool = False
    """Multiplies the KL in the loss by the ratio, so that tokens of an older policy estimate that of the new one."""
    entropy_coef: Annotated[Real, Field(ge=0)] = 0.0
    """Weight of the entropy that is subtracted from the loss."""
    updates_per_step: Count = 1
    """Optimizer updates into which the groups of a step are divided; the log-probs of the anchor stay those of the
    step."""
    passes_per_step: Count = 1
    """Times that the rows of a step are trained."""

    @property
    def scope(self) -> Scope:
        """Whether chunks may be trained as they come, or only when the step has closed."""
        divided = self.updates_per_step > 1 or self.passes_per_step > 1
        return "batch" if self.whole_step or self.surveys or divided else "sample"

    @property
    def actor_starts_at_step(self) -> int:
        """The first step whose rows change the actor."""
        return 0

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that write a column before a row can be trained."""
        wanted = {
            "actor_fwd": self.old_policy == "actor_fwd",
            "reference": bool(self.kl_loss_coef or self.kl_reward_coef),
            "critic": self.critic,
            "teacher": self.teacher,
        }
        return tuple(role for role, needed in wanted.items() if needed)

    @property
    def shared_fields(self) -> tuple[str, ...]:
        """Fields of every row of a chunk, whichever rank trains it, from which advantages are computed."""
        fields = ("reward", "reward_status", *self.reads_step, *self.optional_fields)
        if not self.kl_reward_coef:
            return fields
        anchor = "old_log_probs" if self.old_policy == "actor_fwd" else "log_probs"
        return tuple(dict.fromkeys((*fields, "loss_mask", "versions", anchor, "ref_log_probs")))

    @model_validator(mode="after")
    def _fits_together(self) -> AlgorithmConfig:
        for rule in (*REFUSED, *self.refused):
            if rule.when(self):
                raise ValueError(f"name = {self.name!r}: {rule.why.format(c=self)}")
        return self


REFUSED = (
    Refused(
        lambda c: c.aggregation == "seq_mean_token_sum_norm" and c.aggregation_constant < 1,
        "aggregation = 'seq_mean_token_sum_norm' divides by aggregation_constant, which must be at least 1; found "
        "{c.aggregation_constant:g} (usual is sampling.max_new_tokens)",
    ),
    Refused(
        lambda c: c.aggregation_constant > 0 and c.aggregation != "seq_mean_token_sum_norm",
        "aggregation_constant belongs to aggregation = 'seq_mean_token_sum_norm'",
    ),
    Refused(
        lambda c: (c.correction != "none" or c.rejection != "none") and c.old_policy == "rollout",
        "correction and rejection compare old with rollout log-probs, which are the same under old_policy = 'rollout'; "
        "set old_policy = 'actor_fwd', or both to 'none'",
    ),
    Refused(
        lambda c: c.correction_low >= c.correction_high,
        "correction_low must lie below correction_high",
    ),
    Refused(
        lambda c: c.correction == "none" and c.correction_level != "token",
        "correction_level belongs to a correction",
    ),
    Refused(
        lambda c: c.rejection == "none" and (c.rejection_low > 0 or c.rejection_level != "mean"),
        "rejection_low and rejection_level belong to a rejection",
    ),
    Refused(
        lambda c: c.rejection in ("k2", "k3") and c.rejection_low > 0,
        "rejection_low is a bound of k1: k2 and k3 have no sign",
    ),
    Refused(lambda c: c.rejection_low >= 1, "rejection_low must lie below 1, the value of rho without any difference"),
    Refused(
        lambda c: c.kl_loss_coef > 0 and c.kl_reward_coef > 0,
        "kl_loss_coef and kl_reward_coef would count the same penalty twice; set one of them",
    ),
    Refused(
        lambda c: c.kl_unbiased and not c.kl_loss_coef,
        "kl_unbiased weighs the KL in the loss; set kl_loss_coef",
    ),
    Refused(
        lambda c: c.kl_reward_coef > 0 and c.kl == "k3+",
        "kl = 'k3+' differs from 'k3' in its gradient, and a reward has none; use 'k3'",
    ),
)
"""What no algorithm can do."""
