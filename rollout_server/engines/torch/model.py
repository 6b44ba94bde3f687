"""A Hugging Face causal language model, as the embedded engine uses it."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from relax_common.failpoints import failpoint
from rollout_server.engines.contract import EngineError
from rollout_server.engines.torch.batch import Batch
from rollout_server.engines.torch.sampling import rollout_log_probs


@dataclass(frozen=True)
class LoadedModel:
    """The module with its true vocabulary; `cache_argument` is what this release of transformers calls the cache."""

    module: PreTrainedModel
    cache_argument: str
    vocab_size: int


def load_model(model_dir: Path, dtype: torch.dtype) -> LoadedModel:
    """Build the module of `dtype` from the folder's config, with random weights: every version comes from dcs."""
    if not (model_dir / "config.json").is_file():
        raise EngineError(f"{model_dir} has no config.json: name a Hugging Face model folder")
    config = AutoConfig.from_pretrained(model_dir)
    module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    module.train(False)
    module.requires_grad_(False)
    arguments = inspect.signature(module.forward).parameters
    return LoadedModel(
        module=module,
        cache_argument="cache" if "cache" in arguments else "past_key_values",
        vocab_size=config.vocab_size,
    )


def named_views(module: PreTrainedModel) -> dict[str, Tensor]:
    """Every parameter under its name in a Hugging Face folder. transformers keeps a layer's experts in one tensor; the
    folder has one tensor per expert."""
    views: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        experts, _, kind = name.rpartition(".")
        if not experts.endswith(".experts"):
            views[name] = parameter
            continue
        for index, expert in enumerate(parameter):
            parts = {"gate_proj": expert.chunk(2)[0], "up_proj": expert.chunk(2)[1]}
            for part, view in (parts if kind == "gate_up_proj" else {kind: expert}).items():
                views[f"{experts}.{index}.{part}.weight"] = view
    return views


def next_logits(model: LoadedModel, batch: Batch) -> Tensor:
    """Logits [rows, width] of the token after the batch's last column; the cache is made or extended."""
    positions = (batch.mask.cumsum(-1) - 1).clamp(min=0)
    whole_rows = batch.cache is None
    if batch.cache is None:
        batch.cache = DynamicCache()
    output = model.module(
        input_ids=batch.tokens if whole_rows else batch.tokens[:, -1:],
        attention_mask=batch.mask,
        position_ids=positions if whole_rows else positions[:, -1:],
        use_cache=True,
        logits_to_keep=1,
        **{model.cache_argument: batch.cache},
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def score_sequences(
    model: LoadedModel, sequences: Sequence[Sequence[int]], temperature: float
) -> list[npt.NDArray[np.float32]]:
    """Log-probs of all tokens but the first of each sequence, without cache, padded on the right."""
    width = max(len(sequence) for sequence in sequences)
    tokens = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    logits = model.module(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
    flat = logits.flatten(0, 1)
    log_probs = rollout_log_probs(flat, torch.full((len(flat),), temperature), model.vocab_size)
    chosen = log_probs.gather(1, tokens[:, 1:].reshape(-1, 1)).view(len(sequences), width - 1)
    return [chosen[row, : len(sequence) - 1].numpy() for row, sequence in enumerate(sequences)]


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
    """Overwrite every parameter; until it returns, the live weights are mixed."""
    parameters = named_views(module)
    half = len(parameters) // 2
    for index, (name, parameter) in enumerate(parameters.items()):
        if index == half:
            failpoint("rollout.mid_swap")
        parameter.copy_(tensors[name])
