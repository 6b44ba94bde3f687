"""A whole run of a tiny Qwen3 with experts in bfloat16: the actor's two ranks share out the experts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import save_qwen3_moe
from transformers import AutoModelForCausalLM

from relaxd.run.files import read_lines
from relaxd.run.ledger import audit

STEPS = 3
BF16_DIFFERENCE = 0.05  # a logit of 2 to 4 is rounded to a 64th


@pytest.mark.timeout(400)
def test_two_ranks_train_and_publish_the_experts_they_share_out(tmp_path: Path, quickstart_material: Path) -> None:
    made = quickstart_material / "quickstart/made/model"
    model = tmp_path / "model"
    vocabulary = json.loads((made / "config.json").read_text())["vocab_size"]
    save_qwen3_moe(model, vocab_size=vocabulary)
    for path in made.glob("tokenizer*"):
        (model / path.name).write_bytes(path.read_bytes())
    changes = {
        "model.path": model,
        "model.dtype": "bfloat16",
        "actor.data_parallel_size": 2,
        "actor.expert_parallel_size": 2,
        "actor.recompute": "full",
        "total_steps": STEPS,
        "prompts_per_step": 4,
        "checkpoint.every_steps": 2,
    }
    sets = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "relaxd.ctl.main", "run", str(quickstart_material / "quickstart.toml")]
    done = subprocess.run(
        [*command, *sets],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run_dir = next((tmp_path / "runs").glob("*"))
    assert not audit(read_lines(run_dir / "events.jsonl"), ended=True, max_staleness=1).faults
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    assert len(lines) == STEPS
    differences = [line["logprob_abs_diff_mean"] for line in lines if "logprob_abs_diff_mean" in line]
    assert differences
    assert max(differences) < BF16_DIFFERENCE
    before, after = (AutoModelForCausalLM.from_pretrained(f, dtype="auto") for f in (model, run_dir / "export"))
    assert {p.dtype for p in after.parameters()} == {torch.bfloat16}
    moved = {n for (n, a), b in zip(before.named_parameters(), after.parameters(), strict=True) if (a != b).any()}
    assert {"model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.gate.weight"} <= moved
