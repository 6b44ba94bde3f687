"""Recipes: typed, frozen, unknown keys refused with the nearest one, budgets checked, round trip through TOML."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from relax_common.errors import InvalidInput
from relax_common.recipe import derive, load_recipe, parse_recipe, recipe_digest, to_toml
from relax_queue.broker.messages import spec_from
from relaxd.launch.commands import rollout_specs
from relaxd.plan.requests import queue_request

RECIPES = Path(__file__).parents[3] / "recipes"

MINIMAL = """
name = "r"
total_steps = 3
prompts_per_step = 4
samples_per_prompt = 2
[model]
path = "m"
[data]
path = "d.jsonl"
prompt_tokens_max = 8
[sampling]
max_new_tokens = 4
"""


def test_a_recipe_survives_the_round_trip_through_toml() -> None:
    recipe = parse_recipe(MINIMAL)
    assert parse_recipe(to_toml(recipe)) == recipe
    assert recipe_digest(recipe) == recipe_digest(parse_recipe(to_toml(recipe)))


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValidationError):
        parse_recipe(MINIMAL).seed = 1


def test_paths_are_resolved_against_the_file(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(MINIMAL)
    assert load_recipe(tmp_path / "r.toml").model.path == tmp_path / "m"


def test_overrides_reach_sections_and_keep_types() -> None:
    recipe = parse_recipe(MINIMAL, overrides=["max_staleness=4", "optimizer.lr=1e-3", "reward.name=numeric"])
    assert (recipe.max_staleness, recipe.optimizer.lr, recipe.reward.name) == (4, 1e-3, "numeric")


def test_data_and_reward_keys_can_be_set_from_the_command_line() -> None:
    recipe = parse_recipe(
        MINIMAL,
        overrides=[
            'data.path=["a.jsonl", "b.parquet"]',
            'data.metadata_fields=["level"]',
            "data.over_length=drop",
            "reward.parts.math=0.5",
            'reward.parts."mine.rewards:short"=-0.5',
        ],
    )
    assert [str(path) for path in recipe.data.path] == ["a.jsonl", "b.parquet"]
    assert (recipe.data.metadata_fields, recipe.data.over_length) == (("level",), "drop")
    assert recipe.reward.parts == {"math": 0.5, "mine.rewards:short": -0.5}
    overrides = ["data.path=[]", "data.generator=reasoning_gym:lcm", "data.generator_options.max_numbers=3"]
    generated = parse_recipe(MINIMAL, overrides=overrides).data
    assert (generated.generator, generated.generator_options) == ("reasoning_gym:lcm", {"max_numbers": 3})
    assert parse_recipe(to_toml(recipe)) == recipe


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sampling.temperatur=1", "unknown key 'sampling.temperatur': did you mean 'sampling.temperature'?"),
        ("lr=1", "unknown key 'lr': it belongs into section [optimizer]"),
        ("optimizer.pace=1", "known keys here are adam_beta1"),
        ("sampling.temperature=0", "need at least 0.001"),
        ("sampling.temperature=0.0", "need at least 0.001"),
        ('sampling.temperature="0"', "expected a number, got the text '0'"),
        ("sampling.temperature=-1", "need at least 0.001"),
        ("sampling.temperature=nan", "expected a finite number"),
        ("sampling.temperature=1e-9", "need at least 0.001"),
        ("samples_per_prompt=1", "always gets advantage 0"),
        ("min_valid_samples=3", "exceeds samples_per_prompt = 2"),
        ("prompts_per_step=two", "should be a valid integer"),
        ("prompts_per_step=0", "greater than or equal to 1"),
        ("actor.tokens_per_microbatch=11", "a row of up to 12 tokens"),
        ("actor.groups_per_chunk=5", "exceeds prompts_per_step = 4"),
        ("queue.closing=min_n", "needs closing_min_prompts and closing_deadline_seconds"),
        ("queue.closing_min_prompts=2", 'need closing = "min_n"'),
        ("actor.data_parallel_size=16", "8 samples per step cannot feed"),
        ("algorithm.dual_clip=0.5", "must be above 1"),
        ("name=Bad Name", "name = 'Bad Name'"),
        ("rollout.engine=vllm", "input should be 'torch' or 'sglang'"),
        ("rollout.engine_python=bin/python", "engine_python is for engine = 'sglang', the engine is 'torch'"),
        ("rollout.engine_options.tp_size=2", "engine_options is for engine = 'sglang', the engine is 'torch'"),
        ("data.generator=reasoning_gym:x", "set either data.path or data.generator"),
        ("data.generator_rows=5", "generator_rows is for data.generator, but data.path is set"),
        ("data.path=[]", "set either data.path or data.generator"),
        ("data.over_length=cut", "input should be 'error' or 'drop'"),
        ("reward.parts.exact=0", "parts.exact = 0 changes nothing"),
        ("reward.parts.exact=nan", "expected a finite number"),
        ('reward.parts."x=1', "is not a key"),
        ("queue", "expected key=value"),
        ("total_steps.x=1", "total_steps is a value, not a section"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(override: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_recipe(MINIMAL, overrides=[override])
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('rollout.engine_urls=["http://a:1", "http://b:1"]', "names 2 engines for servers = 1: one each is needed"),
        ('rollout.engine_urls=["a:1"]', "engine_urls: 'a:1' is not http://host:port"),
        ("rollout.engine_options.dtype=half", "engine_options.dtype follows from the recipe and cannot be set"),
        ("rollout.engine_silence_seconds=0", "greater than 0"),
    ],
)
def test_a_mistake_about_sglang_is_one_line(override: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_recipe(MINIMAL, overrides=["rollout.engine=sglang", override])
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_engine_keys_reach_their_places(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(MINIMAL)
    managed = ["rollout.engine=sglang", "rollout.engine_python=env/bin/python", "rollout.engine_options.tp_size=2"]
    recipe = load_recipe(tmp_path / "r.toml", managed)
    assert recipe.rollout.engine_python == str(tmp_path / "env/bin/python")
    assert recipe.rollout.engine_options == {"tp_size": 2}
    assert parse_recipe(to_toml(recipe)) == recipe
    with pytest.raises(InvalidInput, match="engine_urls names running ones"):
        load_recipe(tmp_path / "r.toml", [*managed, 'rollout.engine_urls=["http://a:1"]'])
    external = ["rollout.engine=sglang", "rollout.servers=2", 'rollout.engine_urls=["http://a:1", "http://b:2"]']
    recipe = load_recipe(tmp_path / "r.toml", external)
    specs = rollout_specs("run", recipe, derive(recipe), tmp_path)
    assert [spec.args for (spec,) in specs] == [("--engine-url", "http://a:1"), ("--engine-url", "http://b:2")]


def test_invalid_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="not valid TOML"):
        parse_recipe("name = ")
    with pytest.raises(InvalidInput, match="No such file"):
        load_recipe(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("seed = 9223372036854775808", "seed: the number does not fit into 64 bits"),
        ("total_steps = 99999999999999999999", "total_steps: the number does not fit into 64 bits"),
        ("generator_options = {a = [-99999999999999999999]}", "generator_options.a: the number does not fit"),
        ('name = "a\\u0000b"', "name: the text has a zero byte"),
        (f"seed = {'9' * 5000}", "not valid TOML: Exceeds the limit"),
        (f"seed = {'[' * 5000}", "not valid TOML: its values are nested too deeply"),
        ("a" + ".a" * 2000 + " = 1", ": values are nested too deeply"),
    ],
)
def test_values_that_nothing_can_hold_are_refused_in_one_line(values: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(words)) as caught:
        parse_recipe(values)
    assert "\n" not in caught.value.message


def test_I4_a_recipe_that_does_not_fit_the_queue_is_refused_with_both_numbers() -> None:
    recipe = parse_recipe(MINIMAL, overrides=["queue.memory_budget_bytes=1000"])
    with pytest.raises(InvalidInput, match=r"= 1000 cannot hold .* = 3 steps of 4 groups x \d+ bytes = \d+ bytes"):
        derive(recipe)


@pytest.mark.parametrize("samples", [2, 8])
def test_I4_the_recipe_check_and_the_queue_reserve_the_same_bytes(samples: int) -> None:
    recipe = parse_recipe(MINIMAL, overrides=[f"samples_per_prompt={samples}"])
    derived = derive(recipe)
    spec = spec_from(queue_request("r", recipe, derived, "").spec)
    assert spec.bytes_per_group == derived.bytes_per_group
    assert spec.bytes_needed == derived.queue_bytes_needed


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["queue.durability=full"], {"durability": "full"}),
        (["queue.deterministic=true", "seed=7"], {"deterministic": True, "seed": 7}),
        (
            ["queue.closing=min_n", "queue.closing_min_prompts=3", "queue.closing_deadline_seconds=2.5"],
            {"closing": "min_n", "closing_min_prompts": 3, "closing_deadline_seconds": 2.5},
        ),
        (["queue.lease_attempts_max=2"], {"lease_attempts_max": 2}),
        *[([f"stale_policy={policy}"], {"stale_policy": policy}) for policy in ("wait", "mask", "regenerate", "drop")],
        *[
            ([f"actor.packer={packer}"], {"packer": packer})
            for packer in ("sequential", "length_balanced", "token_budget", "whole_groups")
        ],
    ],
)
def test_keys_of_the_bus_reach_it_by_set(overrides: list[str], expected: dict[str, object]) -> None:
    recipe = parse_recipe(MINIMAL, overrides=overrides)
    spec = spec_from(queue_request("r", recipe, derive(recipe), "").spec)
    assert {key: getattr(spec, key) for key in expected} == expected


def test_derived_sizes_follow_from_the_recipe() -> None:
    derived = derive(parse_recipe(MINIMAL, overrides=["max_staleness=2", "actor.tensor_parallel_size=2"]))
    assert derived.samples_per_step == 8
    assert derived.tokens_per_row_max == 12
    assert derived.groups_open_max == 12
    assert derived.actor_ranks == 2
    assert derived.queue_bytes_needed == derived.bytes_per_group * 4 * 4


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["optimizer.lr_min=1.0"], "lr_min = 1 lies above lr"),
        (["algorithm.aggregation_constant=500"], "belongs to aggregation = 'seq_mean_token_sum_norm'"),
        (["algorithm.aggregation=seq_mean_token_sum_norm"], "must be at least 1; found 0"),
        (
            ["algorithm.aggregation=seq_mean_token_sum_norm", "algorithm.aggregation_constant=0.5"],
            "must be at least 1; found 0.5",
        ),
    ],
)
def test_values_that_contradict_each_other_or_do_nothing_are_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_recipe(RECIPES / "quickstart.toml", overrides)
    assert says in caught.value.message


def test_a_cosine_that_ends_before_its_warm_up_is_refused_before_anything_starts() -> None:
    recipe = load_recipe(RECIPES / "quickstart.toml", ["optimizer.schedule=cosine", "optimizer.warmup_updates=300"])
    with pytest.raises(InvalidInput, match=r"optimizer.warmup_updates = 300: shorten the warm-up or raise total_steps"):
        derive(recipe)
