"""Per-token estimators of KL(pi || ref)."""

from torch import Tensor

from relax_common.recipe.algorithm import Kl

_LOG_LIMIT = 20.0
_VALUE_LIMIT = 10.0


def kl_per_token(name: Kl, log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """d = log pi - log ref, clamped. "k3+" has the value of k3 (never negative) and the gradient of k2, which is the
    gradient of the KL itself; k3's own gradient is not."""
    d = (log_probs - reference_log_probs).clamp(-_LOG_LIMIT, _LOG_LIMIT)
    if name == "k1":
        return d
    if name == "abs":
        return d.abs()
    k2 = d.square() / 2
    if name == "k2":
        return k2
    k3 = ((-d).exp() + d - 1).clamp(-_VALUE_LIMIT, _VALUE_LIMIT)
    if name == "k3":
        return k3
    return k3.detach() + k2 - k2.detach()
