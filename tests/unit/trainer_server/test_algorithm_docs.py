"""docs/algorithms.md names every algorithm and every refused combination, and its example runs."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from relax_common.errors import InvalidInput
from relax_common.recipe.algorithm import REFUSED
from relax_common.recipe.algorithms import KINDS, CustomConfig, name_of
from trainer_server.algorithms import Samples, Tokens, make_algorithm
from trainer_server.maths.sequences import Sequences

TEXT = (Path(__file__).parents[3] / "docs/algorithms.md").read_text()
OF_NAME = {name_of(kind): kind for kind in KINDS}
REQUIRED: dict[str, dict[str, Any]] = {"dr_grpo": {"aggregation_constant": 1.0}, "cispo": {"eps_high": 0.2}}


@pytest.mark.parametrize("name", list(OF_NAME))
def test_every_algorithm_has_a_line(name: str) -> None:
    assert f"| `{name}` |" in TEXT


def test_every_refusal_is_listed_and_nothing_else() -> None:
    table = TEXT.partition("## Combinations that are refused")[2].partition("\nBesides")[0]
    listed = {line.split("|")[2].strip() for line in table.splitlines() if line.startswith("|")} - {"why", "---"}
    rules = {rule.why for rule in REFUSED} | {rule.why for kind in KINDS for rule in kind.refused}
    assert listed == {re.sub(r"; found \{[^}]*\}", "", why) for why in rules}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("grpo", {"aggregation": "seq_mean_token_sum_norm"}),
        ("grpo", {"aggregation_constant": 4.0}),
        ("gspo", {"correction": "tis"}),
        ("gspo", {"rejection": "k1"}),
        ("grpo", {"old_policy": "actor_fwd", "correction": "icepop", "correction_low": 3.0}),
        ("grpo", {"correction_level": "sequence"}),
        ("grpo", {"rejection_level": "max"}),
        ("grpo", {"old_policy": "actor_fwd", "rejection": "k3", "rejection_low": 0.5}),
        ("grpo", {"old_policy": "actor_fwd", "rejection": "k1", "rejection_low": 1.0}),
        ("grpo", {"kl_loss_coef": 0.1, "kl_reward_coef": 0.1}),
        ("grpo", {"kl_unbiased": True}),
        ("grpo", {"kl_reward_coef": 0.1, "kl": "k3+"}),
        ("dapo", {"dual_clip": 1.0}),
        ("rloo", {"updates_per_step": 2}),
        ("rloo", {"passes_per_step": 2}),
        ("gmpo", {"aggregation": "token_mean"}),
        ("clip_cov", {"covariance_low": 5.0}),
        ("decoupled_ppo", {"correction": "none"}),
        ("opd", {"distill_as": "loss", "dual_clip": 3.0}),
        ("custom", {}),
    ],
)
def test_a_refused_combination_says_why(name: str, keys: dict[str, Any]) -> None:
    kind = OF_NAME[name]
    rules = (*REFUSED, *kind.refused)
    with pytest.raises(ValueError, match=f"name = '{name}': ") as caught:
        kind.model_validate({"name": name, **REQUIRED.get(name, {}), **keys})
    assert any(re.split(r"[;{]", rule.why)[0] in str(caught.value) for rule in rules)


@pytest.mark.parametrize("name", [name for name in OF_NAME if name != "custom"])
def test_an_algorithm_needs_no_more_keys_than_it_says(name: str) -> None:
    config = OF_NAME[name].model_validate({"name": name, **REQUIRED.get(name, {})})
    assert config.scope in ("sample", "batch")
    make_algorithm(config)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the page, importable."""
    code = TEXT.partition("```python\n")[2].partition("```")[0]
    module = ModuleType("my_rl_losses")
    exec(compile(code, "docs/algorithms.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_rl_losses", module)


def tokens() -> Tokens:
    policy, rollout = torch.tensor([-0.5, -1.0]), torch.tensor([-1.5, -1.0])
    return Tokens(policy, rollout, torch.ones(2), torch.ones(2).bool(), Sequences.of([1, 1]))


@pytest.mark.usefixtures("example")
def test_the_pages_own_loss_and_estimator_run() -> None:
    keys = {"eps": 0.2, "leak": 0.5}
    section = CustomConfig(
        loss="my_rl_losses:leaky_clip", estimator="my_rl_losses:best_of_group", parameters=keys, kl_loss_coef=0.0
    )
    algorithm = make_algorithm(section)
    samples = Samples(["a", "a", "b"], torch.tensor([1.0, 0.0, 0.5]), torch.ones(3).bool())
    assert algorithm.advantages(samples).tolist() == [1.0, 0.0, 1.0]
    e = torch.e
    assert algorithm.objective(tokens()).tokens.loss.tolist() == pytest.approx([-(1.2 + 0.5 * (e - 1.2)), -1.0])


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_module:f", "algorithm.loss = 'no_such_module:f'"),
        ("my_rl_losses:none", "has no attribute 'none'"),
        ("my_rl_losses:torch", "is not a function"),
    ],
)
def test_a_function_that_is_not_there_is_named(path: str, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make_algorithm(CustomConfig(loss=path))
    assert says in caught.value.message


def test_a_result_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_rl_losses")
    module.__dict__["mean"] = lambda tokens, anchor: tokens.policy.mean()
    monkeypatch.setitem(sys.modules, "my_rl_losses", module)
    with pytest.raises(InvalidInput, match=r"returned \(\), expected a tensor of shape \(2,\)"):
        make_algorithm(CustomConfig(loss="my_rl_losses:mean")).objective(tokens())
