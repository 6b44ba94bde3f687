"""What the daemons that serve many runs (queue, dcs) do beside serving: register and beat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from relax.common.v1 import common_pb2
from relax_common.process.config import DaemonConfig
from relax_common.rpc.identity import make_identity
from relax_common.rpc.registration import Registration


async def run_support_daemon(
    config: DaemonConfig,
    role: common_pb2.Role,
    service: str,
    address: str,
    metrics_address: str,
    stop: asyncio.Event,
    waits_for: Callable[[], str] = lambda: "",
) -> int:
    """Until `stop` is set, by a drain or by relaxd's word; without a controller just wait. `waits_for` is what the
    daemon waits for, as its heartbeats tell."""
    if not config.controller:
        await stop.wait()
        return 0
    identity = make_identity(role, config.instance or service, config.incarnation)
    registration = Registration(config.controller, identity)
    await registration.register(address, metrics_address)
    beats = asyncio.create_task(registration.heartbeats(waits_for, stop.set))
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({beats, stopped}, return_when=asyncio.FIRST_COMPLETED)
    beats.cancel()
    for task in done:
        task.result()
    return 0
