"""The Prometheus endpoint and the metrics that every daemon has. The registry is the only global state."""

from __future__ import annotations

from prometheus_client import Gauge, start_http_server

LOOP_LAG_SECONDS = Gauge("relax_event_loop_lag_seconds", "How late the event loop woke up last")
SERVES_RUN = Gauge("relax_serves_run", "1 where a daemon serves this run: joins its other metrics to it", ["run"])


def start_metrics_server(listen: str) -> int:
    """Serve /metrics; returns the bound port. Raises OSError where the port is taken."""
    host, _, port = listen.rpartition(":")
    try:
        server, _ = start_http_server(int(port), addr=host)
    except OSError as error:
        raise OSError(error.errno, f"cannot serve metrics on {listen}: {error.strerror}") from error
    return int(server.server_port)
