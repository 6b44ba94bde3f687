"""One step without any daemon: engine, reward and trainer called one after the other in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
from torch._C._distributed_c10d import HashStore

from benchmarks.coin_reward import coin
from relax_common.recipe import Recipe, derive
from relax_common.rows import RowKey
from relaxd.data import read_prompts, visit_order
from rollout_server.engines.contract import GenerateRequest, PauseMode, SamplingParams, StagedWeights
from rollout_server.engines.torch.engine import TorchEngine
from rollout_server.rewards.outcome import RewardItem, interpret
from rollout_server.tokenizers import TextTokenizer
from rollout_server.trajectory.samples import SampleRows, make_rows
from trainer_server.algorithms import Samples, make_algorithm
from trainer_server.maths.aggregation import StepCounts
from trainer_server.megatron.model import dtype_of
from trainer_server.megatron.optimizer import optimizer_of
from trainer_server.megatron.parallel import Parallel, process_groups
from trainer_server.megatron.trainer import Trainer
from trainer_server.model.load import read_name_map
from trainer_server.packing.rows import TrainRow
from trainer_server.step.loss import PolicyLoss


@dataclass
class DirectSeconds:
    """Seconds of one step, by phase."""

    generate: float
    train: float
    swap: float

    @property
    def step(self) -> float:
        return self.generate + self.train + self.swap


class DirectLoop:
    """The same model, data, sizes and code as the daemons use, in one process."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._rows = read_prompts(recipe.data)
        self._tokenizer = TextTokenizer(recipe.model.path)
        self._engine = TorchEngine(recipe.model.path, recipe.seed, dtype_of(recipe))
        self._sampling = SamplingParams(recipe.sampling.temperature, recipe.sampling.max_new_tokens)
        self._algorithm = make_algorithm(recipe.algorithm)
        self._trainer = Trainer(
            Parallel(0, 1, 1),
            read_name_map(recipe.model.path),
            PolicyLoss(self._algorithm),
            optimizer_of(recipe, derive(recipe)),
            seed=recipe.seed,
            dtype=dtype_of(recipe),
        )
        self._trainer.reset(recipe.model.path)
        self._swap(0)

    def steps(self, count: int) -> Iterator[DirectSeconds]:
        order = visit_order(len(self._rows), self._recipe.seed, 0, True)
        for step in range(count):
            begun = time.perf_counter()
            size = self._recipe.prompts_per_step
            groups = self._generate([order[(step * size + i) % len(order)] for i in range(size)])
            generated = time.perf_counter()
            self._train(groups, step)
            trained = time.perf_counter()
            self._swap(step + 1)
            yield DirectSeconds(generated - begun, trained - generated, time.perf_counter() - trained)

    def _generate(self, positions: list[int]) -> dict[str, SampleRows]:
        prompts = {f"{i}": self._rows[position] for i, position in enumerate(positions)}
        ids = {group: self._tokenizer.encode_prompt(row.prompt) for group, row in prompts.items()}
        futures = {
            group: self._engine.generate(
                GenerateRequest(group, ids[group], self._recipe.samples_per_prompt, self._sampling)
            )
            for group in prompts
        }
        rows = {}
        for group, future in futures.items():
            prompt = prompts[group]
            completions = future.result(60)
            texts = self._tokenizer.decode_responses([each.token_ids.tolist() for each in completions])
            outcomes = [interpret(coin(RewardItem(prompt.prompt, text, prompt.label, {}))) for text in texts]
            rows[group] = make_rows(
                range(len(completions)), ids[group], completions, self._sampling.temperature, outcomes
            )
        return rows

    def _train(self, groups: dict[str, SampleRows], step: int) -> None:
        names = [group for group, rows in groups.items() for _ in rows.samples]
        rewards = torch.cat([torch.from_numpy(rows.rewards) for rows in groups.values()])
        advantages = self._algorithm.advantages(Samples(names, rewards, torch.ones(len(names), dtype=torch.bool)))
        rows_of = [(group, rows, at) for group, rows in groups.items() for at in range(len(rows))]
        batch = [
            _train_row(group, rows, at, advantage)
            for (group, rows, at), advantage in zip(rows_of, advantages.tolist(), strict=True)
        ]
        trainer = self._trainer
        trainer.begin_step()
        trainer.accumulate([batch], step, 1)
        tokens = sum(int(row.loss_mask.sum()) for row in batch)
        trainer.finish_update(StepCounts(tokens, len(batch)))

    def _swap(self, version: int) -> None:
        tensors = {}
        for entry in self._trainer.slices():
            tensors[entry.hf_name] = entry.tensor().detach().clone()
        self._engine.swap(StagedWeights(version, tensors, None), PauseMode.RETRACT).result(60)

    def close(self) -> None:
        self._engine.close()


def _train_row(group: str, rows: SampleRows, at: int, advantage: float) -> TrainRow:
    of_row = slice(rows.offsets[at], rows.offsets[at + 1])
    return TrainRow(
        RowKey(group, rows.samples[at], 0),
        rows.tokens[of_row],
        rows.loss_mask[of_row].astype(bool),
        rows.log_probs[of_row],
        rows.versions[of_row],
        float(rows.temperatures[at]),
        np.full(rows.offsets[at + 1] - rows.offsets[at], advantage, np.float32),
    )


@contextmanager
def one_process(recipe: Recipe) -> Iterator[DirectLoop]:
    torch.set_num_threads(recipe.actor.threads_per_rank)
    with process_groups(Parallel(0, 1, 1), HashStore(), "direct", timedelta(seconds=60).seconds):
        loop = DirectLoop(recipe)
        try:
            yield loop
        finally:
            loop.close()
