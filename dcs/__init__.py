"""Weights, the commit log and recovery snapshots."""
