"""SGLang in its own process, which this server starts, watches and kills."""

import asyncio
import json
import os
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from relax_common.json_types import JsonMapping, JsonObject
from relax_common.storage.sealed_memory import SealedMemory, sealed
from relax_common.versions import PackedVersion
from rollout_server.engines.contract import EngineError, EngineUnusable
from rollout_server.engines.sglang.backend import BackendLost, SampleCall
from rollout_server.engines.sglang.connection import Connection
from rollout_server.engines.sglang.frames import Buffer
from rollout_server.engines.sglang.process import EngineProcess
from rollout_server.engines.sglang.sampling import SampleOutput, from_frame

SUPPORTED_RELEASE = "0.5.23"
START_SECONDS = 600.0
PING_SECONDS = 1.0
CHILD = Path(__file__).parent / "child" / "main.py"


@dataclass(frozen=True)
class ManagedSettings:
    """`options` are arguments of sglang.Engine beyond ours; `kv_tokens` bounds the cache where there is no GPU."""

    model_dir: Path
    architecture: str
    dtype: str
    seed: int
    python: str
    log_path: Path
    samples_in_flight_max: int
    kv_tokens: int
    exact_versions: bool
    """Ensures that a token counts for the version that sampled it even if requests keep their cache across a swap:
    SGLang then must not overlap a step with the bookkeeping of the step before."""
    silence_seconds: float
    """An engine that does not answer for this long is killed and started again."""
    options: JsonMapping = field(default_factory=dict)


