"""How much a recipe's model has to learn from before it is trained: its rewards, and the groups whose rewards differ.

    python recipes/smollm2/first_samples.py RECIPE [--prompts N]

Only a group with different rewards gives a gradient. The embedded engine samples; no daemon runs.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from relax_common.recipe import Recipe, load_recipe
from relaxd.data import read_prompts, visit_order
from rollout_server.engines.contract import Completion, GenerateRequest, PauseMode, SamplingParams, StagedWeights
from rollout_server.engines.torch.engine import TorchEngine
from rollout_server.rewards.outcome import RewardItem
from rollout_server.rewards.registry import resolve_spec, reward_spec
from rollout_server.rewards.worker import score
from rollout_server.tokenizers import TextTokenizer

START_SECONDS = 60.0
GROUP_SECONDS = 600.0


def sample(recipe: Recipe, prompts: int) -> list[list[float]]:
    """Rewards of each group, for the prompts that the run visits first."""
    rows = read_prompts(recipe.data)
    visited = [rows[index] for index in visit_order(len(rows), recipe.seed, 0, recipe.data.shuffle)[:prompts]]
    tokenizer = TextTokenizer(recipe.model.path)
    reward = resolve_spec(reward_spec(recipe.reward.name, recipe.reward.parts))
    engine = TorchEngine(recipe.model.path, recipe.seed, getattr(torch, recipe.model.dtype))
    try:
        engine.swap(weights(recipe.model.path), PauseMode.RETRACT).result(START_SECONDS)
        sampling = SamplingParams(recipe.sampling.temperature, recipe.sampling.max_new_tokens)
        futures = [
            engine.generate(
                GenerateRequest(row.where, tokenizer.encode_prompt(row.prompt), recipe.samples_per_prompt, sampling)
            )
            for row in visited
        ]

        def scores(completions: Sequence[Completion], prompt: object, label: str | None) -> list[float]:
            texts = tokenizer.decode_responses([each.token_ids.tolist() for each in completions])
            return [score(reward, RewardItem(prompt, text, label, {})).value for text in texts]

        return [
            scores(future.result(GROUP_SECONDS), row.prompt, row.label)
            for row, future in zip(visited, futures, strict=True)
        ]
    finally:
        engine.close()


def weights(model_dir: Path) -> StagedWeights:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        tensors.update(load_file(path))
    return StagedWeights(0, tensors, None)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="rewards of a recipe's model before it is trained")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started = time.monotonic()
    groups = sample(load_recipe(options.recipe), options.prompts)
    rewards = [reward for group in groups for reward in group]
    mixed = sum(len(set(group)) > 1 for group in groups)
    print(
        f"before training: mean reward {sum(rewards) / len(rewards):.3f} of {len(rewards)} samples; "
        f"{mixed} of {len(groups)} groups ({mixed / len(groups):.0%}) have mixed rewards and give a gradient "
        f"({time.monotonic() - started:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
