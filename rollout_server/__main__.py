"""`python -m rollout_server` or `relax-rollout`: generates, scores and puts the groups of one run."""

import sys

from relax_common.process.config import load_daemon_config
from relax_common.rpc.serving import Daemon, run_daemon
from rollout_server.config import RolloutConfig


def main() -> None:
    config = load_daemon_config(RolloutConfig, "relax-rollout")

    def make() -> Daemon:
        # torch takes seconds to load, so it is imported only after the flags were checked.
        from rollout_server.daemon import RolloutDaemon

        return RolloutDaemon(config)

    sys.exit(run_daemon(config, "rollout", make))


if __name__ == "__main__":
    main()
