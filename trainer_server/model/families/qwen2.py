"""Qwen2 and Qwen2.5, dense: queries, keys and values have a bias."""

from trainer_server.model.families.family import Family, dense_rules, read_decoder_shape
from trainer_server.model.hf_config import Config, ModelShape

ARCHITECTURE = "Qwen2ForCausalLM"


def read_shape(config: Config) -> ModelShape:
    return read_decoder_shape(config, ARCHITECTURE)


QWEN2 = Family(
    architecture=ARCHITECTURE,
    head_norms=False,
    qkv_bias=True,
    read_shape=read_shape,
    rules=dense_rules(head_norms=False, qkv_bias=True),
)
