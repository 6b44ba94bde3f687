"""Qwen3 with a mixture of experts in every layer."""

from dataclasses import replace

from trainer_server.model.families.family import Family, expert_rules, read_decoder_shape
from trainer_server.model.hf_config import Config, ModelError, ModelShape, required

ARCHITECTURE = "Qwen3MoeForCausalLM"


def read_shape(config: Config) -> ModelShape:
    if config.get("norm_topk_prob") is not True:
        raise ModelError(f"config.json: {ARCHITECTURE} is supported with norm_topk_prob = true only")
    experts = required(config, "num_experts" if "num_experts" in config else "num_local_experts", int)
    per_token = required(config, "num_experts_per_tok", int)
    if not 0 < per_token <= experts:
        raise ModelError(f"config.json: a token cannot pass {per_token} of {experts} experts")
    return replace(
        read_decoder_shape(config, ARCHITECTURE),
        ffn_size=required(config, "moe_intermediate_size", int),
        experts=experts,
        experts_per_token=per_token,
    )


QWEN3_MOE = Family(
    architecture=ARCHITECTURE,
    head_norms=True,
    qkv_bias=False,
    read_shape=read_shape,
    rules=expert_rules(head_norms=True, qkv_bias=False),
)
