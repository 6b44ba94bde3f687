"""Metrics of the bus; labels are bounded by the runs of a broker and the words of its contract."""

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from relax_queue.rules.group import Status
from relax_queue.rules.state import RunState
from relax_queue.transport.shm.slabs import Slabs

GROUPS = Gauge("relax_queue_groups", "Groups by state", ["run", "state"])
BYTES = Gauge("relax_queue_bytes", "Payload bytes", ["run", "kind"])
HEAD = Gauge("relax_queue_head_version", "Newest committed version that the broker has applied", ["run"])
WAITING = Gauge("relax_queue_waiting_calls", "Calls that wait now, by what they wait for", ["run", "call"])
WAIT_SECONDS = Counter(
    "relax_queue_wait_seconds_total",
    "Seconds that readers waited, by consumer and the field that was missing (plan: the plan itself)",
    ["run", "consumer", "missing"],
)
ROWS = Gauge("relax_queue_rows", "Rows held, by state of their group", ["run", "state"])
OLDEST_LEASE = Gauge("relax_queue_oldest_lease_seconds", "Age of the oldest lease; 0 without leases", ["run"])
DISK_BYTES = Gauge("relax_queue_disk_bytes", "Bytes on disk: log, snapshot, payload", ["run", "kind"])
RECOVERY_SECONDS = Gauge("relax_queue_recovery_seconds", "Time the last start took to read the run back", ["run"])
LEASE_REFUSALS = Counter("relax_queue_lease_refusals_total", "Times no lease was granted, by reason", ["run", "reason"])
LEASES_LOST = Gauge("relax_queue_leases_lost", "Leases that ran out or were revoked", ["run"])
DROPPED = Gauge("relax_queue_groups_dropped", "Groups dropped, by reason", ["run", "reason"])
PUT_SECONDS = Histogram(
    "relax_queue_put_seconds",
    "Time from the last byte of a put to its answer",
    ["run"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5),
)
WAKE_SECONDS = Histogram(
    "relax_queue_wake_seconds",
    "Time from a change of a run to the wake-up of the call that waited for it",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5),
)
ARENA_USED = Gauge("relax_queue_arena_used_bytes", "Shared memory in use: rows, slabs being written, views")
ARENA_GROWN = Gauge("relax_queue_arena_grown_bytes", "Shared memory allocated, used or not")
SESSIONS = Gauge("relax_queue_shared_sessions", "Clients that share memory")
FOLLOW_RECONNECTS = Counter("relax_queue_follow_reconnects_total", "Times the dcs log had to be opened again", ["run"])

REASONS_MAX = 32
"""Rollout servers choose their own words for reasons: beyond this many, reasons are counted under OTHER_REASON."""
OTHER_REASON = "other"


def publish(state: RunState) -> None:
    """Set the gauges of a run."""
    run = state.run
    for status in Status:
        GROUPS.labels(run, status.value).set(state.count(status))
        ROWS.labels(run, status.value).set(sum(len(state.groups[g].rows) for g in state.by_status[status]))
    BYTES.labels(run, "held").set(state.bytes_held)
    BYTES.labels(run, "reserved").set(state.n_reserved * state.spec.bytes_per_group)
    BYTES.labels(run, "budget").set(state.spec.memory_budget_bytes)
    HEAD.labels(run).set(state.head)
    LEASES_LOST.labels(run).set(state.n_leases_lost)
    _publish_dropped(run, state.dropped_by_reason)


def _publish_dropped(run: str, by_reason: Mapping[str, int]) -> None:
    counts = list(by_reason.items())
    shown = dict(counts[:REASONS_MAX])
    if len(counts) > REASONS_MAX:
        shown[OTHER_REASON] = shown.get(OTHER_REASON, 0) + sum(count for _, count in counts[REASONS_MAX:])
    for reason, count in shown.items():
        DROPPED.labels(run, reason).set(count)
    # A rollback undoes drops; a reason without any drop is no longer shown.
    for sample in next(iter(DROPPED.collect())).samples:
        if sample.labels["run"] == run and sample.labels["reason"] not in shown:
            DROPPED.remove(run, sample.labels["reason"])


def publish_arena(slabs: Slabs) -> None:
    """Make the gauges of shared memory read its current values by themselves."""
    ARENA_USED.set_function(lambda: slabs.arena.used_bytes)
    ARENA_GROWN.set_function(lambda: slabs.arena.grown_bytes)
    SESSIONS.set_function(lambda: slabs.n_sessions)
