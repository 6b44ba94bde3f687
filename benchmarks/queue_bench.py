"""The sample bus, measured: against TransferQueue, its wake-up, and with a thousand clients.

python benchmarks/queue_bench.py --peer transferqueue --json figures.json
python benchmarks/queue_bench.py --wakeup
python benchmarks/queue_bench.py --clients 1000 --rows 100000
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from rich.console import Console

from benchmarks.bus.cases import CASES
from benchmarks.bus.compare import compare
from benchmarks.bus.report import table
from benchmarks.bus.scale import many_clients, show, wake_up


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=["transferqueue"], help="measure it in turn with ours")
    parser.add_argument("--peer-env", type=Path, default=Path.home() / ".cache/relax/transferqueue", metavar="DIR",
                        help="its environment; made where it does not exist")  # fmt: skip
    parser.add_argument("--cases", default=",".join(c.name for c in CASES), help="some of i,ii,iii,iv,single")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--wakeup", action="store_true", help="time from a put to a reader that waits for it")
    parser.add_argument("--clients", type=int, default=0, metavar="N", help="clients connected at once")
    parser.add_argument("--rows", type=int, default=100_000, metavar="N", help="live rows beside --clients")
    return parser.parse_args()


def main() -> None:
    options, console = _options(), Console(width=180)
    result: list[dict[str, Any]]
    if options.wakeup or options.clients:
        result = [wake_up()] if options.wakeup else [many_clients(options.clients, options.rows)]
        show(console, result[0])
    else:
        chosen = [c for c in CASES if c.name in options.cases.split(",")]
        result = compare(chosen, options.repetitions, options.peer_env if options.peer else None)
        console.print(table(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
