"""What a version is made of on its way: all of it, or (later) its difference to another version."""

from dcs.codec.base import Codec
from dcs.codec.full import FULL

__all__ = ["FULL", "Codec"]
