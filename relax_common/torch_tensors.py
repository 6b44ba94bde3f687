"""The torch side of `relax_common.tensors`; only processes that compute import it."""

from __future__ import annotations

import torch

from relax_common.tensors import ELEMENT_TYPES, SAFETENSORS_NAMES, WholeTensor


def torch_dtype(safetensors_name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, ELEMENT_TYPES[safetensors_name].name)
    return dtype


def safetensors_name(dtype: torch.dtype) -> str:
    return SAFETENSORS_NAMES[str(dtype).removeprefix("torch.")]


def as_tensor(whole: WholeTensor) -> torch.Tensor:
    """The tensor in the same memory if that is writable, else in a copy: a tensor on read-only bytes is undefined
    behaviour in torch."""
    data = whole.data
    if isinstance(data, memoryview) and data.readonly:
        data = bytearray(data)
    return torch.frombuffer(data, dtype=torch_dtype(whole.dtype)).reshape(whole.shape)
