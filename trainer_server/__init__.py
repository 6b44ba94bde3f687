"""Megatron-core roles: one daemon process per rank."""

from relax_common.process.tuning import poll_where_it_waits

poll_where_it_waits()
