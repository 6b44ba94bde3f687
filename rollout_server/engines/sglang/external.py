"""A running `sglang.launch_server`, reached by its URL. Its weights can only be changed through files.

Its other ways need pickled tensors (never sent over a network) or a process group with the trainer. The folder of a
version must therefore be one that the server sees under the same path.
"""

import asyncio
import contextlib
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.torch import save_file
from torch import Tensor

from relax_common.json_types import JsonMapping, JsonObject, JsonValue
from relax_common.versions import PackedVersion
from rollout_server.engines.contract import EngineError, EngineUnusable, RequestRefused
from rollout_server.engines.sglang.backend import BackendLost, SampleCall
from rollout_server.engines.sglang.http import HttpClient
from rollout_server.engines.sglang.sampling import SampleOutput, output_of, sampling_params

CALL_SECONDS = 60.0
LOAD_SECONDS = 600.0
PING_SECONDS = 2.0
ABORT_AGAIN_SECONDS = 0.2


@dataclass(frozen=True)
class ExternalSettings:
    url: str
    architecture: str
    weights_dir: Path
    exact_versions: bool
    """As for a managed engine; here the server must have been started with this option."""
    generate_seconds: float
    silence_seconds: float


@dataclass
class _Running:
    rid: str
    ended: asyncio.Event
    wire_rid: str = ""


class ExternalBackend:
    """See `Backend`. A failed try of a sample is repeated under a new id, because the old one may still be running."""

    def __init__(self, settings: ExternalSettings) -> None:
        self._settings = settings
        self._http = HttpClient(settings.url.rstrip("/"))
        self._running: dict[str, _Running] = {}
        self._gone: asyncio.Future[str] | None = None
        self._known = False
        self._staged: Path | None = None

    async def start(self, incarnation: int) -> str:
        """Wait until the server answers, then check that it is one this run can use."""
        del incarnation
        where = f"rollout.engine_urls {self._settings.url}"
        try:
            info = await self._http.call("GET", "/model_info", deadline_seconds=self._settings.silence_seconds)
            server = await self._http.call("GET", "/server_info", deadline_seconds=CALL_SECONDS)
            architectures, release = info["architectures"], server["version"]
            overlaps = not server["disable_overlap_schedule"]
        except BackendLost as error:
            # A server that has answered before will come back; one that never answered is most likely a wrong address.
            kind = EngineError if self._known else EngineUnusable
            raise kind(f"{where} does not answer: {error}") from error
        except (RequestRefused, EngineError, KeyError, TypeError, ValueError) as error:
            raise EngineUnusable(f"{where} is no SGLang server: {error}") from error
        if self._settings.architecture not in (architectures or []):
            raise EngineUnusable(f"{where} runs {architectures}, the recipe's model is a {self._settings.architecture}")
        if self._settings.exact_versions and overlaps:
            raise EngineUnusable(
                f"{where}: rollout.swap_mode = 'in_place' needs a server started with --disable-overlap-schedule, "
                "or a token at a swap is counted for the wrong version; restart it so, or use 'retract'"
            )
        self._known = True
        self._gone = asyncio.get_running_loop().create_future()
        # A previous user may have left it paused or with running requests.
        await self._control("/abort_request", {"abort_all": True})
        await self._control("/continue_generation", {})
        return f"sglang {release} at {self._settings.url}"

    async def lost(self) -> str:
        gone = self._in_use()
        while not gone.done():
            await asyncio.wait({gone}, timeout=PING_SECONDS)
            try:
                await self._http.call("GET", "/model_info", deadline_seconds=self._settings.silence_seconds)
            except EngineError as error:
                await self.discard(str(error))
        return gone.result()

    async def sample(self, call: SampleCall) -> SampleOutput:
        running = self._running.setdefault(call.rid, _Running(call.rid, asyncio.Event()))
        body = {
            "input_ids": list(call.prompt_ids),
            "sampling_params": sampling_params(call.temperature, call.max_new_tokens, call.stop_token_ids),
            "return_logprob": call.max_new_tokens > 0,
            "logprob_start_len": -1,
            "cache_salt": call.salt,
        }
        try:
            return output_of(await self._generate(body, running))
        except ValueError as error:
            raise EngineError(str(error)) from error
        finally:
            del self._running[call.rid]
            running.ended.set()

    async def abort(self, rids: Sequence[str]) -> None:
        """The abort is repeated, because it may overtake the request that it names."""
        while left := [self._running[rid] for rid in rids if rid in self._running]:
            await asyncio.gather(*(self._control("/abort_request", {"rid": each.wire_rid}) for each in left))
            waits = [asyncio.create_task(each.ended.wait()) for each in left]
            await asyncio.wait(waits, timeout=ABORT_AGAIN_SECONDS)
            for wait in waits:
                wait.cancel()

    async def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        body = {
            "input_ids": list(token_ids),
            "sampling_params": sampling_params(1.0, 0, []),
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._generate(body, _Running(uuid.uuid4().hex, asyncio.Event()))
        return np.array([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]], np.float32)

    async def stage(self, version: PackedVersion, tensors: Mapping[str, Tensor]) -> None:
        folder = self._settings.weights_dir / f"{version}-{uuid.uuid4().hex[:8]}"
        await asyncio.to_thread(_write, folder, tensors)
        self._staged = folder

    async def pause(self, mode: str) -> None:
        await self._control("/pause_generation", {"mode": mode})

    async def load(self, version: PackedVersion, *, flush: bool) -> None:
        body = {
            "model_path": str(self._staged),
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        answer = await self._http.call("POST", "/update_weights_from_disk", body, deadline_seconds=LOAD_SECONDS)
        if not answer["success"]:
            raise EngineError(f"{self._settings.url} did not take version {version}: {answer['message']}")
        await asyncio.to_thread(self._forget_files)

    async def resume(self) -> None:
        await self._control("/continue_generation", {})

    async def discard(self, why: str) -> None:
        """The server cannot be killed from here. It counts as lost, is checked again, and gets a whole version."""
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(why)

    async def close(self) -> None:
        """The server belongs to somebody else: it keeps running, but this run's requests are aborted."""
        with contextlib.suppress(EngineError):
            for each in list(self._running.values()):
                await self._http.call("POST", "/abort_request", {"rid": each.wire_rid}, deadline_seconds=1.0)
        await self.discard("it was given up")
        await asyncio.to_thread(self._forget_files)

    async def _generate(self, body: JsonMapping, running: "_Running") -> JsonValue:
        def under_new_id(attempt: int) -> JsonObject:
            running.wire_rid = f"{running.rid}.{attempt}"
            return {**body, "rid": running.wire_rid}

        gone, seconds = self._in_use(), self._settings.generate_seconds
        answer = asyncio.create_task(self._http.call("POST", "/generate", under_new_id, deadline_seconds=seconds))
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        answer.cancel()
        raise BackendLost(f"the engine is lost: {gone.result()}")

    def _in_use(self) -> "asyncio.Future[str]":
        if self._gone is None:
            raise BackendLost("the engine is not in use")
        return self._gone

    async def _control(self, path: str, body: JsonObject) -> None:
        await self._http.call("POST", path, body, deadline_seconds=CALL_SECONDS)

    def _forget_files(self) -> None:
        """Only one version is on disk at a time, and none once it is live."""
        shutil.rmtree(self._settings.weights_dir, ignore_errors=True)
        self._staged = None


def _write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
