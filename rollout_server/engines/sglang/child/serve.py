"""The engine's process: `sglang.Engine`, served over one connection to the rollout server that started it.

The process ends with that server, by the kernel's parent-death signal or when the connection closes. It cannot answer
another server: the connection is one end of a socket pair that only the starter holds.
"""

import asyncio
import json
import os
import signal
import socket
from typing import Any

import sglang
import torch

from relax_common.json_types import JsonObject
from rollout_server.engines.sglang.child.calls import Calls, Refused
from rollout_server.engines.sglang.child.shadow import ShadowError
from rollout_server.engines.sglang.frames import Buffer, frame, read_frame

_STREAM_BYTES_MAX = 1 << 20


def main(settings: str) -> None:
    """`settings`: JSON with control_fd, token, cpu_kv_tokens and `engine`, arguments of sglang.Engine."""
    given = json.loads(settings)
    # Tensors reach the scheduler's process as names of shared memory: descriptors cannot be sent over its sockets.
    torch.multiprocessing.set_sharing_strategy("file_system")
    engine = sglang.Engine(**_on_this_device(given["engine"], given["cpu_kv_tokens"]))
    control = socket.socket(fileno=given["control_fd"])
    asyncio.run(_serve(engine, control, given["token"]))


def _on_this_device(arguments: JsonObject, cpu_kv_tokens: int) -> JsonObject:
    """Settings without CUDA: SGLang's torch code computes. Without a limit it would use most host memory for its
    cache."""
    if torch.cuda.is_available():
        return arguments
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "max_total_tokens": cpu_kv_tokens,
        **arguments,
    }


async def _serve(engine: Any, control: socket.socket, token: str) -> None:
    reader, writer = await asyncio.open_connection(sock=control, limit=_STREAM_BYTES_MAX)
    calls = Calls(engine)
    connection = _Connection(writer)
    await connection.send({"hello": token, **calls.identity()})
    try:
        # A bug in a call ends the process, and the rollout server starts another.
        async with asyncio.TaskGroup() as answers:
            while True:
                header, payload = await read_frame(reader)
                answers.create_task(_answer(calls, connection, header, payload))
    finally:
        os.killpg(os.getpgid(0), signal.SIGKILL)


class _Connection:
    """Answers of many tasks on one stream."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def send(self, header: JsonObject, payload: Buffer = b"") -> None:
        self._writer.writelines(frame(header, payload))
        await self._writer.drain()


async def _answer(calls: Calls, connection: _Connection, header: JsonObject, payload: bytes) -> None:
    number = header["id"]
    try:
        answer, out = await calls.call(header, payload)
    except Refused as error:
        await connection.send({"id": number, "error": str(error), "refused": True})
    except (ShadowError, OSError, RuntimeError, ValueError, KeyError, AssertionError) as error:
        # SGLang raises these from its own calls; the rollout server decides what they mean for the weights.
        text = str(error).splitlines()
        await connection.send({"id": number, "error": f"{type(error).__name__}: {text[0] if text else ''}"})
    else:
        await connection.send({"id": number, "ok": True, **answer}, out)
