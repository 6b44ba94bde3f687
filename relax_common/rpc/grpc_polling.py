"""Which threads of a process look after gRPC's sockets.

Threads of gRPC's own do, by default, and hand every event on to the thread that waits for it. On a stream of megabyte
frames a fifth of all CPU time goes into waking each other (`benchmarks/queue_bench.py`, lane grpc). The thread that
waits can look itself, as it did in earlier releases. A release that does not know the setting says so in one line.
"""

import os

SETTING = "GRPC_EXPERIMENTS"
POLLED_BY_CALLERS = "-event_engine_client,-event_engine_listener"


def poll_where_it_waits() -> None:
    """For packages that move payload, before they import grpc, which reads its settings then. Keeps a user's own."""
    os.environ.setdefault(SETTING, POLLED_BY_CALLERS)
