"""What a new algorithm takes: a class in the recipe, and a class that is made of the maths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from pydantic import BaseModel, ValidationError

from relax_common.errors.validation import one_line
from relax_common.recipe.algorithm import KINDS, AlgorithmConfig, GrpoConfig, one_of
from trainer_server.algorithms import ALGORITHMS, Algorithm, LogProbs, make_algorithm
from trainer_server.maths.advantages import group_advantages
from trainer_server.maths.policy_loss import TokenLoss, log_ratio


class ReinforceConfig(AlgorithmConfig):
    """Leave-one-out baseline, no ratio."""

    name: Literal["reinforce"] = "reinforce"
    baseline_weight: float = 1.0


class Reinforce(Algorithm[ReinforceConfig]):
    def advantages(self, rewards: torch.Tensor, group_ids: Sequence[str], valid: torch.Tensor) -> torch.Tensor:
        return self.config.baseline_weight * group_advantages("leave_one_out", rewards, group_ids, valid)

    def token_loss(
        self, log_probs: torch.Tensor, anchor: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> TokenLoss:
        never = torch.zeros_like(mask)
        loss = torch.where(mask, -advantages * log_probs, torch.zeros_like(log_probs))
        return TokenLoss(loss, log_ratio(log_probs, anchor, mask).exp(), never, never, never)


class Sections(BaseModel):
    """As the recipe has it, with one kind more."""

    algorithm: one_of(*KINDS, ReinforceConfig) = GrpoConfig()  # type: ignore[valid-type]


def test_a_new_algorithm_is_one_class_in_the_recipe_and_one_of_maths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, ReinforceConfig, Reinforce)
    section = Sections.model_validate({"algorithm": {"name": "reinforce", "baseline_weight": 2.0, "kl_coef": 0.5}})
    assert section.algorithm == ReinforceConfig(baseline_weight=2.0, kl_coef=0.5)
    assert section.algorithm.roles == ("reference",)
    algorithm = make_algorithm(section.algorithm)
    advantages = algorithm.advantages(torch.tensor([1.0, 0.0]), ["g", "g"], torch.tensor([True, True]))
    assert advantages.tolist() == [2.0, -2.0]
    log_probs, mask = torch.tensor([-0.5, -1.0]), torch.tensor([True, False])
    seen = LogProbs(log_probs, log_probs, reference=log_probs)
    assert algorithm.objective(seen, advantages, mask).tokens.loss[0].item() == pytest.approx(1.0)


def test_without_a_name_the_section_is_the_first_kinds() -> None:
    assert Sections.model_validate({"algorithm": {"eps_low": 0.1}}).algorithm == GrpoConfig(eps_low=0.1)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"name": "grpoo"}, "algorithm.name = 'grpoo': known are 'grpo', 'reinforce'"),
        ({"name": "reinforce", "eps_low": 0.1}, "unknown key 'algorithm.eps_low'"),
        ({"eps_lo": 0.1}, "unknown key 'algorithm.eps_lo': did you mean 'algorithm.eps_low'?"),
        ({"eps_low": 2}, "algorithm.eps_low = 2: input should be less than 1"),
    ],
)
def test_a_wrong_section_is_named_in_one_line(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Sections.model_validate({"algorithm": section})
    assert one_line(caught.value, Sections).startswith(says)


def test_every_kind_has_its_maths() -> None:
    assert set(KINDS) == set(ALGORITHMS)


@pytest.mark.parametrize("scope", [kind.scope for kind in KINDS])
def test_every_kind_says_whether_chunks_can_be_trained_as_they_come(scope: str) -> None:
    assert scope in ("sample", "batch")
