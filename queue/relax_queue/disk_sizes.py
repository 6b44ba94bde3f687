"""How large the files of a run may grow."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskSizes:
    """segment_bytes: a segment of the log is closed once it has this size and that of the newest snapshot.
    history_bytes: closed segments behind the snapshots that are kept for watchers. payload_file_bytes: a payload file
    takes no more extents once it has this size.
    """

    segment_bytes: int = 4 << 20
    history_bytes: int = 64 << 20
    payload_file_bytes: int = 64 << 20
