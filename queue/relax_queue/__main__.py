"""`python -m relax_queue` or `relax-queue`: the sample bus."""

import sys

from relax_common.process.config import load_daemon_config
from relax_common.rpc.serving import run_daemon
from relax_queue.broker.daemon import QueueConfig, QueueDaemon


def main() -> None:
    config = load_daemon_config(QueueConfig, "relax-queue")
    sys.exit(run_daemon(config, "queue", lambda: QueueDaemon(config)))


if __name__ == "__main__":
    main()
