"""Bytes on disk and in shared memory: framed logs, sealed memory, checkpoint and model folders."""
