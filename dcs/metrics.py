"""Metrics of dcs."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from dcs.store import MemoryStore

PUSHED_BYTES = Counter("relax_dcs_pushed_bytes", "Bytes of weight slices received", ["transport"])
"""By transport: `sealed` is mapped memory of this host, `stream` is copied over the network."""
PULLED_BYTES = Counter("relax_dcs_pulled_bytes", "Bytes of weight slices sent")
COMMITS = Counter("relax_dcs_commits", "CommitVersion calls answered")
CHECKPOINTS = Counter("relax_dcs_checkpoints", "Checkpoints saved")
CHECKPOINT_FAILURES = Counter("relax_dcs_checkpoint_failures", "Checkpoints that could not be saved")
RECOVERY_COPIES = Counter("relax_dcs_recovery_copies", "Recovery states written to disk")
RECOVERY_COPY_FAILURES = Counter("relax_dcs_recovery_copy_failures", "Recovery states that could not be written")
RECOVERY_COPY_SECONDS = Histogram("relax_dcs_recovery_copy_seconds", "Time to write a recovery state to disk")
ROLLBACKS = Counter("relax_dcs_rollbacks", "Rollbacks to an older version", ["run"])
ROLLED_BACK_STEPS = Counter("relax_dcs_rolled_back_steps", "Committed steps undone by rollbacks", ["run"])
DISK_WAITS = Counter("relax_dcs_disk_waits", "Writes of the commit log that found the disk full")
_MEMORY_BYTES = Gauge("relax_dcs_memory_bytes", "Bytes of weights and snapshots held", ["run"])


def observe_memory(run: str, store: MemoryStore) -> None:
    _MEMORY_BYTES.labels(run).set(store.used_bytes)
