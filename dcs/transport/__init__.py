"""How bytes travel between a client and dcs. A new way is one file here and one entry in `TRANSPORTS`."""

from dcs.transport.base import NotNow, Offer, Source, Transport
from dcs.transport.sealed import Sealed
from dcs.transport.stream import Stream

TRANSPORTS: dict[str, Transport] = {transport.name: transport for transport in (Sealed(), Stream())}
"""By name, in the order in which a client tries them."""

STREAM = Stream.name
"""The one that reaches any host; a call that names no transport uses it."""

__all__ = ["STREAM", "TRANSPORTS", "NotNow", "Offer", "Source", "Transport"]
