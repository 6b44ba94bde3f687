"""The algorithms of the `[algorithm]` section, one class each, told apart by `name`.

A class says what makes the algorithm: the estimator of advantages, its own options with their defaults, the aggregation
and the anchor it is published with, and what it cannot be combined with. The maths is in trainer_server/algorithms/.
A new algorithm is a class here, in `KINDS`, and a file there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import Discriminator, Field, Tag

from relax_common.recipe.algorithm import Aggregation, AlgorithmConfig, Kl, Normalizer, OldPolicy, Refused
from relax_common.recipe.base import Real, Section

Fraction = Annotated[Real, Field(gt=0, lt=1)]
Positive = Annotated[Real, Field(gt=0)]
Parameter = bool | int | float | str


class GroupConfig(AlgorithmConfig):
    """Advantages relative to the group."""

    normalizer: Normalizer = "group_mean_std"
    """Advantages of a group's samples from their rewards."""


class ClippedConfig(GroupConfig):
    """Keys of GRPO and of those that share its loss."""

    refused: ClassVar[tuple[Refused, ...]] = (
        Refused(
            lambda c: isinstance(c, ClippedConfig) and 0 < c.dual_clip <= 1,
            "dual_clip must be above 1, or 0 for off: at 1 it would cut losses that the clip leaves alone",
        ),
    )
    eps_low: Fraction = 0.2
    """The ratio is clipped to [1 - eps_low, 1 + eps_high]."""
    eps_high: Positive = 0.28
    dual_clip: Annotated[Real, Field(ge=0)] = 0.0
    """Bounds the loss of tokens with a negative advantage to -A times this; 0: off, else > 1."""


class GrpoConfig(ClippedConfig):
    """Group-relative advantages, clipped ratio."""

    name: Literal["grpo"] = "grpo"


class DrGrpoConfig(ClippedConfig):
    """GRPO without the two divisions that favour short answers and easy questions (Liu et al. 2025)."""

    name: Literal["dr_grpo"] = "dr_grpo"
    normalizer: Normalizer = "group_mean"
    eps_high: Positive = 0.2
    aggregation: Aggregation = "seq_mean_token_sum_norm"


class DapoConfig(ClippedConfig):
    """Clip-higher, token mean and dynamic sampling (Yu et al. 2025). Overlong answers: reward.overlong_tokens."""

    name: Literal["dapo"] = "dapo"


class MaxRlConfig(ClippedConfig):
    """Advantages relative to the mean reward: rare successes weigh most."""

    name: Literal["maxrl"] = "maxrl"
    normalizer: Normalizer = "maxrl"


class GdpoConfig(ClippedConfig):
    """Each part of a weighted reward is normalised in its group, then they are summed and whitened over the step."""

    drops_equal_rewards = False
    whole_step = True
    optional_fields = ("reward_parts",)
    name: Literal["gdpo"] = "gdpo"


class DecoupledPpoConfig(ClippedConfig):
    """Clips against the policy the step starts from and weighs by its distance from the engine's (AReaL, Fu et al.
    2025)."""

    refused = (
        *ClippedConfig.refused,
        Refused(
            lambda c: c.correction == "none", "its weight is a correction: 'tis' clamps it, 'icepop' masks what is over"
        ),
    )
    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    old_policy: OldPolicy = "actor_fwd"
    correction: Literal["none", "tis", "icepop"] = "icepop"
    correction_low: Annotated[Real, Field(ge=0)] = 0.0
    correction_high: Positive = 5.0


class OpsmConfig(ClippedConfig):
    """GRPO without samples of negative advantage from which the policy has already moved away."""

    name: Literal["opsm"] = "opsm"
    opsm_delta: Annotated[Real, Field(ge=0)] = 1e-4
    """Largest mean of log old - log pi of a sample with a negative advantage."""


class GspoConfig(GroupConfig):
    """One ratio per sequence (Zheng et al. 2025)."""

    name: Literal["gspo"] = "gspo"
    eps_low: Fraction = 3e-4
    eps_high: Positive = 4e-4
    aggregation: Aggregation = "seq_mean_token_mean"


