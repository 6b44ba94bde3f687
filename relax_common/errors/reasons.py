"""The reasons that callers tell apart, one class each; the wire carries `REASON`."""

from __future__ import annotations

from relax_common.errors.base import DataLoss, Exhausted, InvalidInput, NotFound, Precondition, RelaxError, Unavailable


class StaleTerm(Precondition):
    """A newer incarnation of the caller has registered; the caller must exit."""

    REASON = "STALE_TERM"


class PlanLost(Precondition):
    """Rows of the plan are lost; the step starts again under the next plan generation."""

    REASON = "PLAN_LOST"


class RowsFreed(Precondition):
    """The rows are no longer kept: their step is trained and its state is safe."""

    REASON = "ROWS_FREED"


class LeaseGone(Precondition):
    """The lease has expired, was superseded or was returned."""

    REASON = "LEASE_GONE"


class RunEnded(Precondition):
    """The run has ended; nothing more can be done in it."""

    REASON = "RUN_ENDED"


class RunSealed(Precondition):
    """The run takes no more groups."""

    REASON = "RUN_SEALED"


class BytesLost(Precondition):
    """The bytes of a committed version are gone from memory; the actor pushes them again."""

    REASON = "BYTES_LOST"


class SnapshotMissing(Precondition):
    """A commit waits for a recovery snapshot that is not complete."""

    REASON = "SNAPSHOT_MISSING"


class EventsCompacted(Precondition):
    """The events after this revision are no longer kept."""

    REASON = "EVENTS_COMPACTED"


class DataChanged(Precondition):
    """The rows of the data are not those that the run began with."""

    REASON = "DATA_CHANGED"


class ProtocolMismatch(Precondition):
    """The peer speaks another wire protocol."""

    REASON = "PROTOCOL_MISMATCH"


class SlabGone(Precondition):
    """The broker has taken this piece of shared memory back."""

    REASON = "SLAB_GONE"


class MemoryOutOfReach(Precondition):
    """This process cannot map the peer's memory: another host or another user."""

    REASON = "MEMORY_OUT_OF_REACH"


class WrongWriter(Precondition):
    """The field belongs to another role."""

    REASON = "WRONG_WRITER"


class AttemptGone(NotFound):
    """The attempt to publish a version is no longer known; begin again."""

    REASON = "ATTEMPT_GONE"


class UnknownSession(NotFound):
    """The broker does not know this session of shared memory; it has restarted."""

    REASON = "UNKNOWN_SESSION"


class UnknownRun(NotFound):
    """The daemon holds no run of this name."""

    REASON = "UNKNOWN_RUN"


class UnknownGroup(NotFound):
    """The run has no group of this id."""

    REASON = "UNKNOWN_GROUP"


class UnknownRow(NotFound):
    """The run has no row of this key."""

    REASON = "UNKNOWN_ROW"


class UnknownField(NotFound):
    """The run's schema has no field of this name."""

    REASON = "UNKNOWN_FIELD"


class UnknownConsumer(NotFound):
    """No consumer of this name has subscribed."""

    REASON = "NO_CONSUMER"


class UnknownBlob(NotFound):
    """No blob of this digest is stored."""

    REASON = "NO_BLOB"


class DiskFull(Exhausted):
    """The disk has too little room; nothing was changed."""

    REASON = "DISK_FULL"


class WaitsForDisk(Unavailable):
    """The disk has too little room, or is too slow; nothing was changed, and the same call succeeds later."""

    REASON = "WAITS_FOR_DISK"


class ArenaFull(Exhausted):
    """The shared memory has no free piece of this size now."""

    REASON = "ARENA_FULL"


class OverBudget(Exhausted):
    """The run would exceed its byte budget; nothing was stored."""

    REASON = "BUDGET"


class BadSpec(InvalidInput):
    """The sizes of a run contradict each other or exceed what the daemon may hold."""

    REASON = "BAD_SPEC"


class BadSchema(InvalidInput):
    """The columns do not match the schema of the run."""

    REASON = "BAD_SCHEMA"


class BadBlock(InvalidInput):
    """A block of columns is damaged."""

    REASON = "BAD_BLOCK"


class Oversize(InvalidInput):
    """More bytes than were reserved or are allowed in one call."""

    REASON = "OVERSIZE"


class NoWriter(InvalidInput):
    """Nobody in the run writes this field."""

    REASON = "NO_WRITER"


class ManifestMismatch(DataLoss):
    """The slices pushed are not those that the manifest names."""

    REASON = "MANIFEST_MISMATCH"


def _all_below(cls: type[RelaxError]) -> list[type[RelaxError]]:
    return [cls, *(found for below in cls.__subclasses__() for found in _all_below(below))]


BY_REASON = {cls.REASON: cls for cls in _all_below(RelaxError) if cls.REASON}
