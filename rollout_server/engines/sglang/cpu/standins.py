"""Put in place before SGLang is imported, in each of its processes; does nothing where CUDA is available.

| what is missing on a CPU | what stands in |
|---|---|
| `sgl_kernel` has no CPU wheel | the package beside this file, first on sys.path |
| torchvision's wheel is built for CUDA: its library does not load, its Python part wants two schemas | the schemas |
| page-locked memory does not exist | ordinary memory |
| CUDA, which a fork would break | helpers are forked with all imports done, which halves the start |
| torch's softmax adds up a row one by one: over 50,000 tokens log-probs are 1e-5 too large | sums in pairs |
"""

import functools
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_FACTORIES = ("arange", "empty", "empty_like", "empty_strided", "full", "ones", "tensor", "zeros", "zeros_like")
_TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def install() -> bool:
    """Returns True if stand-ins were needed."""
    if torch.cuda.is_available():
        return False
    # SGLang looks at this to choose its CPU path, also in the processes it starts.
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.path.insert(0, str(Path(__file__).parent))
    _declare_torchvision_operators()
    _unpin_memory()
    _fork_helpers()
    torch.softmax = _exact_over_vocabularies(torch.softmax, _softmax)
    functional.log_softmax = _exact_over_vocabularies(functional.log_softmax, _log_softmax)
    return True


@functools.cache
def _declare_torchvision_operators() -> torch.library.Library:
    """The cache keeps the library alive: when it is collected, its schemas go with it."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _TORCHVISION_SCHEMAS:
        library.define(schema)
    return library


def _replace(owner: object, name: str, stand_in: object) -> None:
    setattr(owner, name, stand_in)


def _unpin_memory() -> None:
    for name in _FACTORIES:
        _replace(torch, name, _without_pinning(getattr(torch, name)))
    _replace(torch.Tensor, "pin_memory", lambda self, *args, **kwargs: self)


def _fork_helpers() -> None:
    choose = multiprocessing.set_start_method

    def fork(method: str | None, force: bool = False) -> None:
        """SGLang asks for "spawn"."""
        choose("fork", force=True)

    _replace(multiprocessing, "set_start_method", fork)


def _softmax(logits: Tensor) -> Tensor:
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    return weights.div_(weights.sum(-1, keepdim=True))


def _log_softmax(logits: Tensor) -> Tensor:
    return logits - logits.logsumexp(-1, keepdim=True)


def _exact_over_vocabularies(
    original: Callable[..., Tensor], exact: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    """Replaces the two calls that SGLang's sampler and its scoring of prompts make; all others go to torch."""

    @functools.wraps(original)
    def call(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not args and kwargs == {"dim": -1} and logits.dtype is torch.float32:
            return exact(logits)
        return original(logits, *args, **kwargs)

    return call


def _without_pinning(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make
