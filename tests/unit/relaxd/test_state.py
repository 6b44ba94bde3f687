"""The life of a run follows its table, for every sequence of events."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.controller.v1 import controller_pb2
from relax_common.versions import PolicyVersion
from relaxd.run import state
from relaxd.run.state import FINAL, Event, ImpossibleMoveError, Phase, Progress, RunRecord, phase_after


def table() -> dict[tuple[Phase, Event], Phase | None]:
    """The table of the module's docstring."""
    lines = [line for line in (state.__doc__ or "").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    events = [Event(name) for name in cells[0][1:]]
    return {
        (Phase(row[0]), event): None if cell == "-" else Phase(cell)
        for row in cells[1:]
        for event, cell in zip(events, row[1:], strict=True)
    }


def test_the_docstring_says_what_the_code_does() -> None:
    told = table()
    assert told.keys() == {(phase, event) for phase in Phase for event in Event}
    for (phase, event), expected in told.items():
        if expected is None:
            with pytest.raises(ImpossibleMoveError):
                phase_after(phase, event)
        else:
            assert phase_after(phase, event) is expected, (phase, event)


@given(st.lists(st.sampled_from(Event), max_size=30))
def test_whatever_happens_a_run_leaves_a_final_phase_only_when_it_is_resumed(events: list[Event]) -> None:
    phase = Phase.STARTING
    for event in events:
        try:
            after = phase_after(phase, event)
        except ImpossibleMoveError:
            continue
        if phase in FINAL and after is not phase:
            assert (event, after) == (Event.RESUMED, Phase.STARTING)
            assert phase is not Phase.ENDED
        if after is Phase.STOPPED and phase is not Phase.STOPPED:
            assert phase is Phase.STOPPING, "only a run that was asked to stop is stopped"
        phase = after
        # An event that a restarted relaxd sees again changes nothing more.
        if event not in (Event.DONE, Event.SAVED) and not (phase is Phase.STARTING and event is Event.RESUMED):
            assert phase_after(phase, event) is phase


@pytest.mark.parametrize("phase", list(Phase))
def test_every_live_phase_can_break_and_can_be_asked_to_stop(phase: Phase) -> None:
    assert phase_after(phase, Event.STOP_ASKED) in (Phase.STOPPING, phase)
    if phase not in FINAL:
        assert phase_after(phase, Event.BROKEN) is Phase.FAILED


@pytest.mark.parametrize("phase", list(Phase))
def test_a_record_survives_the_wire(phase: Phase) -> None:
    record = RunRecord("r", "toml", "/runs/r", 7, created_ns=5_000_000_001, phase=phase, error="e", revision=3)
    assert RunRecord.from_proto(record.to_proto()) == record


def test_progress_is_shown_and_of_it_only_what_people_wait_for_is_not_read_back() -> None:
    progress = Progress(
        PolicyVersion(1, 4), MappingProxyType({"loss": 0.5}), ("w",), ("steps 2-3",), MappingProxyType({"no_signal": 2})
    )
    record = RunRecord("r", "toml", "/runs/r", 7, created_ns=5_000_000_001, progress=progress)
    message = record.to_proto()
    assert (message.head.lineage, message.head.number, message.has_head) == (1, 4, True)
    assert (dict(message.metrics), list(message.waits)) == ({"loss": 0.5}, ["w"])
    assert (list(message.rollbacks), dict(message.dropped)) == (["steps 2-3"], {"no_signal": 2})
    assert RunRecord.from_proto(message).progress == Progress(progress.head, progress.metrics, (), progress.rollbacks)


def test_a_run_without_a_version_shows_no_head() -> None:
    record = RunRecord("r", "toml", "/runs/r", 7, created_ns=1)
    assert (record.phase, record.error, record.revision) == (Phase.STARTING, "", 0)
    message = record.to_proto()
    assert not message.has_head
    assert not message.HasField("head")
    assert message.state == controller_pb2.RUN_STATE_STARTING
