"""The life of a run: which event may happen in which phase, and which phase follows. Pure functions.

| phase    | opened   | sealed   | stop asked | done  | saved   | broken | resumed  |
|----------|----------|----------|------------|-------|---------|--------|----------|
| starting | running  | -        | stopping   | -     | -       | failed | -        |
| running  | running  | draining | stopping   | ended | -       | failed | running  |
| draining | draining | draining | stopping   | ended | -       | failed | draining |
| stopping | stopping | stopping | stopping   | ended | stopped | failed | stopping |
| ended    | -        | -        | ended      | -     | -       | -      | -        |
| failed   | -        | -        | failed     | -     | -       | failed | starting |
| stopped  | -        | -        | stopped    | -     | -       | -      | starting |

`-` does not happen: it is an error of relaxd. An event that a restarted relaxd repeats leaves the phase as it is.

* opened: queue and dcs have opened the run
* sealed: the queue takes no more prompts, because the data has come to its end
* stop asked: a user wants it to end after the step in flight
* done: the last version is exported, queue and dcs have ended the run
* saved: there is a checkpoint at the head, so the run can be resumed
* broken: something that restarts did not repair; the reason is the run's error
* resumed: a user wants a stopped or failed run to go on
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from relax.controller.v1 import controller_pb2
from relax_common.versions import PolicyVersion


class Phase(Enum):
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"
    FAILED = "failed"
    STOPPED = "stopped"


class Event(Enum):
    OPENED = "opened"
    SEALED = "sealed"
    STOP_ASKED = "stop asked"
    DONE = "done"
    SAVED = "saved"
    BROKEN = "broken"
    RESUMED = "resumed"


FINAL: Final = frozenset({Phase.ENDED, Phase.FAILED, Phase.STOPPED})
_LIVE = (Phase.STARTING, Phase.RUNNING, Phase.DRAINING, Phase.STOPPING)
_OPEN = (Phase.RUNNING, Phase.DRAINING, Phase.STOPPING)

MOVES: Final = MappingProxyType(
    {
        (Phase.STARTING, Event.OPENED): Phase.RUNNING,
        **{(phase, Event.OPENED): phase for phase in _OPEN},
        (Phase.RUNNING, Event.SEALED): Phase.DRAINING,
        (Phase.DRAINING, Event.SEALED): Phase.DRAINING,
        (Phase.STOPPING, Event.SEALED): Phase.STOPPING,
        **{(phase, Event.STOP_ASKED): Phase.STOPPING for phase in _LIVE},
        **{(phase, Event.STOP_ASKED): phase for phase in FINAL},
        **{(phase, Event.DONE): Phase.ENDED for phase in _OPEN},
        (Phase.STOPPING, Event.SAVED): Phase.STOPPED,
        **{(phase, Event.BROKEN): Phase.FAILED for phase in _LIVE},
        (Phase.FAILED, Event.BROKEN): Phase.FAILED,
        **{(phase, Event.RESUMED): phase for phase in _OPEN},
        (Phase.FAILED, Event.RESUMED): Phase.STARTING,
        (Phase.STOPPED, Event.RESUMED): Phase.STARTING,
    }
)

_WIRE = {
    Phase.STARTING: controller_pb2.RUN_STATE_STARTING,
    Phase.RUNNING: controller_pb2.RUN_STATE_RUNNING,
    Phase.DRAINING: controller_pb2.RUN_STATE_DRAINING,
    Phase.STOPPING: controller_pb2.RUN_STATE_STOPPING,
    Phase.ENDED: controller_pb2.RUN_STATE_ENDED,
    Phase.FAILED: controller_pb2.RUN_STATE_FAILED,
    Phase.STOPPED: controller_pb2.RUN_STATE_STOPPED,
}
_PHASES = {state: phase for phase, state in _WIRE.items()}


class ImpossibleMoveError(ValueError):
    """An event in a phase in which it cannot happen."""


def phase_after(phase: Phase, event: Event) -> Phase:
    """The table above. Raises ImpossibleMoveError for its empty cells."""
    try:
        return MOVES[phase, event]
    except KeyError:
        raise ImpossibleMoveError(f"a run that is {phase.value} cannot be {event.value}") from None


@dataclass(frozen=True)
class Progress:
    """What is shown of a run but not stored, because it follows from the events of queue and dcs."""

    head: PolicyVersion | None = None
    metrics: MappingProxyType[str, float] = field(default_factory=lambda: MappingProxyType({}))
    waits: tuple[str, ...] = ()
    rollbacks: tuple[str, ...] = ()
    dropped: MappingProxyType[str, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class RunRecord:
    """A run as it is stored and shown. Immutable: each change makes a new record."""

    run: str
    recipe_toml: str
    run_dir: str
    total_steps: int
    created_ns: int
    phase: Phase = Phase.STARTING
    error: str = ""
    revision: int = 0
    progress: Progress = Progress()

    def to_proto(self) -> controller_pb2.Run:
        progress = self.progress
        created = Timestamp()
        created.FromNanoseconds(self.created_ns)
        return controller_pb2.Run(
            run=self.run,
            state=_WIRE[self.phase],
            recipe_toml=self.recipe_toml,
            run_dir=self.run_dir,
            head=progress.head.to_proto() if progress.head is not None else None,
            has_head=progress.head is not None,
            total_steps=self.total_steps,
            metrics=dict(progress.metrics),
            waits=progress.waits,
            error=self.error,
            created_at=created,
            revision=self.revision,
            rollbacks=progress.rollbacks,
            dropped=dict(progress.dropped),
        )

    @staticmethod
    def from_proto(message: controller_pb2.Run) -> RunRecord:
        progress = Progress(
            head=PolicyVersion.from_proto(message.head) if message.has_head else None,
            metrics=MappingProxyType(dict(message.metrics)),
            rollbacks=tuple(message.rollbacks),
        )
        return RunRecord(
            run=message.run,
            recipe_toml=message.recipe_toml,
            run_dir=message.run_dir,
            total_steps=message.total_steps,
            created_ns=message.created_at.ToNanoseconds(),
            phase=_PHASES[message.state],
            error=message.error,
            revision=message.revision,
            progress=progress,
        )
