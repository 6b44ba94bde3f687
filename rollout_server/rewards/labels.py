"""Reads all labels of a run before it starts: `python -m rollout_server.rewards.labels SPEC`.

Labels come as a JSON list on standard input. The output is an object that maps each label that the reward cannot read
to the reason. Exit status 2: there is no such reward; 3: what it needs is not installed on this host.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from rollout_server.rewards.registry import NotInstalled, UnknownReward, label_readers

EXIT_UNKNOWN_REWARD, EXIT_NOT_INSTALLED = 2, 3
SECONDS_PER_LABEL = 5
REASON_CHARACTERS = 200
LabelReader = Callable[[str], object]


class LabelTimeout(Exception):
    """Reading one label takes too long."""


def main(spec: str) -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a user's module prints is not an answer
    try:
        readers = label_readers(spec)
    except UnknownReward as error:
        print(error, file=sys.stderr)
        return EXIT_NOT_INSTALLED if isinstance(error, NotInstalled) else EXIT_UNKNOWN_REWARD
    faults = {label: why for label in json.load(sys.stdin) if (why := fault_of(label, readers))}
    print(json.dumps(faults), file=answers, flush=True)
    return 0


def fault_of(label: str, readers: Sequence[LabelReader]) -> str:
    """Why one of the readers cannot read the label; empty where all can. For the main thread: an alarm bounds it."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS_PER_LABEL)
    try:
        for read in readers:
            read(label)
    except Exception as error:  # noqa: BLE001 - a user's reader may raise anything, and that is the label's fault
        return (str(error) or repr(error)).splitlines()[0][:REASON_CHARACTERS]
    finally:
        signal.alarm(0)
    return ""


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise LabelTimeout(f"it takes more than {SECONDS_PER_LABEL} s to read")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
