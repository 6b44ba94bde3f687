"""Weights, the commit log and recovery snapshots."""

from relax_common.process.tuning import poll_where_it_waits

poll_where_it_waits()
