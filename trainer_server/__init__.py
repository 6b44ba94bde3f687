"""Megatron-core roles: one daemon process per rank."""
