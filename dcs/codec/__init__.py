"""How a version is encoded for transfer: all of it, or (later) its difference from another version."""

from dcs.codec.base import Codec
from dcs.codec.full import FULL

__all__ = ["FULL", "Codec"]
