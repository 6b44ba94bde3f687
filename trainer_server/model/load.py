"""Loading a Hugging Face folder into a rank's Megatron model: validate everything, then write."""

from pathlib import Path

import torch

from relax_common.errors import InvalidInput
from relax_common.storage.model_folder import check_tied
from trainer_server.model.families import family_of
from trainer_server.model.hf_config import ModelError, architecture_of, read_config
from trainer_server.model.layouts import Place
from trainer_server.model.mapping import NameMap
from trainer_server.model.safetensors_folder import open_folder


def read_name_map(folder: Path) -> NameMap:
    """Family and sizes of the checkpoint in `folder`; ModelError where it is not supported."""
    config = read_config(folder)
    family = family_of(architecture_of(config))
    return NameMap(family, family.read_shape(config))


def load_weights(folder: Path, names: NameMap, module: torch.nn.Module, place: Place) -> None:
    weights = open_folder(folder)
    # A tied model's file may repeat the embedding as its output layer.
    ignored = frozenset({"lm_head.weight"}) if names.shape.tied_embeddings else frozenset()
    weights.check(names.hf_shapes(), ignored)
    if ignored:
        try:
            check_tied(folder)
        except InvalidInput as error:
            raise ModelError(error.message) from error
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()  # what no slice covers is vocabulary padding
    for entry in names.slices(module, place):
        entry.fill(weights.read(entry.hf_name, entry.piece))
