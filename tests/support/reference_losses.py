"""The losses once more, written from their definitions sample by sample in float64, to compare with.

A sample is a dict of float64 tensors [its trained tokens]: pi (requires grad), old, beta, ref, A.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Sample = Mapping[str, Tensor]
Keys = Mapping[str, Any]


def _r(s: Sample, keys: Keys) -> Tensor:
    anchor = s["beta"] if keys["old_policy"] == "rollout" else s["old"]
    return torch.clip(s["pi"] - anchor, -20, 20)


def _clip(x: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(torch.maximum(x, torch.tensor(low).double()), torch.tensor(high).double())


def _ppo(s: Sample, keys: Keys) -> Tensor:
    r, a = _r(s, keys).exp(), s["A"]
    loss = -torch.minimum(a * r, a * _clip(r, 1 - keys["eps_low"], 1 + keys["eps_high"]))
    if keys.get("dual_clip"):
        loss = torch.where(a < 0, torch.minimum(loss, -a * keys["dual_clip"]), loss)
    return loss


def _gspo(s: Sample, keys: Keys) -> Tensor:
    d, a = _r(s, keys), s["A"]
    exponent = d.mean().detach() + s["pi"] - s["pi"].detach()
    ratio = torch.clip(exponent, max=10).exp()
    return torch.maximum(-a * ratio, -a * _clip(ratio, 1 - keys["eps_low"], 1 + keys["eps_high"]))


def _gmpo(s: Sample, keys: Keys) -> Tensor:
    d, a = _r(s, keys), s["A"]
    bounded = [
        min(float(x), keys["eps_high"]) if y > 0 and x > keys["eps_high"]
        else max(float(x), -keys["eps_low"]) if y < 0 and x < -keys["eps_low"]
        else x
        for x, y in zip(d, a.tolist(), strict=True)
    ]  # fmt: skip
    mean = sum(bounded) / len(bounded)
    return -a * (mean if isinstance(mean, Tensor) else torch.tensor(mean).double()).exp()


def _sapo(s: Sample, keys: Keys) -> Tensor:
    r, a = _r(s, keys).exp(), s["A"]
    tau = torch.tensor([keys["tau_positive"] if x > 0 else keys["tau_negative"] for x in a.tolist()]).double()
    return -a * 4 / tau / (1 + (-tau * (r - 1)).exp())


def _cispo(s: Sample, keys: Keys) -> Tensor:
    weight = _clip(_r(s, keys).exp().detach(), 1 - keys["eps_low"], 1 + keys["eps_high"])
    return -weight * s["A"] * s["pi"]


def _dppo(s: Sample, keys: Keys) -> Tensor:
    anchor = s["beta"] if keys["old_policy"] == "rollout" else s["old"]
    moved = s["pi"].exp() - anchor.exp()
    out = ((s["A"] > 0) & (moved > keys["delta_high"])) | ((s["A"] < 0) & (moved < -keys["delta_low"]))
    return torch.where(out, torch.zeros_like(moved), -s["A"] * _r(s, keys).exp())


def _opsm(s: Sample, keys: Keys) -> Tensor:
    away = (-_r(s, keys)).mean() > keys["opsm_delta"]
    return torch.where(away & (s["A"] < 0), torch.zeros_like(s["A"]), _ppo(s, keys))


LOSSES: dict[str, Callable[[Sample, Keys], Tensor]] = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "maxrl", "gdpo", "decoupled_ppo"), _ppo),
    **dict.fromkeys(("reinforce_pp", "reinforce_pp_baseline"), _ppo),
    "gspo": _gspo,
    "gmpo": _gmpo,
    "sapo": _sapo,
    "cispo": _cispo,
    "dppo_tv": _dppo,
    "opsm": _opsm,
    "rloo": lambda s, keys: -s["A"] * s["pi"],
}


def _kl(name: str, d: Tensor) -> Tensor:
    d = torch.clip(d, -20, 20)
    k2 = d * d / 2
    k3 = torch.clip((-d).exp() + d - 1, -10, 10)
    return {"k1": d, "abs": d.abs(), "k2": k2, "k3": k3, "k3+": k3.detach() + k2 - k2.detach()}[name]


def _weights(s: Sample, keys: Keys) -> Tensor:
    log_rho = torch.clip(s["old"] - s["beta"], -20, 20).detach()
    level = keys["correction_level"]
    if level == "sequence":
        level_rho = torch.clip(log_rho.sum(), -20, 20).expand(len(log_rho)).exp()
    else:
        level_rho = (log_rho.mean().expand(len(log_rho)) if level == "geometric" else log_rho).exp()
    inside = (level_rho >= keys["correction_low"]) & (level_rho <= keys["correction_high"])
    weight = {
        "none": torch.ones_like(level_rho),
        "tis": torch.minimum(level_rho, torch.tensor(keys["correction_high"]).double()),
        "icepop": torch.where(inside, level_rho, torch.zeros_like(level_rho)),
    }[keys["correction"]]
    return weight if _accepted(log_rho, keys) else torch.zeros_like(weight)


def _accepted(log_rho: Tensor, keys: Keys) -> bool:
    if keys["rejection"] == "none":
        return True

    def k(x: float) -> float:
        return {"k1": x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[keys["rejection"]]

    values = [k(x) for x in log_rho.tolist()]
    most = k(math.log(keys["rejection_high"]))
    least = math.log(keys["rejection_low"]) if keys["rejection_low"] else -math.inf
    level = keys["rejection_level"]
    seen = values if level == "max" else [sum(values) / (len(values) if level == "mean" else 1)]
    return all(least <= value <= most for value in seen)


def total_loss(samples: Sequence[Sample], keys: Keys) -> Tensor:
    """The aggregated loss of samples with at least one trained token."""
    sums, means = [], []
    for s in samples:
        loss = LOSSES[keys["name"]](s, keys)
        if keys["correction"] != "none" or keys["rejection"] != "none":
            loss = loss * _weights(s, keys)
        if keys["kl_loss_coef"]:
            kl = _kl(keys["kl"], s["pi"] - s["ref"])
            loss = loss + keys["kl_loss_coef"] * (kl * _r(s, keys).exp() if keys["kl_unbiased"] else kl)
        sums.append(loss.sum())
        means.append(loss.mean())
    tokens = sum(len(s["pi"]) for s in samples)
    if not samples:
        return torch.zeros(()).double()
    return {
        "token_mean": lambda: sum(sums) / tokens,
        "token_sum": lambda: sum(sums),
        "seq_mean_token_sum": lambda: sum(sums) / len(samples),
        "seq_mean_token_sum_norm": lambda: sum(sums) / len(samples) / keys["aggregation_constant"],
        "seq_mean_token_mean": lambda: sum(means) / len(samples),
    }[keys["aggregation"]]()
