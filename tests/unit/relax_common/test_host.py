"""What a daemon takes of its host: descriptors and ports."""

from __future__ import annotations

import resource
from pathlib import Path

from relax_common.process.host import keepable_port
from relax_common.rpc.serving import DESCRIPTORS, allow_descriptors


def test_a_daemon_may_have_as_many_descriptors_as_the_hard_limit_allows() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        allow_descriptors()
        found = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == DESCRIPTORS or found == limits[1] < DESCRIPTORS


def test_a_port_that_is_kept_lies_where_no_outgoing_connection_takes_it() -> None:
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {keepable_port() for _ in range(20)}
    assert all(10_000 <= port < first_outgoing for port in ports)
    assert len(ports) > 10
