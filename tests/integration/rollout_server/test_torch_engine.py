"""The embedded engine on the quick start's tiny model, against plain transformers."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout_server.engines.base import (
    Completion,
    EngineError,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Probe,
    SamplingParams,
    StagedWeights,
)
from rollout_server.engines.torch_engine import TorchEngine

WAIT_SECONDS = 30.0
EOS = 2
PROMPTS = [[5, 14, 6, 15], [3, 4, 5, 6, 7, 8, 9, 10, 11], [7], [12, 14, 3, 15], [4, 14, 4]]


@pytest.fixture(scope="module")
def model_dir(quickstart_material: Path) -> Path:
    return quickstart_material / "quickstart" / "made" / "model"


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture
def engine(model_dir: Path, reference: PreTrainedModel) -> Iterator[TorchEngine]:
    made = TorchEngine(model_dir, seed=0)
    made.swap(staged(reference, 0), PauseMode.IN_PLACE).result(WAIT_SECONDS)
    yield made
    made.close()


def staged(reference: PreTrainedModel, version: int, scale: float = 1.0, probe: Probe | None = None) -> StagedWeights:
    return StagedWeights(version, {name: each * scale for name, each in reference.state_dict().items()}, probe)


def request(prompt: list[int], samples: int = 4, temperature: float = 0.7, tokens: int = 20) -> GenerateRequest:
    return GenerateRequest(f"{prompt}", prompt, samples, SamplingParams(temperature, tokens))


def never_ending(engine: TorchEngine, samples: int = 4, tokens: int = 60) -> Future[list[Completion]]:
    """Without end tokens a request runs to its limit, so that something can happen in its middle."""
    engine._end_ids = torch.tensor([], dtype=torch.int64)
    return engine.generate(GenerateRequest("long", [5, 14], samples, SamplingParams(1.0, tokens)))


@torch.no_grad()
def log_probs(model: PreTrainedModel, ids: list[int], temperature: float) -> np.ndarray:
    """Log-prob of each token but the first, one plain forward without cache or padding."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy()


def test_log_probs_equal_a_plain_forward_for_prompts_of_all_lengths(
    engine: TorchEngine, reference: PreTrainedModel
) -> None:
    futures = [engine.generate(request(prompt)) for prompt in PROMPTS]
    for prompt, future in zip(PROMPTS, futures, strict=True):
        for completion in future.result(WAIT_SECONDS):
            ids = completion.token_ids.tolist()
            expected = log_probs(reference, prompt + ids, 0.7)[len(prompt) - 1 :]
            assert np.abs(expected - completion.log_probs).max() <= 1e-5
            assert (completion.versions == 0).all()
            ended = completion.finish_reason is FinishReason.STOP
            assert (ids[-1] == EOS) == ended
            assert EOS not in ids[:-1]
            assert ended or len(ids) == 20


def test_greedy_equals_transformers_generate(engine: TorchEngine, reference: PreTrainedModel) -> None:
    for prompt in PROMPTS:
        (completion,) = engine.generate(request(prompt, samples=1, temperature=0.0)).result(WAIT_SECONDS)
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
        assert completion.token_ids.tolist() == expected.tolist()


def test_sampled_frequencies_follow_the_distribution(engine: TorchEngine, reference: PreTrainedModel) -> None:
    prompt, draws = PROMPTS[0], 4000
    completions = engine.generate(request(prompt, samples=draws, temperature=0.7, tokens=1)).result(WAIT_SECONDS)
    counts = np.bincount([int(each.token_ids[0]) for each in completions], minlength=16)
    expected = np.exp([log_probs(reference, [*prompt, token], 0.7)[-1] for token in range(16)])
    assert np.abs(counts / draws - expected).max() < 5 * np.sqrt(0.25 / draws)


