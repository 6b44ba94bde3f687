"""Hugging Face folders and how their tensors map to Megatron's parameters. Needs torch, not Megatron."""
