"""`python -m timed_work --seconds N ...` plays a daemon in launcher tests: it ends after N s, or on SIGTERM."""

from __future__ import annotations

import signal
import sys
import time


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(float(sys.argv[sys.argv.index("--seconds") + 1]))


if __name__ == "__main__":
    main()
