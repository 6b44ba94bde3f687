"""Messages between the rollout server and the engine's process: a small JSON header and raw bytes. No pickle.

    u32 header length | u64 payload length | header, UTF-8 JSON object | payload

Both ends of the socket pair belong to one rollout server, so lengths are trusted up to limits that catch a lost frame
boundary. A call carries `id`; its answer carries the same `id` and either `ok` or `error`.
"""

import asyncio
import json
import struct

from relax_common.json_types import JsonMapping, JsonObject

Buffer = bytes | bytearray | memoryview

PAYLOAD_BYTES_MAX = 64 << 20
HEADER_BYTES_MAX = 16 << 20
_LENGTHS = struct.Struct("<IQ")


class BrokenFrame(ConnectionError):
    """The received bytes are not a frame; the connection cannot be used any more."""


async def read_frame(reader: asyncio.StreamReader) -> tuple[JsonObject, bytes]:
    """Raises asyncio.IncompleteReadError when the peer is gone, BrokenFrame when it sends an invalid frame."""
    header_bytes, payload_bytes = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    if header_bytes > HEADER_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
        raise BrokenFrame(f"a frame of {header_bytes} + {payload_bytes} bytes")
    header = json.loads(await reader.readexactly(header_bytes))
    return header, await reader.readexactly(payload_bytes) if payload_bytes else b""


def frame(header: JsonMapping, payload: Buffer = b"") -> tuple[bytes, Buffer]:
    """Two buffers for `writelines`: a payload of many megabytes is not copied."""
    text = json.dumps(header, separators=(",", ":")).encode()
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    if size > PAYLOAD_BYTES_MAX:
        raise BrokenFrame(f"a payload of {size} bytes; at most {PAYLOAD_BYTES_MAX} fit a frame")
    return _LENGTHS.pack(len(text), size) + text, payload