class GmpoConfig(GroupConfig):
    """Geometric mean of clipped ratios per sequence (Zhao et al. 2025)."""

    refused = (
        Refused(
            lambda c: c.aggregation != "seq_mean_token_mean",
            "its loss is one number per sequence, averaged over sequences: aggregation = 'seq_mean_token_mean'",
        ),
    )
    name: Literal["gmpo"] = "gmpo"
    eps_low: Positive = 0.4
    """Bounds of the log-ratio of a token: [-eps_low, eps_high], on the side that hurts."""
    eps_high: Positive = 0.4
    aggregation: Aggregation = "seq_mean_token_mean"


class SapoConfig(GroupConfig):
    """A smooth gate in place of the clip (Gao et al. 2025)."""

    name: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    """Steepness of the gate where the advantage is positive."""
    tau_negative: Positive = 1.05
    aggregation: Aggregation = "seq_mean_token_mean"


class CispoConfig(GroupConfig):
    """Clips the weight of a token and keeps its gradient (MiniMax 2025)."""

    name: Literal["cispo"] = "cispo"
    eps_low: Annotated[Real, Field(gt=0, le=1)] = 1.0
    """The weight is clipped to [1 - eps_low, 1 + eps_high]; 1: no lower bound."""
    eps_high: Positive


class DppoTvConfig(GroupConfig):
    """Drops tokens whose probability has moved too far (Qi et al. 2026, divergence PPO with total variation)."""

    name: Literal["dppo_tv"] = "dppo_tv"
    delta_low: Fraction = 0.2
    """Largest fall of a token's probability with a negative advantage."""
    delta_high: Fraction = 0.2
    """Largest rise of a token's probability with a positive advantage."""


class M2poConfig(GroupConfig):
    """Drops the tokens that have moved furthest until the second moment of the log-ratio over the update is small
    (Zheng et al. 2025)."""

    surveys = True
    name: Literal["m2po"] = "m2po"
    second_moment_max: Positive = 0.04


class CovarianceConfig(GroupConfig):
    """Tokens are selected by the covariance of log-prob and advantage over the update (Cui et al. 2025)."""

    surveys = True
    share: Fraction = 2e-4
    """Share of the trained tokens that is selected; at least one token."""


class KlCovConfig(CovarianceConfig):
    """A penalty on the tokens with the highest covariance."""

    name: Literal["kl_cov"] = "kl_cov"
    penalty: Positive = 1.0
    """Weight of |log ratio| at the selected tokens."""


class ClipCovConfig(CovarianceConfig):
    """No gradient from some tokens with a high covariance, drawn at random, beside the usual clip."""

    refused = (
        Refused(
            lambda c: isinstance(c, ClipCovConfig) and c.covariance_low >= c.covariance_high,
            "covariance_low must lie below covariance_high",
        ),
    )
    name: Literal["clip_cov"] = "clip_cov"
    eps_low: Fraction = 0.2
    eps_high: Positive = 0.2
    covariance_low: Real = 1.0
    """Tokens are drawn from those with a covariance between these bounds."""
    covariance_high: Real = 5.0


_WITHOUT_RATIO = Refused(
    lambda c: c.passes_per_step > 1 or c.updates_per_step > 1,
    "without a ratio a second update would be uncorrected: updates_per_step = passes_per_step = 1",
)


class RlooConfig(GroupConfig):
    """REINFORCE with the mean of the other samples as baseline (Ahmadian et al. 2024)."""

    refused = (_WITHOUT_RATIO,)
    name: Literal["rloo"] = "rloo"
    normalizer: Normalizer = "leave_one_out"


class ReinforcePpConfig(AlgorithmConfig):
    """REINFORCE++: discounted returns whitened over the step, clipped ratio (Hu et al. 2025)."""

    samples_min = 1
    drops_equal_rewards = False
    whole_step = True
    reads_step = ("loss_mask", "versions")
    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Annotated[Real, Field(gt=0, le=1)] = 1.0
    """Discount per trained token."""
    eps_low: Fraction = 0.2
    eps_high: Positive = 0.2
    kl: Kl = "k1"


