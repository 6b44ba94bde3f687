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
from trainer_server.model.value_head import FRESH, OUTPUT_LAYER


def read_name_map(folder: Path) -> NameMap:
    """Family and sizes of the checkpoint in `folder`; ModelError where it is not supported."""
    config = read_config(folder)
    family = family_of(architecture_of(config))
    return NameMap(family, family.read_shape(config))


def load_weights(folder: Path, names: NameMap, module: torch.nn.Module, place: Place) -> None:
    """What a value head's folder lacks because it is a language model's starts as zeros."""
    weights = open_folder(folder)
    # A tied model's file may repeat the embedding as its output layer, and a value head takes the place of one.
    ignored = frozenset({OUTPUT_LAYER}) if names.shape.tied_embeddings or names.value_head else frozenset()
    fresh = FRESH - set(weights.files) if names.value_head else frozenset()
    weights.check({name: shape for name, shape in names.hf_shapes().items() if name not in fresh}, ignored)
    if names.shape.tied_embeddings:
        try:
            check_tied(folder)
        except InvalidInput as error:
            raise ModelError(error.message) from error
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()  # what no slice covers is vocabulary padding
    for entry in names.slices(module, place):
        if entry.hf_name not in fresh:
            entry.fill(weights.read(entry.hf_name, entry.piece))
