"""Bringing a staged version into the live module, and proving that it arrived."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relax_common.failpoints import failpoint
from rollout_server.engines.base import EngineError, Probe
from rollout_server.engines.model import LoadedModel, score_sequences


def check_weights(module: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Names and shapes must be exactly the module's; a tied parameter counts once."""
    parameters = dict(module.named_parameters())
    missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    if missing or unknown:
        raise EngineError(f"the version's tensors are not the model's: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            raise EngineError(f"{name} is {tuple(tensors[name].shape)}, the model has {tuple(parameter.shape)}")


def copy_weights(module: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite every parameter; in between, the live weights are mixed."""
    parameters = dict(module.named_parameters())
    half = len(parameters) // 2
    for index, (name, parameter) in enumerate(parameters.items()):
        if index == half:
            failpoint("rollout.mid_swap")
        parameter.copy_(tensors[name])


def probe_difference(model: LoadedModel, probe: Probe, version: int) -> float:
    """The largest |log-prob - publisher's|; beyond the tolerance these are not the weights that were published."""
    scored = score_sequences(model, probe.sequences, probe.temperature)
    differences = [
        (torch.from_numpy(ours) - torch.tensor(theirs)).abs().max().item()
        for ours, theirs in zip(scored, probe.log_probs, strict=True)
        if len(ours)
    ]
    largest = max(differences, default=0.0)
    if not largest <= probe.tolerance:
        raise EngineError(f"version {version}: probe log-probs differ by {largest:.2e}, allowed {probe.tolerance:.2e}")
    return largest
