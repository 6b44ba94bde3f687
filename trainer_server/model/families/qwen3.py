"""Qwen3, dense."""

from trainer_server.model.families.family import Family, dense_rules, read_decoder_shape
from trainer_server.model.hf_config import Config, ModelShape

ARCHITECTURE = "Qwen3ForCausalLM"


def read_shape(config: Config) -> ModelShape:
    return read_decoder_shape(config, ARCHITECTURE)


QWEN3 = Family(
    architecture=ARCHITECTURE,
    head_norms=True,
    qkv_bias=False,
    read_shape=read_shape,
    rules=dense_rules(head_norms=True, qkv_bias=False),
)
