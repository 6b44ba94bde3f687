"""Training on megatron-core: layers, packs, forward and backward, one update, a rank's state as bytes."""

from trainer_server import megatron_cpu

# Before any module of this package imports megatron.core.
megatron_cpu.prepare()
