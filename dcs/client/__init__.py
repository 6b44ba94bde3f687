"""What roles use of dcs; the only room that they may import."""

from dcs.client.client import DcsClient, Head, SliceData

__all__ = ["DcsClient", "Head", "SliceData"]