class ReinforcePpBaselineConfig(GroupConfig):
    """REINFORCE++ with the group's mean as baseline, whitened over the tokens of the step."""

    whole_step = True
    reads_step = ("loss_mask", "versions")
    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    normalizer: Normalizer = "group_mean"
    eps_low: Fraction = 0.2
    eps_high: Positive = 0.2


class PpoConfig(AlgorithmConfig):
    """Advantages from a critic that is trained beside the actor (Schulman et al. 2017)."""

    samples_min = 1
    drops_equal_rewards = False
    whole_step = True
    critic = True
    reads_step = ("loss_mask", "versions", "values")
    name: Literal["ppo"] = "ppo"
    gamma: Annotated[Real, Field(gt=0, le=1)] = 1.0
    """Discount per trained token."""
    gae_lambda: Annotated[Real, Field(ge=0, le=1)] = 1.0
    """Between the error of the next value (0) and the whole return (1)."""
    whiten_advantages: bool = True
    """Over the trained tokens of the step."""
    eps_low: Fraction = 0.2
    eps_high: Positive = 0.2
    value_clip: Positive = 0.2
    """A new value may lie so far from the one that the advantages were computed with."""
    critic_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps in which only the critic is trained."""
    kl: Kl = "k1"

    @property
    def actor_starts_at_step(self) -> int:
        return self.critic_warmup_steps


class OpdConfig(ClippedConfig):
    """On-policy distillation: the policy's own samples, judged token by token by a teacher (Agarwal et al. 2024)."""

    refused = (
        *ClippedConfig.refused,
        Refused(
            lambda c: (
                isinstance(c, OpdConfig) and c.distill_as == "loss" and not c.reward_advantages and c.dual_clip > 0
            ),
            "without rewards and with the divergence as a loss no advantage is left that dual_clip could bound",
        ),
    )
    samples_min = 1
    drops_equal_rewards = False
    teacher = True
    name: Literal["opd"] = "opd"
    distill_coef: Positive = 1.0
    """Weight of the reverse KL from the teacher, log pi - log teacher of the sampled tokens."""
    distill_as: Literal["advantage", "loss"] = "advantage"
    """advantage: it is subtracted from the advantage of each token, with the log-probs of the anchor. loss: it is added
    to the loss, with the value of k3 and the gradient of the KL, weighted by the ratio."""
    reward_advantages: bool = False
    """Whether the rewards count too, relative to the group; otherwise only the teacher does."""

    @property
    def shared_fields(self) -> tuple[str, ...]:
        fields = super().shared_fields
        if self.distill_as == "loss":
            return fields
        anchor = "old_log_probs" if self.old_policy == "actor_fwd" else "log_probs"
        return tuple(dict.fromkeys((*fields, "loss_mask", "versions", anchor, "teacher_log_probs")))


class CustomConfig(ClippedConfig):
    """GRPO with an estimator or a loss of the user's own."""

    refused = (
        *ClippedConfig.refused,
        Refused(
            lambda c: isinstance(c, CustomConfig) and not (c.loss or c.estimator),
            "name a function: loss = 'package.module:function' or estimator = 'package.module:function'",
        ),
    )
    name: Literal["custom"] = "custom"
    loss: Annotated[str, Field(pattern=r"^$|^[\w.]+:\w+$")] = ""
    """A function in place of the clipped loss; see docs/algorithms.md."""
    estimator: Annotated[str, Field(pattern=r"^$|^[\w.]+:\w+$")] = ""
    """A function in place of the normalizer."""
    parameters: dict[str, Parameter] = {}
    """Keyword arguments of both."""


KINDS: tuple[type[AlgorithmConfig], ...] = (
    GrpoConfig,
    DrGrpoConfig,
    DapoConfig,
    GspoConfig,
    SapoConfig,
    CispoConfig,
    RlooConfig,
    ReinforcePpConfig,
    ReinforcePpBaselineConfig,
    PpoConfig,
    OpdConfig,
    MaxRlConfig,
    GdpoConfig,
    GmpoConfig,
    KlCovConfig,
    ClipCovConfig,
    DppoTvConfig,
    M2poConfig,
    DecoupledPpoConfig,
    OpsmConfig,
    CustomConfig,
)


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
