"""A Qwen3 with experts in SGLang: each expert's tensors, as the trainer publishes them, arrive where they belong."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tiny_models import save_qwen3_moe
from transformers import AutoModelForCausalLM

from rollout_server.engines.contract import GenerateRequest, PauseMode, Probe, SamplingParams, StagedWeights, Tolerance

START_SECONDS, CALL_SECONDS = 240.0, 60.0
TOLERANCE = Tolerance(1e-4, 1e-4)
IDS = [3, 9, 20, 31, 44, 5, 6]


def test_I6_experts_that_were_swapped_in_give_the_log_probs_of_transformers(start_engine: Any, tmp_path: Path) -> None:
    save_qwen3_moe(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.tensor([IDS])).logits[0], -1)[:-1]
    expected = log_probs.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].numpy()
    engine = start_engine(tmp_path)
    engine.ready().result(START_SECONDS)
    staged = StagedWeights(1, load_file(tmp_path / "model.safetensors"), Probe([IDS], [expected], 1.0, TOLERANCE))
    report = engine.swap(staged, PauseMode.RETRACT).result(CALL_SECONDS)
    assert report.probe_max_difference < 1e-5
    request = GenerateRequest("experts", IDS, 2, SamplingParams(1.0, 8))
    completions = engine.generate(request).result(CALL_SECONDS)
    assert all(np.isfinite(each.log_probs).all() for each in completions)
    engine.close()
