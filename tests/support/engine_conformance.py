"""What every engine must do, as test functions: an engine's test file imports them and provides a `bench` fixture.

The bench's engine is shared by all of them, so each leaves it serving verified weights.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout_server.engines.contract import (
    Completion,
    Engine,
    EngineError,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Probe,
    SamplingParams,
    StagedWeights,
    Tolerance,
)

WAIT_SECONDS = 60.0
START_SECONDS = 480.0
TOLERANCE = 1e-5
PROMPTS = [[5, 14, 6, 15], list(range(3, 40)), [7], [12, 14, 3, 15], [4, 14, 4]]
IDS = [5, 14, 6, 15, 3, 33, 60, 9]


@dataclass
class Bench:
    """An engine, the same weights in plain transformers, and the scale that each version multiplied them with."""

    engine: Engine
    reference: PreTrainedModel
    scales: dict[int, float] = field(default_factory=dict)
    requests: int = 0
    long_id: str = ""

    @classmethod
    def of(cls, engine: Engine, folder: Path) -> Bench:
        return cls(engine, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())

    def tensors(self, scale: float) -> dict[str, torch.Tensor]:
        return {name: each.detach() * scale for name, each in self.reference.named_parameters()}

    def swap(self, scale: float, mode: PauseMode = PauseMode.RETRACT, probe_scale: float | None = None) -> int:
        """The next version; its probe is right unless another scale is asked for. Raises what the engine raises."""
        version = len(self.scales)
        self.scales[version] = scale
        probe = Probe(
            [IDS, [7]], [self.log_probs(IDS, probe_scale or scale), np.empty(0, np.float32)], 1.0, Tolerance(1e-4, 1e-4)
        )
        self.engine.ready().result(START_SECONDS)
        report = self.engine.swap(StagedWeights(version, self.tensors(scale), probe), mode).result(WAIT_SECONDS)
        assert report.version == version
        assert report.probe_max_difference <= 1e-4
        return version

    def ask(
        self, prompt: list[int], samples: int = 4, temperature: float = 1.0, tokens: int = 20
    ) -> Future[list[Completion]]:
        self.requests += 1
        sampling = SamplingParams(temperature, tokens)
        return self.engine.generate(GenerateRequest(f"request-{self.requests}", prompt, samples, sampling))

    def ask_long(self, tokens: int = 300, prompt: list[int] = PROMPTS[1]) -> Future[list[Completion]]:
        """Returns once each of its samples has tokens: then a shorter request, sent later, has been answered."""
        future = self.ask(prompt, tokens=tokens)
        self.long_id = f"request-{self.requests}"
        wait_until(lambda: self.engine.health().running_samples >= 4)
        self.ask([7], samples=1, tokens=4).result(WAIT_SECONDS)
        return future

    @torch.no_grad()
    def log_probs(self, ids: list[int], scale: float, temperature: float = 1.0) -> np.ndarray:
        """Log-prob of each token except the first, by one plain forward pass without cache or padding."""
        output = torch.func.functional_call(
            self.reference, self.tensors(scale), kwargs={"input_ids": torch.tensor([ids])}
        )
        logits = output.logits[0, :-1].float() / temperature
        # Not torch's log_softmax, whose sums over a large vocabulary are inexact on a CPU.
        exact = logits - logits.logsumexp(-1, keepdim=True)
        return exact.gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy()

    def check(self, prompt: list[int], completion: Completion, temperature: float = 1.0, first: int = 0) -> None:
        """Each token from `first` on has the log-prob that the weights of its version give it."""
        ids, begin = [*prompt, *completion.token_ids.tolist()], len(prompt) - 1
        for version in set(completion.versions[first:].tolist()):
            chosen = np.flatnonzero(completion.versions == version)
            chosen = chosen[chosen >= first]
            expected = self.log_probs(ids, self.scales[version], temperature)[begin:][chosen]
            differences = np.abs(expected - completion.log_probs[chosen])
            assert differences.mean() <= TOLERANCE
            assert differences.max() <= 10 * TOLERANCE


def wait_until(condition: object, seconds: float = WAIT_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"waited {seconds} s"
        time.sleep(0.002)


def test_log_probs_equal_a_plain_forward_for_prompts_of_all_lengths(bench: Bench) -> None:
    version = bench.swap(1.0)
    futures = [bench.ask(prompt, temperature=0.7) for prompt in PROMPTS]
    for prompt, future in zip(PROMPTS, futures, strict=True):
        completions = future.result(WAIT_SECONDS)
        assert len({each.token_ids.tobytes() for each in completions}) == len(completions)
        for completion in completions:
            assert (completion.versions == version).all()
            assert completion.finish_reason is FinishReason.LENGTH
            assert len(completion.token_ids) == 20
            bench.check(prompt, completion, temperature=0.7)


def test_greedy_equals_transformers_generate(bench: Bench) -> None:
    bench.swap(1.0)
    for prompt in PROMPTS:
        (completion,) = bench.ask(prompt, samples=1, temperature=0.0).result(WAIT_SECONDS)
        expected = bench.reference.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[
            0, len(prompt) :
        ]
        assert completion.token_ids.tolist() == expected.tolist()
        bench.check(prompt, completion)


def test_sampled_frequencies_follow_the_distribution(bench: Bench) -> None:
    scale = bench.scales[bench.swap(1.0)]
    prompt, draws, temperature = PROMPTS[0], 1500, 0.7
    completions = bench.ask(prompt, samples=draws, temperature=temperature, tokens=1).result(WAIT_SECONDS)
    counts = np.bincount([int(each.token_ids[0]) for each in completions], minlength=64)
    expected = np.exp([bench.log_probs([*prompt, token], scale, temperature)[-1] for token in range(64)])
    assert np.abs(counts / draws - expected).max() < 5 * np.sqrt(0.25 / draws)


def test_score_equals_a_plain_forward(bench: Bench) -> None:
    scale = bench.scales[bench.swap(0.9)]
    for _ in range(2):  # the second time its keys and values could come from a cache
        for ids, scored in zip(PROMPTS, bench.engine.score(PROMPTS, 1.0).result(WAIT_SECONDS), strict=True):
            assert np.abs(bench.log_probs(ids, scale) - scored).max(initial=0.0) <= TOLERANCE


@pytest.mark.parametrize("mode", list(PauseMode))
def test_I2_tokens_keep_the_version_that_sampled_them_across_a_swap(bench: Bench, mode: PauseMode) -> None:
    before = bench.swap(1.0)
    prompt = PROMPTS[1]
    future = bench.ask_long()
    after = bench.swap(0.9, mode)
    assert not future.done()
    for completion in future.result(WAIT_SECONDS):
        versions = completion.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {before, after}
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(versions) == 300
        first_new = versions.index(after)
        if mode is PauseMode.IN_PLACE:
            # Later tokens see keys and values of both versions; only earlier ones depend on a single version.
            old = Completion(*(each[:first_new] for each in arrays(completion)), FinishReason.ABORT)
            bench.check(prompt, old)
        else:
            bench.check(prompt, completion)


def arrays(completion: Completion) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return completion.token_ids, completion.log_probs, completion.versions


@pytest.mark.parametrize("mode", list(PauseMode))
def test_I6_a_prefix_cache_never_answers_under_other_weights(bench: Bench, mode: PauseMode) -> None:
    bench.swap(1.0)
    prompt = PROMPTS[1]
    long = bench.ask_long()
    bench.ask(prompt).result(WAIT_SECONDS)
    after = bench.swap(0.8, mode)
    for completion in bench.ask(prompt).result(WAIT_SECONDS):
        assert (completion.versions == after).all()
        bench.check(prompt, completion)
    assert len(long.result(WAIT_SECONDS)) == 4


def test_I6_a_probe_that_disagrees_leaves_nothing_served(bench: Bench) -> None:
    bench.swap(1.0)
    long, short = bench.ask_long(), bench.ask([7], tokens=60)
    with pytest.raises(EngineError, match="probe log-probs differ"):
        bench.swap(0.5, PauseMode.IN_PLACE, probe_scale=1.0)
    assert bench.engine.health().version is None
    wrong = len(bench.scales) - 1
    for completion in [*long.result(WAIT_SECONDS), *short.result(WAIT_SECONDS)]:
        assert wrong not in completion.versions
    assert {each.finish_reason for each in long.result()} == {FinishReason.ABORT}
    waiting = bench.ask([7])
    time.sleep(0.1)
    assert not waiting.done()
    right = bench.swap(1.0)
    assert all((each.versions == right).all() for each in waiting.result(WAIT_SECONDS))


def test_I6_tensors_of_another_model_are_refused_before_anything_changes(bench: Bench) -> None:
    version = bench.swap(1.0)
    tensors = bench.tensors(0.5)
    norm = tensors.pop("model.norm.weight")
    for wrong, message in (
        (tensors, r"missing \['model.norm.weight'\]"),
        ({**tensors, "model.norm.weight": norm, "more": norm}, r"unknown \['more'\]"),
        ({**tensors, "model.norm.weight": norm[:2]}, r"model.norm.weight is \(2,\), the model has \(64,\)"),
    ):
        with pytest.raises(EngineError, match=message):
            bench.engine.swap(StagedWeights(999, wrong, None), PauseMode.IN_PLACE).result(WAIT_SECONDS)
    assert bench.engine.health().version == version
    for completion in bench.ask(PROMPTS[0]).result(WAIT_SECONDS):
        bench.check(PROMPTS[0], completion)


def test_a_new_request_joins_while_another_runs(bench: Bench) -> None:
    bench.swap(1.0)
    long = bench.ask_long(tokens=400)
    assert len(bench.ask([7], tokens=1).result(WAIT_SECONDS)) == 4
    assert not long.done()
    assert [len(each.token_ids) for each in long.result(WAIT_SECONDS)] == [400] * 4


def test_abort_gives_back_what_there_is(bench: Bench) -> None:
    bench.swap(1.0)
    long, other = bench.ask_long(tokens=400), bench.ask([7])
    bench.engine.abort(bench.long_id)
    for completion in long.result(WAIT_SECONDS):
        assert completion.finish_reason is FinishReason.ABORT
        assert 0 < len(completion.token_ids) < 400
        bench.check(PROMPTS[1], completion)
    assert {each.finish_reason for each in other.result(WAIT_SECONDS)} == {FinishReason.LENGTH}


def test_pause_stops_and_resume_goes_on(bench: Bench) -> None:
    version = bench.swap(1.0)
    for mode in (PauseMode.IN_PLACE, PauseMode.RETRACT):
        long = bench.ask_long()
        bench.engine.pause(mode).result(WAIT_SECONDS)
        assert bench.engine.health().paused
        waiting = bench.ask([7])
        time.sleep(0.1)
        assert not long.done()
        assert not waiting.done()
        bench.engine.resume()
        for completion in long.result(WAIT_SECONDS):
            assert len(completion.token_ids) == 300
            assert (completion.versions == version).all()
            bench.check(PROMPTS[1], completion)
        assert len(waiting.result(WAIT_SECONDS)) == 4


def test_pause_by_abort_gives_back_what_there_is(bench: Bench) -> None:
    bench.swap(1.0)
    long = bench.ask_long()
    bench.engine.pause(PauseMode.ABORT).result(WAIT_SECONDS)
    for completion in long.result(WAIT_SECONDS):
        assert completion.finish_reason is FinishReason.ABORT
        assert 0 < len(completion.token_ids) < 300
    bench.engine.resume()
    assert len(bench.ask([7]).result(WAIT_SECONDS)) == 4


def test_a_swap_while_paused_leaves_it_paused(bench: Bench) -> None:
    before = bench.swap(1.0)
    long = bench.ask_long()
    bench.engine.pause(PauseMode.RETRACT).result(WAIT_SECONDS)
    after = bench.swap(0.9)
    time.sleep(0.1)
    assert not long.done()
    bench.engine.resume()
    for completion in long.result(WAIT_SECONDS):
        assert set(completion.versions.tolist()) == {before, after}
        bench.check(PROMPTS[1], completion)


@pytest.mark.parametrize(
    ("prompt", "samples", "tokens", "message"),
    [
        ([], 4, 20, "no tokens"),
        ([64], 4, 20, r"outside 0\.\.63"),
        ([-1], 4, 20, r"outside 0\.\.63"),
        ([3] * 500, 4, 20, "500 prompt tokens \\+ 20 new exceed the model's 512"),
        ([3], 0, 20, "must be >= 1"),
        ([3], 4, 0, "must be >= 1"),
    ],
)
def test_bad_requests_are_refused_in_one_line(
    bench: Bench, prompt: list[int], samples: int, tokens: int, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        bench.ask(prompt, samples=samples, tokens=tokens)


def check_end_tokens(bench: Bench, end_ids: set[int]) -> None:
    """Where the model of an engine ends now and then, the sampled end token is the last of a stopped response."""
    bench.swap(1.0)
    reasons = set()
    for prompt in PROMPTS:
        for completion in bench.ask(prompt, samples=16, tokens=40).result(WAIT_SECONDS):
            ids = completion.token_ids.tolist()
            ended = completion.finish_reason is FinishReason.STOP
            reasons.add(completion.finish_reason)
            assert (ids[-1] in end_ids) == ended
            assert not end_ids & set(ids[:-1])
            assert ended or len(ids) == 40
            bench.check(prompt, completion)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
