"""One declaration per algorithm: which estimator, loss and aggregation it is made of."""

from dataclasses import dataclass
from typing import Literal

from trainer_server.maths.correction import CorrectionName
from trainer_server.maths.kl import KlName

AdvantageName = Literal["group_mean_std", "group_mean", "leave_one_out"]
OldPolicyName = Literal["behaviour", "actor_fwd"]
AggregationName = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean"
]


@dataclass(frozen=True)
class AlgorithmSpec:
    """`clip_low` and `clip_high` bound the ratio to [1 - clip_low, 1 + clip_high]; `dual_clip` (> 1) caps the
    loss of tokens with a negative advantage; `norm_constant` divides `seq_mean_token_sum_norm`. `old_policy` says whose
    log-probs anchor the ratio; `correction` bounds old/behaviour; `kl_coef` times `kl` to the reference is added."""

    name: str
    advantage: AdvantageName = "group_mean_std"
    aggregation: AggregationName = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    norm_constant: float | None = None
    old_policy: OldPolicyName = "behaviour"
    correction: CorrectionName = "none"
    correction_low: float = 0.5
    correction_high: float = 2.0
    kl: KlName = "k3"
    kl_coef: float = 0.0

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that write columns before a row can be trained."""
        old = ("actor_fwd",) if self.old_policy == "actor_fwd" else ()
        return (*old, *(("reference",) if self.kl_coef else ()))

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1 or self.clip_high <= 0:
            raise ValueError(
                f"{self.name}: clip_low must lie in (0, 1) and clip_high be positive, "
                f"found {self.clip_low} and {self.clip_high}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"{self.name}: dual_clip must exceed 1, found {self.dual_clip}")
        if self.correction != "none" and self.old_policy == "behaviour":
            raise ValueError(
                f"{self.name}: correction = {self.correction!r} corrects old against behaviour log-probs, and with "
                "old_policy = 'behaviour' these are the same; set old_policy = 'actor_fwd'"
            )
        if not 0 <= self.correction_low < self.correction_high:
            raise ValueError(
                f"{self.name}: the correction's bounds {self.correction_low} and {self.correction_high} hold nothing"
            )
        needs_constant = self.aggregation == "seq_mean_token_sum_norm"
        if needs_constant != (self.norm_constant is not None):
            raise ValueError(
                f"{self.name}: norm_constant belongs to aggregation seq_mean_token_sum_norm and to no other"
            )
        if self.norm_constant is not None and self.norm_constant < 1:
            raise ValueError(f"{self.name}: norm_constant must be at least 1, found {self.norm_constant}")


GRPO = AlgorithmSpec("grpo")
