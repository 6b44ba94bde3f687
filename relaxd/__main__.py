"""`python -m relaxd` or `relaxd`: the controller."""

from __future__ import annotations

import sys

from relax_common.process.config import load_daemon_config
from relax_common.rpc.serving import run_daemon
from relaxd.daemon import RelaxdConfig, RelaxdDaemon


def main() -> None:
    config = load_daemon_config(RelaxdConfig, "relaxd")
    sys.exit(run_daemon(config, "relaxd", lambda: RelaxdDaemon(config)))


if __name__ == "__main__":
    main()
