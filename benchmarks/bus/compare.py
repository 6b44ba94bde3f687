"""Our transports and a peer in turn: one repetition of each, several times, so that all see the same machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bus.broker import QueueDaemon
from benchmarks.bus.cases import Case
from benchmarks.bus.ours import Bus, memory_ratio
from benchmarks.bus.peer import VERSION, TransferQueue
from benchmarks.bus.report import figures, ratios
from benchmarks.bus.result import Repetition
from benchmarks.peer_environment import environment

PEER = "transferqueue"
TRANSPORTS = ("shm", "grpc")


def compare(cases: Sequence[Case], repetitions: int, peer_folder: Path | None) -> list[dict[str, Any]]:
    """One row of figures for each case and system."""
    peer = TransferQueue(environment(peer_folder, [f"TransferQueue=={VERSION}"])) if peer_folder else None
    try:
        memory = {(c.name, transport): memory_ratio(c, transport, _progress) for c in cases for transport in TRANSPORTS}
        if peer is not None:
            for case in cases:
                _progress(f"memory of case {case.name}, {PEER}")
                memory[case.name, PEER] = peer.memory_ratio(case)
        measured = _in_turn(cases, repetitions, peer)
    finally:
        if peer is not None:
            peer.stop()
    rows = []
    for case in cases:
        for system in [s for c, s in measured if c == case.name]:
            mine = measured[case.name, system]
            row = figures(case, system, mine, memory.get((case.name, system)))
            if system != PEER and (case.name, PEER) in measured:
                row |= ratios(mine, measured[case.name, PEER])
            rows.append(row)
    return rows


def _in_turn(
    cases: Sequence[Case], repetitions: int, peer: TransferQueue | None
) -> dict[tuple[str, str], list[Repetition]]:
    measured: dict[tuple[str, str], list[Repetition]] = {}
    with QueueDaemon(arena_bytes=2 << 30) as daemon:
        transports = {transport: Bus(daemon, transport) for transport in TRANSPORTS}
        for case in cases:
            for i in range(repetitions):
                _progress(f"case {case.name} ({case.title}), repetition {i + 1} of {repetitions}")
                # Buffers are touched for the first time in transfers that do not count: ours are freed step by step.
                for transport, bus in transports.items():
                    measured.setdefault((case.name, transport), []).append(bus.repetition(case, 3 * case.per_step))
                if peer is not None:
                    measured.setdefault((case.name, PEER), []).append(peer.repetition(case, 2))
        for bus in transports.values():
            bus.stop()
    return measured


def _progress(words: str) -> None:
    print(f"queue_bench: {words}", file=sys.stderr)
