"""The device of this process."""

import os

import torch


def claim_device() -> torch.device:
    """cuda:LOCAL_RANK where there is CUDA, made the current one; else the CPU. A process that was given one device sees
    no other and needs no LOCAL_RANK."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
