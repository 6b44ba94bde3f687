"""A recipe's plan: counted parameters, bytes against budgets, devices as the launcher sets them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from relax_common.errors import InvalidInput
from relax_common.recipe import Recipe, derive, load_recipe
from relaxd.ctl.dry_run import human
from relaxd.launch.commands import actor_specs, forward_specs, rollout_specs
from relaxd.plan.checks import check_launch, count_gpus
from relaxd.plan.devices import Device, assign_devices
from relaxd.plan.model import model_sizes, read_model_config
from relaxd.plan.plan import make_plan

RECIPES = Path(__file__).parents[3] / "recipes"
DENSE, EXPERTS = RECIPES / "qwen3_4b_8gpu.toml", RECIPES / "qwen3_30b_a3b_16gpu.toml"
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", "tie_word_embeddings": True},
    "Qwen2ForCausalLM": {"model_type": "qwen2", "tie_word_embeddings": False},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}


def elements_in_transformers(folder: Path) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("architecture", FAMILIES)
def test_elements_are_those_of_the_real_model(tmp_path: Path, architecture: str) -> None:
    config = {"architectures": [architecture], **TINY, **FAMILIES[architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_sizes(read_model_config(tmp_path)).elements == elements_in_transformers(tmp_path)


@pytest.mark.parametrize(("recipe", "billions"), [(DENSE, 4.02), (EXPERTS, 30.53)])
def test_recipes_for_gpus_fit_what_they_say(recipe: Path, billions: float) -> None:
    loaded = load_recipe(recipe)
    plan = make_plan(loaded)
    assert plan.model.elements == elements_in_transformers(loaded.model.path)
    assert plan.model.elements / 1e9 == pytest.approx(billions, abs=0.01)
    assert plan.dcs.version == 2 * plan.model.elements
    assert plan.actor.total <= loaded.placement.gpu_memory_bytes
    assert plan.engine is not None
    assert plan.engine.cache_tokens >= plan.derived.tokens_per_row_max
    assert plan.dcs.total <= loaded.dcs.memory_budget_bytes
    assert plan.tokens_per_step_max == 64 * 16 * 9216


def test_bytes_of_a_rank_follow_from_the_layout() -> None:
    plan = make_plan(load_recipe(EXPERTS))
    model, actor = plan.model, plan.actor
    shared, experts = model.shared_elements(1), model.expert_elements // 8
    assert shared + model.expert_elements == model.elements
    assert (actor.parameters, actor.gradients) == (2 * (shared + experts), 4 * (shared + experts))
    assert actor.optimizer == 12 * (shared // 8 + experts)
    assert plan.microbatches == 128


@pytest.mark.parametrize(
    ("recipe", "override", "words"),
    [
        (
            DENSE,
            "actor.tensor_parallel_size=3",
            "tensor_parallel_size = 3 does not divide the model's 32 attention",
        ),
        (DENSE, "actor.expert_parallel_size=2", "the model has no experts"),
        (
            DENSE,
            "actor.data_parallel_size=4",
            "gpus_per_host = 8 do not leave a GPU on one host for rollout server 0",
        ),
        (
            DENSE,
            "rollout.engine_options.tp_size=3",
            "tp_size = 3 does not divide the model's 32 attention",
        ),
        (DENSE, "rollout.engine_options.tp_size=8", "do not leave 8 GPUs on one host for rollout server 0"),
        (DENSE, "actor.recompute=none", "cannot hold a rank of actor"),
        (DENSE, "placement.gpu_memory_bytes=9000000000", "cannot hold a rank of actor"),
        (DENSE, "rollout.engine_options.mem_fraction_static=0.1", "raise rollout.engine_options.tp_size"),
        (DENSE, "rollout.engine_options.mem_fraction_static=0.99", "mem_fraction_static = 0.99 leaves less than"),
        (
            DENSE,
            "dcs.memory_budget_bytes=100000000000",
            "memory_budget_bytes = 100000000000 cannot hold 4 versions",
        ),
        (DENSE, "queue.memory_budget_bytes=100000000", "queue.memory_budget_bytes = 100000000 cannot hold"),
        (DENSE, "sampling.max_new_tokens=50000", "does not fit actor.tokens_per_microbatch"),
        (
            EXPERTS,
            "actor.expert_parallel_size=3",
            "expert_parallel_size = 3 does not divide the model's 128 experts",
        ),
        (
            EXPERTS,
            "actor.data_parallel_size=4",
            "size = 8 does not divide actor.data_parallel_size = 4",
        ),
        (EXPERTS, "actor.tensor_parallel_size=2", "a model with experts is divided by actor.expert_parallel_size"),
        (EXPERTS, "actor.expert_parallel_size=2", "cannot hold a rank of actor"),
        (EXPERTS, "placement.hosts=1", "placement.hosts = 1 x placement.gpus_per_host = 8 do not leave 2 GPUs"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_key(recipe: Path, override: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make_plan(load_recipe(recipe, [override]))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_fp32_and_another_dtype_change_what_is_published_and_held() -> None:
    narrow = make_plan(load_recipe(DENSE))
    big = ["placement.gpu_memory_bytes=200000000000", "dcs.memory_budget_bytes=300000000000"]
    wide = make_plan(load_recipe(DENSE, ["model.dtype=float32", *big]))
    assert wide.dcs.version == 2 * narrow.dcs.version
    # In fp32 the parameters themselves are the optimizer's weights.
    assert wide.actor.parameters + wide.actor.optimizer == (2 + 2) * narrow.actor.parameters
    assert narrow.actor.optimizer == 3 * narrow.actor.parameters


def devices_of(recipe: Recipe) -> list[list[tuple[int, str]]]:
    derived = derive(recipe)
    roles = [
        actor_specs("r", recipe, derived, Path(), Path()),
        *forward_specs("r", recipe, derived, Path(), Path()),
        *rollout_specs("r", recipe, derived, Path()),
    ]
    return [[(spec.host, spec.env.get("CUDA_VISIBLE_DEVICES", "-")) for spec in role] for role in roles]


def test_the_launcher_gives_each_process_the_devices_of_the_plan() -> None:
    on_two = load_recipe(EXPERTS)
    assert devices_of(on_two) == [
        [(0, str(index)) for index in range(8)],
        *([(1, f"{i},{i + 1}")] for i in (0, 2, 4, 6)),
    ]
    assigned = assign_devices(on_two, derive(on_two))
    assert assigned.rollout[1] == (Device(1, 2), Device(1, 3))
    # A reference takes the devices after the actor's; an engine never lies on two hosts.
    changes = ["algorithm.kl_loss_coef=0.1", "actor.data_parallel_size=4", "actor.expert_parallel_size=4"]
    with_reference = load_recipe(EXPERTS, [*changes, "rollout.engine_options.tp_size=4", "rollout.servers=2"])
    assert devices_of(with_reference) == [
        [(0, str(index)) for index in range(4)],
        [(0, "4")],
        [(1, "0,1,2,3")],
        [(1, "4,5,6,7")],
    ]


def test_trainer_ranks_are_started_with_the_recipes_patience() -> None:
    recipe = load_recipe(
        EXPERTS, ["algorithm.kl_loss_coef=0.1", "actor.collective_timeout_seconds=7.5", "placement.hosts=3"]
    )
    derived = derive(recipe)
    roles = [actor_specs("r", recipe, derived, Path(), Path()), *forward_specs("r", recipe, derived, Path(), Path())]
    assert [len(role) for role in roles] == [8, 1]
    given = [spec.args[spec.args.index("--collective-timeout-seconds") + 1] for role in roles for spec in role]
    assert given == ["7.5"] * 9


def test_without_gpus_no_process_is_limited_and_memory_is_not_judged() -> None:
    plain = load_recipe(DENSE, ["placement.gpus_per_host=0", "placement.gpu_memory_bytes=1"])
    assert {devices for role in devices_of(plain) for _, devices in role} == {"-"}
    assert make_plan(plain).engine is None
    embedded = load_recipe(DENSE, ["rollout.engine=torch", "rollout.engine_options={}", "rollout.engine_python="])
    assert devices_of(embedded)[1:] == [[(0, "-")]] * 4


def test_a_run_that_this_host_cannot_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"placement.hosts = 2: `relaxctl run` starts everything on one host"):
        check_launch(load_recipe(EXPERTS), gpus_here=8)
    with pytest.raises(InvalidInput, match=r"placement.gpus_per_host = 8, but nvidia-smi lists 1 on this host"):
        check_launch(load_recipe(DENSE), gpus_here=1)
    check_launch(load_recipe(DENSE), gpus_here=8)
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus() == 0
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n")
    tool.chmod(0o755)
    assert count_gpus() == 2


def dry_run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "relaxd.ctl.main", "run", str(EXPERTS), "--dry-run", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"})


def test_a_dry_run_shows_the_plan_without_weights() -> None:
    shown = dry_run()
    assert shown.returncode == 0, shown.stderr
    assert "the model's folder has no weights" in shown.stdout
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.stdout.splitlines() if "│" in line]
    assert ["actor", "0", "7", "8", "7"] in table
    assert ["rollout-3", "1", "0", "1", "6,7"] in table
    assert ["a published version", "61.1 GB", "-", "30532122624 parameters in bfloat16"] in table
    told = json.loads(dry_run("--json").stdout)
    assert told["version_bytes"] == 2 * told["model"]["elements"]
    assert told["rollout_host_bytes"] == 3 * told["version_bytes"]
    assert [each["devices"] for each in told["processes"] if each["daemon"] == "actor"] == [str(i) for i in range(8)]
    assert told["rank_bytes"]["actor"]["total"] <= 141e9


def test_sizes_are_written_in_powers_of_1000() -> None:
    sizes = (999, 1000, 999_600, 61_064_245_248, 1_500_000_000_000)
    assert [human(size) for size in sizes] == ["999 B", "1 kB", "1 MB", "61.1 GB", "1.5 TB"]
