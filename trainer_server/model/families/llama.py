"""Llama, and models with the same architecture (SmolLM2)."""

from trainer_server.model.families.family import Family, dense_rules, read_decoder_shape
from trainer_server.model.hf_config import Config, ModelShape

ARCHITECTURE = "LlamaForCausalLM"


def read_shape(config: Config) -> ModelShape:
    return read_decoder_shape(config, ARCHITECTURE)


LLAMA = Family(
    architecture=ARCHITECTURE,
    head_norms=False,
    qkv_bias=False,
    read_shape=read_shape,
    rules=dense_rules(head_norms=False, qkv_bias=False),
)
