"""Reads all labels of a run before it starts: `python -m rollout_server.rewards.labels SPEC`.

Labels come as a JSON list on standard input. Each line of the output is a JSON string: the first says that reading
begins, every other one why the next label cannot be read, "" if it can. Exit status 2: there is no such reward; 3: what
it needs is not installed on this host.
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


class LabelTimeout(BaseException):
    """Reading one label takes too long. A reader's own `except Exception` must not catch it."""


def main(spec: str) -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a user's module prints is not an answer
    try:
        readers = label_readers(spec)
    except UnknownReward as error:
        print(error, file=sys.stderr)
        return EXIT_NOT_INSTALLED if isinstance(error, NotInstalled) else EXIT_UNKNOWN_REWARD
    labels = json.load(sys.stdin)
    print(json.dumps("begun"), file=answers, flush=True)
    for label in labels:
        # At once, so that the caller knows in which label this process is stuck.
        print(json.dumps(fault_of(label, readers)), file=answers, flush=True)
    return 0


def fault_of(label: str, readers: Sequence[LabelReader]) -> str:
    """Why one of the readers cannot read the label; empty where all can. For the main thread: an alarm bounds it."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS_PER_LABEL)
    try:
        for read in readers:
            read(label)
    except (Exception, LabelTimeout) as error:  # noqa: BLE001 - a user's reader may raise anything, and that is the label's fault
        return (str(error) or repr(error)).splitlines()[0][:REASON_CHARACTERS]
    finally:
        signal.alarm(0)
    return ""


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise LabelTimeout(f"it takes more than {SECONDS_PER_LABEL} s to read")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
