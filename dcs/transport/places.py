"""Places of memory on the wire."""

from relax.common.v1 import common_pb2
from relax_common.storage.sealed_memory import Place


def place_to_proto(place: Place) -> common_pb2.MemoryPlace:
    return common_pb2.MemoryPlace(host=place.host, pid=place.pid, fd=place.fd, size_bytes=place.size_bytes)


def place_from_proto(message: common_pb2.MemoryPlace) -> Place:
    return Place(message.host, message.pid, message.fd, message.size_bytes)
