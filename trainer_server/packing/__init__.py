"""Rows as the loss needs them, and how they are packed into micro-batches."""