def test_score_equals_a_plain_forward(engine: TorchEngine, reference: PreTrainedModel) -> None:
    for prompt, scored in zip(PROMPTS, engine.score(PROMPTS, 0.5).result(WAIT_SECONDS), strict=True):
        assert np.abs(log_probs(reference, prompt, 0.5) - scored).max(initial=0.0) <= 1e-5


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_I2_tokens_keep_the_version_that_sampled_them_across_a_swap(
    engine: TorchEngine, reference: PreTrainedModel, mode: PauseMode
) -> None:
    future = never_ending(engine)
    while engine.health().running_samples == 0:
        time.sleep(0.001)
    engine.swap(staged(reference, 1, scale=0.9), mode).result(WAIT_SECONDS)
    for completion in future.result(WAIT_SECONDS):
        versions = completion.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        assert completion.finish_reason is FinishReason.LENGTH
        ids, first_new = [5, 14, *completion.token_ids.tolist()], 2 + versions.index(1)
        before = log_probs(reference, ids, 1.0)[1 : first_new - 1]
        assert np.abs(before - completion.log_probs[: first_new - 2]).max(initial=0.0) <= 1e-5
        if mode is PauseMode.RETRACT:
            scaled = AutoModelForCausalLM.from_config(reference.config).eval()
            scaled.load_state_dict(dict(staged(reference, 1, scale=0.9).tensors))
            after = log_probs(scaled, ids, 1.0)[first_new - 1 :]
            assert np.abs(after - completion.log_probs[first_new - 2 :]).max() <= 1e-5


def test_a_new_request_joins_while_another_runs(engine: TorchEngine) -> None:
    long = never_ending(engine)
    short = engine.generate(request([7], tokens=1))
    assert len(short.result(WAIT_SECONDS)) == 4
    assert not long.done()
    assert [len(each.token_ids) for each in long.result(WAIT_SECONDS)] == [60] * 4


def test_abort_gives_back_what_there_is(engine: TorchEngine) -> None:
    future = never_ending(engine)
    while engine.health().running_samples == 0:
        time.sleep(0.001)
    engine.abort("long")
    completions = future.result(WAIT_SECONDS)
    assert [each.finish_reason for each in completions] == [FinishReason.ABORT] * 4
    assert all(0 < len(each.token_ids) < 60 for each in completions)


def test_pause_stops_and_resume_goes_on(engine: TorchEngine) -> None:
    future = never_ending(engine)
    engine.pause(PauseMode.RETRACT).result(WAIT_SECONDS)
    waiting = engine.generate(request([7]))
    time.sleep(0.1)
    assert not future.done()
    assert not waiting.done()
    engine.resume()
    assert len(future.result(WAIT_SECONDS)) == len(waiting.result(WAIT_SECONDS)) == 4


def test_I6_a_probe_that_disagrees_leaves_nothing_served(engine: TorchEngine, reference: PreTrainedModel) -> None:
    future = never_ending(engine)
    ids = [5, 14, 6, 15, 3]
    right = Probe([ids], [log_probs(reference, ids, 1.0)], 1.0, 1e-4)
    with pytest.raises(EngineError, match="version 2: probe log-probs differ"):
        engine.swap(staged(reference, 2, scale=0.5, probe=right), PauseMode.IN_PLACE).result(WAIT_SECONDS)
    assert engine.health().version is None
    assert {each.finish_reason for each in future.result(WAIT_SECONDS)} == {FinishReason.ABORT}
    waiting = engine.generate(request([7]))
    assert engine.swap(staged(reference, 3, probe=right), PauseMode.IN_PLACE).result(WAIT_SECONDS).version == 3
    assert all((each.versions == 3).all() for each in waiting.result(WAIT_SECONDS))


def test_I6_tensors_of_another_model_are_refused_before_anything_changes(
    engine: TorchEngine, reference: PreTrainedModel
) -> None:
    tensors = dict(staged(reference, 1).tensors)
    tensors.pop("lm_head.weight")
    with pytest.raises(EngineError, match=r"missing \['lm_head.weight'\]"):
        engine.swap(StagedWeights(1, tensors, None), PauseMode.IN_PLACE).result(WAIT_SECONDS)
    assert engine.health().version == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request([]), "no tokens"),
        (request([16]), "outside 0..15"),
        (request([3] * 50), "exceed the model's 64"),
        (request([3], samples=0), "must be >= 1"),
    ],
)
def test_bad_requests_are_refused_in_one_line(engine: TorchEngine, wrong: GenerateRequest, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        engine.generate(wrong)


def test_a_stopped_engine_fails_its_waiters(model_dir: Path) -> None:
    engine = TorchEngine(model_dir, seed=0)
    waiting = engine.generate(request([3]))
    engine.close()
    for future in (waiting, engine.generate(request([3]))):
        with pytest.raises(EngineError, match="has stopped"):
            future.result(WAIT_SECONDS)
