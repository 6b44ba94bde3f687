"""The engine's process and everything it starts: one group, watched by a pidfd, killed as a whole."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout_server.engines.contract import EngineError

END_SECONDS = 20.0


class EngineProcess:
    """Started on the loop's own thread: the kernel kills the process when the thread that started it ends."""

    def __init__(self, argv: Sequence[str], control_fd: int, log_path: Path, env: Mapping[str, str]) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # A file, never a pipe: SGLang's helpers hold on to its output after it has ended.
        with log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                argv,
                pass_fds=[control_fd],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=dict(env),
            )
        self._log_path = log_path
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(self._popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._note_end)

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def wait(self) -> int:
        await self._ended.wait()
        return self._popen.wait()

    def kill(self) -> None:
        """SIGKILL to the group; it reaches stopped processes too."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    async def end(self) -> None:
        self.kill()
        try:
            await asyncio.wait_for(self._ended.wait(), END_SECONDS)
        except TimeoutError as error:
            raise EngineError(f"the engine's process {self.pid} does not end") from error

    def last_words(self) -> str:
        """The last line of its log that is not empty."""
        try:
            lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return next((line for line in reversed(lines) if line.strip() and not line.startswith(" ")), "").strip()

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._popen.wait()
        # The kernel ends the processes it had started; one that was just being started may be left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._ended.set()
