"""Rewards that misbehave, for the pool's tests."""

import os
import subprocess
import sys
import time

from rollout_server.rewards.outcome import Reward, RewardItem


def obey(item: RewardItem) -> object:
    """Does what the response says."""
    match item.response:
        case "hang":
            time.sleep(3600)
        case "hang with a child":
            subprocess.run(["sleep", "3600"], check=False)
        case "slow":
            time.sleep(1.0)
        case "raise":
            raise KeyError("missing thing")
        case "exit":
            os._exit(7)
        case "sys.exit":
            sys.exit(3)
        case "none":
            return None
        case "print":
            print("noise on stdout")
        case "torch?":
            return float("torch" in sys.modules)
        case "pid":
            return float(os.getpid())
        case "parts":
            return Reward(1.0, {"format": 0.5})
    return 1.0
