"""The life of a run as its table says, over every sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaxd.run import state
from relaxd.run.state import FINAL, Event, ImpossibleMoveError, Phase, RunRecord, phase_after


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
