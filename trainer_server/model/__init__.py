"""Hugging Face models as megatron-core models: configuration, layers, one mapping table per family."""
