"""Unmodified megatron-core on machines without CUDA.

`prepare()` changes torch for the whole process, so only trainer processes import this package, and it
returns at once where CUDA exists. Call it before the first import of `megatron.core`; it imports
megatron-core itself at the end, because some names can only be replaced once it is loaded.
"""

from typing import Any

import torch

from trainer_server.megatron.cpu import optimizer_fixes, torch_on_cpu


def prepare() -> bool:
    """Make megatron-core importable and runnable. True if anything had to be changed."""
    if torch.cuda.is_available():
        return False
    if not torch_on_cpu.is_installed():
        torch_on_cpu.install()
        _bind_rng_functions()
        _bring_splits_to_host()
        optimizer_fixes.install()
    return True


def _bind_rng_functions() -> None:
    # megatron-core reads and writes generator states through these two functions, which index
    # torch.cuda.default_generators: an empty tuple without a device.
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _bring_splits_to_host() -> None:
    # Megatron's expert dispatcher copies its split sizes to host arrays only if they are on a GPU; all-to-all needs
    # host arrays here too.
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
