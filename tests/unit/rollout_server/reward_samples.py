"""Rewards that misbehave, for the pool's tests."""

import os
import subprocess
import sys
import time

from rollout_server.rewards.outcome import Reward, RewardItem


def obey(item: RewardItem) -> object:
    """Does what the response tells it to."""
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
        case "write to every descriptor":
            _write_everywhere(b"no answer\n")
        case "forge an answer to every descriptor":
            _write_everywhere(b'["0", 0, 1.0, {}, ""]\n')
        case "answer without an end":
            _write_everywhere(b"x" * (1 << 21))
        case "read the standard input":
            return float(len(subprocess.run(["cat"], capture_output=True, check=False, timeout=5).stdout))
        case "descriptors of a child":
            listed = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True, check=False).stdout.split()
            return float(len(listed))
        case text if text.startswith("leave an orphan in "):
            _leave_an_orphan(text.removeprefix("leave an orphan in "))
            time.sleep(3600)
        case text if text.startswith("reward "):
            return float(text.removeprefix("reward "))
        case "many digits":
            return 10**400
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


def _write_everywhere(content: bytes) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:
            try:
                os.write(descriptor, content)
            except OSError:
                continue


def _leave_an_orphan(path: str) -> None:
    """A grandchild in a session of its own, whose parent has ended: it writes its process id and stays."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(path, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(3600)
        os._exit(0)
    os.wait()
