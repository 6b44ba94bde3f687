"""`python -m dcs` or `relax-dcs`: weights, the commit log and recovery snapshots."""

from __future__ import annotations

import sys

from dcs.daemon import DcsConfig, DcsDaemon
from relax_common.process.config import load_daemon_config
from relax_common.rpc.serving import run_daemon


def main() -> None:
    config = load_daemon_config(DcsConfig, "relax-dcs")
    sys.exit(run_daemon(config, "dcs", lambda: DcsDaemon(config)))


if __name__ == "__main__":
    main()
