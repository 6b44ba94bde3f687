"""From weights in memory to a committed version, a recovery snapshot, an export."""
