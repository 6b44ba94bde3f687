"""How a version is encoded for transfer: all of it, or (later) its difference from another version."""

from dcs.codec.codec import FULL, Codec, Pulled

__all__ = ["FULL", "Codec", "Pulled"]
