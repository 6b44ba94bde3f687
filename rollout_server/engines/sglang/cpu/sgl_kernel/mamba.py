"""State-space layers: their kernels exist on accelerators only."""

from sgl_kernel import refusing

causal_conv1d_fn_cpu = refusing("mamba.causal_conv1d_fn_cpu")
causal_conv1d_update_cpu = refusing("mamba.causal_conv1d_update_cpu")
chunk_gated_delta_rule_cpu = refusing("mamba.chunk_gated_delta_rule_cpu")
