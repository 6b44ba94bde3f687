"""Training on megatron-core: the model, forward and backward, one update, a rank's state as bytes."""

from trainer_server.megatron import cpu

# Before any module of this package imports megatron.core.
cpu.prepare()
