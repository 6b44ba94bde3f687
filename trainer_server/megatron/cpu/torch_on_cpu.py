"""Gives the `torch.cuda` calls that megatron-core makes unconditionally a meaning on the CPU."""

import contextlib
import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_PAGED_STASH = "megatron.core.transformer.moe.ops.paged_stash"

# Factories that the dense path calls with device="cuda" (schedules, gradient clipping, optimizer scale,
# parameter and gradient buffers).
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like")


class OrderedStream:
    """The CPU runs everything in order, so all streams are one stream."""

    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self) -> "OrderedStream":
        return self


def is_installed() -> bool:
    return getattr(torch.cuda.current_device, "relax_on_cpu", False)


def install() -> None:
    _stub_triton_module()
    _map_device_functions()
    # `with torch.device(...)` recognises factories by identity, in a set built at its first use. Built from the
    # wrappers below it would miss the originals that they call, and such blocks would silently do nothing.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _map_tensor_methods()
    # megatron-core decorates small fusions with torch.compile, which loads the compiler at import: 1.7 CPU seconds of
    # every (re)start for kernels that no CPU run uses.
    torch.compile = _uncompiled


def _stub_triton_module() -> None:
    # This module of megatron-core 0.19 imports triton at the top, and the package import reaches it even
    # for dense models. Its kernels need a GPU, so a module that fails on use loses nothing.
    if importlib.util.find_spec("triton") is not None:
        return
    stub = types.ModuleType(_PAGED_STASH)

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def needs_gpu(*args: object, **kwargs: object) -> None:
            raise RuntimeError(f"{_PAGED_STASH}.{name} needs triton and a GPU")

        return needs_gpu

    stub.__getattr__ = missing  # type: ignore[method-assign]
    sys.modules[_PAGED_STASH] = stub


def _map_device_functions() -> None:
    def current_device() -> torch.device:
        return _CPU

    current_device.relax_on_cpu = True  # type: ignore[attr-defined]
    cuda: Any = torch.cuda
    # Buffers and layers are allocated on `torch.cuda.current_device()`.
    cuda.current_device = current_device
    # Gradient buffers and the parameter all-gather wait for streams.
    cuda.Stream = OrderedStream
    cuda.current_stream = cuda.default_stream = lambda device=None: OrderedStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda device=None: None
    # The schedule asks whether a CUDA graph is being captured.
    cuda.is_current_stream_capturing = lambda: False
    # model_parallel_cuda_manual_seed() seeds and forks the device generator; here it is the CPU's.
    # torch.manual_seed() calls manual_seed_all() itself, which must not seed again.
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = lambda seed: None
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return wrapped


def _map_tensor_methods() -> None:
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    original_type = tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        # The optimizers sort parameters by comparing this name with "torch.cuda.FloatTensor" etc.
        if dtype is None:
            return original_type(self).replace("torch.", "torch.cuda.", 1)
        return original_type(self, dtype, **kwargs)

    tensor.type = type_


def _uncompiled(model: Any = None, **options: object) -> Any:
    return model if model is not None else lambda function: function
