"""A megatron-core GPT model of a Hugging Face shape, on layers that need no GPU library."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_common.recipe import Recipe
from trainer_server.megatron.attention import PackedCoreAttention
from trainer_server.megatron.parallel import Parallel
from trainer_server.model.families.family import Family
from trainer_server.model.hf_config import ModelShape
from trainer_server.model.layouts import padded_vocab_size
from trainer_server.model.mapping import NameMap
from trainer_server.model.value_head import ValueHead

_RECOMPUTE_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def dtype_of(recipe: Recipe) -> torch.dtype:
    """The dtype of the parameters."""
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    return dtype


class RmsNorm(torch.nn.RMSNorm):
    """Megatron's own fallback refuses sequence parallelism. All it needs is the mark on the weight by which
    the gradient is summed over the tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def transformer_config(
    shape: ModelShape, family: Family, parallel: Parallel, dtype: torch.dtype, recompute: bool
) -> Any:
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_size,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        qk_layernorm=family.head_norms,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor_parallel,
        expert_model_parallel_size=parallel.expert_parallel,
        # Positions are given per token, which lets RoPE run once per pack instead of once per row. With
        # the same position in all three sections this is plain RoPE.
        mrope_section=[shape.head_size // 2, 0, 0],
        use_cpu_initialization=not torch.cuda.is_available(),
        # Weights come from a folder, a version or a state. Also, on a GPU Megatron would draw them from a generator
        # that is only seeded when a run begins.
        perform_initialization=False,
        # Gradients stay sums until the step has closed; one division follows.
        calculate_per_token_loss=True,
        # Fusions need Transformer Engine or Apex.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **_expert_options(shape),
        **(_RECOMPUTE_LAYERS if recompute else {}),
    )


def _expert_options(shape: ModelShape) -> dict[str, Any]:
    if not shape.experts:
        return {}
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.ffn_size,
        # Weights of the chosen experts: softmax over their logits alone.
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
        # Only the policy's own loss trains the router; tokens are never dropped.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        # Grouped kernels and fused permutations need Transformer Engine.
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
    }


def build_model(names: NameMap, parallel: Parallel, dtype: torch.dtype, recompute: bool = False) -> tuple[Any, Any]:
    """(Megatron configuration, model); the parameters are uninitialised.

    The model computes in `dtype` throughout. Megatron's own wrapper is not needed: it would only convert the inputs,
    which are ids here, and the logits, which the loss converts itself. With `recompute` a layer keeps only its
    input."""
    shape, family = names.shape, names.family
    shape.check_layout(parallel.tensor_parallel, parallel.expert_parallel)
    config = transformer_config(shape, family, parallel, dtype, recompute)
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[_layer_spec(family, shape)] * shape.layers, layer_norm=RmsNorm
        ),
        vocab_size=padded_vocab_size(shape.vocab_size, parallel.tensor_parallel),
        max_sequence_length=shape.max_positions,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="mrope",
        rotary_percent=1.0,
        rotary_base=shape.rope_base,
    )
    if names.value_head:
        model.output_layer = ValueHead(shape.hidden_size, dtype)
    return config, model.to(torch.cuda.current_device())


def _layer_spec(family: Family, shape: ModelShape) -> Any:
    spec = get_gpt_layer_local_spec(
        num_experts=shape.experts or None,
        moe_grouped_gemm=False,
        qk_layernorm=family.head_norms,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if family.head_norms:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return spec
