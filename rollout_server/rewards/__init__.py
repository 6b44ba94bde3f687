"""Rewards, one file each, computed in subprocesses that can be killed. Nothing here imports torch."""
