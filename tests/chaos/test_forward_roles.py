"""Reference and actor_fwd in a real run, killed within a step: their columns are written, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relaxd.run.files import read_lines

STEPS = 8


def test_I1_killed_column_roles_write_their_columns_again(start_run: Callable) -> None:
    run = start_run(
        "reference.after_write=kill@3,actor_fwd.after_write=kill@5",
        *("algorithm.old_policy=actor_fwd", "algorithm.correction=tis", "algorithm.kl_loss_coef=0.02"),
    )
    result = run.finish()
    assert run.fired_points() == {"reference.after_write", "actor_fwd.after_write"}
    assert result.counts["rolled_back_ever"] == 0
    lines = list(read_lines(run.run_dir / "metrics.jsonl"))
    assert len(lines) == STEPS
    # actor_fwd computes with the weights that are trained, so the ratio is 1, whatever sampled the tokens.
    assert [line["ratio_max"] for line in lines] == pytest.approx([1.0] * STEPS, abs=1e-5)
    assert lines[0]["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert lines[-1]["kl_reference"] > 1e-6
    assert all(0 < line["correction_weight_mean"] <= 2.0 for line in lines)
