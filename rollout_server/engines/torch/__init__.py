"""The embedded engine: continuous batching over one Hugging Face module."""
