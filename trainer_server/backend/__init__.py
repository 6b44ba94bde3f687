"""Training on megatron-core: packs, forward and backward, one update, a rank's state as bytes."""
