"""Two faults of megatron-core 0.19's distributed optimizer that show only with torch's own Adam.

On GPUs Megatron uses the fused Adam of Transformer Engine or Apex, which keeps one step count per
parameter group and is not affected.
"""

from typing import Any

import torch


def install() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    unshare_step_after_load(DistributedOptimizer)
    _accept_state_without_step(DistributedOptimizer)


def unshare_step_after_load(optimizer_class: Any) -> None:
    # load_state_dict() hands every parameter the same `step` tensor. Adam increments it in place once
    # per parameter, so the bias correction of all of them would run away.
    load = optimizer_class.load_state_dict

    def load_state_dict(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    optimizer_class.load_state_dict = load_state_dict


def _accept_state_without_step(optimizer_class: Any) -> None:
    # Checkpoints store no per-parameter `step` (load_state_dict() restores it from the group), yet the
    # loader indexes it, and it writes into leaves that require gradients.
    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        targets = {"param": main_param, **self.optimizer.state[main_param]}
        with torch.no_grad():
            for name, value in tensors.items():
                if torch.is_tensor(value) and torch.is_tensor(targets.get(name)):
                    targets[name].copy_(value)

    optimizer_class._set_main_param_and_optimizer_states = set_states
