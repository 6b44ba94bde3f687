"""Both transports pass the conformance suite; so does a third one, written here as one class."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from transport_conformance import check_transport

from dcs.client import DcsClient
from dcs.transport import TRANSPORTS, Offer, Source, Transport
from relax_common.errors import InvalidInput, MemoryOutOfReach
from relax_common.storage.sealed_memory import Buffer, SealedMemory, sealed


@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_a_transport_brings_bytes_as_they_were(transport: Transport) -> None:
    check_transport(transport)


class Files:
    """A transport over a folder that both sides see. This is all that a new transport needs."""

    name = "files"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def offer(self, parts: Sequence[Buffer]) -> Offer:
        return Offer(self._write(b"".join(bytes(part) for part in parts)))

    async def take(self, place: bytes, chunks: AsyncIterator[bytes], size_bytes: int, what: str) -> SealedMemory:
        data = self._path(place).read_bytes()
        if len(data) != size_bytes:
            raise InvalidInput(f"{what}: {size_bytes} bytes were announced, the file has {len(data)}")
        return sealed([data])

    def place_of(self, memory: SealedMemory) -> bytes | None:
        return self._write(bytes(memory.view))

    def fetch(self, source: Source) -> list[memoryview]:
        files = [memoryview(bytearray(self._path(place).read_bytes())) for place in source.places]
        return [
            files[at.memory][at.offset : at.offset + entry.size_bytes]
            for entry, at in zip(source.entries, source.offsets, strict=True)
        ]

    def _write(self, data: bytes) -> bytes:
        name = f"{len(list(self._folder.iterdir()))}"
        (self._folder / name).write_bytes(data)
        return name.encode()

    def _path(self, place: bytes) -> Path:
        path = self._folder / place.decode()
        if not path.exists():
            raise MemoryOutOfReach(f"{path} is not here")
        return path


def test_a_new_transport_is_one_class(tmp_path: Path) -> None:
    transport: Transport = Files(tmp_path)
    check_transport(transport)


def test_a_client_tries_transports_in_turn_and_keeps_the_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(TRANSPORTS, "files", Files(tmp_path))
    client = DcsClient("127.0.0.1:1", "r", transports=("files", "stream"))
    asked: list[str] = []

    def call(transport: str, offer: Offer, seconds: float) -> None:
        asked.append(transport)
        if transport == "files":
            raise MemoryOutOfReach("another host")

    client._hand_over([b"abc"], call, "a call")
    client._hand_over([b"abc"], call, "a call")
    assert asked == ["files", "stream", "stream"]
    client.close()
