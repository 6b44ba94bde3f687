"""The names that SGLang's CPU path imports from its kernel package, which has no wheel without CUDA.

Arithmetic runs in SGLang's own torch code (attention backend torch_native, sampling backend pytorch), so only the
bookkeeping of the token pool is needed here. Everything else belongs to features that are not used on a CPU:
importing the name must succeed, but calling it must raise an error.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor


def assign_req_to_token_pool_cpu(
    request_rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, row_stride: int
) -> None:
    """Write each request's new cache slots, which lie in `slots` one request after another, into its row of `table`.

    SGLang does it with a Triton kernel on a GPU. `row_stride` is for kernels that see flat memory.
    """
    del row_stride
    taken = 0
    for row, start, end in zip(request_rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        table[row, start:end] = slots[taken : taken + count]
        taken += count


def refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} exists on accelerators only: this feature does not run on a CPU")

    return refuse


# Cache moves of speculative decoding and of beam-like copies.
copy_all_layer_kv_cache_cpu = refusing("copy_all_layer_kv_cache_cpu")
# Speculative decoding.
assign_draft_cache_locs_contiguous_cpu = refusing("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = refusing("assign_extend_cache_locs_cpu")
build_draft_decode_metadata_cpu = refusing("build_draft_decode_metadata_cpu")
build_tree_kernel_efficient_cpu = refusing("build_tree_kernel_efficient_cpu")
fill_accept_out_cache_loc_cpu = refusing("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = refusing("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = refusing("rotate_input_ids_cpu")
verify_tree_greedy_cpu = refusing("verify_tree_greedy_cpu")
