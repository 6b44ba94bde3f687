"""Metrics of dcs."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from dcs.store import MemoryStore

PUSHED_BYTES = Counter("relax_dcs_pushed_bytes", "Bytes of weight slices received", ["transport"])
"""shared: mapped memory of this host; stream: copied over the network."""
PULLED_BYTES = Counter("relax_dcs_pulled_bytes", "Bytes of weight slices sent")
COMMITS = Counter("relax_dcs_commits", "CommitVersion calls answered")
CHECKPOINTS = Counter("relax_dcs_checkpoints", "Checkpoints saved")
CHECKPOINT_FAILURES = Counter("relax_dcs_checkpoint_failures", "Checkpoints that could not be saved")
_MEMORY_BYTES = Gauge("relax_dcs_memory_bytes", "Bytes of weights and snapshots held", ["run"])


def observe_memory(run: str, store: MemoryStore) -> None:
    _MEMORY_BYTES.labels(run).set(store.used_bytes)
