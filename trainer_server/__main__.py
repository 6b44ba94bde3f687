"""`python -m trainer_server` or `relax-trainer`: one rank of a trainable role."""

import os
import sys

from relax_common.process.config import load_daemon_config
from relax_common.rpc.serving import run_daemon
from trainer_server.config import TrainerConfig


def main() -> None:
    config = load_daemon_config(TrainerConfig, "relax-trainer")
    # Megatron takes seconds to import; a wrong flag is reported before that.
    from trainer_server.daemon import TrainerDaemon

    code = run_daemon(config, "trainer", lambda: TrainerDaemon(config))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the training thread may be stuck in a collective whose peers are gone.
    os._exit(code)


if __name__ == "__main__":
    main()
