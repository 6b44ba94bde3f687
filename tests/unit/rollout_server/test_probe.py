"""The probe by which an engine shows that it serves the right weights."""

import numpy as np
import pytest

from rollout_server.engines.contract import EngineError, Probe, Tolerance


@pytest.mark.parametrize(
    ("largest", "mean", "refused"),
    [(0.5, 0.2, ""), (0.3, 0.2, "4.00e-01 (largest)"), (9.0, 0.05, "1.00e-01 (mean)"), (float("inf"), 0.2, "")],
)
def test_I6_a_probe_bounds_the_largest_and_the_mean_difference(largest: float, mean: float, refused: str) -> None:
    theirs = [np.zeros(3, np.float32), np.empty(0, np.float32), np.zeros(1, np.float32)]
    ours = [np.array([0, 0.4, 0], np.float32), np.empty(0, np.float32), np.zeros(1, np.float32)]
    probe = Probe([[1, 2, 3, 4], [1], [1, 2]], theirs, 1.0, Tolerance(largest, mean))
    if refused:
        with pytest.raises(EngineError, match=refused.replace("(", "[(]").replace(")", "[)]")):
            probe.check(ours, 7)
    else:
        assert probe.check(ours, 7) == pytest.approx(0.4)
    with pytest.raises(EngineError, match="nan"):
        probe.check([ours[0] * np.nan, *ours[1:]], 7)
