"""What the gauges of a run show, and that their labels stay few."""

from typing import Any

from prometheus_client import REGISTRY

from relax_queue.broker.metrics import OTHER_REASON, REASONS_MAX, publish
from relax_queue.rules.state import RunState


def _shown(run: str) -> dict[str, float]:
    (metric,) = (m for m in REGISTRY.collect() if m.name == "relax_queue_groups_dropped")
    return {s.labels["reason"]: s.value for s in metric.samples if s.labels["run"] == run}


def _state(new_story: Any, run: str) -> RunState:
    state: RunState = new_story().state
    state.run = run
    return state


def test_reasons_beyond_the_most_are_counted_together(new_story: Any) -> None:
    state = _state(new_story, "many-reasons")
    state.dropped_by_reason = {f"reason {i}": 2 for i in range(REASONS_MAX + 5)}
    publish(state)
    shown = _shown(state.run)
    assert len(shown) == REASONS_MAX + 1
    assert (shown["reason 0"], shown[OTHER_REASON]) == (2, 10)


def test_a_reason_whose_drops_were_taken_back_is_not_shown(new_story: Any) -> None:
    state, other = _state(new_story, "rolled-back"), _state(new_story, "beside-it")
    state.dropped_by_reason, other.dropped_by_reason = {"no_signal": 3, "failed": 1}, {"failed": 4}
    publish(state)
    publish(other)
    state.dropped_by_reason = {"no_signal": 1}
    publish(state)
    assert (_shown(state.run), _shown(other.run)) == ({"no_signal": 1}, {"failed": 4})