class ManagedBackend:
    """See `Backend`. The process has its own process group, so that nothing of it survives a kill."""

    def __init__(self, settings: ManagedSettings) -> None:
        self._settings = settings
        self._process: EngineProcess | None = None
        self._connection: Connection | None = None
        self._reading: asyncio.Task[None] | None = None
        self._discarded = ""

    async def start(self, incarnation: int) -> str:
        await self.close()
        self._discarded = ""
        ours, theirs = socket.socketpair()
        token = uuid.uuid4().hex
        try:
            process = self._spawn(theirs.fileno(), token, incarnation)
        except OSError as error:
            ours.close()
            raise EngineUnusable(f"rollout.engine_python = {self._settings.python}: {error.strerror}") from error
        finally:
            theirs.close()
        self._process, self._connection = process, await Connection.over(ours)
        hello = await self._hello(process, self._connection)
        self._check_identity(hello, token)
        self._reading = asyncio.create_task(self._connection.read_for_ever())
        return f"sglang {hello['sglang']} on {hello['device']}, pid {process.pid}"

    async def lost(self) -> str:
        """The engine is lost when its process ends, when it is silent, or when a swap breaks."""
        process, connection = self._started()
        ended, silent = asyncio.create_task(process.wait()), asyncio.create_task(self._silence(connection))
        await asyncio.wait({ended, silent}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            why = f"it has not answered for {self._settings.silence_seconds:.0f} s"
        elif self._discarded:
            why = self._discarded
        else:
            why = f"its process ended with {ended.result()}: {process.last_words()}"
        ended.cancel()
        silent.cancel()
        connection.fail(why)
        await self.close()
        return why

    async def sample(self, call: SampleCall) -> SampleOutput:
        header = {
            "call": "sample",
            "rid": call.rid,
            "temperature": call.temperature,
            "max_new_tokens": call.max_new_tokens,
            "stop_token_ids": list(call.stop_token_ids),
            "salt": call.salt,
        }
        answer, payload = await self._call(header, np.array(call.prompt_ids, np.int32).tobytes())
        return from_frame(answer, payload)

    async def abort(self, rids: Sequence[str]) -> None:
        await self._call({"call": "abort", "rids": list(rids)})

    async def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        _, payload = await self._call({"call": "score"}, np.array(token_ids, np.int32).tobytes())
        return np.frombuffer(payload, np.float32)

    async def stage(self, version: PackedVersion, tensors: Mapping[str, Tensor]) -> None:
        memory, entries = await asyncio.to_thread(_shared, tensors)
        await self._call({"call": "stage", "place": list(memory.place()), "tensors": entries})

    async def pause(self, mode: str) -> None:
        await self._call({"call": "pause", "mode": mode})

    async def load(self, version: PackedVersion, *, flush: bool) -> None:
        await self._call({"call": "load", "version": str(version), "flush": flush})

    async def resume(self) -> None:
        await self._call({"call": "resume"})

    async def discard(self, why: str) -> None:
        if self._connection is not None and not self._connection.lost:
            self._discarded = why
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """Kill what runs and wait for its end."""
        if self._connection is not None:
            self._connection.fail("it was stopped")
        if self._reading is not None:
            self._reading.cancel()
        process, self._process = self._process, None
        if process is not None:
            await process.end()

    def _spawn(self, control_fd: int, token: str, incarnation: int) -> EngineProcess:
        settings = {
            "control_fd": control_fd,
            "parent_pid": os.getpid(),
            "token": token,
            "cpu_kv_tokens": self._settings.kv_tokens,
            "engine": self._arguments(incarnation),
        }
        # This interpreter's path must not be used by the engine's interpreter.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return EngineProcess(
            [self._settings.python or sys.executable, "-P", str(CHILD), json.dumps(settings)],
            control_fd,
            self._settings.log_path,
            {**environment, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )

    def _arguments(self, incarnation: int) -> JsonObject:
        given = self._settings
        return {
            "load_format": "dummy",  # every version comes from dcs
            "log_level": "warning",
            "max_running_requests": given.samples_in_flight_max,
            **given.options,
            **({"disable_overlap_schedule": True} if given.exact_versions else {}),
            "model_path": str(given.model_dir),
            "dtype": given.dtype,
            "skip_tokenizer_init": True,  # ids in, ids out
            # Another incarnation must not draw the same samples; SGLang takes 32 bits.
            "random_seed": (given.seed + incarnation) % (1 << 31),
        }

    async def _hello(self, process: EngineProcess, connection: Connection) -> JsonObject:
        try:
            return await asyncio.wait_for(connection.hello(), START_SECONDS)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            code = await process.wait()
            raise EngineError(
                f"the engine's process ended with {code} while it started: {process.last_words()}"
            ) from error
        except TimeoutError as error:
            raise EngineError(f"the engine did not start within {START_SECONDS:.0f} s") from error

    def _check_identity(self, hello: JsonMapping, token: str) -> None:
        if hello.get("hello") != token:
            raise EngineUnusable("the process that answers is not the engine that was started")
        if hello["sglang"] != SUPPORTED_RELEASE:
            raise EngineUnusable(
                f"rollout.engine_python has sglang {hello['sglang']}; this release works with {SUPPORTED_RELEASE}: "
                "`make sglang` installs it"
            )
        if hello["architecture"] != self._settings.architecture:
            raise EngineUnusable(f"the engine runs a {hello['architecture']}, not {self._settings.architecture}")

    async def _silence(self, connection: Connection) -> None:
        """Returns when a ping, which goes through SGLang's scheduler, was not answered in time."""
        while True:
            try:
                await asyncio.wait_for(connection.call({"call": "ping"}), self._settings.silence_seconds)
            except TimeoutError:
                return
            except BackendLost:  # its end follows; a process that closed the connection and lives on is silent
                await asyncio.sleep(self._settings.silence_seconds)
                return
            await asyncio.sleep(PING_SECONDS)

    async def _call(self, header: JsonMapping, payload: Buffer = b"") -> tuple[JsonObject, bytes]:
        _, connection = self._started()
        return await connection.call(header, payload)

    def _started(self) -> tuple[EngineProcess, Connection]:
        if self._process is None or self._connection is None:
            raise BackendLost("the engine is not running")
        return self._process, self._connection


def _shared(tensors: Mapping[str, Tensor]) -> tuple[SealedMemory, list[list[Any]]]:
    """All tensors in one memory, and for each name, element type, shape and hash."""
    parts, entries = [], []
    for name, tensor in tensors.items():
        part = memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        parts.append(part)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append([name, dtype, list(tensor.shape), xxhash.xxh3_64_intdigest(part)])
    return sealed(parts), entries
