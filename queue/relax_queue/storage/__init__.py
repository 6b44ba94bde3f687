"""Storage: the log and its snapshots, payload in memory and on disk, blobs."""
