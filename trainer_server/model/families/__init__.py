"""The supported model families."""

from trainer_server.model.families.family import Family
from trainer_server.model.families.llama import LLAMA
from trainer_server.model.families.qwen2 import QWEN2
from trainer_server.model.families.qwen3 import QWEN3
from trainer_server.model.families.qwen3_moe import QWEN3_MOE
from trainer_server.model.hf_config import ModelError

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE)


def family_of(architecture: str) -> Family:
    for family in FAMILIES:
        if family.architecture == architecture:
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ModelError(f"architecture {architecture} is not supported; supported: {known}")
