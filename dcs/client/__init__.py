"""What roles use of dcs; the only room that they may import."""

from dcs.client.client import DcsClient
from dcs.client.values import Head, SliceData
from dcs.codec import FULL
from dcs.codec.base import Pulled

__all__ = ["FULL", "DcsClient", "Head", "Pulled", "SliceData"]
