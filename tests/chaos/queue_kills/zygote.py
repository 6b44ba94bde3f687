"""Forks queue daemons from a process that has imported everything: a start costs tens of milliseconds, not a second.

One JSON object a line on standard input: {"argv": [...], "env": {...}, "log": path}; the answer is the pid. The child
is the daemon as its users start it, except that its modules were read before.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys

import relax_common.failpoints
import relax_queue.__main__


def become_daemon(order: dict) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, target)
    os.environ.update(order["env"])
    importlib.reload(relax_common.failpoints)  # the names armed for this process
    sys.argv = ["relax-queue", *order["argv"]]
    relax_queue.__main__.main()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become_daemon(json.loads(line))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
