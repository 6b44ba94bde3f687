"""Logs and metrics: one JSON object per line on stderr, and the Prometheus endpoint with the metrics of every daemon.

The registry of metrics is the only global state.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog
from prometheus_client import Gauge, start_http_server


class _StandardError:
    """Writes to whatever standard error is at the moment of writing. If the disk is full the line is lost: a daemon
    must not end because it cannot log."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


def configure_logging(level: str, service: str, instance: str) -> None:
    """JSON lines with ts, level, event, service, instance and whatever is bound later (run, term)."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _StandardError())),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, instance=instance)


def get_logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger()
    return logger


LOOP_LAG_SECONDS = Gauge("relax_event_loop_lag_seconds", "How late the event loop's last wake-up was")
SERVES_RUN = Gauge("relax_serves_run", "1 where a daemon serves this run: joins its other metrics to it", ["run"])


def start_metrics_server(listen: str) -> int:
    """Serve /metrics; returns the bound port. Raises OSError where the port is taken."""
    host, _, port = listen.rpartition(":")
    try:
        server, _ = start_http_server(int(port), addr=host)
    except OSError as error:
        raise OSError(error.errno, f"cannot serve metrics on {listen}: {error.strerror}") from error
    return int(server.server_port)
