"""Forks queue daemons from a process that has imported everything: a start costs tens of milliseconds, not a second.

One JSON object a line on standard input: {"argv": [...], "env": {...}, "log": path, "before": pid}; the answer is the
pid. The child is the daemon as its users start it, except that its modules were read before. A child that has ended
stays a zombie until the order that names it as `before`: its pid belongs to nobody else as long as someone asks for it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import relax_common.failpoints
import relax_queue.__main__


def become_daemon(order: dict) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, target)
    os.environ.update(order["env"])
    importlib.reload(relax_common.failpoints)  # the names armed for this process
    sys.argv = ["relax-queue", *order["argv"]]
    relax_queue.__main__.main()


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["before"]:
            os.waitpid(order["before"], 0)
        pid = os.fork()
        if pid == 0:
            become_daemon(order)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
