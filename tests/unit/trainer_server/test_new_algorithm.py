"""What a new algorithm takes: a class in the recipe, and a class that is made of the maths."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from pydantic import BaseModel, ValidationError

from relax_common.errors.validation import one_line
from relax_common.recipe.algorithm import AlgorithmConfig
from relax_common.recipe.algorithms import KINDS, GrpoConfig, one_of
from trainer_server.algorithms import ALGORITHMS, Algorithm, Samples, Tokens, make_algorithm
from trainer_server.maths.advantages import group_advantages
from trainer_server.maths.policy_loss import TokenLoss, log_ratio, token_loss
from trainer_server.maths.sequences import Sequences


class ReinforceConfig(AlgorithmConfig):
    """Leave-one-out baseline, no ratio."""

    name: Literal["reinforce"] = "reinforce"
    baseline_weight: float = 1.0


class Reinforce(Algorithm[ReinforceConfig]):
    def advantages(self, samples: Samples) -> torch.Tensor:
        relative = group_advantages("leave_one_out", samples.rewards, samples.groups, samples.valid)
        return self.config.baseline_weight * relative

    def token_loss(self, tokens: Tokens, anchor: torch.Tensor) -> TokenLoss:
        ratio = log_ratio(tokens.policy, anchor, tokens.mask).exp()
        return token_loss(-tokens.advantages * tokens.policy, ratio, tokens.mask)


class Sections(BaseModel):
    """As the recipe has it, with one kind more."""

    algorithm: one_of(*KINDS, ReinforceConfig) = GrpoConfig()  # type: ignore[valid-type]


def test_a_new_algorithm_is_one_class_in_the_recipe_and_one_of_maths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, ReinforceConfig, Reinforce)
    section = Sections.model_validate({"algorithm": {"name": "reinforce", "baseline_weight": 2.0, "kl_loss_coef": 0.5}})
    assert section.algorithm == ReinforceConfig(baseline_weight=2.0, kl_loss_coef=0.5)
    assert section.algorithm.roles == ("reference",)
    algorithm = make_algorithm(section.algorithm)
    samples = Samples(["g", "g"], torch.tensor([1.0, 0.0]), torch.tensor([True, True]))
    advantages = algorithm.advantages(samples)
    assert advantages.tolist() == [2.0, -2.0]
    log_probs, mask = torch.tensor([-0.5, -1.0]), torch.tensor([True, False])
    tokens = Tokens(log_probs, log_probs, advantages, mask, Sequences.of([1, 1]), reference=log_probs)
    assert algorithm.objective(tokens).tokens.loss[0].item() == pytest.approx(1.0)


def test_without_a_name_the_section_is_the_first_kinds() -> None:
    assert Sections.model_validate({"algorithm": {"eps_low": 0.1}}).algorithm == GrpoConfig(eps_low=0.1)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"name": "grpoo"}, "algorithm.name = 'grpoo': known are 'grpo', 'dr_grpo'"),
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
