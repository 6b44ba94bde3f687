"""Bringing a staged version into the live module."""

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from relax_common.failpoints import failpoint
from rollout_server.engines.contract import EngineError
from rollout_server.engines.torch.model import named_views


def check_weights(module: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Names and shapes must be exactly the module's; a tied parameter counts once."""
    parameters = named_views(module)
    missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    if missing or unknown:
        raise EngineError(f"the version's tensors are not the model's: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            raise EngineError(f"{name} is {tuple(tensors[name].shape)}, the model has {tuple(parameter.shape)}")


def copy_weights(module: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite every parameter; in between, the live weights are mixed."""
    parameters = named_views(module)
    half = len(parameters) // 2
    for index, (name, parameter) in enumerate(parameters.items()):
        if index == half:
            failpoint("rollout.mid_swap")
        parameter.copy_(tensors[name])
