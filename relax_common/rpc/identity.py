"""Who a daemon is, and whether two builds may talk to each other."""

from __future__ import annotations

import time
import uuid
from importlib import metadata

from google.protobuf.timestamp_pb2 import Timestamp

from relax.common.v1 import common_pb2
from relax_common.errors import ProtocolMismatch

PROTOCOL_VERSION = 1


def make_identity(role: common_pb2.Role, instance: str, incarnation: str = "") -> common_pb2.Identity:
    """Identity of this process; ranks of one role share an incarnation that their launcher chose."""
    started = Timestamp()
    started.FromNanoseconds(time.time_ns())
    return common_pb2.Identity(
        protocol_version=PROTOCOL_VERSION,
        release=metadata.version("relax-rl"),
        instance=instance,
        role=role,
        incarnation=incarnation or uuid.uuid4().hex,
        started_at=started,
    )


def check_protocol(peer: common_pb2.Identity) -> None:
    """Refuse a peer of another wire protocol before anything is exchanged with it."""
    if peer.protocol_version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"{peer.instance or 'peer'} (release {peer.release or 'unknown'}) speaks protocol "
            f"{peer.protocol_version}, this daemon speaks {PROTOCOL_VERSION}: install the same release on both",
        )
