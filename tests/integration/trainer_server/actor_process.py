"""One actor rank without relaxd: the assignment comes from the command line."""

import argparse
import os
from pathlib import Path

from relax_common.process.telemetry import configure_logging
from relax_common.recipe import load_recipe
from relax_common.rpc.registration import Granted, Peers
from trainer_server.config import TrainerConfig
from trainer_server.daemon import train_role
from trainer_server.status import RoleStatus


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("rank", "world-size", "term"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("store", "queue", "dcs", "controller", "run"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("recipe", "run-dir"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    configure_logging("info", "actor", f"actor-{args.rank}")
    config = TrainerConfig(
        rank=args.rank,
        world_size=args.world_size,
        store=args.store,
        controller=args.controller,
        collective_timeout_seconds=30.0,
    )
    granted = Granted(
        term=args.term,
        run=args.run,
        recipe=load_recipe(args.recipe),
        run_dir=args.run_dir,
        peers=Peers(args.queue, args.dcs, "", {}),
        ttl_seconds=10.0,
    )
    return train_role(config, granted, RoleStatus(run=args.run, term=args.term))


if __name__ == "__main__":
    os._exit(main())
